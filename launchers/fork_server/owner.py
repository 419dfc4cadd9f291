"""Who a node's zygote belongs to: its parent, which starts it, ends it, and is not outlived by it.

That is the agent itself (`OwnZygote`), or the process that starts the agent again when it was killed: there
the zygote outlives agents, and the next one need not wait for imports. It serves its agent on a socket
(`serve`), and the agent asks through `KeptZygote`. Nobody here asks the zygote itself for anything.
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
from typing import Any, Protocol

from launchers.fork_server import wire
from launchers.fork_server.appearance import MARK_VARIABLE, NO_MARK, ROOM_BYTES
from launchers.fork_server.server import differing

_BACKLOG = 256
# SIGKILL takes milliseconds, unless the kernel waits for a device or a file server.
_END_TIMEOUT_S = 5.0
# An owner answers in milliseconds; one that is stopped must not hold up its agent.
_ANSWER_TIMEOUT_S = 10.0
# How often an owner looks for the agent's end itself, should something else hold the socket's other end.
_LOOK_S = 0.5


@dataclass(frozen=True)
class Wanted:
    """What a zygote is to be: what it imports, all of its environment, and the file for what it says."""

    modules: tuple[str, ...]
    environment: dict[str, str]
    log: str


@dataclass(frozen=True)
class Held:
    """A zygote that lives."""

    pid: int
    # Name of its abstract socket, without the leading zero byte.
    socket_name: str
    # Whether it has imported everything: then it answers at once, or is ill.
    was_ready: bool = False


class Owner(Protocol):
    """Holds one zygote at most. All calls from the agent's own thread."""

    def provide(self, wanted: Wanted) -> Held:
        """Return the zygote that lives, if it is as wanted; else end that and start one. Raises OSError."""

    def note_ready(self, pid: int) -> None:
        """Note that a zygote has imported everything."""

    def exit_code(self, pid: int) -> int | None:
        """Return how a zygote ended (negative: a signal); None where it lives or nobody knows."""

    def end(self, pid: int) -> None:
        """Kill a zygote, and with it whatever it forked; returns when it is gone."""


class OwnZygote:
    """A zygote whose parent is this process: use it from one thread, to which the kernel ties its life."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._held: Held | None = None
        self._wanted: Wanted | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the zygote that was started last, alive or not."""
        return None if self._held is None else self._held.pid

    def provide(self, wanted: Wanted) -> Held:
        if self._process is not None and self._held is not None and self._wanted is not None:
            is_as_wanted = wanted.modules == self._wanted.modules and (
                differing(wanted.environment, self._wanted.environment) is None
            )
            if is_as_wanted and self._process.poll() is None:
                return self._held
            self.end(self._held.pid)
        # Unguessable, and still the kernel's to forget when the zygote is gone.
        name = f"launchers-{os.getpid()}-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + name)
            # It listens from the start: who calls while the zygote imports is answered behind that.
            listener.listen(_BACKLOG)
            self._process = _started(wanted, listener.fileno())
        self._held, self._wanted = Held(self._process.pid, name), wanted
        return self._held

    def note_ready(self, pid: int) -> None:
        if self._held is not None and self._held.pid == pid:
            self._held = replace(self._held, was_ready=True)

    def exit_code(self, pid: int) -> int | None:
        if self._process is None or self._process.pid != pid:
            return None
        try:
            # It closes its sockets a moment before it has ended.
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def end(self, pid: int) -> None:
        if self._process is not None and self._process.pid == pid:
            self._process.kill()
            self.exit_code(pid)


def _started(wanted: Wanted, listener: int) -> subprocess.Popen[bytes]:
    words = (str(os.getpid()), str(listener), " " * ROOM_BYTES, json.dumps(wanted.modules))
    log_path = Path(wanted.log)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab", buffering=0) as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "launchers.fork_server.server", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # numpy's OpenBLAS starts its threads when it is imported; only one thread survives a fork.
            env={**wanted.environment, "OPENBLAS_NUM_THREADS": "1", MARK_VARIABLE: NO_MARK},
            pass_fds=(listener,),
            start_new_session=True,
        )


class KeptZygote:
    """The zygote of the process that this agent was forked from, which serves the channel's other end."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._channel.settimeout(_ANSWER_TIMEOUT_S)

    def provide(self, wanted: Wanted) -> Held:
        answer = self._ask("provide", **asdict(wanted))
        if "problem" in answer:
            raise OSError(answer["problem"])
        return Held(**answer)

    def note_ready(self, pid: int) -> None:
        self._asked_in_vain("note_ready", pid)

    def exit_code(self, pid: int) -> int | None:
        code = self._asked_in_vain("exit_code", pid).get("code")
        return None if code is None else int(code)

    def end(self, pid: int) -> None:
        self._asked_in_vain("end", pid)

    def _asked_in_vain(self, verb: str, pid: int) -> dict[str, Any]:
        """Ask for what nothing hangs on: without an answer there is nothing to say."""
        try:
            return self._ask(verb, pid=pid)
        except OSError:
            return {}

    def _ask(self, verb: str, **facts: Any) -> dict[str, Any]:
        try:
            wire.send(self._channel, {"verb": verb, **facts})
            found = wire.receive(self._channel)
        except OSError:
            found = None
        if found is None:
            # A late answer would be taken for that to the next question.
            self._channel.close()
            raise OSError("the process that keeps it for this agent does not answer")
        return found[0]


def serve(channel: socket.socket, owner: OwnZygote, is_over: Callable[[], bool]) -> None:
    """Do what an agent asks for until it is gone, which `is_over` tells, or has closed its end."""
    channel.settimeout(_ANSWER_TIMEOUT_S)
    while not is_over():
        if not select.select([channel], [], [], _LOOK_S)[0]:
            continue
        try:
            if (found := wire.receive(channel)) is None:
                return
            wire.send(channel, _answer(owner, found[0]))
        except OSError:
            return


def _answer(owner: OwnZygote, request: dict[str, Any]) -> dict[str, Any]:
    verb = request.pop("verb")
    if verb == "provide":
        try:
            return asdict(owner.provide(Wanted(tuple(request.pop("modules")), **request)))
        except OSError as error:
            return {"problem": str(error)}
    pid = int(request["pid"])
    if verb == "exit_code":
        return {"code": owner.exit_code(pid)}
    owner.note_ready(pid) if verb == "note_ready" else owner.end(pid)
    return {}
