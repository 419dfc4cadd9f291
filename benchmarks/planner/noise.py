"""How well ranks can be told on runs as noisy as these: what a planner that knew every true rate would get.

Pairs that differ only in ZeRO 0 or 1 say how far runs scatter, and how often and by how much one is hurt. A
row with a twin is free of the latter, since sick rows are not scored; a row without one is not. It predicts
nothing.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence

from score import MeasuredRow, quantile, rank_correlation, without_sick

_TRIALS = 200


def rank_correlation_within_reach(rows: Sequence[MeasuredRow]) -> tuple[float, float, float]:
    """Return the 5th, 50th and 95th percentile of the rank correlation that exact predictions would reach.

    Predicted rates stand for the true ones. Each trial scatters all of them as healthy twins scatter, and
    slows down rows without a twin as often and as much as one of two twins was found to be. NaN without pairs
    that agree.
    """
    ran = [row for row in rows if row.tokens_per_s is not None]
    twins = defaultdict(list)
    for row in ran:
        twins[row.twin].append(math.log(row.tokens_per_s or 1.0))
    healthy = without_sick(ran)
    slower = [max(rates) - min(rates) for rates in twins.values() if len(rates) == 2]
    near = [gap for gap in slower if gap <= math.log(1.5)]
    hurt = [gap for gap in slower if gap > math.log(1.5)] or [0.0]
    if not near:
        return math.nan, math.nan, math.nan
    # The gap of two equal scatters has twice their variance.
    scatter = math.sqrt(statistics.mean(gap**2 for gap in near) / 2)
    share = len(hurt) / (2 * len(slower))
    true = [math.log(row.predicted_tokens_per_s) for row in healthy]
    alone = [len(twins[row.twin]) == 1 for row in healthy]
    chance = random.Random(0)

    def trial() -> float:
        found = [
            rate + chance.gauss(0, scatter) - (is_alone and chance.random() < share) * chance.choice(hurt)
            for rate, is_alone in zip(true, alone, strict=True)
        ]
        return rank_correlation(true, found)

    reached = sorted(trial() for _ in range(_TRIALS))
    return quantile(reached, 0.05), quantile(reached, 0.5), quantile(reached, 0.95)
