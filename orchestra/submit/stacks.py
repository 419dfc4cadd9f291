"""What a silent rank is doing, before it is killed: the stacks of its threads, or what the kernel tells.

The rank itself appends its Python stacks to a file of this node when it gets a signal: in the handler, so
that no lock holds it back. A process that cannot answer is looked at from outside: by py-spy where that is
installed, and in /proc. It knows no limits and kills nobody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launchers import processes
from launchers.processes import Process
from orchestra.heartbeat import STACKS_SIGNAL

# How long ranks have to answer. A processor that is busy elsewhere took up to 0.3 s.
_ANSWER_S = 2.0
_POLL_S = 0.05
_PY_SPY_S = 10.0
# Of ranks that only wait, the main thread's stack is kept, up to so many lines.
_SHORT_LINES = 60
# Text per rank: a recursion of a hundred thousand frames would fill a disk, 2,000 nodes at once.
_MAX_BYTES = 256 << 10


@dataclass(frozen=True)
class Asked:
    """One rank that is to show its stacks: the file that it appends them to, and the one they are kept in."""

    rank: int
    process: Process
    answer: Path
    target: Path
    is_suspect: bool
    words: str


def dump(asked: Mapping[int, Asked]) -> dict[int, Path]:
    """Append each rank's stacks to its target; return the targets by rank.

    Waits for two seconds at most, and longer only where py-spy is at work. A file that cannot be written is
    left out.
    """
    sizes = {rank: _size(it.answer) for rank, it in asked.items()}
    answering = [it for it in asked.values() if _can_answer(it.process)]
    processes.send([it.process for it in answering], STACKS_SIGNAL)
    _await_answers({it.rank: it for it in answering}, sizes)
    files = {}
    for rank, it in asked.items():
        text = _answer(it, sizes[rank]) if it in answering else ""
        if not text:
            text = _seen_from_outside(it)
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank}, process {it.process.pid}: {it.words}\n"
        with contextlib.suppress(OSError):
            it.target.parent.mkdir(parents=True, exist_ok=True)
            with it.target.open("a", errors="replace") as file:
                file.write(f"{head}{text}\n")
            files[rank] = it.target
    return files


def _can_answer(process: Process) -> bool:
    """Tell whether it handles the signal (it would die of it otherwise) and is not stopped."""
    if processes.state(process) in ("T", "t", "Z", None):
        return False
    return processes.catches(process, STACKS_SIGNAL)


def _await_answers(answering: Mapping[int, Asked], sizes: Mapping[int, int]) -> None:
    """Wait until every file has grown and then rests: it is written frame by frame."""
    deadline = time.monotonic() + _ANSWER_S
    before: dict[int, int] = {}
    while answering and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = {rank: _size(it.answer) for rank, it in answering.items()}
        if now == before and all(now[rank] > sizes[rank] for rank in now):
            return
        before = now


def _answer(it: Asked, offset: int) -> str:
    try:
        with it.answer.open("rb") as file:
            file.seek(offset)
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return text if it.is_suspect else _main_thread(text)


def _main_thread(text: str) -> str:
    """Return the part of the thread that was interrupted: the main one, which trains."""
    threads = text.split("\n\n")
    current = [it for it in threads if it.startswith("Current thread")] or threads[-1:]
    return "\n".join(current[0].splitlines()[:_SHORT_LINES])


def _seen_from_outside(it: Asked) -> str:
    state = processes.state(it.process)
    reason = {
        "T": "it is stopped (SIGSTOP)",
        "t": "a debugger holds it",
        None: "it is gone",
        "Z": "it is gone",
    }.get(state, "it did not answer")
    words = [f"{reason}: its stacks as seen from outside"]
    if state not in (None, "Z"):
        words += [_py_spy(it.process.pid), _kernel(it.process.pid)]
    return "\n".join(word for word in words if word)


def _py_spy(pid: int) -> str:
    """Return the Python stacks that py-spy reads out of the process's memory, where it is installed."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PY_SPY_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"py-spy: {error}"
    return (done.stdout or done.stderr).decode(errors="replace")[:_MAX_BYTES]


def _kernel(pid: int) -> str:
    """Return what /proc tells of the main thread: state, where it sleeps, its system call, kernel stack."""
    lines = []
    for name in ("status", "wchan", "syscall", "stack"):
        with contextlib.suppress(OSError):
            text = (Path("/proc") / str(pid) / name).read_text(errors="replace").strip()
            if name == "status":
                kept = ("State:", "Threads:", "VmRSS:", "voluntary_ctxt_switches:")
                text = "; ".join(
                    " ".join(line.split()) for line in text.splitlines() if line.startswith(kept)
                )
            lines.append(f"{name}: {text or 'nothing'}")
    return "\n".join(lines)


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0
