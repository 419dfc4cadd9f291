"""`orchestra plan --search [overrides]`: the layouts of a model on a cluster that fit, the fastest first.

Composes a configuration whose own layout need not be possible, searches, and prints the best layouts, why the
first one wins, what less memory costs, and the commands that submit them: for people at most 80 columns wide
(commands apart), for programs one JSON object.
"""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from conf.schema import Config, LauncherName
from orchestra.cli.plan import Mode, layout_words, print_result, with_network
from orchestra.cli.text import figures
from orchestra.config.compose import merge, said_twice, settled
from orchestra.config.compose import typed as typed_config
from orchestra.config.keys import shown
from orchestra.config.machine import Situation, world_size
from orchestra.config.overrides import Checked, check_overrides
from orchestra.config.rules.all_rules import problems_of
from orchestra.config.rules.mixture_rules import rule_expert_placement, rule_latent_attention
from orchestra.config.rules.place_rules import rule_ranks_per_node
from orchestra.config.rules.plugin_rules import rule_block, rule_loss, rule_optimizer
from orchestra.config.rules.recovery_rules import rule_replay
from orchestra.config.rules.shape_rules import rule_fp8, rule_in_pipeline, rule_noise_scale, rule_offload
from orchestra.config.rules.value_rules import rule_numbers, rule_sizes
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from orchestra.plan.assemble import for_planning
from orchestra.plan.case import PlanCase
from orchestra.plan.explain import bounds, main_loss
from orchestra.plan.frameworks import OWN
from orchestra.plan.predict import Prediction, predict
from orchestra.plan.search import SearchResult, remedies, search
from orchestra.plan.space import DP_KEY, KEYS, Fixed, choice_of, other_schedules, space_of
from orchestra.sizes.flops import num_active_parameters, num_parameters
from orchestra.sizes.pipeline_schedule import pipeline_shape, shape_problem
from orchestra.sizes.topology import global_batch_size
from orchestra.sizes.units import first_few

_INDENT = " " * 8
# Reasons given for a layout, and points of the curve of memory against speed.
_NUM_BOUNDS = 3
_NUM_POINTS = 8
_BAR_WIDTH = 24
_KNOB_WIDTH = 26
# Values named with which nothing fits.
_NUM_UNFIT = 5
# Shares below this are shown as none.
_SAME = 5e-4
_WIDER = "tp beyond a node and cp into short pieces too, since nothing fits otherwise"
# What depends on the layout and is nothing that the planner counts.
_OF_LAYOUTS = (
    *(rule_in_pipeline, rule_fp8, rule_optimizer, rule_block, rule_loss),
    *(rule_latent_attention, rule_expert_placement, rule_noise_scale, rule_replay),
)
# Values that are wrong by themselves.
_OF_VALUES = (rule_sizes, rule_numbers, rule_ranks_per_node)
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
_USUAL_TOP = 10

_EXPLAINED = """\
--search tries every layout: dp, tp, sequence parallelism, pp, cp, ZeRO's stage over all ranks or those of one
node, micro-batch and accumulation (the global batch is met exactly), recomputation. A key of these that is
given as KEY=VALUE stays as it is; what a preset says of them does not count. It lists the best layout of each
mesh, what binds it, and what memory buys; for the best one, and for the best that orchestra's trainer can
run, the command to submit it.
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--search", action="store_true", help="find the fastest layouts that fit")
    parser.add_argument("--top", type=int, metavar="N", help=f"how many to list (default: {_USUAL_TOP})")


def _run(arguments: Namespace) -> int:
    """Print what was found and return 0, or 1 where nothing fits. Raises ConfigError for wrong overrides."""
    top = _USUAL_TOP if arguments.top is None else arguments.top
    if top < 1:
        raise ConfigError(f"--top {top}: expected 1 or more")
    request = ask(arguments.overrides)
    space = space_of(request.config, arguments.framework or OWN, request.num_sequences, request.fixed)
    result = search(space, top, runs_today(request.config))
    if not result.num_layouts:
        raise ConfigError(request.broken or _no_layout(request))
    print_result(arguments, lambda: _facts(request, result), lambda: _lines(request, result))
    if request.is_batch_assumed and not arguments.json:
        assumed = f"no global batch given, {request.num_sequences:,} sequences assumed"
        keys = "train.global_batch_size or train.global_batch_tokens"
        print(f"note: {assumed}; {keys} says how many", file=sys.stderr)
    if request.left_out and not arguments.json:
        print(
            f"note: {' and '.join(request.left_out)} left out: a search takes stages and layers alike",
            file=sys.stderr,
        )
    return EXIT_DONE if result.num_fitting else EXIT_FAILED


# What a search takes as null, and each layer for.
_OF_ONE_LAYOUT = ("parallelism.stages", "train.recompute_every", "train.recompute_budget_gib")
MODE = Mode("search", _EXPLAINED, _add_arguments, _run, ("top",))


@dataclass(frozen=True)
class SearchRequest:
    """What a search was asked for: the configuration and the overrides that a command needs to compose it,
    the sequences of a step (`is_batch_assumed`: nobody said how many), what stays as it is, what is wrong
    with its own layout, and what of it no layout has.
    """

    config: Config
    overrides: tuple[str, ...]
    num_sequences: int
    is_batch_assumed: bool
    fixed: Fixed
    broken: list[str]
    left_out: tuple[str, ...] = ()

    @property
    def kept(self) -> dict[str, Any]:
        """The values that stay as they are, by the names of the knobs."""
        return {name: value for name, value in asdict(self.fixed).items() if value is not None}


def ask(typed: Sequence[str]) -> SearchRequest:
    """Return the configuration to search layouts for, and which of its values stay as they are.

    Raises ConfigError with every problem that no layout would cure.
    """
    overrides = for_planning(typed)
    checked = check_overrides(overrides)
    if checked.problems:
        raise ConfigError(checked.problems)
    given = typed_config(merge(checked)[0])
    config, broken = settled(given, checked, Situation("plan"))
    config = with_network(config, typed)
    fixed = _fixed(config, checked)
    lasting = [*said_twice(given, checked.keys), *_lasting(config, broken, checked)]
    if fixed.pp != 1 and not lasting:
        # A schedule is given and not searched.
        pipeline = replace(config.parallelism, pp=fixed.pp or 2)
        problem = shape_problem(pipeline.schedule, pipeline_shape(pipeline), pipeline.virtual_stages)
        lasting += [problem] if problem else []
    if lasting:
        raise ConfigError(lasting)
    free = replace(given.train, micro_batch_size=None)
    return SearchRequest(
        config=config,
        # What is trained on is up to whoever submits: planning alone needs none.
        overrides=tuple(each for each in overrides if each in typed or each != "data=stdlib"),
        num_sequences=global_batch_size(free, world_size(config) or 1),
        is_batch_assumed=not any(
            (given.train.global_batch_size, given.train.global_batch_tokens, given.train.batch_ramp)
        ),
        fixed=fixed,
        broken=broken,
        left_out=tuple(
            f"{key}={shown(value)}"
            for key in _OF_ONE_LAYOUT
            if key in checked.keys and (value := attrgetter(key)(given)) not in (None, 1)
        ),
    )


def _lasting(config: Config, broken: list[str], checked: Checked) -> list[str]:
    """Return the problems that no layout cures: values that mean nothing, and what is wrong on one device on
    its own and on two data-parallel ones with the smallest micro-batch.
    """
    if not broken:
        return []
    # ZeRO's stage stays: one that does not exist is wrong for any layout.
    whole = replace(config.parallelism, dp="auto", tp=1, pp=1, cp=1, ep=1, sequence_parallel=False)
    whole = replace(whole, shard_degree=None, virtual_stages=1, stages=None)
    alone = replace(
        config,
        cluster=replace(config.cluster, nodes=1, gpus_per_node=1),
        parallelism=whole,
        train=replace(config.train, micro_batch_size=None, recompute_every=1, recompute_budget_gib=None),
    )
    both = replace(
        alone,
        cluster=replace(alone.cluster, gpus_per_node=min(2, world_size(config) or 2)),
        parallelism=whole if KEYS["zero"] in checked.keys else replace(whole, zero=0),
        train=replace(alone.train, micro_batch_size=1),
    )
    # The ranks and the stage of ZeRO that offload=all needs are a layout's.
    of_layout = set(rule_offload(alone, Situation("plan")))
    still = set(problems_of(alone, Situation("plan"))) & set(problems_of(both, Situation("plan")))
    of_values = {problem for rule in _OF_VALUES for problem in rule(config, Situation("plan"))}
    return [problem for problem in broken if problem in (still - of_layout) | of_values]


def _fixed(config: Config, checked: Checked) -> Fixed:
    """Return what was given as KEY=VALUE."""
    keys = {**KEYS, "dp": DP_KEY}
    given = {knob: attrgetter(key)(config) for knob, key in keys.items() if key in checked.keys}
    return Fixed(**{knob: value for knob, value in given.items() if value not in ("auto", None)})


def _no_layout(request: SearchRequest) -> str:
    kept = ", ".join(f"{name}={layout_words.value(value)}" for name, value in request.kept.items())
    ranks = request.config.cluster.nodes * int(request.config.cluster.gpus_per_node)
    ramp = request.config.train.batch_ramp
    batches = "each batch of the ramp" if ramp else f"{request.num_sequences:,} sequences"
    return (
        f"no layout of {ranks:,} ranks shares out {batches}{f' with {kept}' if kept else ''}; give other "
        f"values, or another train.{'batch_ramp' if ramp else 'global_batch_size'}"
    )


def _lines(request: SearchRequest, result: SearchResult) -> list[str]:
    header = [*_header(request, result), ""]
    if not result.ranked:
        return [*header, *_nothing_fits(request, result)]
    return [*header, *_ranked(request, result), "", *_best(request, result), "", *_pareto(result)]


def _header(request: SearchRequest, result: SearchResult) -> list[str]:
    base = result.space.base
    device = base.device
    nodes = f"{base.num_nodes:,} node{'s' if base.num_nodes > 1 else ''}"
    usable = f"{layout_words.gib(device.usable_bytes)} of {layout_words.gib(device.memory_bytes)} GiB usable"
    kept = ", ".join(
        f"{name.replace('_', ' ')} {layout_words.value(value)}" for name, value in request.kept.items()
    )
    return [
        *layout_words.model_lines(base.model, base.precision),
        *layout_words.batch(request.config.train, request.num_sequences),
        f"device  {base.layout.world_size:,} × {device.name} on {nodes}, {usable}",
        f"search  {result.num_layouts:,} layouts, {result.num_fitting:,} fit; profile {base.framework.name}",
        *(_wrapped("kept", f"as given: {kept}") if kept else []),
        *(_wrapped("", _WIDER) if result.space.wide else []),
    ]


def _ranked(request: SearchRequest, result: SearchResult) -> list[str]:
    best_s = result.ranked[0].time.total
    rows, runs = [], runs_today(request.config)
    for layout in result.ranked:
        slower, binding = best_s / layout.time.total - 1, bounds(result.space, layout)[0].name
        mark = "*" if runs(layout.case) else ""
        share = "-" if abs(slower) < _SAME else f"{100 * slower:.1f}%"
        rows.append((mark, *layout_words.row(layout), share, _SHORT.get(binding, binding)))
    lines = layout_words.table(("", *layout_words.HEADER, "vs best", "bound by"), rows)
    is_marked = any(mark for mark, *_ in rows)
    return [*lines, "* runs on orchestra's trainer today"] if is_marked else lines


def _best(request: SearchRequest, result: SearchResult) -> list[str]:
    best = result.ranked[0]
    runs = result.chosen[0] if result.chosen else None
    lines = [*_portrait("best", result, best), *_why(result, best), ""]
    if runs is not None and choice_of(runs.case) == choice_of(best.case):
        return [*lines, *command(request, best.case)]
    lines.append("# orchestra's trainer cannot run this one yet; in full:")
    lines += [*command(request, best.case, "plan"), ""]
    if runs is None:
        none = "no layout that fits runs on orchestra's trainer today; of the best one it says:"
        return [*lines, *_wrapped("today", " ".join([none, *refused_today(request.config, best.case)]))]
    share = figures.percent(1 - best.time.total / runs.time.total)
    loss = f"{share} less than the best, most by {main_loss(best, runs) or 'nothing'}"
    lines += [*_portrait("today", result, runs), *_wrapped("", loss), ""]
    return [*lines, *command(request, runs.case)]


def _portrait(title: str, result: SearchResult, layout: Prediction) -> Iterator[str]:
    yield from _wrapped(title, layout_words.line(layout))
    speed = f"{layout.tokens_per_s_per_device:,.0f} tokens/s per device"
    yield f"{_INDENT}{speed}, MFU {figures.percent(layout.mfu)}, {layout_words.gib(layout.peak.total)} GiB"
    for routing in layout_words.routing(layout):
        yield from _wrapped("", routing)
    usable_bytes = layout.case.device.usable_bytes
    for bound in bounds(result.space, layout)[:_NUM_BOUNDS]:
        yield from _wrapped("", f"bound by {layout_words.bound(bound, usable_bytes)}")
    for other in _better_schedules(layout):
        words = " ".join(f"{key}={value}" for key, value in layout_words.schedule_keys(other.case).items())
        gain = figures.percent(other.tokens_per_s / layout.tokens_per_s - 1)
        yield from _wrapped("", f"with {words} {gain} faster, in {layout_words.gib(other.peak.total)} GiB")


def _better_schedules(layout: Prediction) -> list[Prediction]:
    """Return the same layout with other schedules that fit and are faster, the fastest first."""
    others = [other for other in map(predict, other_schedules(layout.case)) if other.fits]
    faster = [other for other in others if other.time.total < layout.time.total * (1 - _SAME)]
    return sorted(faster, key=lambda other: other.time.total)


def _why(result: SearchResult, best: Prediction) -> Iterator[str]:
    """Yield for each knob the best layout with another value: what it loses, and by what most."""
    yield from _wrapped("why", "the best with another value of a knob, and what costs it most:")
    for knob, best_with in result.by_value.items():
        here = choice_of(best.case).value(knob)
        if knob == "dp" or (knob == "sequence_parallel" and best.case.layout.tp == 1):
            continue
        others = [layout for value, layout in best_with.items() if value != here and layout is not None]
        unfit = [layout_words.value(value) for value, layout in best_with.items() if layout is None]
        name = f"{_INDENT}{layout_words.knob(knob, here):<{_KNOB_WIDTH}}"
        if others:
            second = min(others, key=lambda layout: layout.time.total)
            yield f"{name}{_instead(best, knob, second)}"
            name = " " * len(name)
        if unfit:
            yield f"{name}{first_few(unfit, _NUM_UNFIT)}: nothing fits"


def _instead(best: Prediction, knob: str, second: Prediction) -> str:
    value = layout_words.value_in(second, knob)
    loss, most = 1 - best.time.total / second.time.total, main_loss(best, second)
    if loss < _SAME or most is None:
        return f"{value}: as fast, in {layout_words.gib(second.peak.total)} GiB"
    return f"{value}: {figures.percent(-loss)}, {most}"


def _pareto(result: SearchResult) -> list[str]:
    """Return what less memory costs, the fastest first: some points, evenly spread over the memory."""
    points = _spread(result.pareto)
    fastest = points[0].tokens_per_s
    lines = [f"memory  what less of it costs, in tokens/s per device: {len(result.pareto)} layouts, of which"]
    for point in points:
        peak = f"{layout_words.gib(point.peak.total)} GiB"
        bar = "█" * max(1, round(_BAR_WIDTH * point.tokens_per_s / fastest))
        lines.append(f"{peak:>9}  {figures.quantity(point.tokens_per_s_per_device):>6}  {bar}")
        lines += _wrapped("", layout_words.line(point))
    return lines


def _spread(front: tuple[Prediction, ...]) -> list[Prediction]:
    if len(front) <= _NUM_POINTS:
        return list(front)
    most, least = front[0].peak.total, front[-1].peak.total
    nearest = set()
    for step in range(_NUM_POINTS):
        wanted = most + (least - most) * step / (_NUM_POINTS - 1)
        distance = [abs(point.peak.total - wanted) for point in front]
        nearest.add(distance.index(min(distance)))
    return [front[place] for place in sorted(nearest)]


def _nothing_fits(request: SearchRequest, result: SearchResult) -> list[str]:
    nearest = result.nearest
    assert nearest is not None, "a space with layouts has one that takes the least memory"
    peak = layout_words.of_usable(nearest, nearest.case.device.usable_bytes)
    lines = _wrapped("none", f"of these layouts fits. The nearest takes {peak}:")
    lines += _wrapped("", layout_words.line(nearest))
    helping = [
        f"{overrides}: {layout_words.gib(peak_bytes)} GiB, {why}"
        for overrides, peak_bytes, why in remedies(request.config, result.space)
    ] or ["a smaller model; nothing else that was tried"]
    for number, text in enumerate(helping):
        lines += _wrapped("" if number else "helps", text)
    return lines


def _wrapped(title: str, text: str) -> list[str]:
    return figures.wrapped(text, f"{title:<{len(_INDENT)}}", _INDENT)


def _facts(request: SearchRequest, result: SearchResult) -> dict[str, Any]:
    """Return the same for programs: bytes, seconds, shares of 1."""
    base = result.space.base
    helping = [] if result.ranked else remedies(request.config, result.space)
    return {
        "model": base.model.name,
        "num_parameters": num_parameters(base.model),
        "num_active_parameters": num_active_parameters(base.model),
        "precision": base.precision.value,
        "framework": base.framework.name,
        "device": base.device.name,
        "num_devices": base.layout.world_size,
        "devices_per_node": base.devices_per_node,
        "usable_memory_bytes": round(base.device.usable_bytes),
        "seq_len": base.seq_len,
        "global_batch_size": request.num_sequences,
        "num_layouts": result.num_layouts,
        "num_fitting": result.num_fitting,
        "layouts": [_layout_facts(request, result, layout) for layout in result.ranked],
        "runs_today": [_layout_facts(request, result, layout) for layout in result.chosen[:1]],
        "better_schedules": _schedule_facts(result.ranked[0]) if result.ranked else [],
        "pareto": [_layout_facts(request, result, layout) for layout in result.pareto],
        "by_value": {
            knob: {
                layout_words.value(value): layout and layout.tokens_per_s_per_device
                for value, layout in best_with.items()
            }
            for knob, best_with in result.by_value.items()
        },
        "nearest": result.nearest and layout_words.facts(result.nearest),
        "remedies": [
            {"override": overrides, "peak_memory_bytes": round(peak_bytes)}
            for overrides, peak_bytes, _ in helping
        ],
    }


def _layout_facts(request: SearchRequest, result: SearchResult, layout: Prediction) -> dict[str, Any]:
    return {
        **layout_words.facts(layout),
        "runs_today": not refused_today(request.config, layout.case),
        "bound_by": [layout_words.bound_facts(bound) for bound in bounds(result.space, layout)],
        "overrides": overrides_of(request, layout.case),
    }


def _schedule_facts(best: Prediction) -> list[dict[str, Any]]:
    return [
        {**layout_words.schedule_keys(other.case), **layout_words.facts(other)}
        for other in _better_schedules(best)
    ]


# From a layout to the overrides that say it and the command that submits it.


def refused_today(config: Config, case: PlanCase) -> list[str]:
    """Return why orchestra's trainer does not run a layout of a configuration; nothing where it does.

    Asked are the rules of what the planner does not know: where plug-ins may not be cut, what
    pipelines lack, which sizes fp8 takes.
    """
    choice = choice_of(case)
    degrees = {axis: degree for axis, degree in choice.mesh._asdict().items() if axis != "dp"}
    split = choice.sequence_parallel
    parallelism = replace(config.parallelism, **degrees, dp="auto", zero=choice.zero, sequence_parallel=split)
    # What `overrides_of` leaves out.
    train = replace(config.train, micro_batch_size=choice.micro_batch_size, recompute_budget_gib=None)
    if train.global_batch_tokens is None and not train.batch_ramp:
        train = replace(train, global_batch_size=case.tokens_per_step // case.seq_len)
    laid_out = replace(config, parallelism=parallelism, train=train)
    return [problem for rule in _OF_LAYOUTS for problem in rule(laid_out, Situation("plan"))]


def runs_today(config: Config) -> Callable[[PlanCase], bool]:
    """Return what tells whether orchestra's trainer runs a layout of a configuration; see `refused_today`."""
    known: dict[object, bool] = {}

    def runs(case: PlanCase) -> bool:
        choice = choice_of(case)
        # All that the rules look at: thousands of layouts share a few hundred of these.
        looked_at = (choice.mesh, choice.zero, choice.micro_batch_size, choice.sequence_parallel)
        if looked_at not in known:
            known[looked_at] = not refused_today(config, case)
        return known[looked_at]

    return runs


def overrides_of(request: SearchRequest, case: PlanCase) -> list[str]:
    """Return the overrides that turn the configuration into a layout: those in which it differs."""
    config, choice = request.config, choice_of(case)
    wanted: dict[str, Any] = {key: choice.value(knob) for knob, key in KEYS.items()}
    if config.parallelism.dp not in ("auto", case.layout.dp):
        wanted[DP_KEY] = "auto"
    if case.layout.pp == 1:
        wanted["parallelism.virtual_stages"] = 1
    wanted["parallelism.stages"] = None
    wanted["train.recompute_every"] = 1
    wanted["train.recompute_budget_gib"] = None
    if config.train.global_batch_tokens is None:
        wanted["train.global_batch_size"] = request.num_sequences
    # A batch that was assumed is another one for other degrees.
    always = {KEYS["micro_batch_size"], *(["train.global_batch_size"] if request.is_batch_assumed else [])}
    return [
        f"{key}={shown(value)}"
        for key, value in wanted.items()
        if key in always or attrgetter(key)(config) != value
    ]


def command(request: SearchRequest, case: PlanCase, verb: str | None = None) -> list[str]:
    """Return the command for a layout as lines for a shell, at most 80 columns wide where words allow.

    Without a verb it is the one that trains: `submit`, on this machine `run`.
    """
    trains = "run" if request.config.cluster.launcher is LauncherName.local else "submit"
    ours = overrides_of(request, case)
    replaced = {each.partition("=")[0] for each in ours}
    kept = [each for each in request.overrides if each.partition("=")[0].lstrip("+") not in replaced]
    lines = ["orchestra"]
    for word in [verb or trains, *map(shlex.quote, [*kept, *ours])]:
        # Each line but the last ends in a backslash.
        if len(lines[-1]) + len(word) + 3 > figures.WIDTH:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return lines
