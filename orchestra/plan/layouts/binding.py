"""Why one layout is faster than another, and what keeps it from being faster still.

A step's time is work on the device and what comes on top: collectives, waiting, an idle pipeline. Memory is
what binds where one turn of a knob would be faster if only it fitted. Two layouts are compared part by part.
It searches nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from conf.schema import Recompute
from orchestra.plan.cases.case import Case
from orchestra.plan.cases.frameworks import USABLE_SHARE
from orchestra.plan.costs.memory import fullest_stage_bytes
from orchestra.plan.costs.step_time import step_time
from orchestra.plan.layouts.space import Space
from orchestra.plan.layouts.turns import turns
from orchestra.plan.prediction import Prediction, predict

# The parts of `StepTime`, as people call them.
PARTS = {
    "compute": "work on the device",
    "tensor_parallel": "collectives in the layers",
    "host": "waiting for the host",
    "hand_over": "hand-overs between stages",
    "bubble": "pipeline bubble",
    "reduction": "exposed reduction",
    "optimizer": "optimizer",
}
MEMORY, RECOMPUTATION, WORK = "memory", "recomputation", PARTS["compute"]
# Shares of a step below which nobody would change anything.
_WORTH_TELLING = 0.02


@dataclass(frozen=True)
class Bound:
    """What costs time: its name, the share of the step that it takes, and, for memory, the layout that would
    be faster by that share if it fitted.
    """

    name: str
    share: float
    faster: Prediction | None = None
    knob: str | None = None


def bounds(space: Space, found: Prediction) -> list[Bound]:
    """Return what binds a layout, the most expensive first; the work itself where nothing else does."""
    total = found.time.total
    costs = {name: getattr(found.time, part) for part, name in PARTS.items() if part != "compute"}
    costs[RECOMPUTATION] = _recomputed(found)
    told = [Bound(name, cost / total) for name, cost in costs.items()]
    told += [*_memory(space, found)]
    worth = sorted((it for it in told if it.share >= _WORTH_TELLING), key=lambda it: -it.share)
    return worth or [Bound(WORK, found.time.compute / total)]


def _recomputed(found: Prediction) -> float:
    """Seconds of a step that the device works only because activations were not kept."""
    if found.case.recompute is Recompute.none:
        return 0.0
    kept = step_time(replace(found.case, recompute=Recompute.none))
    return max(0.0, found.time.compute - kept.compute)


def _memory(space: Space, found: Prediction) -> Iterator[Bound]:
    """What would be faster by one turn of a knob and does not fit: the largest gain."""
    usable = USABLE_SHARE * found.case.device.memory_bytes
    best: tuple[float, str, Case] | None = None
    for knob, case in turns(space, found.case):
        time = step_time(case)
        gain = 1 - time.total / found.time.total
        if gain > (best[0] if best else 0.0) and fullest_stage_bytes(case, time.layer) > usable:
            best = gain, knob, case
    if best is not None:
        gain, knob, case = best
        yield Bound(MEMORY, gain, predict(case), knob)


@dataclass(frozen=True)
class Difference:
    """By which part one layout differs from another, in seconds of a step; above 0 it takes longer."""

    name: str
    seconds: float


def differences(found: Prediction, other: Prediction) -> list[Difference]:
    """Return where the time of `other` differs from that of `found`, the largest difference first.

    Recomputation is told apart from the other work on the device.
    """
    parts = {name: getattr(other.time, it) - getattr(found.time, it) for it, name in PARTS.items()}
    repeated = _recomputed(other) - _recomputed(found)
    parts[RECOMPUTATION] = repeated
    parts[WORK] -= repeated
    told = [Difference(name, seconds) for name, seconds in parts.items() if seconds]
    return sorted(told, key=lambda it: -abs(it.seconds))


def main_loss(found: Prediction, slower: Prediction) -> str | None:
    """Return the part in which a slower layout loses most; None where it is not slower."""
    losses = [it for it in differences(found, slower) if it.seconds > 0]
    return losses[0].name if losses and slower.time.total > found.time.total else None
