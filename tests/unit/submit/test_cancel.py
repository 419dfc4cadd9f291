"""Asking runs to stop, from their records alone: who is asked, who is not, and what is said."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.fake_slurm import FakeSlurm, queue_line
from support.run_records import led_here, started_elsewhere, submitted

from conf.schema import Config, RunConfig
from orchestra.errors import EXIT_USAGE
from orchestra.run.config_file import write_config
from orchestra.run.control.member_places import newest_place
from orchestra.run.control.stop_requests import read_request, read_requests
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.submit.cancel_jobs import Cancellation, Way, carry_out
from orchestra.submit.claims import take, take_turn

FIRST, SECOND = RunDir(Path("runs/first")), RunDir(Path("runs/second"))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("place", [{}, {"host": "elsewhere"}], ids=["here", "on another host"])
def test_a_run_is_asked_in_its_newest_attempt_and_only_once(
    orchestra: CommandLine, place: dict[str, str]
) -> None:
    led_here(FIRST, attempt=3, **place)
    asked = "first: attempt 3 asked to save and stop; `orchestra status first`"
    assert orchestra("cancel", "fir").out.startswith(asked)
    (request,) = read_requests(FIRST, 3)
    assert (request.reason, request.at_once) == ("cancel", False)
    printed = orchestra("cancel", "first").out
    assert "already (cancel, asked for by " in printed
    assert "orchestra cancel first --now" in printed
    assert len(read_requests(FIRST, 3)) == 1


def test_now_presses_a_run_that_was_asked_before(orchestra: CommandLine) -> None:
    led_here(FIRST)
    orchestra("cancel", "first")
    assert "attempt 0 asked to end at once" in orchestra("cancel", "first", "--now").out
    assert [request.at_once for request in read_requests(FIRST, 0)] == [False, True]
    orchestra("cancel", "first", "--now")
    orchestra("cancel", "first")
    assert len(read_requests(FIRST, 0)) == 2


@pytest.mark.parametrize(
    ("code", "state"), [(0, "finished"), (1, "failed"), (75, "stopped"), (130, "interrupted")]
)
def test_what_does_not_run_is_said_and_not_asked(orchestra: CommandLine, code: int, state: str) -> None:
    led_here(FIRST, ended=code)
    assert orchestra("cancel", "first").out == f"first: {state}, nothing runs that could be stopped\n"
    assert read_requests(FIRST, 0) == []


def test_a_run_that_is_just_being_resumed_is_asked_in_the_attempt_to_come(orchestra: CommandLine) -> None:
    led_here(FIRST, ended=75)
    FIRST.control.mkdir()
    assert take(FIRST, 1)
    orchestra("cancel", "first")
    assert read_request(FIRST, 1) is not None


def test_a_run_whose_job_is_just_being_submitted_is_asked_in_the_attempt_to_come(
    orchestra: CommandLine, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.put("squeue")
    run = submitted(Path.cwd(), "one", job=None)
    turn = take_turn(run, 0, time.time())
    assert turn is not None
    assert "attempt 0 asked to save and stop" in orchestra("cancel", "one").out
    assert read_request(run, 0) is not None


def test_a_job_that_slurm_does_not_let_this_user_cancel_is_told_as_such(
    orchestra: CommandLine, fake_slurm: FakeSlurm
) -> None:
    run = submitted(Path.cwd(), "one")
    fake_slurm.says("squeue", prints=queue_line("7", "PENDING", "one"))
    fake_slurm.put(
        "scancel", "echo 'scancel: error: Kill job error on job id 7: Access/permission denied' >&2; exit 1"
    )
    told = orchestra("cancel", "one", code=1).out
    assert "could not be reached" not in told
    assert "Slurm leaves job 7 in the queue" in told
    assert "Access/permission denied" in told
    assert read_request(run, 0) is not None


def test_a_copy_of_a_run_takes_no_job_of_the_original_and_a_renamed_run_its_own(
    orchestra: CommandLine, fake_slurm: FakeSlurm
) -> None:
    run = submitted(Path.cwd(), "one")
    write_config(run.config, replace(Config(), run=RunConfig("one", str(Path.cwd() / "runs"))))
    fake_slurm.says("squeue", prints=queue_line("7", "PENDING", "one"))
    fake_slurm.put("scancel", f": > {fake_slurm.folder}/squeue.out")
    shutil.copytree(run.path, run.path.with_name("copy"))
    told = orchestra("cancel", "copy", code=1).err
    assert f"copy is a copy of {run.path}, and job 7 is that run's" in told
    assert f"`orchestra cancel {run.path}`" in told
    assert fake_slurm.calls("scancel") == []
    assert read_requests(run, 0) == read_requests(RunDir(run.path.with_name("copy")), 0) == []
    run.path.rename(run.path.with_name("renamed"))
    orchestra("cancel", "renamed")
    assert [call.split()[-1] for call in fake_slurm.calls("scancel")] == ["7"]


def test_now_ends_a_job_that_is_suspended_by_slurm(orchestra: CommandLine, fake_slurm: FakeSlurm) -> None:
    run = submitted(Path.cwd(), "one")
    started_elsewhere(run, job="7")
    fake_slurm.says("squeue", prints=queue_line("7", "SUSPENDED", "one"))
    fake_slurm.put("scancel")
    assert "asked to save and stop" in orchestra("cancel", "one").out
    assert fake_slurm.calls("scancel") == []
    orchestra("cancel", "one", "--now")
    assert [call.split()[-1] for call in fake_slurm.calls("scancel")] == ["7"]


def test_of_several_runs_those_that_run_are_asked_unless_one_is_wrong_or_it_is_a_dry_run(
    orchestra: CommandLine,
) -> None:
    led_here(FIRST)
    led_here(SECOND, ended=0)
    assert "nobody" in orchestra("cancel", "first", "nobody", code=EXIT_USAGE).err
    dry = orchestra("cancel", "first", "second", "--dry-run").out
    assert "first: attempt 0 would be asked to save and stop" in dry
    assert read_requests(FIRST, 0) == []
    rows = orchestra.json("cancel", "first", "second")
    asked = [(row["name"], row["asked"], row["attempt"]) for row in rows]
    assert asked == [("first", True, 0), ("second", False, None)]
    assert len(read_requests(FIRST, 0)) == 1


def test_a_request_that_cannot_be_written_is_an_error_that_says_what_to_do(orchestra: CommandLine) -> None:
    led_here(FIRST).control.write_text("in the way")
    printed = orchestra("cancel", "first", code=1).err
    assert printed.startswith("error: ")
    assert str(FIRST.control) in printed


def test_the_others_are_asked_where_one_cannot_be(orchestra: CommandLine) -> None:
    led_here(FIRST).control.symlink_to("nowhere")
    led_here(SECOND)
    printed = orchestra("cancel", "first", "second", code=1)
    assert "second: attempt 0 asked to save and stop" in printed.out
    assert str(FIRST.control) in printed.err
    assert read_request(SECOND, 0) is not None


def test_others_leave_their_list_where_one_member_s_place_cannot_be_taken(tmp_path: Path) -> None:
    runs = [submitted(tmp_path, name, job=None, pack=0) for name in ("000", "001")]
    runs[0].control.symlink_to("nowhere")
    plans = [Cancellation(run, run.name, RunPhase.queued, attempt=0, way=Way.place) for run in runs]
    first, second = carry_out(plans)
    assert "000 could not be taken off the list" in str(first.problem)
    assert (second.way, second.problem) == (Way.place, None)
    assert newest_place(runs[1], 0) is not None
