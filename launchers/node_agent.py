"""The node agent: starts torchrun on this node, watches it, and leaves nothing of it behind.

It does not decide what an ending means or whether to start again: it hands an `Ending` to its caller. It must
be used from one thread that outlives it: the kernel ties torchrun's life to the thread that started it.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from launchers import processes, torchrun
from launchers.fork_server import wire
from launchers.fork_server.appearance import MARK_VARIABLE
from launchers.fork_server.client import STUB, WarmHost, WarmProcess, WarmRefusal
from launchers.host_network import free_port
from launchers.launch_errors import LauncherError
from launchers.processes import Process
from launchers.spec import Ending, LaunchSpec, Place, RankFailure

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
    # What workers leave behind, such as uploaders that finish by themselves.
    linger_s: float = 10.0
    # The same after a failure: whoever starts again waits for it.
    failed_linger_s: float = 10.0


class NodeAgent:
    """One torchrun and everything below it, until `sweep` has returned. Made by `start_agent`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | WarmProcess,
        log: Path,
        mark: str,
        patience: Patience,
    ) -> None:
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
        size = _size(self._log)
        if self._kill_at is None and size != self._log_size and torchrun.closing(self.output()):
            self._kill_at = time.monotonic() + self._patience.failed_peer_s
        self._log_size = size
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._killed.update(it.pid for it in processes.send(self._workers, signal.SIGKILL))

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
        workers = self._torchrun.workers() if isinstance(self._torchrun, WarmProcess) else {}
        output = self.output()
        killed = self._killed | torchrun.killed(output)
        found = []
        for one in torchrun.failures(output):
            pid = workers.get(one.pid, one.pid)
            # A process that is being killed loses its connections before its parent learns of it, so that
            # torchrun may well see a peer's failure first and close what is dying already.
            by_others = one.exit_code == -signal.SIGKILL and not killed & {one.pid, pid}
            found.append(dataclasses.replace(one, pid=pid, cleaned_up=one.cleaned_up and not by_others))
        return tuple(sorted(found, key=lambda failure: (failure.cleaned_up, failure.rank)))

    def stop(self) -> None:
        """Ask the workers to end (SIGTERM) and give them time; kill those at once that ignore it."""
        workers = self._listeners()
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
        return [*processes.children(self._torchrun.pid), *self._forked()]

    def _listeners(self) -> list[Process]:
        """Return the workers, where they are forked too: not the stub of one, which ends with it."""
        stubs = self._torchrun.workers() if isinstance(self._torchrun, WarmProcess) else {}
        children = processes.children(self._torchrun.pid)
        return [*(child for child in children if child.pid not in stubs), *self._forked()]

    def _forked(self) -> list[Process]:
        """Return the workers of this attempt among the zygote's children."""
        if not isinstance(self._torchrun, WarmProcess):
            return []
        own = processes.with_mark(processes.children(self._torchrun.zygote), self._marking())
        return [process for process in own if process.pid != self._torchrun.pid]

    def _marking(self) -> str:
        return f"{MARK_VARIABLE}={self._mark}"

    def _remaining(self) -> list[Process]:
        return processes.marked(self._marking())

    def sweep(self, hurried: Callable[[], bool], tick: Callable[[], None]) -> tuple[int, ...]:
        """End what an ended torchrun left behind; return the ids of those that even SIGKILL did not end.

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


def _size(log: Path) -> int:
    """Return a log's bytes; 0 when somebody removed it: that ends no training."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def start_agent(
    spec: LaunchSpec, place: Place, patience: Patience | None = None, warm: WarmHost | None = None
) -> NodeAgent:
    """Start torchrun in a session of its own, its output in the node's log. Raises LauncherError.

    With a `warm` process that is ready, torchrun and the workers are forked from it. Where it is not, they
    are started plainly, and the log says why.
    """
    log_path = spec.node_logs[place.node]
    mark = secrets.token_hex(8)
    environment = {**os.environ, **spec.environment, MARK_VARIABLE: mark}
    patience = patience or Patience()
    if warm is not None:
        try:
            forked = _forked_torchrun(spec, place, environment, warm)
            return NodeAgent(forked, log_path, mark, patience)
        except WarmRefusal as refusal:
            _opened(log_path, f"agent {os.getpid()}: a plain start, for {refusal}").close()
    command = torchrun.command(spec, place)
    tether = (sys.executable, "-m", "launchers.processes", str(os.getpid()))
    with _opened(log_path, _first_words(command)) as log:
        plain = _popen((*tether, *command), environment, log)
    return NodeAgent(plain, log_path, mark, patience)


def _forked_torchrun(
    spec: LaunchSpec, place: Place, environment: dict[str, str], warm: WarmHost
) -> WarmProcess:
    if not warm.is_ready():
        raise WarmRefusal(warm.trouble())
    command = torchrun.command(spec, place, STUB)
    environment = {**environment, wire.SOCKET_VARIABLE: warm.socket_name}
    with _opened(spec.node_logs[place.node], f"{_first_words(command)} (forked)") as log:
        # Without the interpreter and its `-m`.
        return warm.popen(command[2:], environment, log)


def _first_words(command: tuple[str, ...]) -> str:
    return f"agent {os.getpid()}: {' '.join(command)}"


def _opened(log_path: Path, first_words: str) -> IO[bytes]:
    """Open a node's log for torchrun to append to, after a line of the agent's own."""
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer of this process's: torchrun writes to the same file.
        log = log_path.open("ab", buffering=0)
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {first_words}\n".encode())
    except OSError as error:
        raise LauncherError(f"cannot write {log_path}: {error.strerror}") from error
    return log


def _popen(command: tuple[str, ...], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise LauncherError(f"cannot start {Path(command[0]).name}: {error}") from error


def supervise(agent: NodeAgent, stops: Callable[[], int], tick: Callable[[], None]) -> Ending:
    """Watch a started agent to its end and return that; whatever happens, nothing of it is left running.

    `stops` counts the stop requests so far (one: SIGTERM and patience; two: SIGKILL). `tick` is called
    about ten times a second for whatever the caller shows meanwhile.
    """
    try:
        code = _watch(agent, stops, tick)
    except BaseException:
        agent.kill()
        agent.sweep(lambda: True, lambda: None)
        raise
    survivors = agent.sweep(lambda: stops() > 1, tick)
    return Ending(code, stops(), agent.failures(), survivors)


def _watch(agent: NodeAgent, stops: Callable[[], int], tick: Callable[[], None]) -> int:
    heard = 0
    while (code := agent.poll()) is None:
        if (count := stops()) > heard:
            heard = count
            agent.stop() if count == 1 else agent.kill()
        tick()
        time.sleep(_POLL_S)
    return code


# Starts an attempt on this machine alone, in the foreground.
#
# What an ending means is the caller's to say.


def run_local(
    spec: LaunchSpec,
    *,
    verdict: Callable[[Ending], int],
    stops: Callable[[], int],
    tick: Callable[[], None],
    patience: Patience | None = None,
) -> int:
    """Run `spec` to its end on this machine and return what `verdict` makes of the ending: an exit code.

    `stops` counts stop requests (see `launchers.node_agent`), `tick` is called about ten times a second.
    Raises LauncherError when the spec wants more than one node or torchrun cannot be started.
    """
    if spec.num_nodes != 1:
        raise LauncherError(f"this machine is one node, but {spec.num_nodes} were asked for")
    place = Place(node=0, master_address="127.0.0.1", master_port=free_port())
    agent = start_agent(spec, place, patience)
    return verdict(supervise(agent, stops, tick))


# Counts the signals that ask this process to stop, instead of dying of them. It stops nothing itself.
#
# A signal that this process was started to ignore stays ignored: `nohup` ignores SIGHUP so that a command
# outlives its terminal, and a shell without job control ignores SIGINT in what it starts with `&`.


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
