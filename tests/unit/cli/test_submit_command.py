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


def test_dry_run_prints_the_exact_script_and_writes_nothing(tmp_path: Path, orchestra: CommandLine) -> None:
    said = orchestra("submit", *CPU, "cluster.time_limit=1:00:00", "--dry-run")
    run = tmp_path / "runs" / "mine"
    assert said.out.startswith("#!/bin/bash\n")
    for line in ("#SBATCH --nodes=3", "#SBATCH --time=1:00:00", "#SBATCH --cpus-per-task=2"):
        assert f"{line}\n" in said.out
    assert f"export PYTHONPATH={run}/code" in said.out
    assert f"-m orchestra.agents {run}\n" in said.out
    assert "was not checked" in said.err
    plan = orchestra.json("submit", *CPU, "cluster.time_limit=1:00:00", "--dry-run")
    assert plan["script"].startswith("#!/bin/bash\n")
    assert plan["script"] != said.out, "each job has a token of its own"
    assert "launcher: slurm" in plan["config"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", *CPU], "not on this machine"),
        (["submit", "cluster=local"], "use cluster=slurm"),
        (["submit", "cluster.nodes=3", "--dry-run"], "cluster.gpus_per_node=auto"),
        (["submit", *CPU, "cluster.time_limit=4", "--dry-run"], "leaves no time to train"),
        (["submit", *CPU, "cluster.slurm_extra.time=10", "--dry-run"], "cluster.time_limit says that"),
        (["submit", *CPU, "cluster.slurm_extra.ntasks=10", "--dry-run"], "one task per node"),
        (["submit", "-m", *CPU, "train.seed=1,2"], "not on this machine"),
        (
            ["submit", "-m", *CPU, "train.seed=1,2", "cluster.array_throttle=0", "--dry-run"],
            "no job of a sweep",
        ),
        (["submit", "-m", *CPU, "train.steps=1,0", "--dry-run"], "train.steps=0"),
        (["submit", *CPU, "--force"], "--force is about the members of a sweep"),
        (["submit", *CPU, "--wait", "--dry-run"], "nothing to wait for"),
        (["run", "cluster=slurm", "cluster.gpus_per_node=2"], "use `orchestra submit`"),
    ],
)
def test_wrong_wishes_end_with_2(words: list[str], message: str, orchestra: CommandLine) -> None:
    assert message in orchestra(*words, code=2).err


def test_dry_run_of_a_sweep_prints_one_script_for_members_with_equal_jobs(
    tmp_path: Path, orchestra: CommandLine
) -> None:
    words = ["submit", "-m", *CPU[:2], "cluster.nodes=1,2", "optim.lr=1e-4,3e-4,1e-3", "run.name=grid"]
    said = orchestra(*words, "cluster.array_throttle=4", "--dry-run")
    assert said.out.count("#!/bin/bash\n") == 2
    assert "#SBATCH --array=0-2%2\n" in said.out
    assert f"-m orchestra.agents {tmp_path}/runs/grid --first 3\n" in said.out
    assert "005  cluster.nodes=2 optim.lr=0.001  (array 1)" in said.err
    assert list(tmp_path.iterdir()) == []
    plan = orchestra.json(*words, "--dry-run")
    assert [array["members"] for array in plan["arrays"]] == [[0, 1, 2], [3, 4, 5]]


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
    assert "#SBATCH --cpus-per-task=12\n" in script(threads_per_rank=3)
