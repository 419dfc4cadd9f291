"""Counts the signals that ask this process to stop, instead of dying of them. It stops nothing itself.

A signal that this process was started to ignore stays ignored: `nohup` ignores SIGHUP so that a command
outlives its terminal, and a shell without job control ignores SIGINT in what it starts with `&`.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """While entered, SIGINT, SIGTERM and SIGHUP only count, those excepted that are ignored already.

    Main thread only; the handlers before are put back.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        for number in _ASKING:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received.append(number)

    def count(self) -> int:
        """Return how many have come so far."""
        return len(self._received)

    @property
    def first(self) -> str | None:
        """Name of the first signal that came, such as "SIGINT"."""
        return signal.Signals(self._received[0]).name if self._received else None
