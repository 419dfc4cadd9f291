"""`orchestra plan --goodput [overrides]`: what failures cost, how often to save, how many spares pay.

Composes or reads a configuration, takes times from the prediction or from a run's records, and prints what
`orchestra.plan.goodput.expected_goodput` computes. `summary` is the line of a plain `orchestra plan`.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from conf.schema import Config
from orchestra.cli.plan import Mode, case_for, configuration, option_of, print_result
from orchestra.cli.text import figures
from orchestra.cli.text.resolve import resolve
from orchestra.config.home import run_folder
from orchestra.config.machine import world_size
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.plan.goodput.expected_goodput import (
    ATTENDED_AFTER_S,
    GoodputStudy,
    Point,
    assumed_times,
    best_of,
    expected,
    interval_of,
    measured,
    scenario_of,
    study,
)
from orchestra.plan.goodput.scenario import Scenario, Times
from orchestra.plan.goodput.simulator import SimulatedRun
from orchestra.plan.predict import Prediction, predict
from orchestra.recovery.policy import Action, Rules
from orchestra.run.config_file import read_config
from orchestra.run.events import read_events
from orchestra.run.files import read_json_lines
from orchestra.sizes import save_interval

_INDENT = " " * 10
_SIZES = (16, 128, 1_024, 16_384, 131_072)
_TIMES = {
    "step_s": "a step",
    "stall_s": "a save's stall",
    "write_s": "its writing",
    "restart_s": "a restart",
    "restore_s": "a restore",
}


# The times of a run that an option can say.
_GIVEN = {"stall_s": "a save's stall", "restart_s": "restart", "restore_s": "restore"}

_EXPLAINED = """\
--goodput takes failures into account: how much of the wall time becomes work that lasts, over the steps
between saves, the spare nodes, and the devices. DALY is his formula; SIMULATED draws failures of Llama 3's
mix, and the recovery policy itself decides what follows. cluster.mtbf_device_hours says how often a device
fails. Times are predicted or assumed, those of --like RUN are measured: it takes a run's own records, and
without overrides its configuration.
"""


@dataclass(frozen=True)
class GoodputRequest:
    """What is simulated: the configuration, the times, and where each of them comes from."""

    config: Config
    scenario: Scenario
    # By the names of `Times`: predicted, assumed, given, or the run that was measured.
    sources: dict[str, str]


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--goodput", action="store_true", help="what failures cost, and how often to save")
    parser.add_argument("--like", metavar="RUN", help="take its measured times of steps, saves and starts")
    for name, what in _GIVEN.items():
        parser.add_argument(option_of(name), type=float, metavar="S", help=f"seconds of {what}")
    parser.add_argument("--queue-s", type=float, metavar="S", help="mean wait in the queue (default: 600)")
    parser.add_argument("--mix-seed", type=int, metavar="N", help="which failures are drawn (default: 0)")


def _run(arguments: Namespace) -> int:
    """Print what failures cost and return 0. Raises ConfigError for times or runs that cannot be used."""
    request = _ask(arguments)
    rules = Rules.of(request.config.recovery)
    result = study(request.scenario, rules, _SIZES, arguments.mix_seed or 0)
    print_result(arguments, lambda: _facts(request, result), lambda: _lines(request, result))
    return EXIT_DONE


MODE = Mode(
    "goodput",
    _EXPLAINED,
    _add_arguments,
    _run,
    ("like", "stall_s", "restart_s", "restore_s", "queue_s", "mix_seed"),
)


def _ask(arguments: Namespace) -> GoodputRequest:
    """Return what the options mean. Raises ConfigError for a run without records, or a time that is none."""
    for name in (*_GIVEN, "queue_s"):
        value = getattr(arguments, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{option_of(name)} {value}: expected seconds, 0 or more")
    config, times, sources = _of_run(arguments) if arguments.like else _planned(arguments)
    given = {name: getattr(arguments, name) for name in _GIVEN if getattr(arguments, name) is not None}
    times = replace(times, **given)
    scenario = scenario_of(config, times)
    if arguments.queue_s is not None:
        scenario = replace(scenario, queue_wait_s=arguments.queue_s)
    assumed = dict.fromkeys(_TIMES, "assumed")
    return GoodputRequest(config, scenario, {**assumed, **sources, **dict.fromkeys(given, "given")})


def _planned(arguments: Namespace) -> tuple[Config, Times, dict[str, str]]:
    config = configuration(arguments.overrides)
    times = _assumed_times(config, predict(case_for(config, arguments)))
    return config, times, {"step_s": "predicted"}


def _of_run(arguments: Namespace) -> tuple[Config, Times, dict[str, str]]:
    run_dir = resolve(arguments.like, run_folder(), takes_dir=False)
    known = measured(read_events(run_dir), read_json_lines(run_dir.metrics))
    if not known:
        raise ConfigError(
            f"--like {arguments.like}: {run_dir.path} has no attempt yet; give a run that trained"
        )
    if arguments.typed:
        # Another model or layout: its own step time, the run's saves and starts.
        config, times, sources = _planned(arguments)
        known.pop("step_s", None)
    else:
        config, sources = read_config(run_dir.config), {}
        if "step_s" not in known:
            raise ConfigError(f"--like {arguments.like}: no step of {run_dir.name} is recorded yet")
        times = assumed_times(config, known["step_s"], world_size(config) or 1)
    return config, replace(times, **known), {**sources, **dict.fromkeys(known, f"measured in {run_dir.name}")}


def _lines(request: GoodputRequest, result: GoodputStudy) -> list[str]:
    scenario = request.scenario
    return [
        *_header(request),
        "",
        *_accounts(result.run),
        "",
        *_save(scenario, result),
        _interval_table(result.intervals, scenario.every_steps),
        "",
        *_spare(scenario, result),
        _spare_table(result.spares, scenario.spare_nodes),
        "",
        "the same step, saves and starts on other numbers of devices, each with its best",
        "interval:",
        _device_table(result.devices, scenario),
        *_notes(request.config, result),
    ]


def _header(request: GoodputRequest) -> list[str]:
    scenario, config = request.scenario, request.config
    nodes = f"{scenario.num_nodes:,} node{'s' if scenario.num_nodes > 1 else ''}"
    spare = f" and {scenario.spare_nodes} spare" if scenario.spare_nodes else ""
    hours = scenario.mtbf_device_hours
    shown = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    whose = "as Llama 3 had it" if config.cluster.mtbf_device_hours is None else "given"
    rows = [
        f"run       {config.model.name} on {scenario.num_devices:,} devices, {nodes}{spare}",
        f"failures  every {figures.duration(scenario.mttf_s)} (a device: {shown} h, {whose})",
    ]
    for name, words in _TIMES.items():
        title = "times" if name == "step_s" else ""
        seconds = getattr(scenario.times, name)
        time = f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"
        rows.append(f"{title:<10}{words:<15} {time:>9}  {request.sources[name]}")
    return [line for row in rows for line in figures.wrapped(row, indent=_INDENT)]


def _accounts(run: SimulatedRun) -> list[str]:
    accounts = run.accounts
    shares = {
        "lost": accounts.lost_s,
        "saving": accounts.checkpoint_s,
        "restarts": accounts.restart_s,
        "restores": accounts.restore_s,
        "queue": accounts.queue_s,
        "idle": accounts.idle_s,
    }
    words = [f"{name} {figures.percent(part / accounts.wall_s)}" for name, part in shares.items() if part]
    over = f"{run.num_failures:,} failures in {figures.duration(run.scenario.horizon_s)}"
    return [
        f"goodput   {figures.percent(run.goodput)}, simulated over {over}",
        *figures.wrapped(", ".join(words), _INDENT, _INDENT),
    ]


def _save(scenario: Scenario, result: GoodputStudy) -> list[str]:
    step_s = scenario.times.step_s
    best = best_of(result.intervals)
    young, daly = (
        f"{name} {figures.duration(seconds)}, {max(1, round(seconds / step_s)):,} steps"
        for name, seconds in (("Young", result.young_s), ("Daly", result.daly_s))
    )
    return figures.wrapped(f"save every: {young}; {daly}; simulated {best.value:,}", indent=" " * 12)


def _spare(scenario: Scenario, result: GoodputStudy) -> list[str]:
    best = best_of(result.spares)
    waits = f"a job waits {figures.duration(scenario.queue_wait_s)} in the queue"
    text = f"spares that pay: {best.value} (work per allocated device; {waits})"
    return figures.wrapped(text, indent=" " * 17)


def _interval_table(points: Sequence[Point], chosen: int) -> str:
    best = best_of(points)
    rows = [
        (
            figures.duration(point.seconds) if point.seconds >= 1 else f"{1000 * point.seconds:.0f} ms",
            f"{point.value:,}",
            figures.percent(point.closed),
            figures.percent(point.simulated),
            _mark(point, best, chosen),
        )
        for point in points
    ]
    return figures.table(("SAVE EVERY", "STEPS", "DALY", "SIMULATED", ""), rows)


def _spare_table(points: Sequence[Point], chosen: int) -> str:
    best = best_of(points)
    rows = [
        (
            str(point.value),
            figures.percent(point.simulated),
            figures.percent(point.per_device),
            _mark(point, best, chosen),
        )
        for point in points
    ]
    return figures.table(("SPARES", "GOODPUT", "PER DEVICE", ""), rows)


def _mark(point: Point, best: Point, chosen: int) -> str:
    marks = [_gives_up(point)] if point.num_given_up else []
    marks += ["best"] if point is best else []
    marks += ["yours"] if point.value == chosen else []
    return ", ".join(marks)


def _gives_up(point: Point) -> str:
    return f"gives up {point.num_given_up}×" if point.num_given_up else ""


def _device_table(points: Sequence[Point], scenario: Scenario) -> str:
    rows = [
        (
            f"{point.value:,}",
            figures.duration(save_interval.mttf_s(point.value, scenario.mtbf_device_hours)),
            figures.duration(point.seconds),
            figures.percent(point.closed),
            figures.percent(point.simulated),
            _gives_up(point),
        )
        for point in points
    ]
    return figures.table(("DEVICES", "FAILURE EVERY", "SAVE EVERY", "DALY", "SIMULATED", ""), rows)


def _notes(config: Config, result: GoodputStudy) -> list[str]:
    points = [*result.intervals, *result.spares, *result.devices]
    if not any(point.num_given_up for point in points):
        return []
    later = figures.age(ATTENDED_AFTER_S)
    return [
        "",
        f"gives up: so often the policy ended it, and a person went on {later} later;",
        f"          so many failures take more than recovery.max_restarts={config.recovery.max_restarts}",
    ]


def _facts(request: GoodputRequest, result: GoodputStudy) -> dict[str, Any]:
    """Return the same for programs: seconds, shares of 1."""
    scenario, run = request.scenario, result.run
    return {
        "model": request.config.model.name,
        "num_devices": scenario.num_devices,
        "num_nodes": scenario.num_nodes,
        "spare_nodes": scenario.spare_nodes,
        "mtbf_device_hours": scenario.mtbf_device_hours,
        "mttf_s": scenario.mttf_s,
        "times": asdict(scenario.times),
        "sources": {name: request.sources[name] for name in _TIMES},
        "every_steps": scenario.every_steps,
        "young_s": result.young_s,
        "daly_s": result.daly_s,
        "goodput": run.goodput,
        "goodput_daly": expected(scenario),
        "num_failures": run.num_failures,
        "failures": dict(run.failures),
        "actions": dict(run.actions),
        "rules": dict(run.rules),
        "num_given_up": run.actions[Action.give_up.name],
        "accounts": run.accounts.to_json(),
        "intervals": [asdict(point) for point in result.intervals],
        "best_every_steps": best_of(result.intervals).value,
        "spares": [asdict(point) for point in result.spares],
        "best_spare_nodes": best_of(result.spares).value,
        "devices": [asdict(point) for point in result.devices],
    }


def summary(config: Config, prediction: Prediction) -> str:
    """Return the line of a plain `orchestra plan`: goodput by Daly's formula, and the interval."""
    scenario = scenario_of(config, _assumed_times(config, prediction))
    mttf = figures.duration(scenario.mttf_s)
    if config.checkpoint.every_steps is None:
        return f"goodput nothing is saved, and a failure is due every {mttf}"
    every = f"{scenario.every_steps:,}"
    auto = " (auto)" if config.checkpoint.every_steps == save_interval.AUTO else ""
    best = interval_of(config, scenario.times).every_steps
    is_near = 0.5 <= scenario.every_steps / best <= 2 or scenario.every_steps >= config.train.steps
    advice = "" if auto or is_near else f" (best {best:,})"
    share = figures.percent(expected(scenario))
    saves = f"a save every {every} steps{auto}{advice}"
    return f"goodput {share}, a failure every {mttf}; {saves}; by Daly's formula"


def summary_facts(config: Config, prediction: Prediction) -> dict[str, Any]:
    """Return the same for programs."""
    scenario = scenario_of(config, _assumed_times(config, prediction))
    return {
        "mttf_s": scenario.mttf_s if math.isfinite(scenario.mttf_s) else None,
        "goodput": None if config.checkpoint.every_steps is None else expected(scenario),
        "every_steps": None if config.checkpoint.every_steps is None else scenario.every_steps,
        "best_interval": interval_of(config, scenario.times).to_json(),
    }


def _assumed_times(config: Config, prediction: Prediction) -> Times:
    return assumed_times(config, prediction.time.total, prediction.case.layout.world_size)
