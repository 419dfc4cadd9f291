"""The gradient noise scale of a run from its rows, and what it says of the batch. Pure.

McCandlish et al. (arXiv:1812.06162): with a batch B and the noise scale N a training takes 1 + N/B times the
steps of one without noise, and 1 + B/N times the tokens of one with tiny batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestra.run.events import is_number
from orchestra.run.files import Record
from orchestra.run.metrics_file import NOISE_GRADIENT, NOISE_VARIANCE

# Rows that are averaged: the noise grows while a run trains, and one row alone says little.
_RECENT_ROWS = 100


def noise_scale(rows: Sequence[Record]) -> float | None:
    """Return the noise scale in sequences over the last rows that measured it; None where that says nothing.

    The means of variance and squared gradient are divided, not the rows' quotients.
    """
    measured = [
        row for row in rows if is_number(row.get(NOISE_GRADIENT)) and is_number(row.get(NOISE_VARIANCE))
    ]
    recent = measured[-_RECENT_ROWS:]
    gradient, variance = (math.fsum(row[key] for row in recent) for key in (NOISE_GRADIENT, NOISE_VARIANCE))
    return variance / gradient if gradient > 0 and variance > 0 else None


def words(rows: Sequence[Record], seq_len: int, batch_tokens: int) -> str | None:
    """Return what a batch of so many tokens costs, and up to which one more would pay."""
    found = noise_scale(rows)
    if found is None:
        return None
    noise = found * seq_len
    ratio = batch_tokens / noise
    said = f"gradient noise scale {noise:,.0f} tokens, batch {batch_tokens:,}"
    fewer = 1 - (1 + 0.5 / ratio) / (1 + 1 / ratio)
    more = (1 + 2 * ratio) / (1 + ratio) - 1
    doubled = f"twice the batch would take {fewer:.0%} fewer steps and {more:.0%} more tokens"
    verdict = "a larger batch still pays" if ratio < 1 else "a larger batch pays little"
    return f"{said}: {doubled}; {verdict}".replace("%", " %")
