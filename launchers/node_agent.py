"""The node agent: starts torchrun on this node, watches it to its end, and ends whatever it left running.

`run_local` (this machine alone) and the agents of a job use it; the caller decides what an `Ending` means and
whether to start again. Use it from one thread that outlives it: the kernel ties torchrun's life to the thread
that started it. `StopRequests` counts the signals that ask the calling process to stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from launchers import LauncherError, processes, torchrun
from launchers.host_network import free_port
from launchers.processes import MARK_VARIABLE, Process
from launchers.torchrun import Ending, LaunchPlace, LaunchSpec, RankFailure

_POLL_S = 0.1
# As much of torchrun's output as is searched for its report: that stands at the end.
_OUTPUT_BYTES = 1 << 18
# How long SIGKILL may take before a process counts as unkillable.
_KILL_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Patience:
    """How long what is to end may take, in seconds, before it is killed."""

    # Workers after SIGTERM, where they handle it.
    stop_s: float = 10.0
    # Workers that torchrun closes because another one failed (torchrun itself would wait 30 s).
    failed_peer_s: float = 5.0
    # What workers leave running, such as uploaders that finish by themselves.
    linger_s: float = 10.0
    # The same after a failure: whoever starts again waits for it.
    failed_linger_s: float = 10.0


class TorchrunProcess(Protocol):
    """A torchrun that runs or has ended; `subprocess.Popen` and where its workers are."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code (negative: a signal), or None while it runs."""

    def wait(self) -> int:
        """Return the exit code once it has ended."""

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""

    def workers_elsewhere(self) -> list[Process]:
        """Return its living workers that are not its children."""

    def worker_ids(self) -> Mapping[int, int]:
        """Return the process ids of such workers, living or not, by the children that stand for them."""


# Starts torchrun with this environment by other means than a new interpreter: `launchers.fork_server`.
# Raises StartRefused where a new interpreter has to be started.
TorchrunStarter = Callable[[LaunchSpec, LaunchPlace, Mapping[str, str]], TorchrunProcess]


class StartRefused(LauncherError):  # noqa: N818  nothing failed
    """Raised when a starter cannot start torchrun; the message says why, as after "because"."""


class NodeAgent:
    """One torchrun and everything below it, until `sweep` has returned. Made by `start_agent`."""

    def __init__(self, process: TorchrunProcess, log: Path, mark: str, patience: Patience) -> None:
        self._torchrun = process
        self._log = log
        self._mark = mark
        self._patience = patience
        self._workers: set[Process] = set()
        # Those that were killed for taking too long to end.
        self._killed: set[int] = set()
        self._log_size = 0
        self._kill_at: float | None = None
        self._idle_since: float | None = None

    def poll(self) -> int | None:
        """Return torchrun's exit code (negative: a signal) once it has ended; until then keep deadlines."""
        code = self._torchrun.poll()
        if code is None:
            below = self._below()
            self._workers.update(below)
            is_idle = bool(self._workers) and not below
            self._idle_since = (self._idle_since or time.monotonic()) if is_idle else None
            self._keep_deadlines()
        return code

    @property
    def idle_s(self) -> float:
        """For how long torchrun has gone on with all its workers ended, as `poll` saw it."""
        return 0.0 if self._idle_since is None else time.monotonic() - self._idle_since

    def _keep_deadlines(self) -> None:
        size = 0
        # Somebody may have removed it: that ends no training.
        with contextlib.suppress(OSError):
            size = self._log.stat().st_size
        if self._kill_at is None and size != self._log_size and torchrun.closing(self.output()):
            self._kill_at = time.monotonic() + self._patience.failed_peer_s
        self._log_size = size
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            killed = processes.send(self._workers, signal.SIGKILL)
            self._killed.update(process.pid for process in killed)

    def output(self) -> str:
        """Return the end of what torchrun has written so far; nothing when its log was removed."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def failures(self) -> tuple[RankFailure, ...]:
        """Return the workers that failed, as torchrun reports them, with the workers' own process ids."""
        worker_ids = self._torchrun.worker_ids()
        output = self.output()
        killed = self._killed | torchrun.killed(output)
        failures = []
        for failure in torchrun.failures(output):
            pid = worker_ids.get(failure.pid, failure.pid)
            # A process that is being killed loses its connections before its parent learns of it, so that
            # torchrun may well see a peer's failure first and close what is dying already.
            by_others = failure.exit_code == -signal.SIGKILL and not killed & {failure.pid, pid}
            cleaned_up = failure.cleaned_up and not by_others
            failures.append(dataclasses.replace(failure, pid=pid, cleaned_up=cleaned_up))
        return tuple(sorted(failures, key=lambda failure: (failure.cleaned_up, failure.rank)))

    def stop(self) -> None:
        """Ask the workers to end (SIGTERM) and give them time; kill those at once that ignore it."""
        # Without children of torchrun that stand for one and end with it.
        substitutes = self._torchrun.worker_ids()
        workers = [process for process in self._below() if process.pid not in substitutes]
        deaf = [worker for worker in workers if processes.ignores(worker, signal.SIGTERM)]
        if len(deaf) == len(workers):
            self.kill()
            return
        processes.send(deaf, signal.SIGKILL)
        processes.send(workers, signal.SIGTERM)
        self._kill_at = time.monotonic() + self._patience.stop_s

    def kill(self) -> None:
        """Kill torchrun and its workers at once."""
        below = self._below()
        self._torchrun.kill()
        processes.send({*below, *self._workers}, signal.SIGKILL)

    def _below(self) -> list[Process]:
        return [*processes.children(self._torchrun.pid), *self._torchrun.workers_elsewhere()]

    def _remaining(self) -> list[Process]:
        return processes.marked(f"{MARK_VARIABLE}={self._mark}")

    def sweep(self, hurried: Callable[[], bool], tick: Callable[[], None]) -> tuple[int, ...]:
        """End what an ended torchrun left running; return the ids of those that even SIGKILL did not end.

        Workers are killed; other processes may finish by themselves until the patience ends or `hurried`
        says so.
        """
        code = self._torchrun.wait()
        processes.send(self._workers, signal.SIGKILL)
        linger_s = self._patience.linger_s if code == 0 else self._patience.failed_linger_s
        deadline = time.monotonic() + linger_s
        while self._remaining() and time.monotonic() < deadline and not hurried():
            tick()
            time.sleep(_POLL_S)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while (left := self._remaining()) and time.monotonic() < deadline:
            processes.send(left, signal.SIGKILL)
            time.sleep(_POLL_S)
        return tuple(process.pid for process in left)


def start_agent(
    spec: LaunchSpec,
    place: LaunchPlace,
    patience: Patience | None = None,
    starter: TorchrunStarter | None = None,
) -> NodeAgent:
    """Start torchrun in a session of its own, its output in the node's log. Raises LauncherError.

    A `starter` starts it if it can; where it refuses, a new interpreter is started, and the log says why.
    """
    log_path = spec.node_logs[place.node]
    mark = secrets.token_hex(8)
    environment = {**os.environ, **spec.environment, MARK_VARIABLE: mark}
    patience = patience or Patience()
    if starter is not None:
        try:
            return NodeAgent(starter(spec, place, environment), log_path, mark, patience)
        except StartRefused as refusal:
            reason = f"agent {os.getpid()}: torchrun is not forked but started, because {refusal}"
            open_node_log(log_path, reason).close()
    command = torchrun.command(spec, place)
    # Becomes torchrun, its life tied to this process.
    tie = (sys.executable, "-m", "launchers.processes", str(os.getpid()))
    with open_node_log(log_path, first_line(command)) as log:
        try:
            process = _ChildTorchrun(
                (*tie, *command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise LauncherError(f"cannot start {Path(sys.executable).name}: {error}") from error
    return NodeAgent(process, log_path, mark, patience)


def first_line(command: tuple[str, ...]) -> str:
    """Return what a node's log says of a command that is started."""
    return f"agent {os.getpid()}: {' '.join(command)}"


def open_node_log(log_path: Path, first_line: str) -> IO[bytes]:
    """Open a node's log for torchrun to append to, after a line of the agent's own. Raises LauncherError."""
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer of this process's: torchrun writes to the same file.
        log = log_path.open("ab", buffering=0)
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {first_line}\n".encode())
    except OSError as error:
        raise LauncherError(f"cannot write {log_path}: {error.strerror}") from error
    return log


class _ChildTorchrun(subprocess.Popen[bytes]):
    """A torchrun that is this process's child: its workers are its own children."""

    def workers_elsewhere(self) -> list[Process]:
        return []

    def worker_ids(self) -> Mapping[int, int]:
        return {}


def supervise(agent: NodeAgent, stops: Callable[[], int], tick: Callable[[], None]) -> Ending:
    """Watch a started agent to its end and return that; whatever happens, nothing of it is left running.

    `stops` counts the stop requests so far (one: SIGTERM and patience; two: SIGKILL). `tick` is called
    about ten times a second for whatever the caller shows meanwhile.
    """
    num_stops = 0
    try:
        while (code := agent.poll()) is None:
            if (count := stops()) > num_stops:
                num_stops = count
                agent.stop() if count == 1 else agent.kill()
            tick()
            time.sleep(_POLL_S)
    except BaseException:
        agent.kill()
        agent.sweep(lambda: True, lambda: None)
        raise
    survivors = agent.sweep(lambda: stops() > 1, tick)
    return Ending(code, stops(), agent.failures(), survivors)


def run_local(
    spec: LaunchSpec,
    *,
    verdict: Callable[[Ending], int],
    stops: Callable[[], int],
    tick: Callable[[], None],
) -> int:
    """Run `spec` to its end on this machine, in the foreground; return the exit code that `verdict` gives.

    `stops` counts stop requests (see `supervise`), `tick` is called about ten times a second.
    Raises LauncherError when the spec wants more than one node or torchrun cannot be started.
    """
    if spec.num_nodes != 1:
        raise LauncherError(f"this machine is one node, but {spec.num_nodes} were asked for")
    place = LaunchPlace(node=0, master_address="127.0.0.1", master_port=free_port())
    agent = start_agent(spec, place)
    return verdict(supervise(agent, stops, tick))


_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """While entered, SIGINT, SIGTERM and SIGHUP are counted and do not end this process. *Main thread only*.

    A signal that this process was started to ignore stays ignored: `nohup` ignores SIGHUP so that a command
    outlives its terminal, and a shell without job control ignores SIGINT in what it starts with `&`. The
    earlier handlers are put back at the end.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        for number in _ASKING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
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
