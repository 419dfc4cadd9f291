"""Who was slow when: the ranks' own step times as cells of rank × step, the slowest kept. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestra.run.files import Record
from orchestra.run.step_times import RankStepTimes, ratios_to_others

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


def heat_map(times: Iterable[RankStepTimes], num_stages: int = 1) -> Record | None:
    """Return the cells of the ranks' own times, ranks by host; None where nothing was timed.

    A step that was trained again counts as it was trained last. A cell is the slowest of its steps. What is
    said of a rank is of the host that it is on: one that took another's place answers for no step before.
    """
    hosts, seconds, on_host = merged(times)
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
    ratios = ratios_of_ranks(on_host, num_stages)
    return {
        "columns": [[column[0], column[-1]] for column in columns],
        "cells": rows,
        "median_s": _rounded(statistics.median(own for each in seconds.values() for own in each.values())),
        "ranks": [
            {
                "rank": rank,
                "host": hosts[rank],
                "steps": len(on_host[rank]),
                "median_s": _rounded(statistics.median(on_host[rank].values())),
                "slowest_s": _rounded(max(on_host[rank].values())),
                "ratio": None if (ratio := ratios.get(rank)) is None else round(ratio, 4),
            }
            for rank in ranks
        ],
    }


def merged(
    times: Iterable[RankStepTimes],
) -> tuple[dict[int, str], dict[int, dict[int, float]], dict[int, dict[int, float]]]:
    """Return the ranks' newest hosts, their seconds by step as last trained, and those of them that were
    timed on that host. `times`: oldest first.
    """
    hosts: dict[int, str] = {}
    seconds: dict[int, dict[int, float]] = {}
    on_host: dict[int, dict[int, float]] = {}
    for each in times:
        if hosts.get(each.rank) != each.host:
            on_host[each.rank] = {}
        hosts[each.rank] = each.host
        seconds.setdefault(each.rank, {}).update(each.seconds)
        on_host[each.rank].update(each.seconds)
    return hosts, seconds, on_host


def ratios_of_ranks(seconds: Mapping[int, Mapping[int, float]], num_stages: int) -> dict[int, float]:
    """Return for each rank its own time over the median of the others of its pipeline stage in the same
    step: the median over steps. Ranks without steps that others timed too have none.
    """
    size = max(1, (max(seconds) + 1) // num_stages)
    together: dict[tuple[int, int], dict[int, float]] = {}
    for rank, of_rank in seconds.items():
        for step, own in of_rank.items():
            together.setdefault((step, rank // size), {})[rank] = own
    ratios: dict[int, list[float]] = {}
    for owns in together.values():
        if len(owns) > 1:
            for rank, ratio in zip(owns, ratios_to_others(list(owns.values())), strict=True):
                ratios.setdefault(rank, []).append(ratio)
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
