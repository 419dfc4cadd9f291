"""`orchestra plan --search [overrides]`: the layouts of a model on a cluster that fit, the fastest first.

It composes a configuration whose own layout need not be possible, hands it to the search, and says how to
submit what was found. It predicts nothing itself.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from conf.schema import Config
    from orchestra.cli.planning.layout_command import Asked
    from orchestra.config.overrides import Checked
    from orchestra.plan.layouts.space import Fixed

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
    from orchestra.cli.planning import search_view
    from orchestra.cli.planning.cpu import measure_if_needed
    from orchestra.cli.planning.layout_command import runs_today
    from orchestra.plan.layouts.search import search
    from orchestra.plan.layouts.space import space_of

    top = _USUAL_TOP if arguments.top is None else arguments.top
    if top < 1:
        raise ConfigError(f"--top {top}: expected 1 or more")
    asked = ask(arguments.overrides)
    measure_if_needed(asked.config)
    profile = arguments.framework or "orchestra"
    space = space_of(asked.config, profile, asked.num_sequences, asked.fixed)
    found = search(space, top, runs_today)
    if not found.num_layouts:
        raise ConfigError(asked.broken or _no_layout(asked))
    if arguments.json:
        print(json.dumps(search_view.facts(asked, found), indent=2))
    else:
        print("\n".join(search_view.lines(asked, found)))
        for note in asked.notes:
            print(f"note: {note}", file=sys.stderr)
    return EXIT_DONE if found.num_fitting else EXIT_FAILED


def ask(typed: list[str]) -> Asked:
    """Return the configuration to search layouts for, and which of its values stay as they are.

    Raises ConfigError with every problem that no layout would cure.
    """
    from orchestra.cli.planning.layout_command import Asked
    from orchestra.config.compose import batch_said_twice, merge, settled
    from orchestra.config.compose import typed as typed_config
    from orchestra.config.overrides import check_overrides
    from orchestra.config.situation import Situation
    from orchestra.plan.cases.assemble import for_planning

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
    return Asked(config, tuple(overrides), tuple(typed), size, _fixed(config, checked), broken, notes)


def _lasting(config: Config, broken: list[str]) -> list[str]:
    """Return the problems that one device on its own has too: no layout cures them."""
    from dataclasses import replace

    from conf.schema import Offload
    from orchestra.config.rules import problems_of
    from orchestra.config.situation import Situation

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
    from dataclasses import replace

    from orchestra.config.situation import world_size
    from orchestra.topology import global_batch_size

    is_said = given.train.global_batch_size or given.train.global_batch_tokens
    free = replace(given.train, micro_batch_size=None)
    size = global_batch_size(free, world_size(config) or 1)
    keys = "train.global_batch_size or train.global_batch_tokens"
    return size, [] if is_said else [
        f"no global batch given, {size:,} sequences assumed; {keys} says how many"
    ]


def _fixed(config: Config, checked: Checked) -> Fixed:
    """Return what was given as KEY=VALUE."""
    from operator import attrgetter

    from orchestra.plan.layouts.space import KEYS, Fixed

    keys = {**KEYS, "dp": "parallelism.dp"}
    said = {knob: attrgetter(key)(config) for knob, key in keys.items() if key in checked.keys}
    return Fixed(**{knob: value for knob, value in said.items() if value not in ("auto", None)})


def _no_layout(asked: Asked) -> str:
    kept = {name: value for name, value in vars(asked.fixed).items() if value is not None}
    told = ", ".join(f"{name}={value}" for name, value in kept.items())
    ranks = asked.config.cluster.nodes * int(asked.config.cluster.gpus_per_node)
    return (
        f"no layout of {ranks:,} ranks shares out {asked.num_sequences:,} sequences"
        f"{f' with {told}' if told else ''}; give other values, or another train.global_batch_size"
    )
