"""A further job for a run: its code, configuration and script, once, and nothing changed where it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.schema import LauncherName
from launchers.slurm import sbatch
from orchestra.config.compose import compose
from orchestra.config.machine import Situation, signature
from orchestra.errors import ConfigError, LaunchError
from orchestra.run.config_file import read_config
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir
from orchestra.submit import code_snapshot
from orchestra.submit.job import Share
from orchestra.submit.new_run import RunRequest, planned_run, prepare
from orchestra.submit.resume_run import ResumeJob, plan_resume, resume_job, submit_resume

LOGIN = Situation("resume")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a little code that is running, one file in each package."""
    root = tmp_path / "tree"
    for package in code_snapshot.PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text(f"# {package}\n")
    monkeypatch.setattr(code_snapshot, "source_root", lambda: root)
    return root


@pytest.fixture
def run(tmp_path: Path, tree: Path) -> RunDir:
    """A run that was submitted for two nodes and stopped in attempt 0."""
    overrides = ["cluster=slurm", "cluster.nodes=2", "cluster.device=cpu", "cluster.gpus_per_node=1"]
    config = compose([*overrides, "run.name=mine", f"run.dir={tmp_path}"], Situation("submit")).config
    request = RunRequest(config, signature(config), overrides)
    run = prepare(request, planned_run(request, 0.0))
    code_snapshot.take_snapshot(run.code)
    run.batch_script.write_text("the older script")
    record = json.loads(run.record.read_text())
    job = {"token": "orchestra:0", "id": "12", "name": "mine", "user": "me", "submitted": 1e9, "attempt": 0}
    run.record.write_text(json.dumps({**record, "jobs": [job]}, indent=2) + "\n")
    events = EventWriter(run, node_writer(0, 0), 0)
    events.write("attempt_started", node=0, job="12")
    events.write("failed", node=0, code=75, cause="StopRequested")
    return run


def put_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(sbatch, "_LOOK_AGAIN_S", (0.0,))
    for name, content in (("sbatch", text), ("squeue", "exit 0")):
        command = folder / name
        command.write_text(f"#!/bin/sh\n{content}\n")
        command.chmod(0o755)


def planned(run: RunDir, *overrides: str) -> ResumeJob:
    return resume_job(plan_resume(run, overrides, LOGIN, 1e9), Share())


def files(run: RunDir) -> dict[str, str]:
    found = (file for file in run.path.rglob("*") if file.is_file() and file.parent != run.control)
    return {str(file.relative_to(run.path)): file.read_text() for file in found}


def test_a_new_job_gets_code_configuration_and_script(
    run: RunDir, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_sbatch(tmp_path, monkeypatch, "echo 15")
    older = files(run)
    (tree / "conf" / "__init__.py").write_text("# edited\n")
    plan = planned(run, "cluster.nodes=4")
    assert submit_resume(plan, ["orchestra", "resume"]) == "15"
    now = files(run)
    assert now["code/conf/__init__.py"] == "# edited\n"
    assert now["code.attempt-000/conf/__init__.py"] == "# conf\n"
    assert now["config.attempt-000.yaml"] == older["config.yaml"]
    assert read_config(run.config).cluster.nodes == 4
    assert now["job.sbatch"] == plan.script()
    record = json.loads(now["run.json"])
    assert [(job["id"], job["attempt"]) for job in record["jobs"]] == [("12", 0), ("15", 1)]
    assert record["jobs"][1]["token"] == plan.token
    assert (record["pid"], record["resumes"][0]["overrides"]) == (None, ["cluster.nodes=4"])


def test_the_same_code_is_kept_once(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_sbatch(tmp_path, monkeypatch, "echo 15")
    submit_resume(planned(run), [])
    assert not run.code_of_attempt(0).exists()
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


def test_what_slurm_refuses_changes_nothing(
    run: RunDir, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_sbatch(tmp_path, monkeypatch, "echo 'sbatch: error: invalid account' >&2; exit 1")
    (tree / "conf" / "__init__.py").write_text("# edited\n")
    before = files(run)
    with pytest.raises(ConfigError, match="Slurm refuses the job: sbatch: invalid account"):
        submit_resume(planned(run, "cluster.nodes=4"), [])
    after = files(run)
    kept = {name: text for name, text in after.items() if name != "config.attempt-000.yaml"}
    assert kept == before
    put_sbatch(tmp_path, monkeypatch, "echo 15")
    assert submit_resume(planned(run), []) == "15"


def test_an_answer_that_is_lost_keeps_the_token(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_sbatch(tmp_path, monkeypatch, "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    plan = planned(run)
    with pytest.raises(LaunchError, match="Slurm may have the job or not"):
        submit_resume(plan, [])
    assert json.loads(run.record.read_text())["jobs"][1]["token"] == plan.token
    assert run.batch_script.read_text() == plan.script()


def test_of_two_that_planned_the_same_job_one_submits(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_sbatch(tmp_path, monkeypatch, "echo 15")
    first, second = planned(run), planned(run, "cluster.nodes=4")
    submit_resume(first, [])
    with pytest.raises(ConfigError, match="is being resumed already"):
        submit_resume(second, [])
    assert read_config(run.config).cluster.nodes == 2
    assert read_config(run.config).cluster.launcher is LauncherName.slurm
