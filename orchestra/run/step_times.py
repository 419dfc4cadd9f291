"""The ranks' own times in the steps that were timed, in <run>/times/<writer>.jsonl: written and read.

Each rank has a file of its own in each attempt. Its step clock (`orchestra.train.watch.stragglers`) times one
step of every so many (recovery.straggler_every_steps), and this writes several of them in one line, the more
the longer the attempt lasts: a rank that is killed leaves all but the newest ones. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from orchestra.run.events import is_number, is_whole, rank_writer
from orchestra.run.files import JsonLinesWriter, read_json_lines
from orchestra.run.paths import RunDir

# How long times wait to be written: twice as long each time, up to a minute. Few writes on a shared file
# system, and short attempts leave something too.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0
# A microsecond is less than the clock's own cost.
_DECIMALS = 6
_NAME = re.compile(r"^attempt-(\d{3,9})\.rank-(\d{5,9})\.jsonl$")


class StepTimesFile:
    """Appends one rank's own times. *Any rank.* A file that cannot be written ends no training."""

    def __init__(self, run: RunDir, attempt: int, rank: int) -> None:
        self._path = run.times_file(rank_writer(attempt, rank))
        self._host = socket.gethostname()
        self._file: JsonLinesWriter | None = None
        self._steps: list[int] = []
        self._seconds: list[float] = []
        self._wait_s = _FIRST_WAIT_S
        self._due = time.monotonic() + _FIRST_WAIT_S

    def add(self, step: int, own_time_s: float) -> None:
        """Take the seconds of `step` in which this rank waited for no other; write what has waited enough."""
        self._steps.append(step)
        self._seconds.append(round(own_time_s, _DECIMALS))
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Write what is left."""
        if not self._steps:
            return
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = JsonLinesWriter(self._path)
            self._file.write({"host": self._host, "steps": self._steps, "own_s": self._seconds})
        self._steps, self._seconds = [], []
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        self._due = time.monotonic() + self._wait_s


@dataclass(frozen=True)
class RankStepTimes:
    """The own times (seconds) of one rank in one attempt, by step in the order in which they were timed."""

    attempt: int
    rank: int
    host: str
    seconds: dict[int, float]


def read_step_times(run: RunDir) -> Iterator[RankStepTimes]:
    """Yield what each file holds, by attempt and rank; what is damaged in it is passed over."""
    try:
        with os.scandir(run.times) as entries:
            names = [match for entry in entries if (match := _NAME.match(entry.name))]
    except OSError:
        return
    for match in sorted(names, key=lambda each: (int(each[1]), int(each[2]))):
        host, seconds = "?", {}
        for record in read_json_lines(run.times / match[0]):
            steps, own_s = record.get("steps"), record.get("own_s")
            if isinstance(steps, list) and isinstance(own_s, list):
                pairs = zip(steps, own_s, strict=False)
                seconds.update({step: own for step, own in pairs if is_whole(step) and is_number(own)})
            host = str(record.get("host", host))
        if seconds:
            yield RankStepTimes(int(match[1]), int(match[2]), host, seconds)
