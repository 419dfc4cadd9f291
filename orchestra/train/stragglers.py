"""Which ranks compute slower than the others, from their own step times. Pure: it knows no clock and no
host, and does nothing about what it finds.

A window is one time per rank: seconds of the same step, the waits for other ranks left out. A rank is slow in
it that needs `factor` times the median of the others; it counts as a straggler once that was so in `windows`
windows in a row, and no more once it was not so in as many. One hiccup, or noise that hits every rank, is
none: with a noise of 10 % (one standard deviation) a single window is 1.3 times the median once in a thousand
times, five in a row never.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Straggler:
    """A rank, and how many times the others' median it needed (the median over the windows)."""

    rank: int
    ratio: float


@dataclass(frozen=True)
class Judgement:
    """What changed with the newest window: who became slow, and who is it no more."""

    found: tuple[Straggler, ...] = ()
    gone: tuple[int, ...] = ()


def judge(
    history: Sequence[Sequence[float]], known: Collection[int], *, factor: float, windows: int
) -> Judgement:
    """Judge the newest `windows` of a history (oldest first; seconds by rank), given who is known to be slow.

    With fewer windows, or a single rank, nothing changes. All windows have the same ranks.
    """
    if len(history) < windows or len(history[-1]) < 2:
        return Judgement()
    ratios = [ratios_to_others(window) for window in history[-windows:]]
    found, gone = [], []
    for rank, of_rank in enumerate(zip(*ratios, strict=True)):
        if rank not in known and min(of_rank) > factor:
            found.append(Straggler(rank, statistics.median(of_rank)))
        elif rank in known and max(of_rank) <= factor:
            gone.append(rank)
    return Judgement(tuple(found), tuple(gone))


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
