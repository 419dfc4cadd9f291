"""What the job of a run does first that begins after others: it begins, waits on in another job, or ends."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from job_in_slurm import Slurm, jobs, options
from support.command_line import CommandLine
from support.fake_slurm import ME, queue_line
from support.run_records import led_here, started_elsewhere, submitted

from conf.schema import Config
from launchers.slurm.batch_script import NOT_THIS_JOB
from orchestra.agents.follow import __main__ as follow
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from orchestra.report.run_state import read_state
from orchestra.run.config_file import write_config
from orchestra.run.control import stop_requests
from orchestra.run.events import read_events
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.submit.fair.predecessors import predecessor_of, record_of


@pytest.fixture
def before(run: RunDir) -> RunDir:
    """The run that is to be done first: it was in job 7, and has gone on in job 8."""
    first = submitted(run.path.parent.parent, "first", "8")
    started_elsewhere(first, job="7").write("failed", node=0, code=75, cause="StopRequested")
    return first


@pytest.fixture(autouse=True)
def _in_its_job(run: RunDir, before: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(run.config, Config())
    entry = {"token": "orchestra:0", "id": "12", "name": "mine", "user": ME, "submitted": 1.0, "attempt": 0}
    record = {"name": "mine", "jobs": [entry], "after": record_of([predecessor_of(before)])}
    run.record.write_text(json.dumps(record))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(follow, "_BELIEVED_S", 0.2)
    monkeypatch.setattr(follow, "_SILENCE_S", 0.2)
    monkeypatch.setattr(follow, "_PAUSE_S", 0.05)
    slurm.put("sacct", "exit 1")


def goes_on(slurm: Slurm) -> None:
    slurm.tell("queue", queue_line("8", "PENDING", "first") + "\n")


def test_it_waits_on_behind_the_job_in_which_the_other_run_goes_on_once(run: RunDir, slurm: Slurm) -> None:
    goes_on(slurm)
    assert follow.main([str(run.path)]) == NOT_THIS_JOB
    # Started again, by an administrator perhaps.
    assert follow.main([str(run.path)]) == NOT_THIS_JOB
    (call,) = slurm.calls("sbatch")
    assert (options(call, "dependency"), options(call, "begin")) == ("afterany:8", None)
    assert call.endswith("/job.sbatch")
    assert [(job["id"], job["attempt"]) for job in jobs(run)] == [("12", 0), ("20", 0)]
    (event,) = (event for event in read_events(run) if event["event"] == "waits_on")
    assert (event["job"], event["instead_of"], event["behind"]) == ("20", "12", ["8"])
    assert not list(run.path.glob("events/*crew*"))


def test_it_begins_when_the_other_run_is_done_and_never_waits_again(
    run: RunDir, before: RunDir, slurm: Slurm
) -> None:
    started_elsewhere(before, 1, job="8").write("finished", node=0, code=0)
    slurm.tell("silent")
    assert follow.main([str(run.path)]) == EXIT_DONE
    led_here(run)
    started_elsewhere(before, 2, job="9").write("failed", node=0, code=93, cause="x")
    assert follow.main([str(run.path)]) == EXIT_DONE
    assert slurm.calls("sbatch") == []


def test_it_ends_with_93_where_the_other_run_ended_and_says_what_to_do(
    run: RunDir, slurm: Slurm, orchestra: CommandLine
) -> None:
    assert follow.main([str(run.path)]) == EXIT_DO_NOT_RESTART
    (event,) = (event for event in read_events(run) if event["event"] == "start_failed")
    assert event["cause"].startswith("it begins after first, which was stopped (exit code 75: ")
    words = "`orchestra resume first` first, then `orchestra resume mine`"
    assert words in " ".join(orchestra("why", str(run.path)).out.split())
    state = orchestra.json("status", str(run.path))[0]
    assert (state["state"], state["code"], words in state["cause"]) == ("failed", 93, True)
    assert slurm.calls("sbatch") == []


def test_an_end_is_believed_only_when_it_stands(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, progress = itertools.count(), follow.progress

    def look(*arguments: Any) -> Any:
        if next(looks) == 2:
            goes_on(slurm)
        return progress(*arguments)

    monkeypatch.setattr(follow, "progress", look)
    monkeypatch.setattr(follow, "_BELIEVED_S", 10.0)
    assert follow.main([str(run.path)]) == NOT_THIS_JOB


def test_where_nothing_can_be_waited_for_it_looks_again_later(
    run: RunDir, before: RunDir, slurm: Slurm
) -> None:
    led_here(before, 1)
    before.record.write_text(json.dumps({"name": "first", "jobs": []}))
    assert follow.main([str(run.path)]) == NOT_THIS_JOB
    (call,) = slurm.calls("sbatch")
    assert (options(call, "dependency"), options(call, "begin")) == (None, "now+600")


def test_a_silent_slurm_and_a_cancel_start_nothing(run: RunDir, slurm: Slurm) -> None:
    (slurm.folder / "queue").unlink()
    assert follow.main([str(run.path)]) == EXIT_FAILED
    (event,) = (event for event in read_events(run) if event["event"] == "start_failed")
    assert "whether first is done is not known; `orchestra resume mine` tries again" in event["cause"]
    goes_on(slurm)
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    assert follow.main([str(run.path)]) == EXIT_STOPPED
    assert slurm.calls("sbatch") == []
    assert read_state(run, time.time()).state is RunPhase.cancelled
