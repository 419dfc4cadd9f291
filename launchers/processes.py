"""Finds and signals processes through /proc; as a program, ties a command's life to its parent's (`main`).

A process is its id together with its start time, so that a reused id is never mistaken for the process it
was. Workers of torchrun have sessions of their own: a process group does not hold them. They are found by
their parents, and after their parent's death by a mark in their environment (`MARK_VARIABLE`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# Set for whatever belongs to one start of an agent: what is left of that is found by it.
MARK_VARIABLE = "LAUNCHERS_MARK"


@dataclass(frozen=True)
class Process:
    """One process for good: `started` is in clock ticks since boot (field 22 of /proc/<pid>/stat)."""

    pid: int
    started: int


@dataclass(frozen=True)
class _Status:
    process: Process
    parent: int
    # One letter: R running, S sleeping, D uninterruptible, Z zombie …
    state: str


def _read(pid: int, name: str) -> bytes:
    """Return a file of the process in /proc; empty where it is gone or another user's."""
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def _status(pid: int) -> _Status | None:
    # The name stands in parentheses and may hold any byte, spaces and parentheses too.
    fields = _read(pid, "stat").rpartition(b")")[2].decode().split()
    if not fields:
        return None
    return _Status(Process(pid, int(fields[19])), int(fields[1]), fields[0])


def _living() -> Iterator[_Status]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (status := _status(int(entry.name))) is not None and status.state != "Z":
            yield status


def find(pid: int) -> Process | None:
    """Return the process that has this id now, or None; a zombie counts as gone."""
    status = _status(pid)
    return status.process if status is not None and status.state != "Z" else None


def waits_for_a_device(pid: int) -> bool:
    """Tell whether a process's first thread waits in the kernel where no signal reaches it: for a disk or a
    network file system.
    """
    status = _status(pid)
    return status is not None and status.state == "D"


def is_alive(process: Process) -> bool:
    """Tell whether this very process still runs; a zombie counts as gone."""
    return find(process.pid) == process


def children(pid: int) -> list[Process]:
    """Return the living children of a process."""
    try:
        lists = [path.read_text() for path in (_PROC / str(pid) / "task").glob("*/children")]
    except OSError:
        lists = []
    if lists:
        living = [find(int(child)) for text in lists for child in text.split()]
        return [process for process in living if process is not None]
    # Kernels without CONFIG_PROC_CHILDREN: look at every process.
    return [status.process for status in _living() if status.parent == pid]


def marked(mark: str) -> list[Process]:
    """Return this user's living processes that were started with `mark` ("NAME=value") in the environment."""
    return with_mark((status.process for status in _living()), mark)


def with_mark(processes: Iterable[Process], mark: str) -> list[Process]:
    """Return those of `processes` that have `mark` ("NAME=value") in their environment, as /proc shows it."""
    wanted = mark.encode()
    return [process for process in processes if wanted in _read(process.pid, "environ").split(b"\0")]


def with_words(*words: str) -> list[Process]:
    """Return the living processes that have each of `words` as a whole word on their command line."""
    wanted = {word.encode() for word in words}
    living = (status.process for status in _living())
    return [process for process in living if wanted <= set(_read(process.pid, "cmdline").split(b"\0"))]


def ignores(process: Process, number: signal.Signals) -> bool:
    """Tell whether the process ignores a signal (or is gone)."""
    masks = _signal_masks(process)
    return masks is None or bool(masks.get(b"SigIgn", 0) >> (number - 1) & 1)


def catches(process: Process, number: signal.Signals | int) -> bool:
    """Tell whether the process has a handler for a signal, and does not block it."""
    masks = _signal_masks(process) or {}
    return bool((masks.get(b"SigCgt", 0) & ~masks.get(b"SigBlk", 0)) >> (number - 1) & 1)


def blocks(process: Process, number: signal.Signals | int) -> bool:
    """Tell whether the process's main thread blocks a signal, so that it waits for whoever takes it."""
    return bool((_signal_masks(process) or {}).get(b"SigBlk", 0) >> (number - 1) & 1)


def _signal_masks(process: Process) -> dict[bytes, int] | None:
    """Return the masks in /proc/<pid>/status by their names there; None where the process is gone."""
    text = _read(process.pid, "status")
    if not text:
        return None
    lines = (line.split() for line in text.splitlines() if line.startswith(b"Sig"))
    return {name.rstrip(b":"): int(mask, 16) for name, mask in lines if name != b"SigQ:"}


def send(processes: Iterable[Process], number: signal.Signals | int) -> list[Process]:
    """Send a signal to those that still run; return them."""
    reached = []
    for process in processes:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
                reached.append(process)
    return reached


def state(process: Process) -> str | None:
    """Return the process's letter in /proc (R runs, S sleeps, T stopped, Z ended …); None when it is gone."""
    status = _status(process.pid)
    return status.state if status is not None and status.process == process else None


# <sys/prctl.h>
_PR_SET_PDEATHSIG = 1
# Set for the workers: the process id of their parent, so that they can tell whether it still is. It is
# torchrun's, or that of the process that forked them.
PARENT_VARIABLE = "LAUNCHERS_PARENT_PID"
# What `timeout` and `env` return for a command that cannot be started.
_EXIT_NOT_STARTED = 127


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send a signal to this process when its parent (the thread that started it) ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent (the thread that started it) ends.

    Exits at once when `parent` is already gone.
    """
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(_EXIT_NOT_STARTED)


def main(arguments: list[str]) -> None:
    """`python -m launchers.processes PARENT_PID COMMAND…`: become a command that dies with its parent.

    The kernel kills the command when the parent, an agent, dies in whatever way, SIGKILL included. This is a
    program of its own because code between fork and exec is not safe in a threaded parent. SIGTERM, SIGUSR1
    and SIGUSR2 are ignored from here on: Slurm sends them to every process of a job, and torchrun would die
    of them before its workers. Workers inherit that and install handlers of their own where they need them.
    """
    parent, command = int(arguments[0]), arguments[1:]
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    os.execve(command[0], command, {**os.environ, PARENT_VARIABLE: str(os.getpid())})


if __name__ == "__main__":
    main(sys.argv[1:])
