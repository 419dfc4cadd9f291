"""`orchestra plan --explain [KEY] [overrides]`: why a layout is as it is, and what other values would do.

It explains the configuration as composed, whether it fits or not; the numbers come from the planner.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from orchestra.errors import EXIT_DONE, ConfigError

NAME = "explain"
OPTIONS: tuple[str, ...] = ()

_ALL = "all"

EXPLAINED = """\
--explain walks the decisions behind a configuration (fit a step in memory, reach the global batch, then
throughput), and tells for KEY, such as parallelism.tp or train.recompute, what each other value would do to
memory and speed: with all else as it is, and with all else chosen anew. Without KEY it tells all of them.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add --explain."""
    parser.add_argument(
        "--explain", nargs="?", const=_ALL, metavar="KEY", help="what each value of a key would do, and why"
    )


def run(arguments: Namespace) -> int:
    """Print the explanation and return 0. Raises ConfigError for a key that is none of them."""
    from orchestra.cli.planning import explain_view
    from orchestra.cli.planning.cpu import measure_if_needed
    from orchestra.config.compose import compose
    from orchestra.config.situation import Situation
    from orchestra.plan.cases.assemble import case_of, for_planning
    from orchestra.plan.layouts.explain import explain

    key, overrides = arguments.explain, list(arguments.overrides)
    if "=" in key:
        # `--explain model=llama3_8b`: an override, not a key.
        key, overrides = _ALL, [key, *overrides]
    knobs = _knobs(key)
    config = compose(for_planning(overrides), Situation("plan")).config
    measure_if_needed(config)
    told = explain(case_of(config, arguments.framework or "orchestra"))
    if arguments.json:
        print(json.dumps(explain_view.facts(told, knobs), indent=2))
    else:
        print("\n".join(explain_view.lines(told, knobs)))
    return EXIT_DONE


def _knobs(key: str) -> list[str]:
    from orchestra.config.keys import nearest
    from orchestra.plan.layouts.space import KEYS

    keys = {**KEYS, "dp": "parallelism.dp"}
    if key == _ALL:
        return list(KEYS)
    for knob, name in keys.items():
        if key in (knob, name):
            return [knob]
    meant = nearest(key, [*keys.values()])
    hint = f"did you mean {meant}? There are" if meant else "there are"
    raise ConfigError(f"--explain {key}: the planner turns no such key; {hint} {', '.join(keys.values())}")
