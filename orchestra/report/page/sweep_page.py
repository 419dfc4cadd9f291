"""The data of a sweep's page: a row for each member, what distinguishes it, and the curves of the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from orchestra.errors import ConfigError
from orchestra.report.carry_over import carried_over
from orchestra.report.page.configurations import flat_config, is_secret
from orchestra.report.page.curves import thinned
from orchestra.report.run_state import MemberState, SweepState
from orchestra.run.config_file import read_config
from orchestra.run.events import is_number
from orchestra.run.files import Record
from orchestra.run.metrics_file import eval_column, read_metrics
from orchestra.run.record import RunPhase

# Members whose curves are drawn, and the rows of each.
_MOST_CURVES, _MOST_ROWS = 12, 300
_LOSS = "loss"


def sweep_page(state: SweepState) -> Record:
    """Return all that a page shows of a sweep, as JSON. Reads the metrics of the best members alone."""
    members = [_member(each) for each in state.members]
    metric = _metric(state.members)
    ranked = sorted(
        (row for row in members if is_number(row["values"].get(metric))),
        key=lambda row: row["values"][metric],
    )
    best = [row["index"] for row in ranked if row["state"] == RunPhase.finished] or [
        row["index"] for row in ranked
    ]
    keys = dict.fromkeys(key for row in members for key in row["overrides"])
    drawn = set(best[:_MOST_CURVES])
    return {
        "name": state.sweep.name,
        "path": str(state.sweep.path),
        "created": state.created,
        "problem": state.problem,
        "counts": {str(phase): count for phase, count in state.counts.items()},
        "metric": metric,
        "keys": list(keys),
        "members": members,
        "best": best[:_MOST_CURVES],
        "curves": {
            str(each.member.index): _curve(each) for each in state.members if each.member.index in drawn
        },
        "verdict": _verdict(state, members, metric, best),
        "config": flat_config(state.members[0].run.config) if state.members else {},
    }


def _member(each: MemberState) -> Record:
    state = each.state
    values: dict[str, Any] = {
        _LOSS: state.loss,
        **{eval_column(name): loss for name, loss in state.eval.items()},
        "tokens_per_s": state.tokens_per_s,
        "mfu": state.mfu,
    }
    pairs = (override.partition("=") for override in each.member.overrides)
    return {
        "index": each.member.index,
        "name": state.name,
        "state": state.state,
        "overrides": {key.lstrip("+"): _typed(value) for key, _, value in pairs if not is_secret(key)},
        "step": state.step,
        "steps": state.steps,
        "attempts": state.attempts,
        "values": {key: value if is_number(value) else None for key, value in values.items()},
        "cause": state.cause,
    }


def _typed(text: str) -> float | str:
    """Return a number where an override is one: plots put it on an axis."""
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def _metric(members: Sequence[MemberState]) -> str:
    """Return what members are compared by: run.metric where they have it, else the training loss."""
    evaluated = next((each for each in members if each.state.eval), None)
    if evaluated is None:
        return _LOSS
    try:
        metric = read_config(evaluated.run.config).run.metric
    except ConfigError:
        return _LOSS
    return metric if metric in {eval_column(name) for name in evaluated.state.eval} else _LOSS


def _curve(each: MemberState) -> Record:
    rows = thinned([row for row in read_metrics(each.run) if is_number(row.get(_LOSS))], _MOST_ROWS)
    return {"step": [row["step"] for row in rows], "loss": [float(f"{row[_LOSS]:.6g}") for row in rows]}


def _verdict(state: SweepState, members: Sequence[Record], metric: str, best: Sequence[int]) -> Record:
    name = state.sweep.name
    if state.problem is not None:
        return {"sentence": state.problem, "tone": "bad", "evidence": [], "next": []}
    counts = ", ".join(f"{count} {phase}" for phase, count in state.counts.items())
    sentence = f"{len(members)} members: {counts}" if members else "It has no members"
    bad = [row for row in members if RunPhase(row["state"]).ended_badly]
    is_open = any(RunPhase(row["state"]).ended_early for row in members)
    tone = "bad" if len(bad) * 2 > len(members) else "warn" if bad or is_open else "good"
    if best:
        first = next(row for row in members if row["index"] == best[0])
        values = " ".join(f"{key}={_shown(value)}" for key, value in first["overrides"].items())
        sentence += f"; lowest {metric} {first['values'][metric]:.4f}: {first['name']} ({values})"
    words = [f"`orchestra resume {name}` runs what is missing or failed"] if bad or is_open else []
    words = [f"`orchestra why {name}` tells what ended them", *words] if bad else words
    if best and not words:
        words = [f"`orchestra report {name}/{best[0]:03d}` shows the best member's run"]
    if best and (carried := _carried(next(each for each in state.members if each.member.index == best[0]))):
        words.append(f"`{carried}` carries its values over to a larger model")
    evidence = [f"{row['name']}: {row['cause']}" for row in bad[:3] if row["cause"]]
    return {"sentence": sentence + ".", "tone": tone, "evidence": evidence, "next": words}


def _carried(best: MemberState) -> str | None:
    try:
        return carried_over(read_config(best.run.config))
    except ConfigError:
        return None


def _shown(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else value
