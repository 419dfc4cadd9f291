"""The signals that reach a job's tasks, counted instead of died of. It stops nothing itself.

Slurm sends USR2 (or another warning) before the time limit, TERM at a cancel, a preemption and the limit
itself, some of them twice. It kills by itself when a task takes too long: no second signal makes it urgent.
"""

from __future__ import annotations

import signal
from types import TracebackType

from launchers.stops import StopRequests

_OF_A_JOB = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class JobSignals(StopRequests):
    """While entered, what Slurm sends counts as one request to stop; handlers that stood before are replaced.

    Main thread only. Signals that were ignored before are heard too: submitit and shells may leave them so.
    """

    def __enter__(self) -> JobSignals:
        for number in _OF_A_JOB:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ignore them from here on.

        srun ends the other tasks when one has failed, and a task that is about to end with its own code must
        not end with a signal's.
        """
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def count(self) -> int:
        """Return 1 once a signal has come, however many follow."""
        return min(1, super().count())
