"""The agent's handle on its zygote: have it started, ask whether it is ready, have it fork torchrun, end it.

It never starts anything plainly: what the zygote cannot do is refused with a reason, and the caller does it.
"""

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

from launchers import processes
from launchers.fork_server import wire
from launchers.fork_server.owner import Held, Owner, OwnZygote, Wanted
from launchers.fork_server.server import differing
from launchers.launch_errors import LauncherError

# What torchrun runs instead of `python -m MODULE`, in front of MODULE.
STUB = (sys.executable, "-I", "-S", str(Path(__file__).with_name("worker.py")))
# torchrun first: every agent needs it, whatever its workers are.
_ALWAYS = ("torch", "torch.distributed.run")
# A fork takes milliseconds; a machine that swaps takes longer.
_ANSWER_TIMEOUT_S = 20.0
# A zygote that has imported everything speaks at once: of an agent that calls, of a process that has ended.
_SILENCE_S = 5.0
_POLL_S = 0.02


class WarmRefusal(LauncherError):  # noqa: N818  no error of anybody's
    """Raised when the zygote cannot fork what it is asked for; the message says why. Start it plainly."""


class WarmProcess:
    """A process that the zygote forked, with as much of subprocess.Popen as an agent needs."""

    def __init__(self, host: WarmHost, pid: int, zygote: int) -> None:
        self._host = host
        self._process = processes.find(pid)
        self._workers: dict[int, int] = {}
        self._gone_since: float | None = None
        self.pid = pid
        # Process id of what forked it, and forks its workers.
        self.zygote = zygote
        self.returncode: int | None = None

    def workers(self) -> dict[int, int]:
        """Return the process ids of the workers forked for it so far, by those of their stubs."""
        self._host.hear()
        return self._workers

    def take_in(self, message: dict[str, Any]) -> None:
        """Note what the zygote says of this process."""
        if "code" in message:
            self.returncode = int(message["code"])
        else:
            self._workers[int(message["stub"])] = int(message["worker"])

    def poll(self) -> int | None:
        """Return the exit code (negative: a signal), or None while it runs."""
        if self.returncode is None:
            self._host.hear()
        if self.returncode is None and not self._is_alive():
            self._gone_since = self._gone_since or time.monotonic()
            if self._is_watched() and time.monotonic() - self._gone_since < _SILENCE_S:
                return None
            # Killed together with its zygote, or under one that is stopped: that says nothing any more.
            self.returncode = -signal.SIGKILL
            if self._is_watched():
                self._host.close()
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
        return self._host.pid == self.zygote and self._host.is_alive()

    def _is_alive(self) -> bool:
        return self._process is not None and processes.is_alive(self._process)


class WarmHost:
    """One node's zygote, as its agent uses it. All calls from one thread.

    A zygote that is ill is replaced at the next `start`: dead, silent though it was ready once, or one that
    says that it can't be forked from any more.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], log: Path, owner: Owner | None = None
    ) -> None:
        """`modules` are imported after torch and torchrun, `environment` is the launch specification's, and
        what the zygote itself has to say goes to `log`. Without an `owner` it is this process's own.
        """
        self._environment = {**os.environ, **environment}
        self._wanted = Wanted((*_ALWAYS, *modules), self._environment, str(log))
        self._owner: Owner = owner or OwnZygote()
        self._held: Held | None = None
        self._process: processes.Process | None = None
        self._control: socket.socket | None = None
        self._greeted_at = 0.0
        self._forked: dict[int, WarmProcess] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._last_number = 0
        # Why it is not ready; None: it says so when it ends.
        self._trouble: str | None = "the warm process was not started"
        self._ready = False

    @property
    def pid(self) -> int | None:
        """The zygote's process id; None when there is none."""
        return None if self._held is None else self._held.pid

    @property
    def socket_name(self) -> str:
        """Name of the zygote's abstract socket, for torchrun's stubs."""
        return "" if self._held is None else self._held.socket_name

    def start(self) -> None:
        """Have a zygote started unless one lives; return at once, it imports in the background.

        It never raises: what went wrong is the reason of the next refusal.
        """
        if self.is_alive() or sys.platform != "linux":
            return
        self._lose_control()
        self._ready, self._trouble = False, None
        try:
            self._held = self._owner.provide(self._wanted)
            self._process = processes.find(self._held.pid)
            self._control = _greeted(self._held.socket_name)
        except OSError as error:
            self._trouble = f"the warm process cannot be started: {error}"
        self._greeted_at = time.monotonic()

    def is_alive(self) -> bool:
        """Tell whether the zygote runs, ready or not."""
        return self._control is not None and self._process is not None and processes.is_alive(self._process)

    def is_ready(self) -> bool:
        """Tell whether the zygote runs and has imported everything."""
        self.hear()
        return self._ready and self.is_alive()

    def await_ready(self, timeout_s: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the zygote has imported everything or never will, `timeout_s` at most; tell which.

        A plain start imports the same twice, one after the other: waiting is worth while at the first
        attempt already. It ends at once where `hurried` says so.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_ready() and self.is_alive() and time.monotonic() < deadline and not hurried():
            if self._is_ill():
                self.close()
                self.start()
            time.sleep(_POLL_S)
        return self.is_ready()

    def _is_ill(self) -> bool:
        was_ready = self._held is not None and self._held.was_ready
        return was_ready and not self._ready and time.monotonic() - self._greeted_at > _SILENCE_S

    def trouble(self) -> str:
        """Return why the zygote is not ready."""
        self.hear()
        if self._trouble is None and self._held is not None and not self.is_alive():
            return f"the warm process ended with {self._owner.exit_code(self._held.pid)}"
        return self._trouble or "the warm process is still importing"

    def popen(self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> WarmProcess:
        """Fork `python -u -m *arguments` in a session of its own, its output in `log`.

        `environment` is all of it. The process is killed when the zygote or this agent dies. Raises
        WarmRefusal.
        """
        if not self.is_ready():
            raise WarmRefusal(self.trouble())
        if (name := differing(environment, self._environment)) is not None:
            raise WarmRefusal(f"the warm process was started with another {name}")
        number = self._last_number = self._last_number + 1
        request = {"number": number, "arguments": list(arguments), "environment": dict(environment)}
        answer = self._ask(request, log.fileno())
        if number not in self._forked:
            # What keeps it from forking does not pass.
            self.close()
            raise WarmRefusal(str(answer.get("refused")))
        return self._forked[number]

    def _ask(self, request: dict[str, Any], file: int) -> dict[str, Any]:
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        try:
            if self._control is None:
                raise WarmRefusal(self.trouble())
            wire.send(self._control, {**request, "folder": str(Path.cwd())}, (file,))
        except OSError as error:
            self.close()
            raise WarmRefusal(f"the warm process does not listen: {error}") from error
        while (answer := self._answers.pop(request["number"], None)) is None:
            self.hear(_POLL_S)
            if not self.is_alive() or time.monotonic() > deadline:
                # Whatever it forks yet dies with it.
                self.close()
                raise WarmRefusal("the warm process does not answer")
        return answer

    def hear(self, timeout_s: float = 0.0) -> None:
        """Take in what the zygote has said by now, or says within `timeout_s`."""
        while self._control is not None and _has_news(self._control, timeout_s):
            timeout_s = 0.0
            try:
                found = wire.receive(self._control)
            except (OSError, ValueError):
                found = None
            if found is None:
                self._lose_control()
                return
            self._take_in(found[0])

    def _take_in(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._take_word(bool(message["ready"]), message.get("reason"))
        elif (process := self._forked.get(int(message["number"]))) is not None:
            process.take_in(message)
        else:
            # Noted at once: that it has ended may be the next message.
            if "pid" in message and self._held is not None:
                process = WarmProcess(self, int(message["pid"]), self._held.pid)
                self._forked[int(message["number"])] = process
            self._answers[int(message["number"])] = message

    def _take_word(self, is_ready: bool, reason: str | None) -> None:
        """Take in how a zygote answers the agent's call."""
        assert self._held is not None
        self._ready = is_ready
        if is_ready:
            self._owner.note_ready(self._held.pid)
            return
        was_ready = self._held.was_ready
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
        """End the zygote and with it whatever it forked; returns when it is gone."""
        self._lose_control()
        if self._held is not None:
            self._owner.end(self._held.pid)
        self._held = self._process = None
        self._ready = False
        self._trouble = "the warm process was closed"


def _greeted(socket_name: str) -> socket.socket:
    """Return a connection on which the zygote answers as soon as it can. Raises OSError."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Of what it says: messages are short, and one that has begun is whole in no time.
        channel.settimeout(_ANSWER_TIMEOUT_S)
        channel.connect("\0" + socket_name)
        wire.send(channel, {"agent": os.getpid()})
    except OSError:
        channel.close()
        raise
    return channel


def _has_news(channel: socket.socket, timeout_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))
