"""The owner of a node's fork server: its parent, which starts it, ends it, and is not outlived by it.

That is the agent itself (`OwnServer`), or the process that starts the agent again when it was killed: there
the server outlives agents, and the next one need not wait for imports. That process answers its agent on a
socket (`serve`), and the agent asks through `KeptServer`.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launchers.fork_server import wire
from launchers.fork_server.server import NO_MARK, ROOM_BYTES, differing
from launchers.processes import MARK_VARIABLE

_BACKLOG = 256
# SIGKILL takes milliseconds, unless the kernel waits for a device or a file server.
_END_TIMEOUT_S = 5.0
# An owner answers in milliseconds; one that is stopped must not hold up its agent.
_ANSWER_TIMEOUT_S = 10.0
# How often an owner looks for the agent's end itself, should something else hold the socket's other end.
_LOOK_S = 0.5


@dataclass(frozen=True)
class ServerSettings:
    """How a server is started: what it imports, all of its environment, and the file for its output."""

    modules: tuple[str, ...]
    environment: dict[str, str]
    log: str


@dataclass(frozen=True)
class RunningServer:
    """A server that was started."""

    pid: int
    # Name of its abstract socket, without the leading zero byte.
    socket_name: str
    # Whether it has imported everything: then it answers at once, or something is wrong with it.
    was_ready: bool = False


class OwnServer:
    """One server at most, whose parent is this process: use it from one thread, to which the kernel ties
    its life.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._server: RunningServer | None = None
        self._settings: ServerSettings | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server that was started last, alive or not."""
        return None if self._server is None else self._server.pid

    def provide(self, settings: ServerSettings) -> RunningServer:
        """Return the server that lives, if it has these settings; else end it, start one. Raises OSError."""
        if self._process is not None and self._server is not None and self._settings is not None:
            has_them = settings.modules == self._settings.modules and (
                differing(settings.environment, self._settings.environment) is None
            )
            if has_them and self._process.poll() is None:
                return self._server
            self.end(self._server.pid)
        # Unguessable, and still the kernel's to forget when the server is gone.
        name = f"launchers-{os.getpid()}-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + name)
            # It listens from the start: who calls while the server imports is answered after that.
            listener.listen(_BACKLOG)
            self._process = _started(settings, listener.fileno())
        self._server, self._settings = RunningServer(self._process.pid, name), settings
        return self._server

    def note_ready(self, pid: int) -> None:
        """Note that a server has imported everything."""
        if self._server is not None and self._server.pid == pid:
            self._server = replace(self._server, was_ready=True)

    def exit_code(self, pid: int) -> int | None:
        """Return how a server ended (negative: a signal); None where it lives or nobody knows."""
        if self._process is None or self._process.pid != pid:
            return None
        try:
            # It closes its sockets a moment before it has ended.
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def end(self, pid: int) -> None:
        """Kill a server, and with it whatever it forked; returns when it is gone."""
        if self._process is not None and self._process.pid == pid:
            self._process.kill()
            self.exit_code(pid)


def _started(settings: ServerSettings, listener: int) -> subprocess.Popen[bytes]:
    words = (str(os.getpid()), str(listener), " " * ROOM_BYTES, json.dumps(settings.modules))
    log_path = Path(settings.log)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab", buffering=0) as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "launchers.fork_server.server", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # numpy's OpenBLAS starts its threads when it is imported; only one thread survives a fork.
            env={**settings.environment, "OPENBLAS_NUM_THREADS": "1", MARK_VARIABLE: NO_MARK},
            pass_fds=(listener,),
            start_new_session=True,
        )


class KeptServer:
    """The server of the process that this agent was forked from, which answers at the channel's other end."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._channel.settimeout(_ANSWER_TIMEOUT_S)

    def provide(self, settings: ServerSettings) -> RunningServer:
        answer = self._ask("provide", **asdict(settings))
        if "problem" in answer:
            raise OSError(answer["problem"])
        return RunningServer(**answer)

    def note_ready(self, pid: int) -> None:
        self._ask_if_it_answers("note_ready", pid)

    def exit_code(self, pid: int) -> int | None:
        code = self._ask_if_it_answers("exit_code", pid).get("code")
        return None if code is None else int(code)

    def end(self, pid: int) -> None:
        self._ask_if_it_answers("end", pid)

    def _ask_if_it_answers(self, verb: str, pid: int) -> dict[str, Any]:
        """Ask for what nothing depends on; {} where the other end does not answer."""
        try:
            return self._ask(verb, pid=pid)
        except OSError:
            return {}

    def _ask(self, verb: str, **facts: Any) -> dict[str, Any]:
        try:
            wire.send(self._channel, {"verb": verb, **facts})
            received = wire.receive(self._channel)
        except OSError:
            received = None
        if received is None:
            # A late answer would be taken for that to the next question.
            self._channel.close()
            raise OSError("the process that owns the fork server does not answer")
        return received[0]


ServerOwner = OwnServer | KeptServer


def serve(channel: socket.socket, owner: OwnServer, is_over: Callable[[], bool]) -> None:
    """Do what an agent asks for until it is gone, which `is_over` tells, or has closed its end."""
    channel.settimeout(_ANSWER_TIMEOUT_S)
    while not is_over():
        if not select.select([channel], [], [], _LOOK_S)[0]:
            continue
        try:
            if (received := wire.receive(channel)) is None:
                return
            wire.send(channel, _answer(owner, received[0]))
        except OSError:
            return


def _answer(owner: OwnServer, request: dict[str, Any]) -> dict[str, Any]:
    verb = request.pop("verb")
    if verb == "provide":
        try:
            return asdict(owner.provide(ServerSettings(tuple(request.pop("modules")), **request)))
        except OSError as error:
            return {"problem": str(error)}
    pid = int(request["pid"])
    if verb == "exit_code":
        return {"code": owner.exit_code(pid)}
    owner.note_ready(pid) if verb == "note_ready" else owner.end(pid)
    return {}
