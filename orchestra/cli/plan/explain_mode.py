"""`orchestra plan --explain [KEY] [overrides]`: why a layout is as it is, and what other values would do.

Explains the configuration as composed, whether it fits or not: three decisions with their numbers, then a
table for each key, at most 80 columns wide.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from conf.schema import Config
from orchestra.cli.plan import Mode, case_for, configuration, layout_words, one_layout, print_result
from orchestra.cli.text import figures
from orchestra.config.keys import nearest
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.plan.explain import Explanation, Option, explain, main_loss
from orchestra.plan.predict import Prediction
from orchestra.plan.space import DP_KEY, KEYS, Value, choice_of, common_sequences

_INDENT = "   "
# Turns of a knob that are listed where a step does not fit, and things that bind.
_NUM_TURNS = 5
_NUM_BOUNDS = 3
# Values of a knob that are listed around the present and the best one.
_NUM_OPTIONS = 12
# Speeds this near are the same.
_SAME = 5e-4
_ALL = "all"
_HEADER = ("value", "", "GiB", "tok/s", "vs now", "best with it", "GiB ")

_EXPLAINED = """\
--explain walks through the decisions of a configuration (fit a step in memory, reach the global batch, then
throughput), and says for KEY, such as parallelism.tp or train.recompute, what each other value would do to
memory and speed: with all else as it is, and with all else chosen anew. Without KEY it shows all of them.
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--explain", nargs="?", const=_ALL, metavar="KEY", help="what each value of a key would do, and why"
    )


def _run(arguments: Namespace) -> int:
    """Print the explanation and return 0. Raises ConfigError for a key that is none of them."""
    key, overrides = arguments.explain, list(arguments.overrides)
    if "=" in key:
        # `--explain model=llama3_8b`: an override, not a key.
        key, overrides = _ALL, [key, *overrides]
    knobs = _knobs(key)
    config = configuration(overrides)
    explanation = explain(case_for(config, arguments), common_sequences(config.train))
    print_result(arguments, lambda: _facts(explanation, knobs), lambda: _lines(config, explanation, knobs))
    return EXIT_DONE


MODE = Mode("explain", _EXPLAINED, _add_arguments, _run)


def _knobs(key: str) -> list[str]:
    keys = {**KEYS, "dp": DP_KEY}
    if key == _ALL:
        return list(KEYS)
    for knob, name in keys.items():
        if key in (knob, name):
            return [knob]
    meant = nearest(key, [*keys.values()])
    hint = f"did you mean {meant}? There are" if meant else "there are"
    raise ConfigError(f"--explain {key}: the planner turns no such key; {hint} {', '.join(keys.values())}")


def _lines(config: Config, explanation: Explanation, knobs: Sequence[str]) -> list[str]:
    lines = [*one_layout.header(config.train, explanation.here.case), ""]
    lines += ["1  fit a step in memory", *_memory(explanation), ""]
    lines += ["2  reach the global batch", *_batch(explanation.here), ""]
    lines += ["3  throughput", *_throughput(explanation)]
    for knob in knobs:
        lines += ["", *_knob(explanation, knob)]
    return lines


def _wrapped(text: str) -> list[str]:
    return figures.wrapped(text, _INDENT, _INDENT)


def _memory(explanation: Explanation) -> Iterator[str]:
    here, smallest = explanation.here, explanation.smallest
    usable, size = here.case.device.usable_bytes, here.case.micro_batch_size
    if size > 1:
        peak, fits = layout_words.of_usable(smallest, usable), _fits(smallest)
        yield from _wrapped(f"A micro-batch of 1 sequence takes {peak}: {fits}.")
    parts = one_layout.components(here.peak)
    largest = sorted(parts, key=lambda name: -parts[name])[:4]
    words = ", ".join(f"{name} {layout_words.gib(parts[name])}" for name in largest)
    peak, fits = layout_words.of_usable(here, usable), _fits(here)
    yield from _wrapped(f"A micro-batch of {size} takes {peak}: {fits}. Most of it: {words}.")
    if here.fits:
        return
    if not explanation.fitting_turns:
        instead = "; the search finds what fits together" if explanation.best else " on this cluster"
        yield from _wrapped(f"No single turn of a knob makes it fit{instead}.")
        return
    yield from _wrapped("One turn makes it fit, the fastest first:")
    for knob, turned in explanation.fitting_turns[:_NUM_TURNS]:
        speed = figures.quantity(turned.tokens_per_s_per_device)
        peak = f"{layout_words.gib(turned.peak.total)} GiB"
        value = layout_words.value_in(turned, knob)
        yield f"{_INDENT}  {KEYS[knob]}={value}: {peak}, {speed} tokens/s per device"


def _fits(prediction: Prediction) -> str:
    return "fits" if prediction.fits else "does not fit"


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


def _throughput(explanation: Explanation) -> Iterator[str]:
    here, best = explanation.here, explanation.best
    speed = f"{here.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {figures.percent(here.mfu)}"
    yield from _wrapped(f"{speed}{'' if here.fits else ', if it fitted'}.")
    for bound in explanation.bounds[:_NUM_BOUNDS]:
        yield from _wrapped(f"Bound by {layout_words.bound(bound, here.case.device.usable_bytes)}.")
    if best is None:
        yield from _wrapped("No layout fits on this cluster; orchestra plan --search tells what would help.")
    elif choice_of(best.case) == choice_of(here.case):
        yield from _wrapped("No layout that fits is faster.")
    else:
        gain = best.tokens_per_s / here.tokens_per_s - 1
        unfit_speed = f"{figures.quantity(best.tokens_per_s_per_device)} tokens/s per device"
        change = f"{100 * gain:+.1f}%" if here.fits else unfit_speed
        yield from _wrapped(f"The best that fits: {layout_words.line(best)}; {change}.")


def _knob(explanation: Explanation, knob: str) -> list[str]:
    now = choice_of(explanation.here.case).value(knob)
    # Not None where nothing fits: that is a value too.
    best = "" if explanation.best is None else choice_of(explanation.best.case).value(knob)
    chosen = _near(explanation.options[knob], (now, best))
    rows = []
    for option in chosen:
        marks = ["now"] * (option.value == now) + ["best"] * (option.value == best)
        rows.append((f"  {layout_words.value(option.value)}", ", ".join(marks), *_cells(explanation, option)))
    has_unfit = any(option.turned is not None and not option.turned.fits for option in chosen)
    note = ["   ! does not fit"] if has_unfit else []
    title = KEYS.get(knob, DP_KEY)
    return [title, *figures.table(_HEADER, rows).splitlines(), *note, *_advice(explanation, knob, now, best)]


def _near(options: Sequence[Option], wanted: tuple[object, ...]) -> list[Option]:
    """Return at most a screenful: what lies next to the wanted values."""
    if len(options) <= _NUM_OPTIONS:
        return list(options)
    places = [place for place, option in enumerate(options) if option.value in wanted]
    distance = [min(abs(place - other) for other in places) for place in range(len(options))]
    kept = sorted(range(len(options)), key=distance.__getitem__)[:_NUM_OPTIONS]
    return [options[place] for place in sorted(kept)]


def _cells(explanation: Explanation, option: Option) -> tuple[str, ...]:
    """Return what a value does by itself (memory, speed, change), and the best layout with it."""
    turned, best = option.turned, option.best
    alone: tuple[str, ...] = ("-", "-", "-")
    if turned is not None:
        change = turned.tokens_per_s / explanation.here.tokens_per_s - 1
        alone = (
            f"{layout_words.gib(turned.peak.total)}{'' if turned.fits else '!'}",
            figures.quantity(turned.tokens_per_s_per_device),
            "-" if abs(change) < _SAME else f"{100 * change:+.1f}%",
        )
    if best is None:
        return (*alone, "nothing fits", "-")
    return (*alone, figures.quantity(best.tokens_per_s_per_device), layout_words.gib(best.peak.total))


def _advice(explanation: Explanation, knob: str, now: Value, best_value: object) -> list[str]:
    """Say which value is recommended, and why."""
    options, best = explanation.options[knob], explanation.best
    if best is None:
        return _wrapped("No value makes it fit on this cluster.")
    others = [option.best for option in options if option.value != best_value and option.best is not None]
    second = min(others, key=lambda layout: layout.time.total, default=None)
    start = f"Recommended: {layout_words.value_in(best, knob)}" + (", as it is" if now == best_value else "")
    if second is None:
        other = "nothing fits with any other value" if len(options) > 1 else "there is no other value"
        return _wrapped(f"{start}; {other}.")
    other = layout_words.value_in(second, knob)
    loss, most = 1 - best.time.total / second.time.total, main_loss(best, second)
    if loss < _SAME or most is None:
        return _wrapped(f"{start}; {other} is as fast, in {layout_words.gib(second.peak.total)} GiB.")
    return _wrapped(
        f"{start}; {other}, the next best, loses {figures.percent(loss)} even with all else chosen for it, "
        f"most by {most}."
    )


def _facts(explanation: Explanation, knobs: Sequence[str]) -> dict[str, Any]:
    """Return the same for programs: bytes, seconds, shares of 1."""
    here, best = explanation.here, explanation.best
    return {
        "here": layout_words.facts(here),
        "usable_memory_bytes": round(here.case.device.usable_bytes),
        "bound_by": [layout_words.bound_facts(bound) for bound in explanation.bounds],
        "best": best and layout_words.facts(best),
        "keys": {
            KEYS.get(knob, DP_KEY): [_option_facts(option) for option in explanation.options[knob]]
            for knob in knobs
        },
    }


def _option_facts(option: Option) -> dict[str, Any]:
    return {
        "value": layout_words.value(option.value),
        "alone": option.turned and layout_words.facts(option.turned),
        "best_with_it": option.best and layout_words.facts(option.best),
    }
