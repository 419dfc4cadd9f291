"""`python -m orchestra.crew RUN_DIR`: what srun starts on each node of a job.

For an array of a sweep it is `SWEEP_DIR --first F`: task t trains the member with index F + t.

The process that srun starts does nothing but keep an agent alive: it forks it before anything else is
imported, and forks it again when it was killed, after everything that the dead one had started is gone.
Signals are the agent's to hear: Slurm sends them to every process of the step.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from launchers import processes
from launchers.slurm.signals import JobSignals
from launchers.tether import die_with_parent

_MARK = "LAUNCHERS_NODE_MARK"
# An agent that is killed over and over takes its node along. What lived for a while is no such agent.
_MOST_STARTS = 5
_LONG_LIFE_S = 600.0
_LEFTOVERS_TIMEOUT_S = 30.0
_POLL_S = 0.05


def main(argv: list[str]) -> int:
    """Keep this node's agent alive until it ends by itself; return its exit code."""
    os.environ[_MARK] = mark = secrets.token_hex(8)
    signals = _Heard()
    num_starts = 0
    while num_starts < _MOST_STARTS:
        num_starts += 1
        began = time.monotonic()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _become_agent(parent, argv)
        signals.child = child
        _, status = os.waitpid(child, 0)
        signals.child = None
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return code
        _end_leftovers(mark)
        if signals.is_any:
            break
        sys.stderr.write(f"this node's agent (process {child}) was killed by signal {-code}\n")
        if time.monotonic() - began >= _LONG_LIFE_S:
            num_starts = 0
    sys.stderr.write("error: this node's agent is not started again\n")
    return 1


class _Heard:
    """Hands what would end this process to its agent, and ends only when that does."""

    def __init__(self) -> None:
        self.is_any = False
        self.child: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._hear)

    def _hear(self, number: int, _: object) -> None:
        self.is_any = True
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, number)


def _become_agent(parent: int, argv: list[str]) -> None:
    """Be the agent to the end of this process."""
    code = 1
    try:
        with JobSignals() as signals:
            die_with_parent(parent)
            code = _work(argv, signals)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_leftovers(mark: str) -> None:
    """Wait until nothing of a dead agent is left; the kernel ends most of it together with the agent."""
    deadline = time.monotonic() + _LEFTOVERS_TIMEOUT_S
    while time.monotonic() < deadline:
        left = [it for it in processes.marked(f"{_MARK}={mark}") if it.pid != os.getpid()]
        if not left:
            return
        processes.send(left, signal.SIGKILL)
        time.sleep(_POLL_S)


def _work(argv: list[str], signals: JobSignals) -> int:
    from launchers.errors import LauncherError
    from orchestra.crew.attend import attend
    from orchestra.crew.join import station
    from orchestra.errors import EXIT_FAILED, OrchestraError
    from orchestra.rundir import RunDir
    from orchestra.sweepdir import SweepDir

    try:
        if len(argv) == 1:
            return attend(station(RunDir(Path(argv[0])), signals))
        path, _, first = argv
        task = int(os.environ["SLURM_ARRAY_TASK_ID"])
        return attend(station(SweepDir(Path(path)).member(int(first) + task), signals))
    except OrchestraError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except (LauncherError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
