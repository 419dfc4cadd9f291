"""`orchestra site init` writes what Slurm says, never over another file, and something that composes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.command_line import CommandLine
from support.fake_slurm import FakeSlurm
from support.pages import DOCS, blocks

from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.doctor.site_file import associations, node_sizes

SINFO = """\
debug*|up|30:00|2|16|idle|(null)
gpu|up|2-00:00:00|30|224|mixed|gpu:h100:8(S:0-1)
gpu|up|2-00:00:00|2|224|down*|gpu:h100:4(S:0-1)
old|down|infinite|4|64|idle|gpu:v100:8
"""
SIZES = "debug*|64000|16\ngpu|2063000+|224\nold|500000|64\n"
CONFIG = """\
Configuration data as of 2026-11-25T03:00:00
ClusterName             = big cluster
DefMemPerCPU            = 4000
JobRequeue              = 0
KillWait                = 60 sec
PreemptMode             = REQUEUE
"""


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("ORCHESTRA_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    fake_slurm.says("sizes", prints=SIZES)
    fake_slurm.says("kinds", prints=SINFO)
    fake_slurm.put("sinfo", 'case "$*" in *%m*) exec sizes;; *) exec kinds;; esac')
    fake_slurm.says("scontrol", prints=CONFIG)
    fake_slurm.says("defaults", prints="physics")
    fake_slurm.says("rows", prints="physics|normal,long\nmath|normal")
    fake_slurm.put("sacctmgr", 'case "$*" in *defaultaccount*) exec defaults;; *) exec rows;; esac')
    return fake_slurm


@pytest.mark.usefixtures("slurm")
def test_a_site_file_says_what_slurm_says_and_where_from(tmp_path: Path, orchestra: CommandLine) -> None:
    printed = orchestra("site", "init", "--dry-run").out
    assert yaml.safe_load(printed) == {
        "defaults": ["slurm"],
        "name": "big-cluster",
        "partition": "gpu",
        "device": "cuda",
        "gpus_per_node": 8,
        "time_limit": "2-00:00:00",
        "account": "physics",
        "qos": None,
        "requeue": "requeue",
        "stop_exit_code": 75,
        "slurm_extra": {},
        "setup": [],
        "network": {"interface": None},
    }
    told = " ".join(line.removeprefix("# ") for line in printed.splitlines() if line.startswith("#"))
    for words in (
        "debug (default) 2 nodes, no GPUs, limit 30:00",
        "GPUs per node of type h100; not all nodes are alike: 4, 8",
        "a node has 224 cores, memory 1.97 TiB",
        "you may also use math",
        "you may use normal, long",
        "JobRequeue=0, PreemptMode=REQUEUE, KillWait=60 sec; jobs ask for it themselves",
        "DefMemPerCPU=4000",
    ):
        assert words in told, told
    assert not (tmp_path / "home").exists()


def test_it_is_written_once_and_composes(tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine) -> None:
    written = orchestra("site", "init", "lab").out
    file = tmp_path / "home" / "presets" / "cluster" / "lab.yaml"
    assert yaml.safe_load((tmp_path / "home" / "config.yaml").read_text()) == {
        "searchpath": [str(tmp_path / "home" / "presets")]
    }
    assert "`orchestra submit cluster=lab --dry-run`" in written
    script = orchestra("submit", "cluster=lab", "run.name=one", "--dry-run").out
    for line in ("--partition=gpu", "--gpus-per-node=8", "--time=2-00:00:00", "--account=physics"):
        assert f"#SBATCH {line}\n" in script
    text = file.read_text()
    assert "is there already; --force" in orchestra("site", "init", "lab", code=2).err
    slurm.says("kinds", prints=SINFO.replace("gpu|up", "gpu|down"))
    orchestra("site", "init", "lab", "--force")
    assert (file.read_text() == text, "no GPUs" in file.read_text()) == (False, True)
    # A folder that the configuration does not name is named on the command line.
    other = orchestra("site", "init", "--output", "elsewhere/cluster/mine.yaml").out
    assert "hydra.searchpath=[elsewhere] cluster=mine" in other
    for name in ("../lab", "", "a b", "lab,ä"):
        assert "is no name of a preset" in orchestra("site", "init", name, code=2).err
    assert "give the site another name" in orchestra("site", "init", "slurm", code=2).err
    assert (
        "use elsewhere/cluster/mine.yaml"
        in orchestra("site", "init", "--output", "elsewhere/mine.yaml", code=2).err
    )


def test_without_slurm_it_is_a_file_for_this_machine(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    dead = ("error: fetch_config: DNS SRV lookup failed", "fatal: Could not establish a configuration source")
    slurm.says("sinfo", complains="\n".join(f"sinfo: {words}" for words in dead), code=1)
    answer = orchestra("site", "init", "desk")
    assert "note: sinfo finds no configuration of a Slurm cluster" in answer.err
    assert "`orchestra doctor cluster=desk`, `orchestra run cluster=desk --dry-run`" in answer.out
    folder = tmp_path / "home" / "presets"
    config = compose([f"hydra.searchpath=[{folder}]", "cluster=desk"], Situation("run")).config
    assert (config.cluster.name, config.cluster.launcher.value) == ("desk", "local")
    # What is only away for now is waited for.
    slurm.says(
        "sinfo", complains="sinfo: error: Unable to contact slurm controller (connect failure)", code=1
    )
    refused = orchestra("site", "init", "later", code=1)
    assert "nothing was written" in refused.err
    assert not (folder / "cluster" / "later.yaml").exists()


def test_the_networks_of_the_manual_compose(tmp_path: Path) -> None:
    recipes = blocks(DOCS / "networks.md", "yaml")
    assert len(recipes) >= 4
    (tmp_path / "cluster").mkdir()
    for recipe in recipes:
        (tmp_path / "cluster" / "lab.yaml").write_text(f"defaults: [slurm]\n{recipe}")
        config = compose([f"hydra.searchpath=[{tmp_path}]", "cluster=lab"], Situation("plan")).config
        assert all(line.startswith("export ") for line in config.cluster.setup)


def test_answers_that_leave_things_out_are_understood() -> None:
    assert associations(None, "") == ((), ())
    assert associations("b", "a|\nb|x\n") == (("b", "a"), ("x",))
    sizes = node_sizes("p*|N/A|8\np|1000+|4\nodd\n")
    assert (sizes["p"].num_cpus, sizes["p"].memory_bytes) == (4, 1000 * 2**20)
    assert (sizes["odd"].num_cpus, sizes["odd"].memory_bytes) == (None, None)
