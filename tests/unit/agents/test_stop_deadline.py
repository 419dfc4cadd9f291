"""What signals to an agent and files in control/ come to: time to save, or an end at once."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers.node_agent import StopRequests
from launchers.slurm.this_job import JobSignals
from orchestra.agents import attempt
from orchestra.agents.attempt import StopDeadline
from orchestra.run import stop_requests
from orchestra.run.paths import RunDir


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_STOP_LOOK_S", 0.0)


@pytest.fixture
def signals() -> Iterator[StopRequests]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with StopRequests() as signals:
        yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


def _urgency(path: Path, signals: StopRequests, timeout_s: float = 1000.0) -> StopDeadline:
    return StopDeadline(RunDir(path), 2, signals, timeout_s)


def _kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_nobody_asks(tmp_path: Path, signals: StopRequests) -> None:
    stop_requests.write_request(RunDir(tmp_path), 1, "the attempt before")
    stop = _urgency(tmp_path, signals)
    assert (stop.level(), stop.num_asked(), stop.interruption) == (0, 0, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_becomes_one_request_and_the_ranks_get_time(
    tmp_path: Path, signals: StopRequests, number: signal.Signals
) -> None:
    stop = _urgency(tmp_path, signals)
    _kill(number)
    assert [stop.level() for _ in range(3)] == [0, 0, 0]
    (request,) = stop_requests.read_requests(RunDir(tmp_path), 2)
    assert (request.reason, request.at_once) == (f"signal {number.name}", False)
    assert (stop.num_asked(), stop.interruption) == (1, None)


def test_ctrl_c_and_a_second_signal_end_at_once_and_one_more_hurries(
    tmp_path: Path, signals: StopRequests
) -> None:
    stop, pressed = _urgency(tmp_path, signals), _urgency(tmp_path, signals)
    _kill(signal.SIGTERM)
    assert stop.level() == 0
    _kill(signal.SIGINT)
    assert [stop.level(), stop.level()] == [1, 1]
    assert stop.interruption == "SIGTERM received, and a second signal after it"
    _kill(signal.SIGINT)
    assert stop.level() == 2
    # Both at once, before anybody looked.
    assert pressed.level() == 1


def test_ctrl_c_asks_no_rank_to_save(tmp_path: Path, signals: StopRequests) -> None:
    stop = _urgency(tmp_path, signals)
    _kill(signal.SIGINT)
    assert (stop.level(), stop.interruption) == (1, "SIGINT received")
    assert stop_requests.read_requests(RunDir(tmp_path), 2) == []
    _kill(signal.SIGINT)
    assert stop.level() == 2


def test_a_request_of_somebody_else_gives_time_too_and_one_that_presses_does_not(
    tmp_path: Path, signals: StopRequests
) -> None:
    stop = _urgency(tmp_path, signals)
    stop_requests.write_request(RunDir(tmp_path), 2, stop_requests.CANCEL)
    assert (stop.level(), stop.num_asked()) == (0, 1)
    pressing = stop_requests.write_request(RunDir(tmp_path), 2, stop_requests.CANCEL, at_once=True)
    assert stop.level() == 1
    assert stop.interruption == f"{pressing}, at once"


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_ranks_that_take_too_long_are_ended(
    tmp_path: Path, signals: StopRequests, number: signal.Signals | None
) -> None:
    stop = _urgency(tmp_path, signals, timeout_s=0.0)
    if number is None:
        stop_requests.write_request(RunDir(tmp_path), 2, stop_requests.CANCEL)
    else:
        _kill(number)
    assert [stop.level(), stop.level()][1] == 1
    assert stop.interruption is not None
    assert "recovery.stop_timeout_s=0" in stop.interruption


def test_a_signal_that_cannot_be_passed_on_ends_at_once(tmp_path: Path, signals: StopRequests) -> None:
    run = tmp_path / "run"
    run.mkdir()
    stop = _urgency(run, signals)
    shutil.rmtree(run)
    _kill(signal.SIGTERM)
    assert stop.level() == 1
    assert stop.interruption is not None
    assert "No such file" in stop.interruption


def test_what_slurm_sends_before_the_time_limit_and_at_it_is_one_request(tmp_path: Path) -> None:
    numbers = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        with JobSignals() as signals:
            stop = StopDeadline(RunDir(tmp_path), 2, signals, 1000.0)
            _kill(signal.SIGUSR2)
            assert stop.level() == 0
            _kill(signal.SIGTERM)
            _kill(signal.SIGTERM)
            assert [stop.level(), stop.level()] == [0, 0]
            assert stop.num_asked() == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    (request,) = stop_requests.read_requests(RunDir(tmp_path), 2)
    assert request.reason == stop_requests.TIME_LIMIT
