"""Why one layout is faster than another, what keeps it from being faster, and what other values would do.

A step's time is work on the device and what comes on top: collectives, waiting, an idle pipeline. Memory is
what binds where one turn of a knob would be faster if only it fitted. Two layouts are compared part by part.
`explain` walks the decisions that lead to a layout in the Ultra-Scale Playbook's order: fit a step in memory,
reach the global batch, then throughput.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from conf.schema import Recompute
from orchestra.plan.case import PlanCase
from orchestra.plan.predict import Prediction, predict, step_time
from orchestra.plan.search import search
from orchestra.plan.space import Space, Value, choice_of, turns
from orchestra.plan.stage_memory import fullest_stage_bytes

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


def bounds(space: Space, layout: Prediction) -> list[Bound]:
    """Return what binds a layout, the most expensive first; the work itself where nothing else does."""
    total = layout.time.total
    costs = {name: getattr(layout.time, part) for part, name in PARTS.items() if part != "compute"}
    costs[RECOMPUTATION] = _recomputed(layout)
    every = [*(Bound(name, cost / total) for name, cost in costs.items()), *_memory(space, layout)]
    worth = sorted(
        (bound for bound in every if bound.share >= _WORTH_TELLING), key=lambda bound: -bound.share
    )
    return worth or [Bound(WORK, layout.time.compute / total)]


def _recomputed(layout: Prediction) -> float:
    """Return the seconds of a step that the device works only because activations were not kept."""
    if layout.case.recompute is Recompute.none:
        return 0.0
    kept = step_time(replace(layout.case, recompute=Recompute.none))
    return max(0.0, layout.time.compute - kept.compute)


def _memory(space: Space, layout: Prediction) -> Iterator[Bound]:
    """Yield what would be faster by one turn of a knob and does not fit: the largest gain."""
    best: tuple[float, str, PlanCase] | None = None
    for knob, case in turns(space, layout.case):
        time = step_time(case)
        gain = 1 - time.total / layout.time.total
        is_better = gain > (best[0] if best else 0.0)
        if is_better and fullest_stage_bytes(case, time.layer) > case.device.usable_bytes:
            best = gain, knob, case
    if best is not None:
        gain, knob, case = best
        yield Bound(MEMORY, gain, predict(case), knob)


@dataclass(frozen=True)
class TimeDifference:
    """By which part one layout differs from another, in seconds of a step; above 0 it takes longer."""

    name: str
    seconds: float


def differences(layout: Prediction, other: Prediction) -> list[TimeDifference]:
    """Return where the time of `other` differs from that of `layout`, the largest difference first.

    Recomputation stands apart from the other work on the device.
    """
    parts = {name: getattr(other.time, part) - getattr(layout.time, part) for part, name in PARTS.items()}
    parts[RECOMPUTATION] = _recomputed(other) - _recomputed(layout)
    parts[WORK] -= parts[RECOMPUTATION]
    found = [TimeDifference(name, seconds) for name, seconds in parts.items() if seconds]
    return sorted(found, key=lambda part: -abs(part.seconds))


def main_loss(layout: Prediction, slower: Prediction) -> str | None:
    """Return the part in which a slower layout loses most; None where it is not slower."""
    losses = [part.name for part in differences(layout, slower) if part.seconds > 0]
    return losses[0] if losses and slower.time.total > layout.time.total else None


@dataclass(frozen=True)
class Option:
    """One value of a knob: the layout with it and nothing else changed (data parallelism takes up the rest;
    None where there is none), and the best layout with it (None where none fits).
    """

    value: Value
    turned: Prediction | None
    best: Prediction | None


@dataclass(frozen=True)
class Explanation:
    """The three decisions for one layout, and the options of each knob."""

    here: Prediction
    # The same with a micro-batch of one sequence: what has to fit in any case.
    smallest: Prediction
    # Turns of one knob that fit, the fastest first, with the knob's name.
    fitting_turns: tuple[tuple[str, Prediction], ...]
    bounds: tuple[Bound, ...]
    best: Prediction | None
    options: Mapping[str, tuple[Option, ...]]


def explain(case: PlanCase, common_sequences: int = 0) -> Explanation:
    """Explain the layout of a case, whether it fits or not. `common_sequences`: of the batches of a ramp, 0
    without one; other values share out all of them.
    """
    alike = replace(case, options=replace(case.options, activation_bytes=None, recompute_every=1))
    space = Space(alike, case.tokens_per_step // case.seq_len, common_sequences=common_sequences)
    here, result = predict(case), search(space, top=1)
    turned = [(knob, predict(other)) for knob, other in turns(space, case)]
    fitting = sorted((turn for turn in turned if turn[1].fits), key=lambda turn: turn[1].time.total)
    options = {}
    for knob, best_with in result.by_value.items():
        alone = {choice_of(layout.case).value(knob): layout for name, layout in turned if name == knob}
        alone[choice_of(case).value(knob)] = here
        values = dict.fromkeys([*best_with, *alone])
        options[knob] = tuple(Option(value, alone.get(value), best_with.get(value)) for value in values)
    return Explanation(
        here=here,
        smallest=predict(
            replace(case, micro_batch_size=1, accumulation=case.accumulation * case.micro_batch_size)
        ),
        fitting_turns=tuple(fitting),
        bounds=tuple(bounds(space, here)),
        best=result.ranked[0] if result.ranked else None,
        options=options,
    )
