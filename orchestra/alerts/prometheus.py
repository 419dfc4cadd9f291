"""Runs as text for Prometheus, by the textfile collector of node_exporter. Pure but for `write`.

What is not known is left out: a 0 would be a measurement. Written by `orchestra watch --prometheus FILE` at
each look, as one act, so that a scrape sees a whole file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestra.alerts.detect import Findings
from orchestra.alerts.observed import ObservedRun
from orchestra.report.run_state import RunState
from orchestra.run.events import is_number
from orchestra.run.files import write_atomically

# By the end of the name: what it is. One that ends with `_total` is a counter, by Prometheus' own rules for
# names, and what is measured is told in base units.
_HELP = {
    "step": "last step in metrics.jsonl",
    "steps": "train.steps",
    "loss": "mean loss of the last logged step, nats per token",
    "tokens_per_second": "median of the last rows, over all ranks",
    "mfu": "model FLOPs utilization, median of the last rows",
    "goodput": "seconds in steps that count over all seconds since the submission",
    "attempts": "attempts that were started",
    "checkpoint_step": "step that a resume would go on from",
    "last_row_timestamp_seconds": "when the last row was written",
    "energy_joules_total": "what the GPUs used, steps that were trained again included",
    "gpu_power_watts": "mean of one GPU in the last row of a run that trains",
}


@dataclass(frozen=True)
class Seen:
    """One run at one look."""

    state: RunState
    observed: ObservedRun
    findings: Findings


def text_of(runs: Sequence[Seen], now: float) -> str:
    """Return the text of all runs; a run's state and its alerts are 1 where they hold."""
    lines = []
    for name, meaning in _HELP.items():
        values = [(each, value) for each in runs if (value := _value(each, name)) is not None]
        lines += _metric(name, meaning, [(f"{_of(each)}", value) for each, value in values])
    states = [(f'{_of(each)},state="{each.state.state}"', 1.0) for each in runs]
    alerts = [
        (f'{_of(each)},detector="{alert.detector}",detail="{_escaped(alert.detail)}"', 1.0)
        for each in runs
        for alert in each.findings.alerts
    ]
    unseen = [
        (f'{_of(each)},detector="{detector}"', 1.0)
        for each in runs
        for detector in sorted(each.findings.blind)
    ]
    lines += _metric("state", "1 for the state that the run is in", states)
    lines += _metric("alert", "1 for each alert that fires", alerts)
    lines += _metric("unseen", "1 for each detector that cannot see", unseen)
    return "\n".join([*lines, "# TYPE orchestra_watch_timestamp_seconds gauge", f"{_WATCH} {now!r}", ""])


_WATCH = "orchestra_watch_timestamp_seconds"


def _value(seen: Seen, name: str) -> float | None:
    state, rows = seen.state, seen.observed.rows
    value = {
        "step": state.step,
        "steps": state.steps,
        "loss": state.loss,
        "tokens_per_second": state.tokens_per_s,
        "mfu": state.mfu,
        "goodput": seen.observed.accounts.goodput,
        "attempts": state.attempts,
        "checkpoint_step": state.checkpoint_step,
        "last_row_timestamp_seconds": rows[-1]["time"] if rows else None,
        "energy_joules_total": seen.observed.used.joules,
        "gpu_power_watts": _power_w(seen.observed),
    }[name]
    return float(value) if is_number(value) else None


def _power_w(run: ObservedRun) -> float | None:
    """Return the newest power of a run that trains: what was used before an end is not used now."""
    known = [row["power_w"] for row in run.own_rows if is_number(row.get("power_w"))]
    return known[-1] if known and run.training is not None else None


def _metric(name: str, meaning: str, values: Sequence[tuple[str, float]]) -> list[str]:
    if not values:
        return []
    kind = "counter" if name.endswith("_total") else "gauge"
    head = [f"# HELP orchestra_run_{name} {meaning}", f"# TYPE orchestra_run_{name} {kind}"]
    return [*head, *(f"orchestra_run_{name}{{{labels}}} {value!r}" for labels, value in values)]


def _of(seen: Seen) -> str:
    return f'run="{_escaped(seen.state.name)}",path="{_escaped(seen.state.path)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write(file: Path, runs: Sequence[Seen], now: float) -> None:
    """Replace the file. Raises OSError."""
    write_atomically(file, text_of(runs, now), is_synced=False)
