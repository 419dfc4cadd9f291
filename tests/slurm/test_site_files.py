"""What a site installs and what its users type, on a real cluster: health check, site file, manual."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sites import ROOT, Site, wait_until

from tests.support.pages import DOCS, blocks, commands

HEALTHCHECK = ROOT / "slurm" / "healthcheck"
MIB = 2**20
# What is typed on a cluster; the other commands of the manual are run where there is none.
COMMANDS = commands("sh")
(SITE_FILE,) = blocks(DOCS / "site.md", "yaml")


@pytest.fixture
def configuration() -> Iterator[Path]:
    """Return the health check's configuration file, in a folder that root's daemons on all hosts see."""
    with tempfile.TemporaryDirectory(prefix="orchestra-health-") as folder:
        yield Path(folder) / "healthcheck.conf"


def node(site: Site, name: str) -> tuple[str, str]:
    """Return Slurm's state of a node and the reason for it."""
    state, _, reason = site.about_node(name, "%T|%E").partition("|")
    return state, reason


def test_node_with_a_full_disk_is_drained_by_slurmd_and_comes_back_when_it_is_not(
    new_site: Callable[..., Site], configuration: Path
) -> None:
    """Nobody else's drain is taken back. The disk is each host's own /dev/shm."""
    program = configuration.with_name("program")
    program.write_text(f"#!/bin/sh\nexec {shlex.quote(str(HEALTHCHECK))} --config {configuration}\n")
    program.chmod(0o755)
    configuration.write_text("gpus = 0\nfree = /tmp=1M\n")
    site = new_site(
        *("--nodes", "2", "--no-accounting"),
        *("--set", f"HealthCheckProgram={program}", "--set", "HealthCheckInterval=2"),
    )
    site.as_root("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=a fan is broken")
    free = int(site.as_root("df", "--output=avail", "--block-size=1", "/dev/shm", host="node1").split()[-1])
    lines = [
        "gpus = 0  # there are none behind the pretended ones",
        "drain",
        "heal",
        f"slurm-conf = {site.layout.slurm_conf}",
        f"shared-write = {site.shared}",
        f"free = /dev/shm={(free - 64 * MIB) // MIB}M",
    ]
    configuration.write_text("\n".join(lines))
    site.as_root("sh", "-c", "head -c 100M /dev/zero > /dev/shm/full", host="node1")
    wait_until(lambda: node(site, "node1")[0] == "drained", "node1 is drained")
    assert node(site, "node1")[1].startswith("orchestra: free /dev/shm: ")
    assert node(site, "node2") == ("drained", "a fan is broken")
    site.as_root("rm", "/dev/shm/full", host="node1")
    wait_until(lambda: node(site, "node1")[0] == "idle", "node1 is given jobs again")
    assert node(site, "node2") == ("drained", "a fan is broken")
    assert site.run("srun", "--nodelist=node1", "echo", "well").stdout == "well\n"


@pytest.fixture(scope="module")
def lab(new_site: Callable[..., Site]) -> Iterator[Site]:
    """Return the manual's cluster: its partition, and a job that keeps all nodes but one busy.

    What the commands submit needs more nodes than one or comes after what does, so that nothing is trained.
    """
    partition = "PartitionName=gpu Nodes=ALL MaxTime=2-00:00:00"
    site = new_site("--nodes", "5", "--gpus", "8", "--no-accounting", "--set", partition)
    blocker = site.submit("--nodes=4", "--exclusive", "--partition=gpu", "--wrap", "srun sleep 1000")
    wait_until(lambda: site.job_state(blocker) == "RUNNING", "the nodes are busy")
    tree = site.copy_of_the_code("tree")
    (tree / "conf" / "cluster" / "lab.yaml").write_text(SITE_FILE)
    yield site
    site.cancel_all_jobs()


def typed(site: Site, command: str) -> str:
    """Run a command of the manual and return what it printed; what would wait for nodes is only planned."""
    words = shlex.split(command)
    assert words[0] == "orchestra"
    dry = ["--dry-run"] if words[1] == "bench" else []
    return site.orchestra(*words[1:], *dry, root=site.shared / "tree").stdout


@pytest.mark.slow
def test_commands_of_the_manual_work_on_a_cluster_in_their_order(lab: Site) -> None:
    printed = {command: typed(lab, command) for command in COMMANDS}
    assert len(printed) == len(COMMANDS) >= 10
    scripts = [text for text in printed.values() if text.startswith("#!/bin/bash")]
    for line in ("#SBATCH --partition=gpu", "#SBATCH --gpus-per-node=8", "#SBATCH --exclusive"):
        assert all(f"{line}\n" in script for script in scripts)
    assert "export NCCL_DEBUG=WARN\n" in scripts[0]
    waiting = [name.strip() for name in lab.queue("--array", "--format=%j")]
    assert (waiting.count("big"), waiting.count("rates")) == (1, 4)


def test_a_site_file_from_what_slurm_says_submits(cluster: Site) -> None:
    mine, user = {"ORCHESTRA_CONFIG_DIR": str(cluster.shared / "mine")}, cluster.user.pw_name
    manage = ("sacctmgr", "--immediate")
    cluster.as_root(*manage, "add", "account", "physics")
    cluster.as_root(*manage, "add", "user", user, "account=physics")
    try:
        cluster.orchestra("site", "init", "found", **mine)
    finally:
        cluster.as_root(*manage, "delete", "user", user)
        cluster.as_root(*manage, "delete", "account", "physics")
    text = (cluster.shared / "mine" / "presets" / "cluster" / "found.yaml").read_text()
    assert '# sacctmgr: your default account.\naccount: "physics"\n' in text
    words = ("cluster=found", "cluster.account=null", "run.name=by-site")
    planned = cluster.orchestra("submit", *words, "--dry-run", **mine)
    (partition,) = [line for line in text.splitlines() if line.startswith("partition: ")]
    assert f"#SBATCH --partition={partition.split()[1].strip(chr(34))}\n" in planned.stdout
    assert "Slurm would accept the job" in planned.stderr


def test_site_file_may_lie_in_a_folder_of_ones_own(lab: Site) -> None:
    folder = lab.shared / "sites" / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.yaml").write_text(SITE_FILE.replace("partition: gpu", "partition: main"))
    place = f"hydra.searchpath=[{folder.parent}]"
    script = typed(lab, f"orchestra submit {place} cluster=own run.name=elsewhere --dry-run")
    assert "#SBATCH --partition=main\n" in script
