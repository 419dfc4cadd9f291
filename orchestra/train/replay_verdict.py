"""Who computed wrongly, from what several ranks made of the same micro-batch. Pure: it computes no step.

Each rank's micro-batch is computed by itself and by the rank that comes next to it in data parallelism, which
holds the same part of the model. Where the two differ a third rank, the one after that, computes it too: of
three the one that differs from the others is broken. With two ranks there is no third one, and with three
different results no majority: then nobody is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.topology import Layout

# Of the ranks of data parallelism: who computes a rank's micro-batch again, and who settles it.
SECOND, THIRD = 1, 2
_DATA_PARALLEL = ("replicate", "shard")


@dataclass(frozen=True)
class Outcome:
    """What a micro-batch came to: the digest of its loss and gradients, and for comparison with a tolerance
    the loss and the gradients' L2 norm.
    """

    digest: str
    loss: float
    norm: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Outcome:
        """Return the outcome that a word of JSON holds."""
        return cls(str(record["digest"]), float(record["loss"]), float(record["norm"]))


def agree(one: Outcome, other: Outcome, tolerance: float | None) -> bool:
    """Whether two ranks made the same of a micro-batch: bit for bit, or within a relative tolerance."""
    if tolerance is None:
        return one.digest == other.digest
    return _is_near(one.loss, other.loss, tolerance) and _is_near(one.norm, other.norm, tolerance)


def _is_near(one: float, other: float, tolerance: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        # Equal infinities say as little as two NaNs.
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


@dataclass(frozen=True)
class Difference:
    """A micro-batch of `rank` that came out differently when rank `by` computed it. `broken` is the one that
    a third rank speaks against; None: nobody could tell.
    """

    rank: int
    by: int
    broken: int | None = None


def partner(layout: Layout, rank: int, shift: int) -> int | None:
    """Return the rank so many places further in data parallelism; None where that is no third one."""
    members = layout.neighbours(rank, _DATA_PARALLEL)
    if shift >= len(members):
        return None
    return members[(members.index(rank) + shift) % len(members)]


def differences(
    own: Sequence[Outcome], second: Sequence[Outcome], layout: Layout, tolerance: float | None
) -> list[Difference]:
    """Return what the second computations brought to light.

    `own` by rank; `second` by the rank that computed, which is the one next to whose micro-batch it was.
    """
    found = []
    for rank, outcome in enumerate(own):
        by = partner(layout, rank, SECOND)
        if by is not None and not agree(outcome, second[by], tolerance):
            found.append(Difference(rank, by))
    return found


def settled(
    found: Sequence[Difference],
    own: Sequence[Outcome],
    second: Sequence[Outcome],
    third: Sequence[Outcome],
    layout: Layout,
    tolerance: float | None,
) -> list[Difference]:
    """Return the differences with what the third computations say, by the rank that computed."""
    return [Difference(it.rank, it.by, _broken(it, own, second, third, layout, tolerance)) for it in found]


def _broken(
    it: Difference,
    own: Sequence[Outcome],
    second: Sequence[Outcome],
    third: Sequence[Outcome],
    layout: Layout,
    tolerance: float | None,
) -> int | None:
    judge = partner(layout, it.rank, THIRD)
    if judge is None:
        return None
    is_like_own = agree(third[judge], own[it.rank], tolerance)
    is_like_second = agree(third[judge], second[it.by], tolerance)
    if is_like_own == is_like_second:
        return None
    return it.by if is_like_own else it.rank
