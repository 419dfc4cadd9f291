"""The process that has imported the slow modules: `python -m launchers.warm.zygote PARENT FD NAME … MODULES`.

It forks torchrun for its agent (control socket FD) and workers for torchrun's stubs (abstract socket NAME),
hands back how they end, and kills them with whoever asked for them. A fork is one of a process with one
thread that has touched no device, or it is refused. Slurm's signals do not end it; its agent's end does.
It knows the modules by name only, and nothing of what the forked ones do.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.tether import PARENT_VARIABLE, die_with_parent
from launchers.warm import wire
from launchers.warm.appearance import MARK_VARIABLE, NO_MARK, Appearance
from launchers.warm.child import Job, become, differing

# How long a stub that has connected may take to say what it wants: it holds up all others.
_REQUEST_TIMEOUT_S = 10.0
_PEER = struct.Struct("3i")
# What `timeout` and `env` return for a command that cannot be started.
_EXIT_NOT_STARTED = 127


@dataclass
class _Child:
    """A forked process: torchrun under the agent's number for it, or a worker with its stub's channel."""

    pid: int
    number: int = 0
    stub: socket.socket | None = None
    torchrun: int = 0


class Zygote:
    """Serves until its agent is gone, or, in a forked process, until that is to become something else."""

    def __init__(self, control: socket.socket, listener: socket.socket, appearance: Appearance) -> None:
        self._control = control
        self._listener = listener
        self._appearance = appearance
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_end = socket.socketpair()

    def serve(self) -> Job | None:
        """Return None when the agent is gone, all children killed; a job only in a process forked for it."""
        for end in (self._wakeup, self._wakeup_end, self._listener):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for channel in (self._control, self._listener, self._wakeup):
            self._selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                job = None
                if key.fileobj is self._control:
                    found = wire.receive(self._control)
                    if found is None:
                        self._kill(list(self._children.values()))
                        return None
                    job = self._start_torchrun(*found)
                elif key.fileobj is self._listener:
                    job = self._start_worker()
                elif key.fileobj is self._wakeup:
                    self._reap()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)
                if job is not None:
                    return job

    def _start_torchrun(self, request: dict[str, Any], files: list[int]) -> Job | None:
        job = _job(request, [os.open(os.devnull, os.O_RDONLY), *files, *files])
        number = int(request["number"])
        if (reason := refusal()) is not None:
            _close(job.files)
            wire.send(self._control, {"number": number, "refused": reason})
            return None
        if (pid := self._fork(job)) == 0:
            # As the tether does for a plain one.
            job.environment[PARENT_VARIABLE] = str(os.getpid())
            return job
        self._children[pid] = _Child(pid, number)
        wire.send(self._control, {"number": number, "pid": pid})
        return None

    def _start_worker(self) -> Job | None:
        try:
            stub, _ = self._listener.accept()
        except BlockingIOError:
            return None
        try:
            stub.settimeout(_REQUEST_TIMEOUT_S)
            if _peer(stub)[1] != os.getuid() or (found := wire.receive(stub)) is None:
                stub.close()
                return None
            return self._fork_worker(stub, *found)
        except OSError:
            stub.close()
            return None

    def _fork_worker(self, stub: socket.socket, request: dict[str, Any], files: list[int]) -> Job | None:
        job = _job(request, files)
        torchrun = self._children.get(int(request["torchrun"]))
        reason = refusal()
        if (name := differing(job.environment, os.environ)) is not None:
            reason = f"it wants another {name}"
        if torchrun is None or torchrun.torchrun or reason is not None:
            sys.stdout.write(f"a worker is started plainly: {reason or 'whose torchrun is it?'}\n")
            sys.stdout.flush()
            _close(files)
            wire.send_pair(stub, wire.REFUSED, 0)
            stub.close()
            return None
        parent = os.getpid()
        if (pid := self._fork(job)) == 0:
            job.environment[PARENT_VARIABLE] = str(parent)
            job.environment.pop(wire.SOCKET_VARIABLE, None)
            stub.close()
            return job
        self._children[pid] = _Child(pid, 0, stub, int(request["torchrun"]))
        self._selector.register(stub, selectors.EVENT_READ)
        wire.send(self._control, {"number": torchrun.number, "stub": _peer(stub)[0], "worker": pid})
        wire.send_pair(stub, wire.FORKED, pid)
        return None

    def _fork(self, job: Job) -> int:
        """Fork and return the child's id, or 0 in the child, which is no zygote any more."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            _close(job.files)
            return pid
        try:
            self._leave(job, parent)
        except BaseException:  # noqa: BLE001  whatever it is: a child must never go on as a second zygote
            os._exit(_EXIT_NOT_STARTED)
        return 0

    def _leave(self, job: Job, parent: int) -> None:
        """In a child: leave nothing open that is the zygote's, and look like the job."""
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        self._selector.close()
        stubs = [child.stub for child in self._children.values() if child.stub is not None]
        for channel in (self._control, self._listener, self._wakeup, self._wakeup_end, *stubs):
            channel.close()
        shown = [sys.executable, "-u", "-m", *job.arguments]
        self._appearance.show(shown, job.environment.get(MARK_VARIABLE, NO_MARK))

    def _hear(self, stub: socket.socket) -> None:
        """Pass on a stub's signal to the worker's group; kill the worker of a stub that is gone."""
        if stub.fileno() < 0:
            # Closed since the selector saw it: its worker has ended.
            return
        child = next((child for child in self._children.values() if child.stub is stub), None)
        try:
            said = wire.receive_pair(stub)
        except OSError:
            said = None
        if child is None or said is None:
            self._selector.unregister(stub)
            stub.close()
            if child is not None:
                child.stub = None
                self._kill([child])
        elif said[0] == wire.SIGNAL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, said[1])

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
            if child.stub is not None:
                self._selector.unregister(child.stub)
                with contextlib.suppress(OSError):
                    wire.send_pair(child.stub, wire.ENDED, code)
                child.stub.close()
            return
        # Workers live no longer than their torchrun.
        self._kill([worker for worker in self._children.values() if worker.torchrun == child.pid])
        with contextlib.suppress(OSError):
            wire.send(self._control, {"number": child.number, "code": code})

    def _kill(self, children: list[_Child]) -> None:
        for child in children:
            # Not reaped yet, so that the id is still this child's.
            os.kill(child.pid, signal.SIGKILL)


def refusal() -> str | None:
    """Return why this process must not be forked, or None."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        return f"the warm process has {threads} threads, and only one survives a fork"
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := str(entry.readlink())).startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return f"the warm process has opened {target}, and a device does not survive a fork"
    return None


def _peer(channel: socket.socket) -> tuple[int, int]:
    """Return the process and user id of who connected."""
    pid, user, _ = _PEER.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


def _job(request: dict[str, Any], files: list[int]) -> Job:
    return Job(request["arguments"], request["environment"], request["folder"], files)


def _close(files: list[int]) -> None:
    for file in set(files):
        os.close(file)


def _imported(modules: list[str]) -> str | None:
    """Import what is to be warm; return why that failed, or None."""
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a module does at its import
            return f"cannot import {name}: {type(error).__name__}: {error}"
    return None


def _prepared(parent: int, control: socket.socket, name: str, modules: list[str]) -> Zygote | None:
    """Import, listen, and tell the agent that forks may begin; None, and the reason, where they may not."""
    begin = time.monotonic()
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen(256)
        appearance = Appearance()
        appearance.show(["warm", f"(of {parent})", "python", "-m", "launchers.warm.zygote"], NO_MARK)
        reason = _imported(modules) or refusal()
    except (OSError, ValueError) as error:
        reason = str(error)
    if reason is not None:
        wire.send(control, {"ready": False, "reason": reason})
        return None
    # What was imported stays; without this a collection in a child would copy all its pages.
    gc.collect()
    gc.freeze()
    wire.send(control, {"ready": True, "seconds": time.monotonic() - begin})
    return Zygote(control, listener, appearance)


def main(arguments: list[str]) -> None:
    """Serve the agent with process id PARENT; in a forked process, run its job as `python -m` would."""
    parent, control = int(arguments[0]), socket.socket(fileno=int(arguments[1]))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    os.set_inheritable(control.fileno(), False)
    zygote = _prepared(parent, control, arguments[2], json.loads(arguments[4]))
    job = zygote.serve() if zygote is not None else None
    if job is None:
        # Winding up what was imported takes time that its agent waits.
        os._exit(0)
    become(job)


if __name__ == "__main__":
    main(sys.argv[1:])
