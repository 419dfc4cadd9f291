"""Which process leads which attempt of a run, and which submits its next job: claims in <run>/control/.

Each is taken once, by creating a file that names the process. Called by the node agents and the commands that
resume and cancel.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from launchers import processes
from orchestra.recovery.history import last_attempt
from orchestra.run import stop_requests
from orchestra.run.events import is_number, is_whole, read_events
from orchestra.run.files import read_json
from orchestra.run.paths import RunDir
from orchestra.run.record import read_record
from orchestra.run.stop_requests import claimed_attempt

# A claim of another host, or one that cannot be read yet, counts for so long.
_CLAIM_COUNTS_S = 600.0


def read_claim(run: RunDir, attempt: int) -> dict[str, Any]:
    """Return who claimed an attempt: host, pid, pid_started, time; empty where that cannot be read."""
    return read_claim_file(run.claim(attempt))


def read_claim_file(file: Path) -> dict[str, Any]:
    """Return what a claim says; empty where there is none or it cannot be read."""
    return read_json(file) or {}


def take(run: RunDir, attempt: int, crew: str | None = None) -> bool:
    """Claim an attempt for this process, and for its crew where it has one; return False when somebody has it
    already. Raises OSError where the run directory cannot be written.
    """
    return write_claim(run.claim(attempt), crew)


def write_claim(file: Path, crew: str | None = None) -> bool:
    """Write a claim that names this process; return False when somebody else's stands there already.

    Raises OSError where it cannot be written, and leaves nothing then.
    """
    process = processes.find(os.getpid())
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": None if process is None else process.started,
        "time": time.time(),
        **({} if crew is None else {"crew": crew}),
    }
    # Exclusive creation works on every file system that clusters share, locks do not.
    try:
        draft = file.open("x")
    except FileExistsError:
        return False
    try:
        with draft:
            draft.write(json.dumps(content) + "\n")
    except OSError:
        # On a full disk an empty claim would stand for ten minutes.
        file.unlink(missing_ok=True)
        raise
    return True


def is_held(file: Path, now: float) -> bool:
    """Tell whether the process that wrote a claim may still do what it claimed.

    On another host, or where the claim cannot be read yet, it may for ten minutes.
    """
    claim = read_claim_file(file)
    pid, started = claim.get("pid"), claim.get("pid_started")
    if claim.get("host") == socket.gethostname() and is_whole(pid):
        process = processes.find(pid)
        return process is not None and (started is None or process.started == started)
    try:
        made = claim["time"] if is_number(claim.get("time")) else file.stat().st_mtime
    except OSError:
        return False
    return now - float(made) < _CLAIM_COUNTS_S


def take_turn(run: RunDir, number: int, now: float) -> Path | None:
    """Claim to submit the run's job of this number, and return the claim; None when somebody else does it.

    Claims of processes that died over it are passed over. Raises OSError where nothing can be written.
    """
    run.control.mkdir(exist_ok=True)
    for time_ in itertools.count():
        file = run.turn(number, time_)
        if write_claim(file):
            return file
        if is_held(file, now):
            return None
    raise AssertionError("unreachable")


def next_attempt_number(run: RunDir, last: int | None) -> int:
    """Return the attempt that a resume begins: after `last`, the newest that was started, and after all that
    were claimed or asked to stop. Raises OSError.
    """
    known = (last, claimed_attempt(run), stop_requests.requested_attempt(run))
    return max((number for number in known if number is not None), default=-1) + 1


def rival_claim(run: RunDir, attempt: int, crew: str) -> int | None:
    """Return an attempt after `attempt` that somebody outside `crew` has claimed and may train; None without.

    What a dead leader of the same crew claimed and never began counts for nothing.
    """
    newest = claimed_attempt(run)
    for number in range(attempt + 1, (attempt if newest is None else newest) + 1):
        claim = read_claim(run, number)
        if claim.get("crew") != crew and (claim or run.claim(number).exists()):
            began = any(event["attempt"] == number for event in read_events(run, ("attempt_started",)))
            if began or is_held(run.claim(number), time.time()):
                return number
    return None


def take_next(run: RunDir, crew: str | None = None) -> int:
    """Claim the attempt after all that were started or claimed, and return its number.

    It is none before the one that the newest job was submitted for: that one comes after all stop requests
    of the time, which are meant for attempts that will not begin any more.
    """
    run.control.mkdir(exist_ok=True)
    number = upcoming_attempt(run)
    while not take(run, number, crew):
        number += 1
    return number


def upcoming_attempt(run: RunDir) -> int:
    """Return the attempt that `take_next` would claim. Raises OSError."""
    known = (last_attempt(read_events(run)), claimed_attempt(run), _planned_attempt(run) - 1)
    return max((number for number in known if number is not None), default=-1) + 1


def _planned_attempt(run: RunDir) -> int:
    """Return the attempt that the newest job was submitted for; 0 without a job."""
    jobs = read_record(run).get("jobs")
    newest = jobs[-1] if isinstance(jobs, list) and jobs and isinstance(jobs[-1], dict) else {}
    return int(newest["attempt"]) if is_whole(newest.get("attempt")) else 0
