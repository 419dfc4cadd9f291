"""`orchestra plan --explain [KEY] [overrides]`: why a layout is as it is, and what other values would do.

Explains the configuration as composed, whether it fits or not: three decisions with their numbers, then a
table for each key, at most 80 columns wide.
"""

from __future__ import annotations

import json
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from orchestra.cli.plan import layout_words, one_layout
from orchestra.cli.text import figures
from orchestra.config.compose import compose
from orchestra.config.keys import nearest
from orchestra.config.machine import Situation
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.plan.assemble import case_of, for_planning
from orchestra.plan.explain import Explanation, Option, explain, main_loss
from orchestra.plan.predict import Prediction
from orchestra.plan.space import KEYS, choice_of

_WIDTH = 80
_INDENT = "   "
# Turns of a knob that are told where a step does not fit, and things that bind.
_NUM_TURNS = 5
_NUM_BOUNDS = 3
# Values of a knob that are listed around the present and the best one.
_NUM_OPTIONS = 12
# Speeds this near are the same.
_SAME = 5e-4


def lines(told: Explanation, knobs: Sequence[str]) -> list[str]:
    """Return what a person reads about these knobs."""
    text = [*one_layout.header(told.here.case), ""]
    text += ["1  fit a step in memory", *_memory(told), ""]
    text += ["2  reach the global batch", *_batch(told.here), ""]
    text += ["3  throughput", *_throughput(told)]
    for knob in knobs:
        text += ["", *_knob(told, knob)]
    return text


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
    )


def _memory(told: Explanation) -> Iterator[str]:
    usable, here, smallest = told.usable_bytes, told.here, told.smallest
    size = here.case.micro_batch_size
    if size > 1:
        fits = "fits" if smallest.fits else "does not fit"
        yield from _wrapped(f"A micro-batch of 1 sequence takes {_of(smallest, usable)}: {fits}.")
    parts = one_layout.components(here.peak)
    largest = sorted(parts.items(), key=lambda it: -it[1])[:4]
    words = ", ".join(f"{name} {layout_words.gib(value)}" for name, value in largest)
    fits = "fits" if here.fits else "does not fit"
    yield from _wrapped(f"A micro-batch of {size} takes {_of(here, usable)}: {fits}. Most of it: {words}.")
    if here.fits:
        return
    if not told.fitting_turns:
        instead = "; the search finds what fits together" if told.best else " on this cluster"
        yield from _wrapped(f"No single turn of a knob makes it fit{instead}.")
        return
    yield from _wrapped("One turn makes it fit, the fastest first:")
    for knob, turned in told.fitting_turns[:_NUM_TURNS]:
        value = layout_words.value(choice_of(turned.case).value(knob))
        speed = figures.quantity(turned.tokens_per_s_per_device)
        peak = f"{layout_words.gib(turned.peak.total)} GiB"
        yield f"{_INDENT}  {KEYS[knob]}={value}: {peak}, {speed} tokens/s per device"


def _of(found: Prediction, usable: float) -> str:
    return f"{layout_words.gib(found.peak.total)} of {layout_words.gib(usable)} usable GiB"


def _batch(here: Prediction) -> Iterator[str]:
    case = here.case
    sequences = case.tokens_per_step // case.seq_len
    product = f"micro-batch {case.micro_batch_size} × accumulation {case.accumulation} × dp {case.layout.dp}"
    yield from _wrapped(f"{sequences:,} sequences = {product}: met exactly.")
    if case.accumulation > 1:
        yield from _wrapped(
            f"Each rank runs {case.accumulation} micro-batches one after another: up to {case.accumulation} "
            f"times the ranks could share this batch."
        )
    elif case.layout.dp > 1:
        yield from _wrapped("Nothing is accumulated: more data-parallel ranks need a larger global batch.")
    if case.layout.pp > 1:
        idle = figures.percent(here.time.bubble / here.time.total)
        yield from _wrapped(
            f"The pipeline of {case.layout.pp} stages is idle for {idle} of the step with "
            f"{case.accumulation} micro-batches; more of them make it less."
        )


def _throughput(told: Explanation) -> Iterator[str]:
    here, best = told.here, told.best
    speed = f"{here.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {figures.percent(here.mfu)}"
    yield from _wrapped(f"{speed}{'' if here.fits else ', if it fitted'}.")
    for bound in told.bounds[:_NUM_BOUNDS]:
        yield from _wrapped(f"Bound by {layout_words.bound(bound, told.usable_bytes)}.")
    if best is None:
        yield from _wrapped("No layout fits on this cluster; orchestra plan --search tells what would help.")
    elif choice_of(best.case) == choice_of(here.case):
        yield from _wrapped("No layout that fits is faster.")
    else:
        gain = best.tokens_per_s / here.tokens_per_s - 1
        change = f"{100 * gain:+.1f}%" if here.fits else figures.quantity(best.tokens_per_s_per_device)
        unit = "" if here.fits else " tokens/s per device"
        yield from _wrapped(f"The best that fits: {layout_words.line(best)}; {change}{unit}.")


def _knob(told: Explanation, knob: str) -> list[str]:
    header = ("value", "", "GiB", "tok/s", "vs now", "best with it", "GiB ")
    now = choice_of(told.here.case).value(knob)
    # Not None where nothing fits: that is a value too.
    best = "" if told.best is None else choice_of(told.best.case).value(knob)
    chosen = _near(told.options[knob], now, best)
    rows = [_row(told, option, is_now=option.value == now, is_best=option.value == best) for option in chosen]
    name = KEYS.get(knob, f"parallelism.{knob}")
    table = figures.table(header, rows).splitlines()
    has_unfit = any(it.turned is not None and not it.turned.fits for it in chosen)
    note = ["   ! does not fit"] if has_unfit else []
    return [name, *table, *note, *_advice(told, knob, now, best)]


def _near(options: Sequence[Option], now: object, best: object) -> list[Option]:
    """Return at most a screenful: what lies next to the present and the best value."""
    if len(options) <= _NUM_OPTIONS:
        return list(options)
    places = [place for place, it in enumerate(options) if it.value in (now, best)]
    distance = [min(abs(place - it) for it in places) for place in range(len(options))]
    kept = sorted(range(len(options)), key=distance.__getitem__)[:_NUM_OPTIONS]
    return [options[place] for place in sorted(kept)]


def _row(told: Explanation, option: Option, *, is_now: bool, is_best: bool) -> tuple[str, ...]:
    marks = ", ".join([*(["now"] * is_now), *(["best"] * is_best)])
    turned, best = option.turned, option.best
    if turned is None:
        direct = ("-", "-", "-")
    else:
        change = turned.tokens_per_s / told.here.tokens_per_s - 1
        peak = f"{layout_words.gib(turned.peak.total)}{'' if turned.fits else '!'}"
        direct = (
            peak,
            figures.quantity(turned.tokens_per_s_per_device),
            "-" if abs(change) < _SAME else f"{100 * change:+.1f}%",
        )
    rest = (
        ("nothing fits", "-")
        if best is None
        else (figures.quantity(best.tokens_per_s_per_device), f"{layout_words.gib(best.peak.total)}")
    )
    return (f"  {layout_words.value(option.value)}", marks, *direct, *rest)


def _advice(told: Explanation, knob: str, now: object, best: object) -> list[str]:
    """Say which value is recommended, and why."""
    options = {option.value: option for option in told.options[knob]}
    if told.best is None:
        return _wrapped("No value makes it fit on this cluster.")
    others = [it.best for value, it in options.items() if value != best and it.best is not None]
    second = min(others, key=lambda it: it.time.total, default=None)
    word = layout_words.value(choice_of(told.best.case).value(knob))
    start = f"Recommended: {word}" + (", as it is" if now == best else "")
    if second is None:
        other = "nothing fits with any other value" if len(options) > 1 else "there is no other value"
        return _wrapped(f"{start}; {other}.")
    other = layout_words.value(choice_of(second.case).value(knob))
    loss, most = 1 - told.best.time.total / second.time.total, main_loss(told.best, second)
    if loss < _SAME or most is None:
        return _wrapped(f"{start}; {other} is as fast, in {layout_words.gib(second.peak.total)} GiB.")
    return _wrapped(
        f"{start}; {other}, the next best, loses {figures.percent(loss)} even with all else chosen for it, "
        f"most by {most}."
    )


def facts(told: Explanation, knobs: Sequence[str]) -> dict[str, Any]:
    """Return the same for programs: bytes, seconds, shares of 1."""
    return {
        "here": layout_words.facts(told.here),
        "usable_memory_bytes": round(told.usable_bytes),
        "bound_by": [layout_words.bound_facts(bound) for bound in told.bounds],
        "best": told.best and layout_words.facts(told.best),
        "keys": {
            KEYS.get(knob, f"parallelism.{knob}"): [_option_facts(it) for it in told.options[knob]]
            for knob in knobs
        },
    }


def _option_facts(option: Option) -> dict[str, Any]:
    return {
        "value": layout_words.value(option.value),
        "alone": option.turned and layout_words.facts(option.turned),
        "best_with_it": option.best and layout_words.facts(option.best),
    }


NAME = "explain"
OPTIONS: tuple[str, ...] = ()

_ALL = "all"

EXPLAINED = """\
--explain walks through the decisions of a configuration (fit a step in memory, reach the global batch, then
throughput), and says for KEY, such as parallelism.tp or train.recompute, what each other value would do to
memory and speed: with all else as it is, and with all else chosen anew. Without KEY it shows all of them.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add --explain."""
    parser.add_argument(
        "--explain", nargs="?", const=_ALL, metavar="KEY", help="what each value of a key would do, and why"
    )


def run(arguments: Namespace) -> int:
    """Print the explanation and return 0. Raises ConfigError for a key that is none of them."""
    key, overrides = arguments.explain, list(arguments.overrides)
    if "=" in key:
        # `--explain model=llama3_8b`: an override, not a key.
        key, overrides = _ALL, [key, *overrides]
    knobs = _knobs(key)
    config = compose(for_planning(overrides), Situation("plan")).config
    told = explain(case_of(config, arguments.framework or "orchestra"))
    if arguments.json:
        print(json.dumps(facts(told, knobs), indent=2))
    else:
        print("\n".join(lines(told, knobs)))
    return EXIT_DONE


def _knobs(key: str) -> list[str]:
    keys = {**KEYS, "dp": "parallelism.dp"}
    if key == _ALL:
        return list(KEYS)
    for knob, name in keys.items():
        if key in (knob, name):
            return [knob]
    meant = nearest(key, [*keys.values()])
    hint = f"did you mean {meant}? There are" if meant else "there are"
    raise ConfigError(f"--explain {key}: the planner turns no such key; {hint} {', '.join(keys.values())}")
