"""`python -m orchestra.agents RUN_DIR` (or as `agent.run_of` says): what srun starts on each node of a job.

The process that srun starts only keeps an agent alive: it forks the agent, and forks it again when it was
killed, after everything that the dead one had started is gone. It keeps for the next agent what takes long to
import: the agent's own modules, and the fork server that ranks are forked from. Signals, which Slurm sends to
every process of the step, are passed on to the agent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator

from launchers import processes
from launchers.fork_server.owner import KeptServer, OwnServer, ServerOwner, serve
from launchers.processes import die_with_parent
from launchers.slurm.this_job import JobSignals

_MARK = "LAUNCHERS_NODE_MARK"
# An agent that is killed over and over ends, and its node with it; one that lived for long does not count.
_MOST_STARTS = 5
_LONG_LIFE_S = 600.0
_LEFTOVERS_TIMEOUT_S = 30.0
_POLL_S = 0.05


def main(argv: list[str]) -> int:
    """Keep this node's agent alive until it ends by itself; return its exit code."""
    if "--place" in argv:
        # What keeps several members at work on this node has started it.
        die_with_parent(os.getppid())
    signals = _SignalRelay()
    os.environ[_MARK] = mark = secrets.token_hex(8)
    # What agents need: the first one is here no later for it, and the next ones at once.
    importlib.import_module("orchestra.agents.agent")
    server = OwnServer()
    num_starts = 0
    while num_starts < _MOST_STARTS:
        num_starts += 1
        began = time.monotonic()
        with signals.held_back():
            agent = _forked(argv)
            signals.hand_to(agent.pid)
        serve(agent.channel, server, agent.is_over)
        code = agent.wait()
        signals.hand_to(None)
        if code >= 0:
            return code
        _end_leftovers(mark, server)
        if signals.is_any:
            break
        sys.stderr.write(f"this node's agent (process {agent.pid}) was killed by signal {-code}\n")
        if time.monotonic() - began >= _LONG_LIFE_S:
            num_starts = 0
    reason = "the job is being ended" if signals.is_any else f"it was killed {_MOST_STARTS} times in a row"
    sys.stderr.write(f"error: this node's agent is not started again: {reason}\n")
    return 1


class _AgentProcess:
    """The agent as its keeper sees it: a process id, and a socket on which it asks for the fork server."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel
        self._status: int | None = None

    def is_over(self) -> bool:
        """Tell whether it has ended."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    def wait(self) -> int:
        """Return its exit code (negative: a signal) once it has ended."""
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)
        self.channel.close()
        return os.waitstatus_to_exitcode(self._status)


def _forked(argv: list[str]) -> _AgentProcess:
    ours, agents = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_agent(parent, argv, KeptServer(agents))
    agents.close()
    return _AgentProcess(pid, ours)


_RELAYED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _SignalRelay:
    """Hands what would end this process to its agent, and ends only when that does."""

    def __init__(self) -> None:
        self.is_any = False
        self._child: int | None = None
        # What came before there was an agent.
        self._early: list[int] = []
        for number in _RELAYED:
            signal.signal(number, self._hear)

    def hand_to(self, child: int | None) -> None:
        """Hand what came and comes to this process; None: to nobody, for now."""
        self._child = child
        while child is not None and self._early:
            self._send(child, self._early.pop(0))

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Block signals while this process forks; the new one lets them through when it can handle them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _RELAYED)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _RELAYED)

    def _hear(self, number: int, _: object) -> None:
        self.is_any = True
        if self._child is None:
            self._early.append(number)
        else:
            self._send(self._child, number)

    @staticmethod
    def _send(child: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def _become_agent(parent: int, argv: list[str], owner: ServerOwner) -> None:
    """Be the agent to the end of this process."""
    code = 1
    try:
        with JobSignals() as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _RELAYED)
            die_with_parent(parent)
            code = _work(argv, signals, owner)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_leftovers(mark: str, server: OwnServer) -> None:
    """Wait until nothing of a dead agent is left but the fork server, which kills what it forked by itself;
    where it does not, that is killed here too.
    """
    deadline = time.monotonic() + _LEFTOVERS_TIMEOUT_S
    kept = {os.getpid(), server.pid}
    while time.monotonic() < deadline:
        left = [process for process in processes.marked(f"{_MARK}={mark}") if process.pid not in kept]
        if not left:
            return
        processes.send(left, signal.SIGKILL)
        time.sleep(_POLL_S)


def _work(argv: list[str], signals: JobSignals, owner: ServerOwner) -> int:
    from launchers import LauncherError
    from orchestra.agents.agent import attend, code_for_slurm, context_of_task
    from orchestra.errors import EXIT_FAILED, OrchestraError

    try:
        context = context_of_task(argv, signals, owner)
        return code_for_slurm(attend(context).code, context.config)
    except OrchestraError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except (LauncherError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
