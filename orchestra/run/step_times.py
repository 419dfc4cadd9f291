"""The ranks' own times in the steps that were timed, in <run>/times/<writer>.jsonl: written, read, compared.

Each rank has a file of its own in each attempt. Its step clock (`orchestra.train.watch.stragglers`) times one
step of every so many (recovery.straggler_every_steps), and this writes several of them in one line, the more
the longer the attempt lasts: a rank that is killed leaves all but the newest ones. Standard library only.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestra.run.events import is_number, is_whole, rank_writer
from orchestra.run.files import JsonLinesWriter, Record, read_json_lines
from orchestra.run.paths import RunDir

# How long times wait to be written: twice as long each time, up to a minute. Few writes on a shared file
# system, and short attempts leave something too.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0
# A microsecond is less than the clock's own cost.
_DECIMALS = 6
# About what one time takes in a file; and the multiples of this number are spread evenly (D. Knuth, The Art
# of Computer Programming 3, 6.4: near the golden ratio).
_BYTES_OF_ONE = 16
_SCATTER, _SCATTERED = 2654435769, 1 << 32
_NAME = re.compile(r"^attempt-(\d{3,9})\.rank-(\d{5,9})\.jsonl$")


# Lines that wait for a file system that does not answer; times beyond them wait for a place.
_MOST_LINES = 4
# How long the end of an attempt waits for its last line.
_CLOSING_S = 1.0


class StepTimesFile:
    """Appends one rank's own times, in a thread: no step waits for a file system. *Any rank.* A file that
    cannot be written ends no training.
    """

    def __init__(self, run: RunDir, attempt: int, rank: int) -> None:
        self._path = run.times_file(rank_writer(attempt, rank))
        self._host = socket.gethostname()
        self._steps: list[int] = []
        self._seconds: list[float] = []
        self._wait_s = _FIRST_WAIT_S
        self._due = time.monotonic() + _FIRST_WAIT_S
        self._lines: queue.Queue[Record | None] = queue.Queue(_MOST_LINES)
        self._thread = threading.Thread(target=self._follow, name="step times", daemon=True)
        self._thread.start()

    def add(self, step: int, own_time_s: float) -> None:
        """Take the seconds of `step` in which this rank waited for no other."""
        self._steps.append(step)
        self._seconds.append(round(own_time_s, _DECIMALS))
        if time.monotonic() >= self._due:
            self._hand_on()

    def close(self) -> None:
        """Write what is left, and wait for that a second at most."""
        if self._steps:
            self._hand_on()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_CLOSING_S)

    def _hand_on(self) -> None:
        line = {"host": self._host, "steps": self._steps, "own_s": self._seconds}
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)
            self._steps, self._seconds = [], []
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        self._due = time.monotonic() + self._wait_s

    def _follow(self) -> None:
        file: JsonLinesWriter | None = None
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError):
                file = file or JsonLinesWriter(self._path)
                file.write(line)


@dataclass(frozen=True)
class RankStepTimes:
    """The own times (seconds) of one rank in one attempt, by step in the order in which they were timed."""

    attempt: int
    rank: int
    host: str
    seconds: dict[int, float]


def read_step_times(run: RunDir, most: int = 1_000_000) -> Iterator[RankStepTimes]:
    """Yield what each file holds, by attempt and rank; what is damaged in it is passed over. Of many more
    times than `most` some steps are taken, the same ones of all ranks.
    """
    try:
        with os.scandir(run.times) as entries:
            found = [(match, entry.stat().st_size) for entry in entries if (match := _NAME.match(entry.name))]
    except OSError:
        return
    names = [match for match, _ in found]
    share = most * _BYTES_OF_ONE / max(1, sum(size for _, size in found))
    for match in sorted(names, key=lambda each: (int(each[1]), int(each[2]))):
        host, seconds = "?", {}
        for record in read_json_lines(run.times / match[0]):
            steps, own_s = record.get("steps"), record.get("own_s")
            if isinstance(steps, list) and isinstance(own_s, list):
                pairs = zip(steps, own_s, strict=False)
                known = ((step, own) for step, own in pairs if is_whole(step) and is_number(own))
                seconds.update({step: own for step, own in known if _is_taken(step, share)})
            host = str(record.get("host", host))
        if seconds:
            yield RankStepTimes(int(match[1]), int(match[2]), host, seconds)


def _is_taken(step: int, share: float) -> bool:
    """Whether a step is among that share of all, as if drawn at random."""
    return share >= 1.0 or step * _SCATTER % _SCATTERED < share * _SCATTERED


def ratios_in_stages(window: Sequence[float], num_stages: int) -> list[float]:
    """Return the ratios of ranks that are numbered by stages."""
    size = len(window) // num_stages
    if size == 1 and num_stages > 1:
        return [1.0] * len(window)
    stages = [window[begin : begin + size] for begin in range(0, len(window), size)]
    return [ratio for stage in stages for ratio in ratios_to_others(stage)]


def ratios_to_others(window: Sequence[float]) -> list[float]:
    """Return each rank's time over the median of the others'; 1 where the others took no time."""
    ordered = sorted(window)
    medians = [_median_without(ordered, value) for value in window]
    return [value / median if median > 0 else 1.0 for value, median in zip(window, medians, strict=True)]


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of all but one that has this value, without copying them for each rank."""
    place = bisect.bisect_left(ordered, value)
    num_others = len(ordered) - 1

    def other(index: int) -> float:
        return ordered[index if index < place else index + 1]

    middle = num_others // 2
    return other(middle) if num_others % 2 else (other(middle - 1) + other(middle)) / 2
