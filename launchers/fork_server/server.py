"""`python -m launchers.fork_server.server PARENT FD … MODULES`: a process that has imported the slow modules.

It listens on the socket FD, forks torchrun for its agent and workers for torchrun's worker launchers, tells
how they end, and kills them when whoever asked for them ends. It forks only while it has one thread and has
opened no device, and refuses otherwise. Slurm's signals do not end it. The end of its parent (the `owner`)
does, at once; when its agent is gone, it kills what it forked for that one and serves the next that calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any

from launchers.fork_server import wire
from launchers.processes import MARK_VARIABLE, PARENT_VARIABLE, die_with_parent

# What a forked process does to be as if a new interpreter had started it: streams, environment, module.

# Read when a process or a library starts: a fork cannot have another value than its first parent.
_READ_AT_START = ("LD_", "GLIBC_", "MALLOC_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH_")
# … but not by whoever starts: torchrun sets these for its workers, or they are read when a group is made.
_READ_LATER = ("TORCH_NCCL_", "TORCH_FR_")


@dataclass(frozen=True)
class ForkedProgram:
    """What `python -u -m` is to run: module and arguments, with all that a process is started with."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    # Descriptors that become the standard input, output and error.
    files: list[int]


def differing(environment: Mapping[str, str], first: Mapping[str, str]) -> str | None:
    """Return a variable that a process forked from one with the environment `first` cannot have otherwise,
    but should by `environment`; None where there is none.
    """
    for name in sorted({*environment, *first}):
        is_fixed = name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
        if is_fixed and environment.get(name) != first.get(name):
            return name
    return None


def become(program: ForkedProgram) -> None:
    """Take on the program's streams, environment and folder, and run its module as the main one."""
    for place, file in enumerate(program.files):
        os.dup2(file, place)
    for file in {file for file in program.files if file > 2}:
        os.close(file)
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    # Folders may hold other files than when the first parent looked.
    importlib.invalidate_caches()
    _draw_again()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.orig_argv[:] = [sys.executable, "-u", "-m", *program.arguments]
    _run_as_main(*program.arguments)


def _run_as_main(name: str, *arguments: str) -> None:
    """Run a module as `python -m` does, for good: threads and exit handlers still find it as the main one."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    main = importlib.util.module_from_spec(spec)
    main.__name__ = "__main__"
    sys.modules["__main__"] = main
    sys.argv[:] = [str(spec.origin), *arguments]
    exec(code, main.__dict__)


def _draw_again() -> None:
    """Give libraries that drew a seed at their import another one: siblings would all draw the same.

    Python's own `random` does so by itself, and torch begins with a fixed seed.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


# How a forked process looks in /proc: its command line and its mark, written over those of the fork server.
#
# /proc/PID/cmdline and /proc/PID/environ show memory that a fork copies and that no system call of an
# ordinary user moves. So the server is started with room on its command line and a mark of zeros, and each
# forked process writes its own there.
#
# A list of process ids cannot take the place of marks: what a rank forks itself and leaves (data loaders,
# compilers) is on no list. Measured with such a list: of two ranks that each forked a child and ended, both
# children lived on after the attempt, with the rank's memory; by their marks both are found and ended.

NO_MARK = "0" * 16
# Bytes of an argument that only makes room; longer command lines are cut when shown.
ROOM_BYTES = 8192


class Appearance:
    """The two areas of this process's memory. Raises OSError and ValueError where they are not there."""

    def __init__(self) -> None:
        stat = Path("/proc/self/stat").read_text()
        # Fields 48 to 51 of /proc/PID/stat: begin and end of the arguments and of the environment.
        fields = [int(field) for field in stat[stat.rindex(")") + 2 :].split()[45:49]]
        self._arguments_at, arguments_end, environment_at, environment_end = fields
        self._arguments_size = arguments_end - self._arguments_at
        environment = Path("/proc/self/environ").read_bytes()
        if environment_end - environment_at != len(environment):
            raise ValueError("this process's environment is not where /proc says")
        place = environment.index(f"{MARK_VARIABLE}={NO_MARK}\0".encode())
        self._mark_at = environment_at + place + len(MARK_VARIABLE) + 1

    def show(self, command: list[str], mark: str) -> None:
        """Let /proc show this command line, cut where it is too long, and this mark of 16 characters."""
        shown = b"\0".join(word.encode(errors="surrogateescape") for word in command)
        # The last byte stays zero: otherwise the kernel takes the area for one long title.
        shown = shown[: self._arguments_size - 1].ljust(self._arguments_size, b"\0")
        ctypes.memmove(self._arguments_at, shown, len(shown))
        ctypes.memmove(self._mark_at, mark.encode().ljust(len(NO_MARK), b"0"), len(NO_MARK))


# How long a worker launcher that has connected may take to send its request: it holds up all others.
_REQUEST_TIMEOUT_S = 10.0
# How long a server that cannot be forked from waits for its agent's call, to say why.
_LAST_WORD_S = 10.0
# What `timeout` and `env` return for a command that cannot be started.
_EXIT_NOT_STARTED = 127


@dataclass
class _Child:
    """A forked process: torchrun under the agent's number for it, or a worker with its launcher's channel."""

    pid: int
    # Which of the server's agents it was forked for, by number.
    agent: int
    number: int = 0
    launcher: socket.socket | None = None
    torchrun: int = 0


class Server:
    """Serves one agent after another; in a forked process, returns the program to become."""

    def __init__(self, listener: socket.socket, appearance: Appearance, seconds: float) -> None:
        self._listener = listener
        self._appearance = appearance
        # What the imports took.
        self._seconds = seconds
        self._control: socket.socket | None = None
        self._num_agents = 0
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_end = socket.socketpair()

    def serve(self) -> ForkedProgram:
        """Return only in a forked process, with its program; the server itself serves until it is killed."""
        for end in (self._wakeup, self._wakeup_end, self._listener):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for channel in (self._listener, self._wakeup):
            self._selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if (
                    isinstance(key.fileobj, socket.socket)
                    and (program := self._attend(key.fileobj)) is not None
                ):
                    return program

    def _attend(self, channel: socket.socket) -> ForkedProgram | None:
        if channel is self._control:
            return self._hear_agent(channel)
        if channel is self._listener:
            return self._accept()
        if channel is self._wakeup:
            self._reap()
        else:
            self._hear(channel)
        return None

    def _accept(self) -> ForkedProgram | None:
        """Take a call: an agent's, which replaces the one before, or a worker launcher's."""
        try:
            caller, _ = self._listener.accept()
        except BlockingIOError:
            return None
        try:
            caller.settimeout(_REQUEST_TIMEOUT_S)
            if wire.peer(caller)[1] != os.getuid() or (received := wire.receive(caller)) is None:
                caller.close()
                return None
            if "agent" in received[0]:
                self._greet(caller)
                return None
            if self._control is not None and _is_gone(self._control):
                # The end of this launcher's agent may not have been seen yet.
                self._lose_agent()
            return self._fork_worker(caller, *received)
        except OSError:
            caller.close()
            return None

    def _greet(self, caller: socket.socket) -> None:
        self._lose_agent()
        self._control = caller
        self._selector.register(caller, selectors.EVENT_READ)
        reason = refusal()
        self._tell({"ready": reason is None, "reason": reason, "seconds": self._seconds})

    def _lose_agent(self) -> None:
        """Kill whatever was forked for the agent so far; it has no agent then."""
        self._num_agents += 1
        self._kill(list(self._children.values()))
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
            self._control = None

    def _tell(self, message: dict[str, Any]) -> None:
        """Say something to the agent; that it is gone is heard by the end of its connection."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                wire.send(self._control, message)

    def _hear_agent(self, control: socket.socket) -> ForkedProgram | None:
        try:
            received = wire.receive(control)
        except OSError:
            received = None
        if received is None:
            self._lose_agent()
            return None
        return self._start_torchrun(*received)

    def _start_torchrun(self, request: dict[str, Any], files: list[int]) -> ForkedProgram | None:
        program = _program(request, [os.open(os.devnull, os.O_RDONLY), *files, *files])
        number = int(request["number"])
        if (reason := refusal()) is not None:
            _close(program.files)
            self._tell({"number": number, "refused": reason})
            return None
        if (pid := self._fork(program)) == 0:
            # As `launchers.processes` does for one that is not forked.
            program.environment[PARENT_VARIABLE] = str(os.getpid())
            return program
        self._children[pid] = _Child(pid, self._num_agents, number)
        self._tell({"number": number, "pid": pid})
        return None

    def _fork_worker(
        self, launcher: socket.socket, request: dict[str, Any], files: list[int]
    ) -> ForkedProgram | None:
        program = _program(request, files)
        torchrun = self._children.get(int(request["torchrun"]))
        reason = refusal()
        if (name := differing(program.environment, os.environ)) is not None:
            reason = f"it wants another {name}"
        is_own = torchrun is not None and not torchrun.torchrun and torchrun.agent == self._num_agents
        if torchrun is None or not is_own or reason is not None:
            sys.stdout.write(
                f"a worker is not forked: {reason or 'its torchrun is not of this fork server'}\n"
            )
            sys.stdout.flush()
            _close(files)
            wire.send_pair(launcher, wire.REFUSED, 0)
            launcher.close()
            return None
        parent = os.getpid()
        if (pid := self._fork(program)) == 0:
            program.environment[PARENT_VARIABLE] = str(parent)
            program.environment.pop(wire.SOCKET_VARIABLE, None)
            launcher.close()
            return program
        self._children[pid] = _Child(pid, self._num_agents, 0, launcher, torchrun.pid)
        self._selector.register(launcher, selectors.EVENT_READ)
        self._tell({"number": torchrun.number, "launcher": wire.peer(launcher)[0], "worker": pid})
        # A launcher that is gone meanwhile is noticed by the end of its connection.
        with contextlib.suppress(OSError):
            wire.send_pair(launcher, wire.FORKED, pid)
        return None

    def _fork(self, program: ForkedProgram) -> int:
        """Fork and return the child's id, or 0 in the child, which is no server any more."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            _close(program.files)
            return pid
        try:
            self._leave(program, parent)
        except BaseException:  # noqa: BLE001  whatever it is: a child must never go on as a second server
            os._exit(_EXIT_NOT_STARTED)
        return 0

    def _leave(self, program: ForkedProgram, parent: int) -> None:
        """In a child: leave nothing open that is the server's, and look like the program."""
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        self._selector.close()
        launchers = [child.launcher for child in self._children.values() if child.launcher is not None]
        for channel in (self._listener, self._wakeup, self._wakeup_end, *launchers):
            channel.close()
        if self._control is not None:
            self._control.close()
        shown = [sys.executable, "-u", "-m", *program.arguments]
        self._appearance.show(shown, program.environment.get(MARK_VARIABLE, NO_MARK))

    def _hear(self, launcher: socket.socket) -> None:
        """Pass on a launcher's signal to the worker's group; kill the worker of a launcher that is gone."""
        if launcher.fileno() < 0:
            # Closed since the selector saw it.
            return
        child = next((child for child in self._children.values() if child.launcher is launcher), None)
        try:
            message = wire.receive_pair(launcher)
        except OSError:
            message = None
        if child is None or message is None:
            self._selector.unregister(launcher)
            launcher.close()
            if child is not None:
                child.launcher = None
                self._kill([child])
        elif message[0] == wire.SIGNAL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, message[1])

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (child := self._children.pop(pid, None)) is not None:
                self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        if child.torchrun:
            if child.launcher is not None:
                self._selector.unregister(child.launcher)
                with contextlib.suppress(OSError):
                    wire.send_pair(child.launcher, wire.ENDED, code)
                child.launcher.close()
            return
        # Workers live no longer than their torchrun.
        self._kill([worker for worker in self._children.values() if worker.torchrun == child.pid])
        if child.agent == self._num_agents:
            self._tell({"number": child.number, "code": code})

    def _kill(self, children: list[_Child]) -> None:
        for child in children:
            # Not reaped yet, so that the id is still this child's.
            os.kill(child.pid, signal.SIGKILL)


def refusal() -> str | None:
    """Return why this process must not be forked, or None."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        return f"the fork server has {threads} threads, and only one survives a fork"
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := str(entry.readlink())).startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return f"the fork server has opened {target}, and a device does not survive a fork"
    return None


def _program(request: dict[str, Any], files: list[int]) -> ForkedProgram:
    return ForkedProgram(request["arguments"], request["environment"], request["folder"], files)


def _close(files: list[int]) -> None:
    for file in set(files):
        os.close(file)


def _imported(modules: list[str]) -> str | None:
    """Import the slow modules; return why that failed, or None."""
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a module does at its import
            return f"cannot import {name}: {type(error).__name__}: {error}"
    return None


def _is_gone(channel: socket.socket) -> bool:
    """Tell whether the other side has closed its end."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    if not poll.poll(0):
        return False
    try:
        return not channel.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _prepared(parent: int, listener: socket.socket, modules: list[str]) -> Server | None:
    """Import the slow modules; None, and the agent is told why, where nothing may be forked from it."""
    begin = time.monotonic()
    # Nearly all that is made now stays: looking for what doesn't takes an eighth of the imports' time.
    gc.disable()
    try:
        appearance = Appearance()
        appearance.show(
            ["fork-server", f"(of {parent})", "python", "-m", "launchers.fork_server.server"], NO_MARK
        )
        reason = _imported(modules) or refusal()
    except (OSError, ValueError) as error:
        reason = str(error)
    if reason is not None:
        # Its agent called before the imports began.
        listener.settimeout(_LAST_WORD_S)
        with contextlib.suppress(OSError):
            caller, _ = listener.accept()
            wire.send(caller, {"ready": False, "reason": reason})
        return None
    # What was imported stays; without this a collection in a child would copy all its pages.
    gc.collect()
    gc.freeze()
    gc.enable()
    return Server(listener, appearance, time.monotonic() - begin)


def main(arguments: list[str]) -> None:
    """Serve the agents of process PARENT; in a forked process, run its program as `python -m` would."""
    parent, listener = int(arguments[0]), socket.socket(fileno=int(arguments[1]))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    os.set_inheritable(listener.fileno(), False)
    server = _prepared(parent, listener, json.loads(arguments[3]))
    if server is None:
        # Ending the interpreter takes time that its agent waits.
        os._exit(0)
    become(server.serve())


if __name__ == "__main__":
    main(sys.argv[1:])
