"""A further job for a run: its code, configuration and script, once, and nothing changed where it fails.

First the copy of the code alone: what is in it, what is not, and how much it may be.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.fake_slurm import FakeSlurm

from conf.schema import LauncherName
from launchers.slurm import sbatch
from orchestra.config.compose import compose
from orchestra.config.machine import Situation, signature
from orchestra.errors import ConfigError, LaunchError
from orchestra.run.config_file import read_config
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir
from orchestra.submit import new_run
from orchestra.submit.job import Share
from orchestra.submit.new_run import RunRequest, planned_run, prepare
from orchestra.submit.resume_run import ResumeJob, plan_resume, resume_job, submit_resume

LOGIN = Situation("resume")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a little code that is running, a file or two in each package."""
    root = tmp_path / "tree"
    for package in new_run.PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text(f"# {package}\n")
    (root / "conf" / "model").mkdir()
    (root / "conf" / "model" / "debug.yaml").write_text("name: debug\n")
    monkeypatch.setattr(new_run, "source_root", lambda: root)
    return root


@pytest.fixture
def run(tmp_path: Path, tree: Path) -> RunDir:
    """A run that was submitted for two nodes and stopped in attempt 0."""
    overrides = ["cluster=slurm", "cluster.nodes=2", "cluster.device=cpu", "cluster.gpus_per_node=1"]
    config = compose([*overrides, "run.name=mine", f"run.dir={tmp_path}"], Situation("submit")).config
    request = RunRequest(config, signature(config), overrides)
    run = prepare(request, planned_run(request, 0.0))
    new_run.take_snapshot(run.code)
    run.batch_script.write_text("the older script")
    record = json.loads(run.record.read_text())
    job = {"token": "orchestra:0", "id": "12", "name": "mine", "user": "me", "submitted": 1e9, "attempt": 0}
    run.record.write_text(json.dumps({**record, "jobs": [job]}, indent=2) + "\n")
    events = EventWriter(run, node_writer(0, 0), 0)
    events.write("attempt_started", node=0, job="12")
    events.write("failed", node=0, code=75, cause="StopRequested")
    return run


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A cluster that takes every job."""
    monkeypatch.setattr(sbatch, "_LOOK_AGAIN_S", (0.0,))
    fake_slurm.put("squeue")
    fake_slurm.says("sbatch", prints="15")
    return fake_slurm


def planned(run: RunDir, *overrides: str) -> ResumeJob:
    return resume_job(plan_resume(run, overrides, LOGIN, 1e9), Share())


def files(folder: Path) -> dict[str, str]:
    """Return the texts of all files below a folder but those of a run's control."""
    found = (file for file in folder.rglob("*") if file.is_file() and file.parent.name != "control")
    return {str(file.relative_to(folder)): file.read_text() for file in found}


def test_what_members_share_is_nothing_to_one_that_a_command_trains_alone(
    tmp_path: Path, orchestra: CommandLine
) -> None:
    one = ["cluster.device=cpu", "cluster.gpus_per_node=1", f"run.dir={tmp_path}", "run.name=mine"]
    words = [*one, "cluster.members_at_once=2", "train.micro_batch_size=auto"]
    assert (
        "members_at_once=2" in orchestra("run", "-m", "optim.lr=1e-3,1e-2", *words, "--dry-run", code=2).err
    )
    orchestra("run", *words, "--dry-run")
    config = compose(words, Situation("run", is_alone=True)).config
    request = RunRequest(config, signature(config), words)
    run = prepare(request, planned_run(request, 0.0))
    events = EventWriter(run, node_writer(0, 0), 0)
    events.write("attempt_started", node=0)
    events.write("failed", node=0, code=75, cause="StopRequested")
    orchestra("resume", str(run.path), "--dry-run")


def test_a_snapshot_holds_the_packages_as_they_lie_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    packages = files(tree)
    (tree / "data.bin").write_bytes(b"0" * 1000)
    (tree / "conf" / "__pycache__").mkdir()
    (tree / "conf" / "__pycache__" / "x.pyc").write_text("")
    (tree / "conf" / ".hidden").write_text("")
    new_run.take_snapshot(tmp_path / "code")
    assert files(tmp_path / "code") == packages


def test_what_is_too_large_is_named(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_run, "_MAX_BYTES", 1 << 20)
    (tree / "orchestra" / "weights.bin").write_bytes(b"0" * (3 << 20))
    with pytest.raises(ConfigError, match=r"has 3 MiB, at most 1 MiB.*orchestra/weights\.bin \(3 MiB\)"):
        new_run.take_snapshot(tmp_path / "code")
    assert not (tmp_path / "code").exists()


@pytest.mark.usefixtures("slurm")
def test_a_new_job_gets_code_configuration_and_script(run: RunDir, tree: Path) -> None:
    older = files(run.path)
    (tree / "conf" / "__init__.py").write_text("# edited\n")
    plan = planned(run, "cluster.nodes=4")
    assert submit_resume(plan, ["orchestra", "resume"]) == "15"
    now = files(run.path)
    assert now["code/conf/__init__.py"] == "# edited\n"
    assert now["code.attempt-000/conf/__init__.py"] == "# conf\n"
    assert now["config.attempt-000.yaml"] == older["config.yaml"]
    assert read_config(run.config).cluster.nodes == 4
    assert now["job.sbatch"] == plan.script()
    record = json.loads(now["run.json"])
    assert [(job["id"], job["attempt"]) for job in record["jobs"]] == [("12", 0), ("15", 1)]
    assert record["jobs"][1]["token"] == plan.token
    assert (record["pid"], record["resumes"][0]["overrides"]) == (None, ["cluster.nodes=4"])


def test_what_slurm_refuses_changes_nothing(run: RunDir, tree: Path, slurm: FakeSlurm) -> None:
    slurm.says("sbatch", complains="sbatch: error: invalid account", code=1)
    (tree / "conf" / "__init__.py").write_text("# edited\n")
    before = files(run.path)
    with pytest.raises(ConfigError, match="Slurm refuses the job: sbatch: invalid account"):
        submit_resume(planned(run, "cluster.nodes=4"), [])
    kept = {name: text for name, text in files(run.path).items() if name != "config.attempt-000.yaml"}
    assert kept == before
    slurm.says("sbatch", prints="15")
    assert submit_resume(planned(run), []) == "15"


def test_an_answer_that_is_lost_keeps_the_token(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.says("sbatch", complains="Socket timed out on send/recv operation", code=1)
    slurm.says("squeue", complains="Unable to contact slurm controller", code=1)
    plan = planned(run)
    with pytest.raises(LaunchError, match="Slurm may have the job or not"):
        submit_resume(plan, [])
    assert json.loads(run.record.read_text())["jobs"][1]["token"] == plan.token
    assert run.batch_script.read_text() == plan.script()


@pytest.mark.usefixtures("slurm")
def test_of_two_that_planned_the_same_job_one_submits_and_keeps_the_same_code_once(run: RunDir) -> None:
    first, second = planned(run), planned(run, "cluster.nodes=4")
    submit_resume(first, [])
    assert not run.code_of_attempt(0).exists()
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]
    with pytest.raises(ConfigError, match="is being resumed already"):
        submit_resume(second, [])
    assert read_config(run.config).cluster.nodes == 2
    assert read_config(run.config).cluster.launcher is LauncherName.slurm
