"""Which command may submit which arrays of a sweep: claims in <sweep>/control/, each taken once.

A claim names the process that took it. That of a process that has ended counts for nothing.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestra.errors import ConfigError
from orchestra.run.paths import Sweep, SweepDir, read_sweep
from orchestra.submit.claims import is_held, read_claim_file, write_claim


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
            f"run.dir={parent}: cannot make a sweep there: {error.strerror}; choose another run.dir"
        ) from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def take(sweep: SweepDir, record: Sweep) -> int:
    """Claim the sweep's next array for this process and return its number.

    `record` is what the decision to submit more rests on. Raises ConfigError when another command is
    submitting, or has submitted since the record was read.
    """
    sweep.control.mkdir(exist_ok=True)
    refuse_busy(sweep, record)
    number = next(numbers(sweep, record, refuse=True))
    if read_sweep(sweep) != record:
        release(sweep, [number])
        raise ConfigError(
            f"{sweep.name} was changed by another command meanwhile; nothing was submitted by this one: "
            f"look at it (`orchestra status {sweep.name}`) and try again"
        )
    return number


def numbers(sweep: SweepDir, record: Sweep, *, refuse: bool = False) -> Iterator[int]:
    """Yield numbers for further arrays of a sweep, each claimed for this process.

    `refuse` raises ConfigError at a number that a living process claims; else such are passed over.
    """
    for number in itertools.count(max((array.number for array in record.arrays), default=-1) + 1):
        if not write_claim(sweep.claim(number)):
            if refuse:
                _refuse_held(sweep.claim(number), sweep.name)
            continue
        yield number


def refuse_busy(sweep: SweepDir, record: Sweep) -> None:
    """Raise ConfigError when another command is about to submit one of the recorded arrays."""
    for array in record.arrays:
        if array.id is None:
            _refuse_held(sweep.claim(array.number), sweep.name)


def _refuse_held(path: Path, what: str) -> None:
    claim = read_claim_file(path)
    is_own = (claim.get("host"), claim.get("pid")) == (socket.gethostname(), os.getpid())
    if not is_own and is_held(path, time.time()):
        raise ConfigError(
            f"{what} is being submitted already: process {claim.get('pid', '?')} on {claim.get('host', '?')} "
            f"does it; let it end, then look with `orchestra status`"
        )


def release(sweep: SweepDir, numbers: Iterable[int]) -> None:
    """Give claims back, of arrays that were not submitted."""
    for number in numbers:
        sweep.claim(number).unlink(missing_ok=True)
