"""What a node agent makes of the requests to stop an attempt: leave it time to save, or end it at once.

Signals to the agent and files in control/ are the same kind of request. It ends no process itself: it says
how urgent the end is. Ctrl-C, a second signal, a request that says so, and a save that takes longer than
recovery.stop_timeout_s end the ranks at once.
"""

from __future__ import annotations

import time

from launchers.stops import StopRequests
from orchestra import control
from orchestra.control import StopRequest
from orchestra.rundir import RunDir

# How often the folder of requests is looked into.
_LOOK_S = 0.5


class Urgency:
    """How urgent it is to end one attempt. Called from the agent's thread, about ten times a second."""

    def __init__(self, run: RunDir, attempt: int, signals: StopRequests, timeout_s: float) -> None:
        self._run = run
        self._attempt = attempt
        self._signals = signals
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._looked_at = -_LOOK_S
        self._requests: list[StopRequest] = []
        # Signals that led to an end at once; any later one hurries.
        self._num_heard = 0
        # Why the ranks were ended at once; None while they were not.
        self.interruption: str | None = None

    def num_asked(self) -> int:
        """Return how often a stop was asked for, in whatever way."""
        return max(self._signals.count(), len(self._requests))

    def level(self) -> int:
        """Return 0 while the ranks are to be left alone, 1 when they are to be ended, 2 when it hurries."""
        if self.interruption is None:
            self._look()
            self._num_heard = self._signals.count()
            self.interruption = self._found()
            return 0 if self.interruption is None else 1
        return 2 if self._signals.count() > self._num_heard else 1

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        try:
            self._requests = control.read_requests(self._run, self._attempt)
        except OSError:
            # The next look may succeed; a signal is heard without the file system.
            return
        if self._requests and self._deadline is None:
            self._deadline = now + self._timeout_s

    def _found(self) -> str | None:
        """Return why the ranks are to be ended at once, None where they are not."""
        first = self._signals.first
        if first == "SIGINT":
            return "SIGINT received"
        if self._signals.count() > 1:
            return f"{first} received, and a second signal after it"
        pressing = next((request for request in self._requests if request.at_once), None)
        if pressing is not None:
            return f"{pressing}, at once"
        if first is not None and self._deadline is None and (problem := self._asked(first)):
            return f"{first} received, and the ranks could not be asked to save: {problem}"
        if self._deadline is not None and time.monotonic() > self._deadline:
            what = f"{first} received" if first is not None else str(self._requests[0])
            return f"{what}; the ranks had not stopped after recovery.stop_timeout_s={self._timeout_s:g}"
        return None

    def _asked(self, name: str) -> str | None:
        """Turn a signal into a request to the ranks; return what kept it from being written."""
        self._deadline = time.monotonic() + self._timeout_s
        try:
            request = control.write_request(self._run, self._attempt, control.signal_reason(name))
        except OSError as error:
            return error.strerror or str(error)
        self._requests = [*self._requests, request]
        return None
