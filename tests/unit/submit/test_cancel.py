"""Asking runs to stop, from their records alone: who is asked, who is not, and what is said."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from launchers import processes
from orchestra.cli import main
from orchestra.errors import EXIT_USAGE
from orchestra.run import stop_requests
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def _run(
    folder: Path, name: str, attempt: int = 0, ended: int | None = None, host: str | None = None
) -> RunDir:
    """Return a run whose attempt this very process leads, or led."""
    run = RunDir(folder / name)
    run.path.mkdir(parents=True)
    run.record.write_text(json.dumps({"name": name}))
    leader = processes.find(os.getpid())
    assert leader is not None
    events = EventWriter(run, node_writer(attempt, 0), attempt)
    place = {} if host is None else {"host": host}
    events.write("attempt_started", pid=leader.pid, pid_started=leader.started, **place)
    if ended is not None:
        events.write("finished" if ended == 0 else "failed", node=0, code=ended, cause="x")
    return run


def test_a_run_is_asked_in_its_newest_attempt_and_only_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(folder, "first", attempt=3)
    assert main(["cancel", "fir"]) == 0
    assert capsys.readouterr().out.startswith(
        "first: attempt 3 asked to save and stop; `orchestra status first`"
    )
    (request,) = stop_requests.read_requests(run, 3)
    assert (request.reason, request.at_once) == ("cancel", False)
    assert main(["cancel", "first"]) == 0
    told = capsys.readouterr().out
    assert "was asked to stop 0s ago already (cancel, asked for by " in told
    assert "orchestra cancel first --now" in told
    assert len(stop_requests.read_requests(run, 3)) == 1


def test_now_presses_a_run_that_was_asked_before(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(folder, "first")
    assert main(["cancel", "first"]) == main(["cancel", "first", "--now"]) == 0
    assert [request.at_once for request in stop_requests.read_requests(run, 0)] == [False, True]
    assert "attempt 0 asked to end at once" in capsys.readouterr().out
    assert main(["cancel", "first", "--now"]) == main(["cancel", "first"]) == 0
    assert len(stop_requests.read_requests(run, 0)) == 2


def test_a_run_on_another_host_is_asked_too(folder: Path) -> None:
    run = _run(folder, "far", host="elsewhere")
    assert main(["cancel", "far"]) == 0
    assert stop_requests.read_request(run, 0) is not None


@pytest.mark.parametrize(
    ("code", "state"), [(0, "finished"), (1, "failed"), (75, "stopped"), (130, "interrupted")]
)
def test_what_does_not_run_is_said_and_not_asked(
    folder: Path, capsys: pytest.CaptureFixture[str], code: int, state: str
) -> None:
    run = _run(folder, "first", ended=code)
    assert main(["cancel", "first"]) == 0
    assert capsys.readouterr().out == f"first: {state}, nothing runs that could be stopped\n"
    assert stop_requests.read_requests(run, 0) == []


def test_a_run_that_is_just_being_resumed_is_asked_in_the_attempt_to_come(folder: Path) -> None:
    run = _run(folder, "first", ended=75)
    leader = processes.find(os.getpid())
    assert leader is not None
    run.control.mkdir()
    claim = {"host": os.uname().nodename, "pid": leader.pid, "pid_started": leader.started}
    run.claim(1).write_text(json.dumps(claim))
    assert main(["cancel", "first"]) == 0
    assert stop_requests.read_request(run, 1) is not None


def test_several_runs_are_told_of_as_json_and_a_dry_run_asks_nobody(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [_run(folder, "first"), _run(folder, "second", ended=0)]
    assert main(["cancel", "first", "second", "--dry-run"]) == 0
    assert "first: attempt 0 would be asked to save and stop" in capsys.readouterr().out
    assert stop_requests.read_requests(runs[0], 0) == []
    assert main(["cancel", "first", "second", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["asked"], one["attempt"]) for one in told] == [
        ("first", True, 0),
        ("second", False, None),
    ]


def test_of_several_names_one_of_which_is_wrong_none_is_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(folder, "first")
    assert main(["cancel", "first", "nobody"]) == EXIT_USAGE
    assert "nobody" in capsys.readouterr().err
    assert stop_requests.read_requests(run, 0) == []


def test_a_request_that_cannot_be_written_is_an_error_that_says_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(folder, "first")
    shutil.rmtree(run.control, ignore_errors=True)
    run.control.write_text("in the way")
    assert main(["cancel", "first"]) == 1
    told = capsys.readouterr().err
    assert "error: " in told
    assert "Traceback" not in told
