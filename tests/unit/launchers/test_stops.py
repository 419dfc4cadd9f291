"""Signals that ask to stop, sent to this very process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from launchers.node_agent import StopRequests


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_counted_and_the_handlers_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests() as stops:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert (stops.count(), stops.first) == (3, "SIGHUP")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_ignored_from_the_start_stays_ignored(number: signal.Signals) -> None:
    """As under nohup, and in what a shell without job control starts with `&`."""
    signal.signal(number, signal.SIG_IGN)
    with StopRequests() as stops:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stops.count(), stops.first) == (1, "SIGTERM")
    assert signal.getsignal(number) is signal.SIG_IGN
