"""Slurm's word on a run after the run's own: which one counts, from real records and a stand-in squeue."""

from __future__ import annotations

import getpass
import json
import time
from pathlib import Path

import pytest

from orchestra.cli import main
from orchestra.events import EventWriter, node_writer
from orchestra.report.scheduler import newest_job, with_scheduler
from orchestra.report.state import RunState, read_state
from orchestra.rundir import RunDir

ME = getpass.getuser()
SILENT = "exec >&2; echo 'squeue: error: Unable to contact slurm controller (connect failure)'; exit 1"


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    put(folder, "sacct", "exit 1")
    return folder


def put(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def submitted(parent: Path, name: str, job: str | None = "7") -> RunDir:
    run = RunDir(parent / "runs" / name)
    run.path.mkdir(parents=True)
    intent = {"token": f"orchestra:{name}", "id": job, "name": name, "user": ME, "submitted": time.time()}
    run.record.write_text(json.dumps({"name": name, "created": time.time(), "pid": None, "jobs": [intent]}))
    return run


def queue(folder: Path, name: str, state: str) -> None:
    put(folder, "squeue", f"echo '7|{state}|{ME}|Priority|node1|N/A|{name}|orchestra:{name}'")


def told(run: RunDir) -> RunState:
    ((state,), _) = with_scheduler([run], [read_state(run, time.time())])
    return state


def elsewhere(run: RunDir) -> EventWriter:
    """Start an attempt on another host."""
    events = EventWriter(run, node_writer(0, 0), 0, host="node1")
    events.write("attempt_started", pid=1, pid_started=1)
    return events


@pytest.mark.parametrize(
    ("word", "before", "after"),
    [
        ("PENDING", "queued", "queued"),
        ("RUNNING", "starting", "running"),
        ("COMPLETING", "starting", "running"),
        ("NODE_FAIL", "died", "died"),
        ("CANCELLED", "cancelled", "died"),
    ],
)
def test_slurm_tells_what_the_records_leave_open(
    tmp_path: Path, bin_folder: Path, word: str, before: str, after: str
) -> None:
    run = submitted(tmp_path, "one")
    queue(bin_folder, "one", word)
    assert told(run).state == before
    elsewhere(run)
    state = told(run)
    assert (state.state, state.job, state.job_state) == (after, "7", word)


def test_a_verdict_of_the_run_is_stronger_but_a_stopped_run_may_wait_again(
    tmp_path: Path, bin_folder: Path
) -> None:
    run = submitted(tmp_path, "one")
    elsewhere(run).write("failed", node=0, code=75, cause="StopRequested")
    for word, state in (("RUNNING", "stopped"), ("CANCELLED", "stopped"), ("PENDING", "queued")):
        queue(bin_folder, "one", word)
        assert told(run).state == state
    elsewhere(run).write("finished", node=0, code=0)
    assert told(run).state == "finished"


def test_silence_changes_nothing_and_is_said(
    tmp_path: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(tmp_path, "one")
    put(bin_folder, "squeue", SILENT)
    assert told(run).state == "not started"
    elsewhere(run)
    assert told(run).state == "running"
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    assert "Unable to contact slurm controller" in capsys.readouterr().err


def test_a_lost_job_is_found_by_its_token_or_was_never_submitted(tmp_path: Path, bin_folder: Path) -> None:
    run = submitted(tmp_path, "lost", job=None)
    queue(bin_folder, "lost", "PENDING")
    assert (told(run).state, told(run).job) == ("queued", "7")
    put(bin_folder, "squeue", "true")
    assert told(run).state == "not submitted"
    known = submitted(tmp_path, "known")
    assert told(known).state == "died"


def test_runs_of_no_job_ask_nobody(tmp_path: Path, bin_folder: Path) -> None:
    put(bin_folder, "squeue", f"touch {tmp_path}/asked")
    run = RunDir(tmp_path / "local")
    run.path.mkdir()
    for jobs in ([], [{}], "x", [{"token": 1}]):
        run.record.write_text(json.dumps({"jobs": jobs}))
        assert newest_job(run) is None
        assert told(run) == read_state(run, time.time())
    assert not (tmp_path / "asked").exists()
