"""Who leads which attempt of a run: claims in <run>/control/, each taken once. It starts nothing."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from launchers import processes
from orchestra.events import read_events
from orchestra.report.verdict import last_attempt
from orchestra.rundir import RunDir


def claimed_attempt(run: RunDir) -> int | None:
    """Return the highest attempt that somebody claimed."""
    numbers = [file.stem.removeprefix("attempt-") for file in run.control.glob("attempt-*.claim")]
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def read_claim(run: RunDir, attempt: int) -> dict[str, Any]:
    """Return who claimed an attempt: host, pid, pid_started, time; empty where that cannot be read."""
    try:
        claim = json.loads(run.claim(attempt).read_text())
    except (OSError, ValueError):
        return {}
    return claim if isinstance(claim, dict) else {}


def take(run: RunDir, attempt: int) -> bool:
    """Claim an attempt for this process; return False when somebody has it already.

    Raises OSError where the run directory cannot be written.
    """
    process = processes.find(os.getpid())
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": None if process is None else process.started,
        "time": time.time(),
    }
    # Exclusive creation works on every file system that clusters share, locks do not.
    try:
        with run.claim(attempt).open("x") as file:
            file.write(json.dumps(content) + "\n")
    except FileExistsError:
        return False
    return True


def take_next(run: RunDir) -> int:
    """Claim the attempt after all that were started or claimed, and return its number."""
    run.control.mkdir(exist_ok=True)
    known = (last_attempt(read_events(run)), claimed_attempt(run))
    number = max((number for number in known if number is not None), default=-1) + 1
    while not take(run, number):
        number += 1
    return number


def write_whole(path: Path, text: str) -> None:
    """Write a file as one act, its bytes on disk before its name."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
