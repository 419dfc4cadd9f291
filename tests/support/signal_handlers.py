"""Signals that a test sends to its own process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

_NUMBERS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def as_from_a_terminal() -> Iterator[None]:
    """Let nothing be ignored that a shell without job control or nohup ignores; put all handlers back."""
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def send_here(*numbers: int) -> None:
    """Send signals to this process."""
    for number in numbers:
        os.kill(os.getpid(), number)
