"""`ForkServer`, an agent's handle on the fork server of its node. Used by node agents, from one thread."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from launchers import processes, torchrun
from launchers.fork_server import wire
from launchers.fork_server.owner import OwnServer, RunningServer, ServerOwner, ServerSettings
from launchers.fork_server.server import differing
from launchers.node_agent import StartRefused, first_line, open_node_log
from launchers.processes import MARK_VARIABLE, Process
from launchers.torchrun import LaunchPlace, LaunchSpec

# What torchrun runs instead of `python -m MODULE`, in front of MODULE.
WORKER_LAUNCHER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("worker_launcher.py")))
# torchrun first: every agent needs it, whatever its workers are.
_ALWAYS = ("torch", "launchers.bound_torchrun")
# A fork takes milliseconds; a machine that swaps takes longer.
_ANSWER_TIMEOUT_S = 20.0
# A server that has imported everything answers at once: an agent that calls, and that a process has ended.
_SILENCE_S = 5.0
_POLL_S = 0.02


class ForkedTorchrun:
    """A torchrun that the server forked: a `launchers.node_agent.TorchrunProcess`."""

    def __init__(self, client: ForkServer, pid: int, server: int) -> None:
        self._client = client
        self._process = processes.find(pid)
        # Process id of what forked it, and forks its workers.
        self._server = server
        # By the process ids of their launchers.
        self._workers: dict[int, int] = {}
        self._gone_since: float | None = None
        self.pid = pid
        self.mark = ""
        self.returncode: int | None = None

    def worker_ids(self) -> dict[int, int]:
        """Return the process ids of the workers forked for it so far, by those of their launchers."""
        self._client.receive()
        return self._workers

    def workers_elsewhere(self) -> list[Process]:
        """Return its living workers: they are the server's children."""
        own = processes.with_mark(processes.children(self._server), f"{MARK_VARIABLE}={self.mark}")
        return [process for process in own if process.pid != self.pid]

    def take_in(self, message: dict[str, Any]) -> None:
        """Note what the server says of this process."""
        if "code" in message:
            self.returncode = int(message["code"])
        else:
            self._workers[int(message["launcher"])] = int(message["worker"])

    def poll(self) -> int | None:
        """Return the exit code (negative: a signal), or None while it runs."""
        if self.returncode is None:
            self._client.receive()
        if self.returncode is None and not self._is_alive():
            self._gone_since = self._gone_since or time.monotonic()
            if self._is_watched() and time.monotonic() - self._gone_since < _SILENCE_S:
                return None
            # Killed together with its server, or under one that is stopped and will not tell.
            self.returncode = -signal.SIGKILL
            if self._is_watched():
                self._client.close()
        return self.returncode

    def wait(self) -> int:
        """Return the exit code once it has ended."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        if self._process is not None:
            processes.send([self._process], signal.SIGKILL)

    def _is_watched(self) -> bool:
        return self._client.pid == self._server and self._client.is_alive()

    def _is_alive(self) -> bool:
        return self._process is not None and processes.is_alive(self._process)


class ForkServer:
    """One node's fork server, as its agent uses it.

    A server is replaced at the next `start` where it is dead, silent though it was ready once, or says that
    nothing can be forked from it any more.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        owner: ServerOwner | None = None,
    ) -> None:
        """`modules` are imported after torch and torchrun, `environment` is the launch specification's, and
        the server's own output goes to `log`. Without an `owner` the server is this process's own child.
        """
        self._environment = {**os.environ, **environment}
        self._settings = ServerSettings((*_ALWAYS, *modules), self._environment, str(log))
        self._owner: ServerOwner = owner or OwnServer()
        self._server: RunningServer | None = None
        self._process: Process | None = None
        self._control: socket.socket | None = None
        self._greeted_at = 0.0
        self._forked: dict[int, ForkedTorchrun] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._last_number = 0
        # Why it is not ready; None: the end of the server says it.
        self._trouble: str | None = "the fork server was not started"
        self._ready = False

    @property
    def pid(self) -> int | None:
        """The server's process id; None when there is none."""
        return None if self._server is None else self._server.pid

    @property
    def socket_name(self) -> str:
        """Name of the server's abstract socket, for torchrun's worker launchers."""
        return "" if self._server is None else self._server.socket_name

    def start(self) -> None:
        """Have a server started unless one lives; return at once, it imports in the background.

        It never raises: what went wrong is the reason of the next refusal.
        """
        if self.is_alive() or sys.platform != "linux":
            return
        self._lose_control()
        self._ready, self._trouble = False, None
        try:
            self._server = self._owner.provide(self._settings)
            self._process = processes.find(self._server.pid)
            self._control = _greeted(self._server.socket_name)
        except OSError as error:
            self._trouble = f"the fork server cannot be started: {error}"
        self._greeted_at = time.monotonic()

    def is_alive(self) -> bool:
        """Tell whether the server runs, ready or not."""
        return self._control is not None and self._process is not None and processes.is_alive(self._process)

    def is_ready(self) -> bool:
        """Tell whether the server runs and has imported everything."""
        self.receive()
        return self._ready and self.is_alive()

    def await_ready(self, timeout_s: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the server has imported everything or never will, `timeout_s` at most; tell which.

        Without it torchrun and then the workers import the same one after the other: waiting is worth while
        at the first attempt already. It ends at once where `hurried` says so.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_ready() and self.is_alive() and time.monotonic() < deadline and not hurried():
            if self._is_silent():
                self.close()
                self.start()
            time.sleep(_POLL_S)
        return self.is_ready()

    def _is_silent(self) -> bool:
        was_ready = self._server is not None and self._server.was_ready
        return was_ready and not self._ready and time.monotonic() - self._greeted_at > _SILENCE_S

    def trouble(self) -> str:
        """Return why the server is not ready."""
        self.receive()
        if self._trouble is None and self._server is not None and not self.is_alive():
            return f"the fork server ended with {self._owner.exit_code(self._server.pid)}"
        return self._trouble or "the fork server is still importing"

    def start_torchrun(
        self, spec: LaunchSpec, place: LaunchPlace, environment: Mapping[str, str]
    ) -> ForkedTorchrun:
        """Fork torchrun, whose workers will be forked too, its output in the node's log.

        `environment` is all of it. Raises StartRefused where the server cannot, LauncherError where the log
        cannot be written.
        """
        if not self.is_ready():
            raise StartRefused(self.trouble())
        command = torchrun.command(spec, place, WORKER_LAUNCHER)
        environment = {**environment, wire.SOCKET_VARIABLE: self.socket_name}
        with open_node_log(spec.node_logs[place.node], f"{first_line(command)} (forked)") as log:
            # Without the interpreter and its `-m`.
            return self.popen(command[2:], environment, log)

    def popen(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> ForkedTorchrun:
        """Fork `python -u -m *arguments` in a session of its own, its output in `log`.

        `environment` is all of it. The process is killed when the server or this agent dies. Raises
        StartRefused.
        """
        if not self.is_ready():
            raise StartRefused(self.trouble())
        if (name := differing(environment, self._environment)) is not None:
            raise StartRefused(f"the fork server was started with another {name}")
        number = self._last_number = self._last_number + 1
        request = {"number": number, "arguments": list(arguments), "environment": dict(environment)}
        answer = self._ask(request, log.fileno())
        if number not in self._forked:
            # What keeps the server from forking does not pass.
            self.close()
            raise StartRefused(str(answer.get("refused")))
        forked = self._forked[number]
        forked.mark = environment.get(MARK_VARIABLE, "")
        return forked

    def _ask(self, request: dict[str, Any], file: int) -> dict[str, Any]:
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        try:
            if self._control is None:
                raise StartRefused(self.trouble())
            wire.send(self._control, {**request, "folder": str(Path.cwd())}, (file,))
        except OSError as error:
            self.close()
            raise StartRefused(f"the fork server does not listen: {error}") from error
        while (answer := self._answers.pop(request["number"], None)) is None:
            self.receive(_POLL_S)
            if not self.is_alive() or time.monotonic() > deadline:
                # Whatever it still forks dies with it.
                self.close()
                raise StartRefused("the fork server does not answer")
        return answer

    def receive(self, timeout_s: float = 0.0) -> None:
        """Take in what the server has said by now, or says within `timeout_s`."""
        while self._control is not None and _has_news(self._control, timeout_s):
            timeout_s = 0.0
            try:
                received = wire.receive(self._control)
            except (OSError, ValueError):
                received = None
            if received is None:
                self._lose_control()
                return
            self._take_in(received[0])

    def _take_in(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._take_readiness(bool(message["ready"]), message.get("reason"))
        elif (process := self._forked.get(int(message["number"]))) is not None:
            process.take_in(message)
        else:
            # Noted at once: that it has ended may be the next message.
            if "pid" in message and self._server is not None:
                process = ForkedTorchrun(self, int(message["pid"]), self._server.pid)
                self._forked[int(message["number"])] = process
            self._answers[int(message["number"])] = message

    def _take_readiness(self, is_ready: bool, reason: str | None) -> None:
        """Take in how a server answers the agent's call."""
        assert self._server is not None
        self._ready = is_ready
        if is_ready:
            self._owner.note_ready(self._server.pid)
            return
        was_ready = self._server.was_ready
        self.close()
        self._trouble = reason
        if was_ready:
            # Another one may do better; one that never could be forked from had its chance.
            self.start()

    def _lose_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def close(self) -> None:
        """End the server and with it whatever it forked; returns when it is gone."""
        self._lose_control()
        if self._server is not None:
            self._owner.end(self._server.pid)
        self._server = self._process = None
        self._ready = False
        self._trouble = "the fork server was closed"


def _greeted(socket_name: str) -> socket.socket:
    """Return a connection on which the server answers as soon as it can. Raises OSError."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # For the rest of a message that has begun: messages are short.
        channel.settimeout(_ANSWER_TIMEOUT_S)
        wire.connect(channel, socket_name)
        wire.send(channel, {"agent": os.getpid()})
    except OSError:
        channel.close()
        raise
    return channel


def _has_news(channel: socket.socket, timeout_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))
