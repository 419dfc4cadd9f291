"""`orchestra plan --goodput [overrides]`: what failures cost, how often to save, how many spares pay.

It composes or reads a configuration, takes times from the prediction or from a run's records, and lets
`orchestra.plan.failures.goodput` reckon. It starts nothing.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from conf.schema import Config
    from orchestra.plan.failures.scenario import Scenario, Times

NAME = "goodput"
OPTIONS: tuple[str, ...] = ("like", "stall_s", "restart_s", "restore_s", "queue_s", "mix_seed")
# The times of a run that an option can say.
_GIVEN = {"stall_s": "a save's stall", "restart_s": "restart", "restore_s": "restore"}

EXPLAINED = """\
--goodput reckons with failures: how much of the wall time becomes work that lasts, over the steps between
saves, the spare nodes, and the devices. DALY is his formula; SIMULATED lets failures of Llama 3's mix befall
the run, and the recovery policy itself decide what follows. cluster.mtbf_device_hours says how often a device
fails. Times are predicted or assumed, those of --like RUN are measured: it takes a run's own records, and
without overrides its configuration.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add --goodput and what belongs to it."""
    parser.add_argument("--goodput", action="store_true", help="what failures cost, and how often to save")
    parser.add_argument("--like", metavar="RUN", help="take its measured times of steps, saves and starts")
    for name, what in _GIVEN.items():
        parser.add_argument(_option(name), type=float, metavar="S", help=f"seconds of {what}")
    parser.add_argument("--queue-s", type=float, metavar="S", help="mean wait in the queue (default: 600)")
    parser.add_argument("--mix-seed", type=int, metavar="N", help="which failures are drawn (default: 0)")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Asked:
    """What is reckoned with: the configuration, the times, and where each of them comes from."""

    config: Config
    scenario: Scenario
    # By the names of `Times`: predicted, assumed, given, or the run that was measured.
    sources: dict[str, str]
    seed: int


def run(arguments: Namespace) -> int:
    """Print what failures cost and return 0. Raises ConfigError for what cannot be reckoned with."""
    from orchestra.cli.planning import goodput_view

    found = goodput_view.reckoned(ask(arguments))
    if arguments.json:
        print(json.dumps(goodput_view.facts(found), indent=2))
    else:
        print("\n".join(goodput_view.lines(found)))
    return EXIT_DONE


def ask(arguments: Namespace) -> Asked:
    """Return what the options mean. Raises ConfigError for a run without records, or a time that is none."""
    from orchestra.plan.failures.goodput import scenario_of

    for name in (*_GIVEN, "queue_s"):
        value = getattr(arguments, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{_option(name)} {value}: expected seconds, 0 or more")
    config, times, sources = _of_run(arguments) if arguments.like else _planned(arguments)
    given = {name: getattr(arguments, name) for name in _GIVEN if getattr(arguments, name) is not None}
    times = replace(times, **given)
    scenario = scenario_of(config, times)
    if arguments.queue_s is not None:
        scenario = replace(scenario, queue_wait_s=arguments.queue_s)
    return Asked(config, scenario, {**sources, **dict.fromkeys(given, "given")}, arguments.mix_seed or 0)


def _planned(arguments: Namespace) -> tuple[Config, Times, dict[str, str]]:
    from orchestra.cli.planning.cpu import measure_if_needed
    from orchestra.config.compose import compose
    from orchestra.config.situation import Situation
    from orchestra.plan.cases.assemble import case_of, for_planning
    from orchestra.plan.failures.goodput import assumed_times
    from orchestra.plan.prediction import predict

    config = compose(for_planning(arguments.overrides), Situation("plan")).config
    measure_if_needed(config)
    case = case_of(config, arguments.framework or "orchestra")
    times = assumed_times(config, predict(case).time.total, case.layout.world_size)
    return config, times, {"step_s": "predicted"}


def _of_run(arguments: Namespace) -> tuple[Config, Times, dict[str, str]]:
    from orchestra.cli.resolve import resolve
    from orchestra.config.situation import world_size
    from orchestra.events import read_events
    from orchestra.frozen import read_config
    from orchestra.jsonl import read_json_lines
    from orchestra.plan.failures.goodput import assumed_times, measured

    run_dir = resolve(arguments.like, Path("runs"), takes_dir=False)
    known = measured(read_events(run_dir), read_json_lines(run_dir.metrics)).known
    if not known:
        raise ConfigError(
            f"--like {arguments.like}: {run_dir.path} has no attempt yet; give a run that trained"
        )
    if arguments.overrides:
        # Another model or layout: its own step time, the run's saves and starts.
        config, times, sources = _planned(arguments)
        known.pop("step_s", None)
    else:
        config, sources = read_config(run_dir.config), {}
        if "step_s" not in known:
            raise ConfigError(f"--like {arguments.like}: no step of {run_dir.name} is recorded yet")
        times = assumed_times(config, known["step_s"], world_size(config) or 1)
    return config, replace(times, **known), {**sources, **dict.fromkeys(known, f"measured in {run_dir.name}")}
