"""Which checkpoints may go: pure policies over what is there, and nothing about how they are removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """A committed checkpoint. `score` is what `keep_best` compares, lower is better; None: it has none.
    `is_intact` is false where it is known to be damaged.
    """

    step: int
    score: float | None = None
    is_intact: bool = True


@dataclass(frozen=True)
class Policy:
    """Keep the newest `keep_last`, every one whose step is a multiple of `keep_every_steps`, and the
    `keep_best` with the lowest scores.
    """

    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0


def to_remove(checkpoints: Sequence[Kept], policy: Policy) -> list[int]:
    """Return the steps that no rule keeps, ascending. The newest intact one is always kept.

    Damaged ones count for no rule, so that they cannot push an intact one out; they go once `keep_last`
    intact ones are newer.
    """
    intact = sorted((each for each in checkpoints if each.is_intact), key=lambda each: each.step)
    keep = {each.step for each in intact[-max(1, policy.keep_last) :]}
    if policy.keep_every_steps:
        keep |= {each.step for each in intact if each.step % policy.keep_every_steps == 0}
    scored = sorted((each.score, each.step) for each in intact if each.score is not None)
    keep |= {step for _, step in scored[: policy.keep_best]}
    oldest_kept = min(keep, default=None)
    gone = [each.step for each in intact if each.step not in keep]
    gone += [
        each.step
        for each in checkpoints
        if not each.is_intact and oldest_kept is not None and each.step < oldest_kept
    ]
    return sorted(gone)
