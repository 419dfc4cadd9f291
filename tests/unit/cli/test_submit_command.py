"""`orchestra submit` where there is no Slurm: the dry run, refusals, and the job that follows from a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, Config, ContainerConfig, Device, LauncherName
from launchers.slurm.batch_script import rendered
from orchestra.cli import main
from orchestra.run.paths import RunDir
from orchestra.submit.job import Share, batch_job, new_token

CPU = ["cluster.device=cpu", "cluster.gpus_per_node=2", "cluster.nodes=3", "run.name=mine"]


@pytest.fixture(autouse=True)
def _no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_dry_run_prints_the_exact_script_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *CPU, "cluster.time_limit=1:00:00", "--dry-run"]) == 0
    said = capsys.readouterr()
    run = tmp_path / "runs" / "mine"
    assert said.out.startswith("#!/bin/bash\n")
    for line in ("#SBATCH --nodes=3", "#SBATCH --time=1:00:00", "#SBATCH --cpus-per-task=2"):
        assert f"{line}\n" in said.out
    assert f"export PYTHONPATH={run}/code" in said.out
    assert f"-m orchestra.agents {run}\n" in said.out
    assert "was not checked" in said.err
    assert list(tmp_path.iterdir()) == []


def test_dry_run_in_json_holds_script_and_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", *CPU, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["script"].startswith("#!/bin/bash")
    assert "launcher: slurm" in plan["config"]


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
def test_wrong_wishes_end_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_dry_run_of_a_sweep_prints_one_script_for_members_with_equal_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "-m", *CPU[:2], "cluster.nodes=1,2", "optim.lr=1e-4,3e-4,1e-3", "run.name=grid"]
    assert main([*words, "cluster.array_throttle=4", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.out.count("#!/bin/bash\n") == 2
    assert "#SBATCH --array=0-2%2\n" in said.out
    assert f"-m orchestra.agents {tmp_path}/runs/grid --first 3\n" in said.out
    assert "005  cluster.nodes=2 optim.lr=0.001  (array 1)" in said.err
    assert list(tmp_path.iterdir()) == []
    assert main([*words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [it["members"] for it in plan["arrays"]] == [[0, 1, 2], [3, 4, 5]]


def config(**cluster: object) -> Config:
    base = ClusterConfig(launcher=LauncherName.slurm, device=Device.cuda, gpus_per_node=4, nodes=2)
    return dataclasses.replace(Config(), cluster=dataclasses.replace(base, **cluster))  # type: ignore[arg-type]


def script(run: RunDir, **cluster: object) -> str:
    return rendered(batch_job(config(**cluster), run, "orchestra:1", Share(24)))


def test_gpus_are_asked_for_with_their_share_of_the_cores(tmp_path: Path) -> None:
    text = script(RunDir(tmp_path / "mine"))
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "#SBATCH --cpus-per-task=24\n" in text
    assert "gpus-per-node" not in script(RunDir(tmp_path / "mine"), device=Device.cpu)
    named = script(RunDir(tmp_path / "mine"), slurm_extra={"gres": "gpu:h100:4"})
    assert "#SBATCH --gres=gpu:h100:4\n" in named
    assert "gpus-per-node" not in named
    assert "#SBATCH --cpus-per-task=12\n" in script(RunDir(tmp_path / "mine"), threads_per_rank=3)


def test_containers_get_the_run_and_python_of_their_own(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    inside = f"env PYTHONPATH={run.code} PYTHONSAFEPATH=1 python3 -u -m orchestra.agents {run.path}\n"
    pyxis = script(run, container=ContainerConfig(image="nvcr.io#nvidia/pytorch", mounts=["/data:/data"]))
    assert f"--container-mounts={tmp_path}:{tmp_path},/data:/data {inside}" in pyxis
    assert "'--container-image=nvcr.io#nvidia/pytorch'" in pyxis
    apptainer = script(run, container=ContainerConfig(prefix="apptainer exec --nv image.sif"))
    assert f" apptainer exec --nv image.sif {inside}" in apptainer


def test_no_two_tokens_are_the_same() -> None:
    assert len({new_token() for _ in range(100)}) == 100
