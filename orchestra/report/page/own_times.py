"""Who was slow when: the ranks' own step times as cells of rank × step, the slowest kept. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from orchestra.run.files import Record
from orchestra.run.step_times import RankStepTimes

# Cells and columns that a page draws.
MOST_CELLS, MOST_COLUMNS = 40_000, 480
_FEWEST_COLUMNS = 20
# A rank counts as slow for the verdict from so many timed steps on, and from this median ratio on.
_FEWEST_STEPS, SLOW_RATIO = 5, 1.05


@dataclass(frozen=True)
class SlowOne:
    """A rank whose own time is `ratio` times the other ranks', in the median of the timed steps."""

    rank: int
    host: str
    ratio: float


def heat_map(times: Iterable[RankStepTimes]) -> Record | None:
    """Return the cells of the ranks' own times, ranks by host; None where nothing was timed.

    A step that was trained again counts as it was trained last. A cell is the slowest of its steps.
    """
    hosts, seconds = merged(times)
    if not seconds:
        return None
    ranks = sorted(seconds, key=lambda rank: (_natural(hosts[rank]), rank))
    steps = sorted({step for of_rank in seconds.values() for step in of_rank})
    columns = _columns(steps, len(ranks))
    rows = []
    for rank in ranks:
        of_rank = seconds[rank]
        known = [[of_rank[step] for step in column if step in of_rank] for column in columns]
        rows.append([_rounded(max(cell)) if cell else None for cell in known])
    ratios = ratios_to_others(seconds)
    return {
        "columns": [[column[0], column[-1]] for column in columns],
        "cells": rows,
        "median_s": _rounded(statistics.median(own for each in seconds.values() for own in each.values())),
        "ranks": [
            {
                "rank": rank,
                "host": hosts[rank],
                "steps": len(seconds[rank]),
                "median_s": _rounded(statistics.median(seconds[rank].values())),
                "slowest_s": _rounded(max(seconds[rank].values())),
                "ratio": None if (ratio := ratios.get(rank)) is None else round(ratio, 4),
            }
            for rank in ranks
        ],
    }


def merged(times: Iterable[RankStepTimes]) -> tuple[dict[int, str], dict[int, dict[int, float]]]:
    """Return the ranks' newest hosts, and their seconds by step as last trained. `times`: oldest first."""
    hosts: dict[int, str] = {}
    seconds: dict[int, dict[int, float]] = {}
    for each in times:
        hosts[each.rank] = each.host
        seconds.setdefault(each.rank, {}).update(each.seconds)
    return hosts, seconds


def ratios_to_others(seconds: dict[int, dict[int, float]]) -> dict[int, float]:
    """Return for each rank its own time over the others' median in the same step: the median over steps.

    Ranks without steps that others timed too have none.
    """
    by_step: dict[int, dict[int, float]] = {}
    for rank, of_rank in seconds.items():
        for step, own in of_rank.items():
            by_step.setdefault(step, {})[rank] = own
    ratios: dict[int, list[float]] = {}
    for of_step in by_step.values():
        if len(of_step) < 2:
            continue
        # Of many ranks one changes the median of the others little.
        middle = statistics.median(of_step.values()) if len(of_step) > 8 else None
        for rank, own in of_step.items():
            others = middle
            if others is None:
                others = statistics.median(value for other, value in of_step.items() if other != rank)
            if others > 0:
                ratios.setdefault(rank, []).append(own / others)
    return {rank: statistics.median(values) for rank, values in ratios.items()}


def slow_ones(heat: Record | None) -> list[SlowOne]:
    """Return the ranks that were slower than the others for most of the run, slowest first."""
    found = [
        SlowOne(each["rank"], each["host"], each["ratio"])
        for each in (heat or {}).get("ranks", ())
        if each["ratio"] is not None and each["ratio"] >= SLOW_RATIO and each["steps"] >= _FEWEST_STEPS
    ]
    return sorted(found, key=lambda slow: -slow.ratio)


def _columns(steps: list[int], num_ranks: int) -> list[list[int]]:
    """Return the timed steps in equal parts, few enough to be drawn for so many ranks."""
    wanted = min(len(steps), MOST_COLUMNS, max(_FEWEST_COLUMNS, MOST_CELLS // num_ranks))
    edges = [round(index * len(steps) / wanted) for index in range(wanted + 1)]
    return [steps[begin:end] for begin, end in itertools.pairwise(edges)]


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key by which node2 comes before node10."""
    parts: list[str] = []
    for letter in name:
        if parts and parts[-1].isdecimal() == letter.isdecimal():
            parts[-1] += letter
        else:
            parts.append(letter)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
