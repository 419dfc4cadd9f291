"""Which attempt comes next: none that was started, claimed, or asked to stop before it began."""

from __future__ import annotations

import json
from pathlib import Path

from orchestra.run import stop_requests
from orchestra.run.paths import RunDir
from orchestra.submit.claims import next_attempt_number, take, take_next


def run_with_job(folder: Path, attempt: int) -> RunDir:
    """A run directory whose newest job was submitted for `attempt`."""
    run = RunDir(folder / "first")
    run.control.mkdir(parents=True)
    run.record.write_text(json.dumps({"name": run.name, "jobs": [{"token": "t", "attempt": attempt}]}))
    return run


def test_first_attempt_is_0(tmp_path: Path) -> None:
    run = run_with_job(tmp_path, 0)
    assert next_attempt_number(run, None) == 0
    assert take_next(run) == 0


def test_claimed_attempt_is_passed_over(tmp_path: Path) -> None:
    run = run_with_job(tmp_path, 0)
    take(run, 0)
    assert next_attempt_number(run, None) == 1
    assert take_next(run) == 1


def test_job_hears_the_request_to_cancel_it_that_came_while_it_waited(tmp_path: Path) -> None:
    run = run_with_job(tmp_path, 0)
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    attempt = take_next(run)
    assert stop_requests.read_request(run, attempt) is not None


def test_resume_lies_behind_a_request_that_nobody_heard(tmp_path: Path) -> None:
    run = run_with_job(tmp_path, 0)
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    number = next_attempt_number(run, None)
    resumed = run_with_job(tmp_path / "resumed", number)
    stop_requests.write_request(resumed, 0, stop_requests.CANCEL)
    attempt = take_next(resumed)
    assert (number, attempt) == (1, 1)
    assert stop_requests.read_request(resumed, attempt) is None
