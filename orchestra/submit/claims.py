"""Which process leads which attempt of a run, or submits its next job, or the next array of a sweep.

Each is claimed once, by creating a file in control/ that names the process; that of a process that has ended
counts for nothing. Called by the node agents and the commands that submit, resume and cancel.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launchers import processes
from orchestra.errors import ConfigError
from orchestra.recovery.history import last_attempt
from orchestra.run.control import stop_requests
from orchestra.run.control.stop_requests import claimed_attempt
from orchestra.run.events import is_number, is_whole, read_events
from orchestra.run.files import other_place, read_json
from orchestra.run.paths import RunDir, Sweep, SweepDir, read_sweep
from orchestra.run.record import newest_job, read_record

# A claim of another host, or one that cannot be read yet, counts for so long.
_CLAIM_COUNTS_S = 600.0


def read_claim(file: Path) -> dict[str, Any]:
    """Return who wrote a claim: host, pid, pid_started, time; empty where that cannot be read."""
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
    claim = read_claim(file)
    pid, started = claim.get("pid"), claim.get("pid_started")
    if claim.get("host") == socket.gethostname() and is_whole(pid):
        process = processes.find(pid)
        return process is not None and (started is None or process.started == started)
    try:
        made = claim["time"] if is_number(claim.get("time")) else file.stat().st_mtime
        if made - now >= _CLAIM_COUNTS_S:
            # Of a host whose clock ran ahead: the claim would count until that time has come.
            made = file.stat().st_mtime
    except OSError:
        return False
    return abs(now - float(made)) < _CLAIM_COUNTS_S


def take_turn(run: RunDir, number: int, now: float) -> Path | None:
    """Claim to submit the run's job of this number, and return the claim; None when somebody else does it.

    Claims of processes that died over it are passed over. Raises OSError where nothing can be written.
    """
    run.control.mkdir(exist_ok=True)
    for file in (run.turn(number, time_) for time_ in itertools.count()):
        if write_claim(file):
            return file
        if is_held(file, now):
            return None
    raise AssertionError("unreachable")


def next_attempt_number(run: RunDir, last: int | None) -> int:
    """Return the attempt that a resume begins: after `last`, the newest that was started, and after all that
    were claimed or asked to stop. Raises OSError.
    """
    return _after(last, claimed_attempt(run), stop_requests.requested_attempt(run))


def _after(*attempts: int | None) -> int:
    """Return the attempt after all that are known."""
    return max((number for number in attempts if number is not None), default=-1) + 1


def rival_claim(run: RunDir, attempt: int, crew: str) -> int | None:
    """Return an attempt after `attempt` that somebody outside `crew` has claimed and may train; None without.

    What a dead leader of the same crew claimed and never began counts for nothing.
    """
    for number in range(attempt + 1, _after(attempt, claimed_attempt(run))):
        claim = read_claim(run.claim(number))
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
    # The one that the newest job was submitted for.
    planned = (newest_job(read_record(run)) or {}).get("attempt")
    before = planned - 1 if is_whole(planned) else None
    last = last_attempt(read_events(run, ("attempt_started",)))
    return _after(last, claimed_attempt(run), before)


@contextmanager
def exclusively(parent: Path, signature: str) -> Iterator[None]:
    """Let no other command submit a sweep of the same members into the same folder meanwhile.

    Raises ConfigError when one does, or when the folder cannot be written.
    """
    lock = parent / f".sweep-{signature}.claim"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if not write_claim(lock):
            _refuse_held(lock, "the same sweep")
            # Of a process that is no more.
            lock.unlink(missing_ok=True)
            if not write_claim(lock):
                raise ConfigError("the same sweep is being submitted already by another command")
    except OSError as error:
        raise ConfigError(
            f"run.dir={parent}: cannot make a sweep there: {error.strerror}; {other_place(error)}"
        ) from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def take_array(sweep: SweepDir, record: Sweep) -> int:
    """Claim the sweep's next array for this process and return its number.

    `record` is what the decision to submit more rests on. Raises ConfigError when another command is
    submitting, or has submitted since the record was read.
    """
    sweep.control.mkdir(exist_ok=True)
    refuse_busy_sweep(sweep, record)
    number = next(array_numbers(sweep, record, refuse=True))
    if read_sweep(sweep) != record:
        release_arrays(sweep, [number])
        raise ConfigError(
            f"{sweep.name} was changed by another command meanwhile; nothing was submitted by this one: "
            f"look at it (`orchestra status {sweep.name}`) and try again"
        )
    return number


def array_numbers(sweep: SweepDir, record: Sweep, *, refuse: bool = False) -> Iterator[int]:
    """Yield numbers for further arrays of a sweep, each claimed for this process.

    `refuse` raises ConfigError at a number that a living process claims; else such are passed over.
    """
    for number in itertools.count(max((array.number for array in record.arrays), default=-1) + 1):
        if not write_claim(sweep.claim(number)):
            if refuse:
                _refuse_held(sweep.claim(number), sweep.name)
            continue
        yield number


def refuse_busy_sweep(sweep: SweepDir, record: Sweep) -> None:
    """Raise ConfigError when another command is about to submit one of the recorded arrays."""
    for array in record.arrays:
        if array.id is None:
            _refuse_held(sweep.claim(array.number), sweep.name)


def _refuse_held(path: Path, what: str) -> None:
    claim = read_claim(path)
    is_own = (claim.get("host"), claim.get("pid")) == (socket.gethostname(), os.getpid())
    if not is_own and is_held(path, time.time()):
        raise ConfigError(
            f"{what} is being submitted already: process {claim.get('pid', '?')} on {claim.get('host', '?')} "
            f"does it; let it end, then look with `orchestra status`"
        )


def release_arrays(sweep: SweepDir, numbers: Iterable[int]) -> None:
    """Give claims back, of arrays that were not submitted."""
    for number in numbers:
        sweep.claim(number).unlink(missing_ok=True)
