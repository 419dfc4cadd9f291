"""What a silent process is doing: the stacks of its threads, or what the kernel tells.

A process that prepared itself for it appends its Python stacks to a file when it gets a signal: in the
handler, so that no lock holds it back. One that cannot answer is looked at from outside: by py-spy where that
is installed, and in /proc. Called before the process is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launchers import processes
from launchers.processes import Process

# How long processes have to begin to answer, and to have done so: frame by frame, between which a starved one
# may stand still for some tenths of a second. Files that rest for so long are whole.
_ANSWER_S, _LONGEST_S = 2.0, 6.0
_REST_S = 0.5
_POLL_S = 0.05
_PY_SPY_S = 10.0
# Of processes that only wait, the main thread's stack is kept, up to so many lines.
_SHORT_LINES = 60
# Text per process: a recursion of a hundred thousand frames would fill a disk, 2,000 nodes at once.
_MAX_BYTES = 256 << 10


@dataclass(frozen=True)
class StackRequest:
    """One process that is to show its stacks. `title` is the line that they are kept under."""

    process: Process
    # The file that the process itself appends them to, and the one that they are kept in.
    answer: Path
    target: Path
    # Whether all threads are wanted, or the main one is enough.
    is_suspect: bool
    title: str


def write_stacks(
    requests: Mapping[int, StackRequest], signal_number: signal.Signals | int
) -> dict[int, Path]:
    """Append the stacks of each process to its target; return the targets by the requests' keys.

    Waits for two seconds at most where one does not answer, and longer only where stacks are still being
    written or py-spy is at work. A file that cannot be written is left out.
    """
    sizes = {key: _size(request.answer) for key, request in requests.items()}
    answering = {
        key: request for key, request in requests.items() if _can_answer(request.process, signal_number)
    }
    processes.send([request.process for request in answering.values()], signal_number)
    _await_answers(answering, sizes)
    files = {}
    for key, request in requests.items():
        text = _answer(request, sizes[key]) if key in answering else ""
        if not text:
            text = _seen_from_outside(request.process)
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {request.title}\n"
        with contextlib.suppress(OSError):
            request.target.parent.mkdir(parents=True, exist_ok=True)
            with request.target.open("a", errors="replace") as file:
                file.write(f"{head}{text}\n")
            files[key] = request.target
    return files


def _can_answer(process: Process, signal_number: signal.Signals | int) -> bool:
    """Tell whether it handles the signal (it would die of it otherwise) and is not stopped."""
    is_running = processes.state(process) not in ("T", "t", "Z", None)
    return is_running and processes.catches(process, signal_number)


def _await_answers(answering: Mapping[int, StackRequest], sizes: Mapping[int, int]) -> None:
    """Wait until every file has grown and then rests: it is written frame by frame."""
    begun = changed = time.monotonic()
    before: dict[int, int] = {}
    while answering:
        time.sleep(_POLL_S)
        now, found = time.monotonic(), {key: _size(request.answer) for key, request in answering.items()}
        if found != before:
            before, changed = found, now
        all_answer = all(found[key] > sizes[key] for key in found)
        if all_answer and now - changed >= _REST_S:
            return
        if now - begun > (_LONGEST_S if all_answer else _ANSWER_S):
            return


def _answer(request: StackRequest, offset: int) -> str:
    try:
        with request.answer.open("rb") as file:
            file.seek(offset)
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return text if request.is_suspect else _main_thread(text)


def _main_thread(text: str) -> str:
    """Return the part of the thread that was interrupted: the main one."""
    threads = text.split("\n\n")
    current = [thread for thread in threads if thread.startswith("Current thread")] or threads[-1:]
    return "\n".join(current[0].splitlines()[:_SHORT_LINES])


def _seen_from_outside(process: Process) -> str:
    state = processes.state(process)
    if state in (None, "Z"):
        return "it is gone: its stacks as seen from outside"
    reason = {"T": "it is stopped (SIGSTOP)", "t": "a debugger holds it"}.get(state, "it did not answer")
    parts = [f"{reason}: its stacks as seen from outside", _py_spy(process.pid), _kernel(process.pid)]
    return "\n".join(part for part in parts if part)


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
