"""What would make a model fit where no layout does: tried one by one, with the memory it then takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from conf.schema import Recompute
from orchestra.plan.case import PlanCase
from orchestra.plan.predict import Prediction, predict, step_time
from orchestra.plan.search import Found, search
from orchestra.plan.space import Fixed, Space, Value, choice_of, turns
from orchestra.plan.stage_memory import fullest_stage_bytes
from orchestra.sizes.memory import USABLE_SHARE

# Why one layout is faster than another, and what keeps it from being faster still.
#
# A step's time is work on the device and what comes on top: collectives, waiting, an idle pipeline. Memory is
# what binds where one turn of a knob would be faster if only it fitted. Two layouts are compared part by
# part.


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
    best: tuple[float, str, PlanCase] | None = None
    for knob, case in turns(space, found.case):
        time = step_time(case)
        gain = 1 - time.total / found.time.total
        if gain > (best[0] if best else 0.0) and fullest_stage_bytes(case, time.layer) > usable:
            best = gain, knob, case
    if best is not None:
        gain, knob, case = best
        yield Bound(MEMORY, gain, predict(case), knob)


@dataclass(frozen=True)
class TimeDifference:
    """By which part one layout differs from another, in seconds of a step; above 0 it takes longer."""

    name: str
    seconds: float


def differences(found: Prediction, other: Prediction) -> list[TimeDifference]:
    """Return where the time of `other` differs from that of `found`, the largest difference first.

    Recomputation is told apart from the other work on the device.
    """
    parts = {name: getattr(other.time, it) - getattr(found.time, it) for it, name in PARTS.items()}
    repeated = _recomputed(other) - _recomputed(found)
    parts[RECOMPUTATION] = repeated
    parts[WORK] -= repeated
    told = [TimeDifference(name, seconds) for name, seconds in parts.items() if seconds]
    return sorted(told, key=lambda it: -abs(it.seconds))


def main_loss(found: Prediction, slower: Prediction) -> str | None:
    """Return the part in which a slower layout loses most; None where it is not slower."""
    losses = [it for it in differences(found, slower) if it.seconds > 0]
    return losses[0].name if losses and slower.time.total > found.time.total else None


# Walks the decisions that lead to a layout: fit a step in memory, reach the global batch, then throughput.
#
# The order is the Ultra-Scale Playbook's. For each knob it tells what every other value would do: with all
# else as it is, and with all else chosen anew.


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
    usable_bytes: float
    # Turns of one knob that fit, the fastest first, with the knob's name.
    fitting_turns: tuple[tuple[str, Prediction], ...]
    bounds: tuple[Bound, ...]
    best: Prediction | None
    options: Mapping[str, tuple[Option, ...]]


def explain(here: PlanCase) -> Explanation:
    """Explain the layout of a case, whether it fits or not."""
    alike = replace(here, options=replace(here.options, activation_bytes=None, recompute_every=1))
    space = Space(alike, here.tokens_per_step // here.seq_len, Fixed())
    now = predict(here)
    found = search(space, top=1)
    turned = [(knob, predict(case)) for knob, case in turns(space, here)]
    fitting = sorted((it for it in turned if it[1].fits), key=lambda it: it[1].time.total)
    return Explanation(
        here=now,
        smallest=predict(_with_smallest_micro_batch(here)),
        usable_bytes=USABLE_SHARE * here.device.memory_bytes,
        fitting_turns=tuple(fitting),
        bounds=tuple(bounds(space, now)),
        best=found.ranked[0] if found.ranked else None,
        options={knob: _options(found, now, knob, turned) for knob in found.by_value},
    )


def _with_smallest_micro_batch(case: PlanCase) -> PlanCase:
    return replace(case, micro_batch_size=1, accumulation=case.accumulation * case.micro_batch_size)


def _options(
    found: Found, now: Prediction, knob: str, turned: list[tuple[str, Prediction]]
) -> tuple[Option, ...]:
    at = {choice_of(it.case).value(knob): it for name, it in turned if name == knob}
    at[choice_of(now.case).value(knob)] = now
    values = dict(found.by_value[knob])
    order = [*values, *(value for value in at if value not in values)]
    return tuple(Option(value, at.get(value), values.get(value)) for value in order)
