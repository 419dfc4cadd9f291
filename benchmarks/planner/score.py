"""How well predictions meet measured rows: relative errors, ranks, memory, fitting, and the layout picked.

Rows of the playbook that differ only in ZeRO 0 or 1 are twins; a row whose twin is more than 1.5 times faster
counts as sick and is not scored for speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_SICK_RATIO = 1.5
# A pick that reaches this share of the best measured throughput counts as right.
_GOOD_PICK = 0.95


@dataclass(frozen=True)
class MeasuredRow:
    """One row: what was measured (None where it did not run) and what is predicted. `place` groups the rows
    among which a layout is picked, `twin` those that differ only in the ZeRO stage.
    """

    place: Hashable
    twin: Hashable
    tokens_per_s: float | None
    memory_gib: float | None
    predicted_tokens_per_s: float
    predicted_memory_gib: float
    predicted_fits: bool


@dataclass(frozen=True)
class Score:
    """Shares of 1; errors are |predicted ÷ measured − 1|."""

    num_rows: int
    median: float
    upper_quartile: float
    upper_tenth: float
    rank_correlation: float
    memory_mean: float
    out_of_memory_recall: float
    out_of_memory_precision: float
    good_picks: float
    num_places: int


def score(rows: Sequence[MeasuredRow], among: Sequence[MeasuredRow] = ()) -> Score:
    """Score rows of which at least two ran. A part of a table is scored with the whole as `among`: a row is
    sick whether or not its twin is in that part.
    """
    ran = [row for row in rows if row.tokens_per_s is not None]
    healthy = without_sick(ran, among)
    measured = [row.tokens_per_s or 0.0 for row in healthy]
    predicted = [row.predicted_tokens_per_s for row in healthy]
    errors = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
    with_memory = [row for row in ran if row.memory_gib]
    memory = [abs(row.predicted_memory_gib / (row.memory_gib or 1) - 1) for row in with_memory]
    recall, precision = _out_of_memory(rows)
    picks = picked_shares(ran)
    return Score(
        num_rows=len(healthy),
        median=quantile(errors, 0.5),
        upper_quartile=quantile(errors, 0.75),
        upper_tenth=quantile(errors, 0.9),
        rank_correlation=rank_correlation(predicted, measured),
        memory_mean=sum(memory) / max(1, len(memory)),
        out_of_memory_recall=recall,
        out_of_memory_precision=precision,
        good_picks=sum(share >= _GOOD_PICK for share in picks.values()) / max(1, len(picks)),
        num_places=len(picks),
    )


def without_sick(ran: Sequence[MeasuredRow], among: Sequence[MeasuredRow] = ()) -> list[MeasuredRow]:
    """Return the rows that ran, without those whose twin, here or `among` others, is 1.5 times faster."""
    best: dict[Hashable, float] = defaultdict(float)
    for row in (*ran, *among):
        best[row.twin] = max(best[row.twin], row.tokens_per_s or 0.0)
    return [row for row in ran if best[row.twin] <= _SICK_RATIO * (row.tokens_per_s or 0.0)]


def _out_of_memory(rows: Sequence[MeasuredRow]) -> tuple[float, float]:
    failed = [row for row in rows if row.tokens_per_s is None]
    refused = [row for row in rows if not row.predicted_fits]
    both = sum(not row.predicted_fits for row in failed)
    return both / max(1, len(failed)), both / max(1, len(refused))


def picked_shares(ran: Sequence[MeasuredRow]) -> dict[Hashable, float]:
    """Return for each place what the layout predicted to be fastest reached of the best measured."""
    places: dict[Hashable, list[MeasuredRow]] = defaultdict(list)
    for row in ran:
        places[row.place].append(row)
    shares = {}
    for place, here in places.items():
        picked = max(here, key=lambda row: row.predicted_tokens_per_s)
        shares[place] = (picked.tokens_per_s or 0.0) / max(row.tokens_per_s or 0.0 for row in here)
    return shares


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, straight between neighbours; NaN of none."""
    if not ordered:
        return float("nan")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank."""
    if len(first) < 2:
        return float("nan")
    x, y = _ranks(first), _ranks(second)
    mean = (len(x) - 1) / 2
    top = sum((a - mean) * (b - mean) for a, b in zip(x, y, strict=True))
    spread = sum((a - mean) ** 2 for a in x) * sum((b - mean) ** 2 for b in y)
    return float(top / spread**0.5) if spread else float("nan")


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            ranks[place] = (start + end) / 2
        start = end + 1
    return ranks
