"""`orchestra submit` where there is no Slurm: the dry run, refusals, and the job that follows from a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine

from conf.schema import ClusterConfig, Config, Device, LauncherName
from launchers.slurm.batch_script import rendered
from orchestra.run.paths import RunDir
from orchestra.submit.job import Share, batch_job

CPU = ["cluster.device=cpu", "cluster.gpus_per_node=2", "cluster.nodes=3", "run.name=mine"]


@pytest.fixture(autouse=True)
def _no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("more", [(), ("-m", "optim.lr=1e-4,3e-4")], ids=["a job", "a sweep"])
def test_dry_run_writes_nothing_gives_each_job_its_own_token_and_says_what_was_not_checked(
    more: tuple[str, ...], tmp_path: Path, orchestra: CommandLine
) -> None:
    first, second = (orchestra("submit", *more, *CPU, "--dry-run") for _ in range(2))
    assert first.out != second.out
    assert "was not checked" in first.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", *CPU], "not on this machine"),
        (["submit", "cluster=local"], "use cluster=slurm"),
        (["submit", "cluster.nodes=3", "--dry-run"], "cluster.gpus_per_node=auto"),
        (["submit", *CPU, "cluster.slurm_extra.time=10", "--dry-run"], "cluster.time_limit says that"),
        (["submit", *CPU, "cluster.slurm_extra.ntasks=10", "--dry-run"], "one task per node"),
        (["submit", "-m", *CPU, "train.seed=1,2"], "not on this machine"),
        (["submit", *CPU, "--force"], "--force is about the members of a sweep"),
        (["submit", *CPU, "--wait", "--dry-run"], "nothing to wait for"),
    ],
)
def test_wrong_wishes_end_with_2(words: list[str], message: str, orchestra: CommandLine) -> None:
    assert message in orchestra(*words, code=2).err


@pytest.mark.parametrize("more", [(), ("-m", "train.seed=1,2")], ids=["a job", "a sweep"])
def test_what_sbatch_would_take_from_the_shell_is_told(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    for name, value in (("ACCOUNT", "mine"), ("PARTITION", "gpu"), ("RESERVATION", "ours"), ("QOS", "")):
        monkeypatch.setenv(f"SBATCH_{name}", value)
    told = orchestra("submit", *more, *CPU, "cluster.partition=cpu", "--dry-run").err
    assert "note: SBATCH_ACCOUNT is set and not used: a job depends on no shell; cluster.account=mine" in told
    assert "cluster.slurm_extra.reservation=ours says it" in told
    assert told.count("is set and not used") == 2


def test_gpus_are_asked_for_with_their_share_of_the_cores(tmp_path: Path) -> None:
    def script(**cluster: Any) -> str:
        base = ClusterConfig(launcher=LauncherName.slurm, device=Device.cuda, gpus_per_node=4, nodes=2)
        config = dataclasses.replace(Config(), cluster=dataclasses.replace(base, **cluster))
        return rendered(batch_job(config, RunDir(tmp_path / "mine"), "orchestra:1", Share(24)))

    assert "#SBATCH --gpus-per-node=4\n" in script()
    assert "#SBATCH --cpus-per-task=24\n" in script()
    assert "gpus-per-node" not in script(device=Device.cpu)
    named = script(slurm_extra={"gres": "gpu:h100:4"})
    assert "#SBATCH --gres=gpu:h100:4\n" in named
    assert "gpus-per-node" not in named
    assert "cpus-per-task" not in script(slurm_extra={"cpus-per-gpu": 6})
    # Another resource than a GPU comes beside them.
    beside = script(slurm_extra={"gres": "nvme:1"})
    assert "#SBATCH --gres=nvme:1\n" in beside
    assert "#SBATCH --gpus-per-node=4\n" in beside
    assert "gpus-per-node" not in script(slurm_extra={"gres": ["nvme:1", "gpu:4"]})
    for words in ({"--gres": "shard:8"}, {"gres": "gres:gpu:4"}, {"tres-per-node": "gres/gpu=4"}):
        assert "gpus-per-node" not in script(slurm_extra=words)
    assert "#SBATCH --cpus-per-task=12\n" in script(threads_per_rank=3)


@pytest.mark.parametrize(
    ("cluster", "share", "line"),
    [
        ({}, Share(24, has_whole_nodes=True), "#SBATCH --mem=0\n"),
        ({"slurm_extra": {"exclusive": True}}, Share(24), "#SBATCH --mem=0\n"),
        ({}, Share(24), None),
        ({"device": Device.cpu}, Share(24, has_whole_nodes=True), None),
        ({"slurm_extra": {"mem": "200G"}}, Share(24, has_whole_nodes=True), "#SBATCH --mem=200G\n"),
        ({"slurm_extra": {"mem-per-gpu": "20G"}}, Share(24, has_whole_nodes=True), None),
        ({"slurm_extra": {"mem": None}}, Share(24, has_whole_nodes=True), None),
    ],
    ids=["whole nodes", "exclusive", "parts of nodes", "cpu", "said", "said per GPU", "left to the site"],
)
def test_whole_nodes_with_gpus_are_asked_for_with_all_their_memory(
    tmp_path: Path, cluster: dict[str, Any], share: Share, line: str | None
) -> None:
    base = ClusterConfig(launcher=LauncherName.slurm, device=Device.cuda, gpus_per_node=4, nodes=2)
    config = dataclasses.replace(Config(), cluster=dataclasses.replace(base, **cluster))
    script = rendered(batch_job(config, RunDir(tmp_path / "mine"), "orchestra:1", share))
    assert line is None or line in script
    assert ("--mem=" in script) == (line is not None)


def test_0_is_said_to_slurm(orchestra: CommandLine) -> None:
    script = orchestra("submit", *CPU, "cluster.slurm_extra={mem: 0, nice: 0}", "--dry-run").out
    assert "#SBATCH --mem=0\n#SBATCH --nice=0\n" in script


def test_a_script_written_without_slurm_says_which_lines_are_missing(orchestra: CommandLine) -> None:
    gpus = ("cluster.device=cuda", "cluster.gpus_per_node=8", "run.name=mine", "--dry-run")
    script = orchestra("submit", *gpus).out
    assert "# Missing, since Slurm could not be asked" in script
    assert "#   --cpus-per-task " in script
    assert "#   --mem " in script
    full = ("cluster.threads_per_rank=4", "cluster.slurm_extra.mem=0")
    assert "Missing" not in orchestra("submit", *gpus, *full).out
    assert "Missing" not in orchestra("submit", *CPU, "--dry-run").out


def test_a_set_up_line_may_fail_where_that_is_said(orchestra: CommandLine) -> None:
    line = "cluster.setup=[module load nosuch]"
    assert "trap 'setup_failed" in orchestra("submit", *CPU, line, "--dry-run").out
    script = orchestra("submit", *CPU, line, "cluster.setup_may_fail=true", "--dry-run").out
    assert "\n# setup\nmodule load nosuch\n\nexport PYTHONPATH=" in script
