"""What signals to an agent and files in control/ come to: time to save, or an end at once."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator

import pytest
from support.signal_handlers import as_from_a_terminal, send_here

from launchers.node_agent import StopRequests
from launchers.slurm.this_job import JobSignals
from orchestra.agents import attempt
from orchestra.agents.attempt import StopDeadline
from orchestra.run.control import stop_requests
from orchestra.run.paths import RunDir


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_STOP_LOOK_S", 0.0)


@pytest.fixture
def signals() -> Iterator[StopRequests]:
    with as_from_a_terminal(), StopRequests() as requests:
        yield requests


@pytest.fixture
def stop(run: RunDir, signals: StopRequests) -> StopDeadline:
    """What attempt 2 goes by."""
    return StopDeadline(run, 2, signals, 1000.0)


def test_nobody_asks(run: RunDir, stop: StopDeadline) -> None:
    stop_requests.write_request(run, 1, "the attempt before")
    assert (stop.level(), stop.interruption) == (0, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_becomes_one_request_and_the_ranks_get_time(
    run: RunDir, stop: StopDeadline, number: signal.Signals
) -> None:
    send_here(number)
    assert [stop.level() for _ in range(3)] == [0, 0, 0]
    (request,) = stop_requests.read_requests(run, 2)
    assert (request.reason, request.at_once) == (f"signal {number.name}", False)
    assert stop.interruption is None


def test_a_second_signal_ends_at_once_and_one_more_hurries(
    run: RunDir, signals: StopRequests, stop: StopDeadline
) -> None:
    pressed = StopDeadline(run, 2, signals, 1000.0)
    send_here(signal.SIGTERM)
    assert stop.level() == 0
    send_here(signal.SIGINT)
    assert [stop.level(), stop.level()] == [1, 1]
    assert stop.interruption == "SIGTERM received, and a second signal after it"
    send_here(signal.SIGINT)
    assert stop.level() == 2
    # Both at once, before anybody looked.
    assert pressed.level() == 1


def test_a_request_of_somebody_else_gives_time_too_and_one_that_presses_does_not(
    run: RunDir, stop: StopDeadline
) -> None:
    stop_requests.write_request(run, 2, stop_requests.CANCEL)
    assert stop.level() == 0
    pressing = stop_requests.write_request(run, 2, stop_requests.CANCEL, at_once=True)
    assert stop.level() == 1
    assert stop.interruption == f"{pressing}, at once"


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_ranks_that_take_too_long_are_ended(
    run: RunDir, signals: StopRequests, number: signal.Signals | None
) -> None:
    stop = StopDeadline(run, 2, signals, 0.0)
    if number is None:
        stop_requests.write_request(run, 2, stop_requests.CANCEL)
    else:
        send_here(number)
    assert [stop.level(), stop.level()][1] == 1
    assert "recovery.stop_timeout_s=0" in str(stop.interruption)


def test_a_signal_that_cannot_be_passed_on_ends_at_once(run: RunDir, stop: StopDeadline) -> None:
    shutil.rmtree(run.path)
    send_here(signal.SIGTERM)
    assert stop.level() == 1
    assert "No such file" in str(stop.interruption)


def test_what_slurm_sends_before_the_time_limit_and_at_it_is_one_request(run: RunDir) -> None:
    with as_from_a_terminal(), JobSignals() as signals:
        stop = StopDeadline(run, 2, signals, 1000.0)
        send_here(signal.SIGUSR2)
        assert stop.level() == 0
        send_here(signal.SIGTERM, signal.SIGTERM)
        assert [stop.level(), stop.level()] == [0, 0]
    (request,) = stop_requests.read_requests(run, 2)
    assert request.reason == stop_requests.TIME_LIMIT
