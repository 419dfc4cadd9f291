"""Waiting for runs to be over: real records, real processes, and a stand-in squeue where Slurm has a word."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_slurm import FakeSlurm, queue_line
from support.run_records import age_files, led_here, started_elsewhere, submitted

from orchestra.report.run_state import read_state
from orchestra.run.control.stop_requests import CANCEL, write_request
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.submit import wait
from orchestra.submit.wait import RunResult, exit_code, result_of, wait_for


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(wait, "_ASK_S", 0.0)
    monkeypatch.setattr(wait, "_SHORTEST_S", 0.05)
    monkeypatch.setattr(wait, "_LONGEST_S", 0.1)
    fake_slurm.put("sacct", "exit 1")
    fake_slurm.put("squeue")
    return fake_slurm


def begun_elsewhere(parent: Path, name: str, job: str) -> RunDir:
    run = submitted(parent, name, job)
    started_elsewhere(run)
    return run


def ended(run: RunDir, code: int = 0, cause: str = "finished", **last_row: float) -> RunDir:
    rows = JsonLinesWriter(run.metrics)
    for step, row in enumerate([{"loss": 9.0, "mfu": 0.1}, {"loss": 2.5, **last_row}], 1):
        rows.write({"step": step, **row})
    EventWriter(run, node_writer(0, 0), 0).write("failed" if code else "finished", code=code, cause=cause)
    return run


def waited(runs: Sequence[RunDir], change: Callable[[], object]) -> list[RunResult]:
    """Wait for runs that are over when something changes, after a while and not before."""
    later = threading.Timer(0.7, change)
    began = time.monotonic()
    later.start()
    results = wait_for(runs, "loss")
    assert time.monotonic() - began >= 0.7
    later.join()
    return results


def test_finished_runs_are_returned_in_order_with_the_last_value_of_the_metric(tmp_path: Path) -> None:
    runs = [ended(led_here(RunDir(tmp_path / "b")), mfu=0.5), ended(led_here(RunDir(tmp_path / "a")))]
    assert wait_for(runs, "loss") == [RunResult(run, "finished", 0, "loss", 2.5, "finished") for run in runs]
    # The last row's, not the last that there was: without a number there is none.
    assert [result.value for result in wait_for(runs, "mfu")] == [0.5, None]


def test_a_run_that_trains_is_waited_for_and_its_steps_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = led_here(RunDir(tmp_path / "slow"))
    (result,) = waited([run], lambda: ended(run))
    assert (result.is_done, result.value) == (True, 2.5)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "slow: running" in shown.err
    assert "slow: finished, loss 2.5" in shown.err


def test_an_end_without_a_job_in_slurm_needs_two_looks(tmp_path: Path, slurm: FakeSlurm) -> None:
    """A failed run whose job Slurm starts again goes on, until Slurm has it no more."""
    run = ended(begun_elsewhere(tmp_path, "one", "7"), code=1, cause="OutOfMemory")
    slurm.says("squeue", prints=queue_line("7", "PENDING", "one"))
    (result,) = waited([run], lambda: slurm.put("squeue"))
    assert (result.state, result.code, result.cause, result.value) == ("failed", 1, "OutOfMemory", 2.5)


def test_a_question_that_fails_decides_nothing(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (begun_elsewhere(tmp_path, name, job) for name, job in (("one", "7"), ("two", "8")))
    slurm.says("squeue", complains="Unable to contact slurm controller", code=1)
    runs = [ended(one, code=75, cause="stopped"), ended(two)]
    results = waited(runs, lambda: slurm.put("squeue"))
    assert [(result.state, result.code) for result in results] == [("stopped", 75), ("finished", 0)]
    assert capsys.readouterr().err.count("Unable to contact") == 1


@pytest.mark.usefixtures("slurm")
def test_a_job_that_vanished_without_a_verdict_counts_as_failed(tmp_path: Path) -> None:
    run = begun_elsewhere(tmp_path, "one", "7")
    # Files that grew within the last minute would speak for a run that lives.
    age_files(run)
    (result,) = wait_for([run], "loss")
    assert (result.state, result.code, result.value) == ("died", 1, None)


def test_ctrl_c_leaves_the_jobs_alone_and_says_so(tmp_path: Path) -> None:
    run = led_here(RunDir(tmp_path / "long"))
    script = textwrap.dedent(
        f"""\
        from pathlib import Path
        from orchestra.run.paths import RunDir
        from orchestra.submit.wait import wait_for
        wait_for([RunDir(Path({str(run.path)!r}))], "loss")
        """
    )
    waiter = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert waiter.stderr is not None
    assert "waiting for 1 run" in waiter.stderr.readline()
    assert "long: running" in waiter.stderr.readline()
    waiter.send_signal(signal.SIGINT)
    said = waiter.communicate(timeout=60)[1]
    assert "its job goes on" in said
    assert "KeyboardInterrupt" in said
    assert not run.control.exists()


def test_a_run_that_never_began_has_failed_unless_somebody_cancelled_it(tmp_path: Path) -> None:
    run = submitted(tmp_path, "run", "1")
    state = replace(read_state(run, time.time()), state=RunPhase.not_started, code=None)
    assert result_of(run, state, "loss").code == 1
    write_request(run, 0, CANCEL)
    assert result_of(run, state, "loss").code == 75


@pytest.mark.parametrize(
    ("codes", "worst"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 75], 75),
        ([75, 130], 130),
        ([130, 1, 75], 1),
        ([93, 1], 93),
        ([139, 75], 139),
    ],
)
def test_the_exit_code_is_that_of_the_worst_end(codes: list[int], worst: int) -> None:
    results = [RunResult(RunDir(Path("x")), "?", code, "loss", None) for code in codes]
    assert exit_code(results) == worst
