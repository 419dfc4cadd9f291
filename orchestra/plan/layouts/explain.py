"""Walks the decision behind a layout: fit a step in memory, reach the global batch, then throughput.

The order is the Ultra-Scale Playbook's. For each knob it tells what every other value would do: with all else
as it is, and with all else chosen anew. It prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestra.plan.cases.case import Case
from orchestra.plan.cases.frameworks import USABLE_SHARE
from orchestra.plan.layouts.binding import Bound, bounds
from orchestra.plan.layouts.search import Found, search
from orchestra.plan.layouts.space import Fixed, Space, Value, choice_of
from orchestra.plan.layouts.turns import turns
from orchestra.plan.prediction import Prediction, predict


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


def explain(here: Case) -> Explanation:
    """Explain the layout of a case, whether it fits or not."""
    alike = replace(here, choices=replace(here.choices, activation_bytes=None, recompute_every=1))
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


def _with_smallest_micro_batch(case: Case) -> Case:
    return replace(case, micro_batch_size=1, accumulation=case.accumulation * case.micro_batch_size)


def _options(
    found: Found, now: Prediction, knob: str, turned: list[tuple[str, Prediction]]
) -> tuple[Option, ...]:
    at = {choice_of(it.case).value(knob): it for name, it in turned if name == knob}
    at[choice_of(now.case).value(knob)] = now
    values = dict(found.by_value[knob])
    order = [*values, *(value for value in at if value not in values)]
    return tuple(Option(value, at.get(value), values.get(value)) for value in order)
