"""`orchestra plan --search [overrides]`: the layouts of a model on a cluster that fit, the fastest first.

Composes a configuration whose own layout need not be possible, searches, and prints the best layouts, why the
first one wins, what less memory costs, and the commands that submit them: for people at most 80 columns wide
(commands apart), for programs one JSON object.
"""

from __future__ import annotations

import json
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

from conf.schema import Config, Offload
from orchestra.cli.plan import layout_words
from orchestra.cli.plan.layout_words import SearchRequest, command, overrides_of, runs_today
from orchestra.cli.text import figures
from orchestra.config.compose import batch_said_twice, merge, settled
from orchestra.config.compose import typed as typed_config
from orchestra.config.machine import Situation, world_size
from orchestra.config.overrides import Checked, check_overrides
from orchestra.config.rules.all_rules import problems_of
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from orchestra.plan.assemble import for_planning
from orchestra.plan.explain import Bound, bounds, main_loss
from orchestra.plan.predict import Prediction
from orchestra.plan.search import Found, remedies, search
from orchestra.plan.space import KEYS, Fixed, choice_of, space_of
from orchestra.sizes.flops import num_active_parameters, num_parameters
from orchestra.sizes.memory import USABLE_SHARE
from orchestra.sizes.topology import global_batch_size

_WIDTH = 80
_INDENT = " " * 8
# Reasons told for a layout, and points of the curve of memory against speed.
_NUM_BOUNDS = 3
_NUM_POINTS = 8
_BAR_WIDTH = 24
_KNOB_WIDTH = 26
# Shares below this are shown as none.
_SAME = 5e-4
_WIDER = "tp beyond a node and cp into short pieces too, since nothing fits otherwise"
# What binds, in one word for a column.
_SHORT = {
    "collectives in the layers": "collectives",
    "waiting for the host": "host",
    "hand-overs between stages": "hand-overs",
    "pipeline bubble": "bubble",
    "exposed reduction": "reduction",
    "recomputation": "recompute",
    "work on the device": "work",
}


def lines(asked: SearchRequest, found: Found) -> list[str]:
    """Return what a person reads."""
    told = [*_header(asked, found), ""]
    if not found.ranked:
        return [*told, *_nothing_fits(asked, found)]
    told += [*_ranked(found), "", *_best(asked, found), "", *_pareto(found)]
    return told


def _header(asked: SearchRequest, found: Found) -> list[str]:
    base = found.space.base
    device = base.device
    nodes = f"{base.num_nodes:,} node{'s' if base.num_nodes > 1 else ''}"
    usable = f"{layout_words.gib(_usable(found))} of {layout_words.gib(device.memory_bytes)} GiB usable"
    return [
        f"model   {layout_words.model(base.model)}, {base.precision.value}",
        f"batch   {asked.num_sequences:,} × {base.seq_len:,} = {asked.num_sequences * base.seq_len:,} tokens",
        f"device  {base.layout.world_size:,} × {device.name} on {nodes}, {usable}",
        f"search  {found.num_layouts:,} layouts, {found.num_fitting:,} fit; profile {base.framework.name}",
        *_kept(asked),
        *(_wrapped("", _WIDER) if found.space.wide else []),
    ]


def _kept(asked: SearchRequest) -> list[str]:
    kept = {name: value for name, value in vars(asked.fixed).items() if value is not None}
    words = ", ".join(f"{name.replace('_', ' ')} {layout_words.value(value)}" for name, value in kept.items())
    return _wrapped("kept", f"as given: {words}") if kept else []


def _usable(found: Found) -> float:
    return USABLE_SHARE * found.space.base.device.memory_bytes


def _ranked(found: Found) -> list[str]:
    first = found.ranked[0]
    rows = []
    for each in found.ranked:
        slower = first.time.total / each.time.total - 1
        cells = (
            *layout_words.row(each),
            _share(slower),
            _SHORT.get(_binds(found, each), _binds(found, each)),
        )
        rows.append((_mark(each), *cells))
    titles = ("", *layout_words.HEADER, "vs best", "bound by")
    note = "* runs on orchestra's trainer today" if any(runs_today(it.case) for it in found.ranked) else ""
    return [*layout_words.table(titles, rows), *([note] if note else [])]


def _mark(found: Prediction) -> str:
    return "*" if runs_today(found.case) else ""


def _binds(found: Found, each: Prediction) -> str:
    return bounds(found.space, each)[0].name


def _share(value: float) -> str:
    return "-" if abs(value) < _SAME else f"{100 * value:.1f}%"


def _best(asked: SearchRequest, found: Found) -> list[str]:
    best = found.ranked[0]
    runs = found.chosen[0] if found.chosen else None
    told = [*_portrait("best", found, best), *_why(found, best)]
    if runs is not None and choice_of(runs.case) == choice_of(best.case):
        return [*told, "", *command(asked, best.case)]
    told += [
        "",
        "# orchestra's trainer cannot run this one yet; in full:",
        *command(asked, best.case, "plan"),
    ]
    if runs is None:
        missing = "pp, cp or ep" if not best.case.model.num_experts else "experts, which it does not have yet"
        none = "no layout that fits runs on orchestra's trainer today"
        return [*told, "", *_wrapped("today", f"{none}: all of them need {missing}")]
    return [*told, "", *_portrait("today", found, runs), *_loses(best, runs), "", *command(asked, runs.case)]


def _portrait(title: str, found: Found, each: Prediction) -> Iterator[str]:
    yield from _wrapped(title, layout_words.line(each))
    speed = f"{each.tokens_per_s_per_device:,.0f} tokens/s per device"
    yield f"{_INDENT}{speed}, MFU {figures.percent(each.mfu)}, {layout_words.gib(each.peak.total)} GiB"
    for bound in bounds(found.space, each)[:_NUM_BOUNDS]:
        yield from _wrapped("", f"bound by {layout_words.bound(bound, _usable(found))}")


def _loses(best: Prediction, other: Prediction) -> list[str]:
    share = figures.percent(1 - best.time.total / other.time.total)
    return _wrapped("", f"{share} less than the best, most by {main_loss(best, other) or 'nothing'}")


def _why(found: Found, best: Prediction) -> Iterator[str]:
    """Yield for each knob the best layout with another value: what it loses, and by what most."""
    yield from _wrapped("why", "the best with another value of a knob, and what costs it most:")
    for knob, at in found.by_value.items():
        here = choice_of(best.case).value(knob)
        if knob == "dp" or (knob == "sequence_parallel" and best.case.layout.tp == 1):
            continue
        others = [it for value, it in at.items() if value != here and it is not None]
        unfit = [layout_words.value(value) for value, it in at.items() if it is None]
        name = f"{_INDENT}{layout_words.knob(knob, here):<{_KNOB_WIDTH}}"
        if others:
            second = min(others, key=lambda it: it.time.total)
            yield f"{name}{_instead(best, knob, second)}"
            name = " " * len(name)
        if unfit:
            yield f"{name}{', '.join(unfit)}: nothing fits"[:_WIDTH]


def _instead(best: Prediction, knob: str, second: Prediction) -> str:
    value = layout_words.value(choice_of(second.case).value(knob))
    loss, most = 1 - best.time.total / second.time.total, main_loss(best, second)
    if loss < _SAME or most is None:
        return f"{value}: as fast, in {layout_words.gib(second.peak.total)} GiB"
    return f"{value}: {figures.percent(-loss)}, {most}"


def _pareto(found: Found) -> list[str]:
    """Return what less memory costs, the fastest first: some points, evenly spread over the memory."""
    points = _spread(found.pareto)
    fastest = points[0].tokens_per_s
    rows = [
        (
            f"{layout_words.gib(it.peak.total)} GiB",
            figures.quantity(it.tokens_per_s_per_device),
            "█" * max(1, round(_BAR_WIDTH * it.tokens_per_s / fastest)),
        )
        for it in points
    ]
    told = [f"memory  what less of it costs, in tokens/s per device: {len(found.pareto)} layouts, of which"]
    for cells, it in zip(rows, points, strict=True):
        told.append(f"{cells[0]:>9}  {cells[1]:>6}  {cells[2]}")
        told += textwrap.wrap(
            layout_words.line(it), _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT
        )
    return told


def _spread(front: tuple[Prediction, ...]) -> list[Prediction]:
    if len(front) <= _NUM_POINTS:
        return list(front)
    most, least = front[0].peak.total, front[-1].peak.total
    wanted = [most + (least - most) * step / (_NUM_POINTS - 1) for step in range(_NUM_POINTS)]
    near = [min(front, key=lambda it, at=at: abs(it.peak.total - at)) for at in wanted]  # type: ignore[misc]
    return [it for it in front if any(it is each for each in near)]


def _nothing_fits(asked: SearchRequest, found: Found) -> list[str]:
    nearest = found.nearest
    assert nearest is not None, "a space with layouts has one that takes the least memory"
    peak = f"{layout_words.gib(nearest.peak.total)} of {layout_words.gib(_usable(found))} usable GiB"
    told = _wrapped("none", f"of these layouts fits. The nearest takes {peak}:")
    told += _wrapped("", layout_words.line(nearest))
    helping = remedies(asked.config, found.space)
    title = "helps"
    for overrides, peak_bytes, why in helping:
        told += _wrapped(title, f"{overrides}: {layout_words.gib(peak_bytes)} GiB, {why}")
        title = ""
    return told if helping else [*told, *_wrapped("helps", "a smaller model; nothing else that was tried")]


def _wrapped(title: str, text: str) -> list[str]:
    head = f"{title:<{len(_INDENT)}}"
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=_INDENT, break_on_hyphens=False)


def facts(asked: SearchRequest, found: Found) -> dict[str, Any]:
    """Return the same for programs: bytes, seconds, shares of 1."""
    base = found.space.base
    return {
        "model": base.model.name,
        "num_parameters": num_parameters(base.model),
        "num_active_parameters": num_active_parameters(base.model),
        "precision": base.precision.value,
        "framework": base.framework.name,
        "device": base.device.name,
        "num_devices": base.layout.world_size,
        "devices_per_node": base.devices_per_node,
        "usable_memory_bytes": round(_usable(found)),
        "seq_len": base.seq_len,
        "global_batch_size": asked.num_sequences,
        "num_layouts": found.num_layouts,
        "num_fitting": found.num_fitting,
        "layouts": [_facts(asked, found, it) for it in found.ranked],
        "runs_today": [_facts(asked, found, it) for it in found.chosen[:1]],
        "pareto": [_facts(asked, found, it) for it in found.pareto],
        "by_value": {
            knob: {layout_words.value(value): it and it.tokens_per_s_per_device for value, it in at.items()}
            for knob, at in found.by_value.items()
        },
        "nearest": found.nearest and layout_words.facts(found.nearest),
        "remedies": [
            {"override": overrides, "peak_memory_bytes": round(peak_bytes)}
            for overrides, peak_bytes, _ in ([] if found.ranked else remedies(asked.config, found.space))
        ],
    }


def _facts(asked: SearchRequest, found: Found, each: Prediction) -> dict[str, Any]:
    told: list[Bound] = bounds(found.space, each)
    return {
        **layout_words.facts(each),
        "runs_today": runs_today(each.case),
        "bound_by": [layout_words.bound_facts(it) for it in told],
        "overrides": overrides_of(asked, each.case),
    }


NAME = "search"
OPTIONS: tuple[str, ...] = ("top",)

_USUAL_TOP = 10

EXPLAINED = """\
--search tries every layout: dp, tp, sequence parallelism, pp, cp, ZeRO's stage over all ranks or those of one
node, micro-batch and accumulation (the global batch is met exactly), recomputation. A key of these that is
given as KEY=VALUE stays as it is; what a preset says of them does not count. It lists the best layout of each
mesh, what binds it, and what memory buys; for the best one, and for the best that orchestra's trainer can
run, the command to submit it.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add --search and what belongs to it."""
    parser.add_argument("--search", action="store_true", help="find the fastest layouts that fit")
    parser.add_argument("--top", type=int, metavar="N", help=f"how many to list (default: {_USUAL_TOP})")


def run(arguments: Namespace) -> int:
    """Print what was found and return 0, or 1 where nothing fits. Raises ConfigError for wrong overrides."""
    top = _USUAL_TOP if arguments.top is None else arguments.top
    if top < 1:
        raise ConfigError(f"--top {top}: expected 1 or more")
    asked = ask(arguments.overrides)
    profile = arguments.framework or "orchestra"
    space = space_of(asked.config, profile, asked.num_sequences, asked.fixed)
    found = search(space, top, runs_today)
    if not found.num_layouts:
        raise ConfigError(asked.broken or _no_layout(asked))
    if arguments.json:
        print(json.dumps(facts(asked, found), indent=2))
    else:
        print("\n".join(lines(asked, found)))
        for note in asked.notes:
            print(f"note: {note}", file=sys.stderr)
    return EXIT_DONE if found.num_fitting else EXIT_FAILED


def ask(typed: list[str]) -> SearchRequest:
    """Return the configuration to search layouts for, and which of its values stay as they are.

    Raises ConfigError with every problem that no layout would cure.
    """
    overrides = for_planning(typed)
    checked = check_overrides(overrides)
    if checked.problems:
        raise ConfigError(checked.problems)
    given = typed_config(merge(checked).values)
    config, broken = settled(given, checked, Situation("plan"))
    lasting = [*batch_said_twice(given, checked.keys), *_lasting(config, broken)]
    if lasting:
        raise ConfigError(lasting)
    size, notes = _num_sequences(given, config)
    return SearchRequest(config, tuple(overrides), tuple(typed), size, _fixed(config, checked), broken, notes)


def _lasting(config: Config, broken: list[str]) -> list[str]:
    """Return the problems that one device on its own has too: no layout cures them."""
    if not broken:
        return []
    # ZeRO's stage stays: one that does not exist is wrong for any layout.
    whole = replace(config.parallelism, dp="auto", tp=1, pp=1, cp=1, ep=1, sequence_parallel=False)
    whole = replace(whole, shard_degree=None, offload=Offload.none)
    alone = replace(
        config,
        cluster=replace(config.cluster, nodes=1, gpus_per_node=1),
        parallelism=whole,
        train=replace(config.train, micro_batch_size=None, recompute_every=1, recompute_budget_gib=None),
    )
    still = set(problems_of(alone, Situation("plan")))
    return [problem for problem in broken if problem in still]


def _num_sequences(given: Config, config: Config) -> tuple[int, list[str]]:
    """Return the sequences of a step, and a note where nobody said how many."""
    is_said = given.train.global_batch_size or given.train.global_batch_tokens
    free = replace(given.train, micro_batch_size=None)
    size = global_batch_size(free, world_size(config) or 1)
    keys = "train.global_batch_size or train.global_batch_tokens"
    return size, [] if is_said else [
        f"no global batch given, {size:,} sequences assumed; {keys} says how many"
    ]


def _fixed(config: Config, checked: Checked) -> Fixed:
    """Return what was given as KEY=VALUE."""
    keys = {**KEYS, "dp": "parallelism.dp"}
    said = {knob: attrgetter(key)(config) for knob, key in keys.items() if key in checked.keys}
    return Fixed(**{knob: value for knob, value in said.items() if value not in ("auto", None)})


def _no_layout(asked: SearchRequest) -> str:
    kept = {name: value for name, value in vars(asked.fixed).items() if value is not None}
    told = ", ".join(f"{name}={value}" for name, value in kept.items())
    ranks = asked.config.cluster.nodes * int(asked.config.cluster.gpus_per_node)
    return (
        f"no layout of {ranks:,} ranks shares out {asked.num_sequences:,} sequences"
        f"{f' with {told}' if told else ''}; give other values, or another train.global_batch_size"
    )
