"""What failures cost, as lines for people and as facts for programs. It composes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from conf.schema import Config
from orchestra import save_interval
from orchestra.cli import figures
from orchestra.cli.planning.goodput import Asked
from orchestra.plan.failures.goodput import (
    ATTENDED_AFTER_S,
    Point,
    assumed_times,
    best_of,
    by_devices,
    by_interval,
    by_spares,
    expected,
    interval_of,
    scenario_of,
)
from orchestra.plan.failures.scenario import Scenario
from orchestra.plan.failures.simulator import Result, simulate
from orchestra.plan.prediction import Prediction
from orchestra.recovery.policy import Action, Rules

_WIDTH = 80
_SIZES = (16, 128, 1_024, 16_384, 131_072)
_TIMES = {
    "step_s": "a step",
    "stall_s": "a save's stall",
    "write_s": "its writing",
    "restart_s": "a restart",
    "restore_s": "a restore",
}


@dataclass(frozen=True)
class Reckoned:
    """What was asked, and what came of it."""

    asked: Asked
    result: Result
    intervals: list[Point]
    spares: list[Point]
    devices: list[Point]
    young_s: float
    daly_s: float


def reckoned(asked: Asked) -> Reckoned:
    """Simulate the run as it is asked about, and over intervals, spares and devices."""
    scenario, rules, seed = asked.scenario, Rules.of(asked.config.recovery), asked.seed
    stall_s, mttf = scenario.times.stall_s, scenario.mttf_s
    return Reckoned(
        asked=asked,
        result=simulate(scenario, seed, rules),
        intervals=by_interval(scenario, rules, seed),
        spares=by_spares(scenario, rules, seed),
        devices=by_devices(scenario, rules, _SIZES, seed),
        young_s=save_interval.young_s(stall_s, mttf),
        daly_s=save_interval.daly_s(stall_s, mttf),
    )


def lines(found: Reckoned) -> list[str]:
    """Return what a person reads, at most 80 columns wide."""
    scenario, result = found.asked.scenario, found.result
    return [
        *_header(found),
        "",
        *_accounts(result),
        "",
        *_save(found),
        _table("SAVE EVERY", "STEPS", found.intervals, scenario.every_steps),
        "",
        *_spare(found),
        _spare_table(found.spares, scenario.spare_nodes),
        "",
        "the same step, saves and starts on other numbers of devices, each with its best",
        "interval:",
        _device_table(found.devices, scenario),
        *_notes(found),
    ]


def _header(found: Reckoned) -> list[str]:
    scenario, config = found.asked.scenario, found.asked.config
    nodes = f"{scenario.num_nodes:,} node{'s' if scenario.num_nodes > 1 else ''}"
    spare = f" and {scenario.spare_nodes} spare" if scenario.spare_nodes else ""
    hours = scenario.mtbf_device_hours
    told = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    whose = "as Llama 3 had it" if config.cluster.mtbf_device_hours is None else "given"
    rows = [
        f"run       {config.model.name} on {scenario.num_devices:,} devices, {nodes}{spare}",
        f"failures  every {figures.duration(scenario.mttf_s)} (a device: {told} h, {whose})",
    ]
    for name, words in _TIMES.items():
        source = found.asked.sources.get(name, "assumed")
        title = "times" if name == "step_s" else ""
        rows.append(f"{title:<10}{words:<15} {_seconds(getattr(scenario.times, name)):>9}  {source}")
    indent = " " * 10
    return [
        part for row in rows for part in wrap(row, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    ]


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"


def _accounts(result: Result) -> list[str]:
    accounts = result.accounts
    shares = {
        "lost": accounts.lost_s,
        "saving": accounts.checkpoint_s,
        "restarts": accounts.restart_s,
        "restores": accounts.restore_s,
        "queue": accounts.queue_s,
        "idle": accounts.idle_s,
    }
    told = ", ".join(
        f"{name} {figures.percent(part / accounts.wall_s)}" for name, part in shares.items() if part
    )
    over = f"{result.num_failures:,} failures in {figures.duration(result.scenario.horizon_s)}"
    indent = " " * 10
    return [
        f"goodput   {figures.percent(result.goodput)}, simulated over {over}",
        *wrap(told, _WIDTH, initial_indent=indent, subsequent_indent=indent),
    ]


def _save(found: Reckoned) -> list[str]:
    step_s = found.asked.scenario.times.step_s
    best = best_of(found.intervals)
    young, daly = (
        f"{name} {figures.duration(seconds)}, {max(1, round(seconds / step_s)):,} steps"
        for name, seconds in (("Young", found.young_s), ("Daly", found.daly_s))
    )
    told = f"save every: {young}; {daly}; simulated {best.value:,}"
    return wrap(told, _WIDTH, subsequent_indent=" " * 12)


def _spare(found: Reckoned) -> list[str]:
    best = best_of(found.spares)
    waits = f"a job waits {figures.duration(found.asked.scenario.queue_wait_s)} in the queue"
    told = f"spares that pay: {best.value} (work per allocated device; {waits})"
    return wrap(told, _WIDTH, subsequent_indent=" " * 17)


def _table(title: str, unit: str, points: Sequence[Point], chosen: int) -> str:
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
    return figures.table((title, unit, "DALY", "SIMULATED", ""), rows)


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


def _notes(found: Reckoned) -> list[str]:
    points = [*found.intervals, *found.spares, *found.devices]
    if not any(point.num_given_up for point in points):
        return []
    restarts = found.asked.config.recovery.max_restarts
    return [
        "",
        f"gives up: so often the policy ended it, and a person went on {_waited()} later;",
        f"          so many failures take more than recovery.max_restarts={restarts}",
    ]


def _waited() -> str:
    return figures.age(ATTENDED_AFTER_S)


def facts(found: Reckoned) -> dict[str, Any]:
    """Return the same for programs: seconds, shares of 1."""
    scenario, result = found.asked.scenario, found.result
    return {
        "model": found.asked.config.model.name,
        "num_devices": scenario.num_devices,
        "num_nodes": scenario.num_nodes,
        "spare_nodes": scenario.spare_nodes,
        "mtbf_device_hours": scenario.mtbf_device_hours,
        "mttf_s": scenario.mttf_s,
        "times": asdict(scenario.times),
        "sources": {name: found.asked.sources.get(name, "assumed") for name in _TIMES},
        "every_steps": scenario.every_steps,
        "young_s": found.young_s,
        "daly_s": found.daly_s,
        "goodput": result.goodput,
        "goodput_daly": expected(scenario),
        "num_failures": result.num_failures,
        "failures": dict(result.failures),
        "actions": dict(result.actions),
        "rules": dict(result.rules),
        "num_given_up": result.actions[Action.give_up.name],
        "accounts": result.accounts.to_json(),
        "intervals": [asdict(point) for point in found.intervals],
        "best_every_steps": best_of(found.intervals).value,
        "spares": [asdict(point) for point in found.spares],
        "best_spare_nodes": best_of(found.spares).value,
        "devices": [asdict(point) for point in found.devices],
    }


def summary(config: Config, prediction: Prediction) -> str:
    """Return the line of a plain `orchestra plan`: goodput by Daly's formula, and the interval."""
    scenario = _scenario(config, prediction)
    mttf = figures.duration(scenario.mttf_s)
    if config.checkpoint.every_steps is None:
        return f"goodput nothing is saved, and a failure is due every {mttf}"
    every = f"{scenario.every_steps:,}"
    auto = " (auto)" if config.checkpoint.every_steps == save_interval.AUTO else ""
    best = interval_of(config, scenario.times).every_steps
    is_near = 0.5 <= scenario.every_steps / best <= 2 or scenario.every_steps >= config.train.steps
    advice = "" if auto or is_near else f" (best {best:,})"
    share = figures.percent(expected(scenario))
    return f"goodput {share}, a failure every {mttf}; a save every {every} steps{auto}{advice}"


def summary_facts(config: Config, prediction: Prediction) -> dict[str, Any]:
    """Return the same for programs."""
    scenario = _scenario(config, prediction)
    return {
        "mttf_s": scenario.mttf_s if math.isfinite(scenario.mttf_s) else None,
        "goodput": None if config.checkpoint.every_steps is None else expected(scenario),
        "every_steps": None if config.checkpoint.every_steps is None else scenario.every_steps,
        "best_interval": interval_of(config, scenario.times).to_json(),
    }


def _scenario(config: Config, prediction: Prediction) -> Scenario:
    case = prediction.case
    return scenario_of(config, assumed_times(config, prediction.time.total, case.layout.world_size))
