"""The data of one run's page: read from the run's files once, and put together by pure functions.

Called by `orchestra report`. A run that never started, one of an older version and one with damaged files
have a page too: what could not be read is said in `notes`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import Config
from orchestra.errors import ConfigError
from orchestra.recovery.accounting import Accounts, account, attempt_times
from orchestra.report import batch_advice
from orchestra.report.attempts import ended_attempts, slow_ranks
from orchestra.report.page import planned
from orchestra.report.page.configurations import changes_between_attempts, flat_config, shown_overrides
from orchestra.report.page.curves import curves, void_curve
from orchestra.report.page.life import (
    MOST_LISTED,
    attempt_rows,
    checkpoint_rows,
    expert_move_rows,
    node_rows,
    passed_over_checkpoints,
)
from orchestra.report.page.own_times import heat_map, slow_ones
from orchestra.report.page.traces import trace_rows
from orchestra.report.page.verdict import Facts, verdict
from orchestra.report.run_state import RunState, median_of, read_state
from orchestra.report.spending import held_until, spending
from orchestra.run.config_file import read_config
from orchestra.run.events import is_number, is_whole, read_events
from orchestra.run.files import Record, read_json_lines
from orchestra.run.metrics_file import rows_that_count, wall_begin
from orchestra.run.paths import RunDir
from orchestra.run.record import read_record
from orchestra.run.run_lineage import lineage_of
from orchestra.run.step_times import read_step_times
from orchestra.sizes.step_shares import OTHER, Part, read_shares
from orchestra.sizes.topology import batch_ramp

# What a profile's parts are called, in the order in which they are drawn.
_PARTS = (*(part.value for part in Part), OTHER)
_UNREAD = {"why": "its configuration could not be read"}
_RECENT_ROWS = 200


@dataclass(frozen=True)
class RunFiles:
    """What a run's directory holds, as far as it can be read."""

    run: RunDir
    state: RunState
    record: Record
    events: list[Record]
    # All of metrics.jsonl, and those rows of it that count.
    all_rows: list[Record]
    rows: list[Record]
    # None where it is missing or of another version; then `notes` says so.
    config: Config | None
    notes: list[str]

    @property
    def began(self) -> float:
        """When its wall time began (Unix seconds); 0 for a run of which nothing is known."""
        begin = wall_begin(self.events, self.record)
        if begin is None:
            times = [float(row["time"]) for row in self.rows if is_number(row.get("time"))]
            begin = min(times, default=float(self.record.get("created") or 0.0))
        return begin


def read_run(run: RunDir, now: float) -> RunFiles:
    """Read a run's records. Never raises for what is missing, damaged or of another version."""
    notes: list[str] = []
    state, record = read_state(run, now), read_record(run)
    if not record:
        notes.append("run.json is missing or damaged: its name, overrides and jobs are not known")
    try:
        events = read_events(run)
        all_rows = list(read_json_lines(run.metrics))
    except OSError as error:
        events, all_rows = [], []
        notes.append(f"its records cannot be read: {error}")
    rows = rows_that_count(all_rows, lineage_of(events))
    if not any(event["event"] == "attempt_started" for event in events):
        notes.append("no attempt of it has started: there is nothing to measure yet")
    elif not rows:
        notes.append("metrics.jsonl has no row: no step was logged")
    config = None
    try:
        config = read_config(run.config)
    except ConfigError as error:
        first = "; ".join(error.problems).partition("\n")[0]
        notes.append(f"no plan and no FLOPs: {first}" if run.config.exists() else "config.yaml is missing")
    return RunFiles(run, state, record, events, all_rows, rows, config, notes)


def run_page(files: RunFiles, now: float, page_folder: Path | None = None) -> Record:
    """Return all that a page shows of one run, as JSON. `page_folder`: where the page will lie, if known."""
    state, events = files.state, files.events
    accounts = account(
        events,
        files.all_rows,
        began=wall_begin(events, files.record),
        now=None if state.state.is_over else now,
    )
    starts = [event for event in events if event["event"] == "attempt_started"]
    config = None if files.config is None else planned.resolved(files.config, starts)
    heat = heat_map(read_step_times(files.run), 1 if config is None else config.parallelism.pp)
    times = attempt_times(events, files.all_rows)
    end = max((each.end for each in times), default=now) if state.state.is_over else now
    attempts = attempt_rows(times, ended_attempts(events), files.began)
    checkpoints = checkpoint_rows(events, files.began)
    plan: Record = _UNREAD if config is None else planned.speed(config)
    facts = Facts(
        state=state,
        accounts=accounts,
        attempts=attempts,
        slow_now=slow_ranks(events),
        slow_ever=slow_ones(heat),
        tokens_per_s=median_of(files.rows[-_RECENT_ROWS:], "tokens_per_s"),
        planned_tokens_per_s=plan.get("tokens_per_s"),
        checkpoints=checkpoints,
        batch=None if config is None else _batch(files.rows, config),
    )
    return {
        "name": state.name,
        "path": state.path,
        "state": state.state,
        "is_alive": state.state.is_alive,
        "step": state.step,
        "steps": state.steps,
        "began": files.began or None,
        "notes": files.notes,
        "verdict": verdict(facts),
        "figures": _figures(files, accounts, config),
        "curves": curves(
            files.rows, None if config is None else planned.flops_per_token(config), files.began or None
        ),
        "void": void_curve(files.all_rows, files.rows),
        "speed": {"plan": plan, **_device(events), "median_tokens_per_s": facts.tokens_per_s},
        "accounts": accounts.to_json(),
        "attempts": attempts,
        "nodes": node_rows(events, files.began),
        "expert_moves": expert_move_rows(events, files.began),
        "heat": heat,
        "memory": None if config is None else planned.memory(config, files.rows),
        **_saves(checkpoints),
        "passed_over": passed_over_checkpoints(events),
        "newest_checkpoint": _age(checkpoints, state.checkpoint_step, files.began, end),
        "profile": _profile(files.run),
        "traces": trace_rows(files.run, page_folder),
        "used": _used(files, config, now),
        "config": flat_config(files.run.config),
        "changes": changes_between_attempts(files.run),
        "overrides": shown_overrides([str(each) for each in _listed(files.record.get("overrides"))]),
    }


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _figures(files: RunFiles, accounts: Accounts, config: Config | None) -> Record:
    """Return the numbers at the head of the page; None where the records do not say."""
    last = files.rows[-1] if files.rows else {}
    recent = files.rows[-_RECENT_ROWS:]
    starts = [event for event in files.events if event["event"] == "attempt_started"]
    trained = [event for event in files.events if event["event"] == "training_started"]
    return {
        "loss": last.get("loss"),
        "tokens": last.get("tokens"),
        "nonfinite_steps": files.state.nonfinite_steps,
        "tokens_per_s": median_of(recent, "tokens_per_s"),
        "mfu": median_of(recent, "mfu"),
        "step_time_s": median_of(recent, "step_time_s"),
        "wall_s": accounts.wall_s,
        "goodput": accounts.goodput,
        "attempts": len({event["attempt"] for event in starts}),
        "ranks": trained[-1].get("world_size") if trained else None,
        "num_parameters": trained[-1].get("num_parameters") if trained else None,
        "model": None if config is None else config.model.name,
        "precision": None if config is None else config.precision.name.value,
        "eval": dict(files.state.eval),
        "revision": _revision(files.record),
        "job": files.state.job or _job(files.record),
    }


def _batch(rows: Sequence[Record], config: Config) -> str | None:
    """Return what the gradient's noise says of the batch that the last row was trained with."""
    train = config.train
    if not rows or (train.global_batch_size is None and train.global_batch_tokens is None):
        return None
    batch = batch_ramp(train).at(rows[-1]["step"]).global_batch_size * train.seq_len
    return batch_advice.words(rows, train.seq_len, batch)


def _revision(record: Record) -> str | None:
    revision = record.get("code_revision")
    return revision if isinstance(revision, str) else None


def _job(record: Record) -> str | None:
    jobs = record.get("jobs")
    newest = jobs[-1] if isinstance(jobs, list) and jobs and isinstance(jobs[-1], dict) else {}
    return newest["id"] if isinstance(newest.get("id"), str) else None


def _device(events: Sequence[Record]) -> Record:
    """Return the device, its peak and what MFU means, as the newest attempt announced them."""
    announced = [event for event in events if event["event"] == "training_started"]
    newest: dict[str, Any] = announced[-1] if announced else {}
    keys = ("device", "peak_flops_per_s", "mfu_convention", "world_size", "torch")
    return {key: newest.get(key) for key in keys}


def _saves(checkpoints: Sequence[Record]) -> Record:
    """Return the newest saves, one by one, and what all of them come to."""
    stalls = [row["stall_s"] for row in checkpoints if is_number(row.get("stall_s"))]
    whole = {"num_checkpoints": len(checkpoints), "stall_s": math.fsum(stalls)}
    return {"checkpoints": checkpoints[-MOST_LISTED:], **whole}


def _age(checkpoints: Sequence[Record], step: int | None, began: float, now: float) -> Record | None:
    """Return the checkpoint of `step`, the newest that counts, and how old it is `now`, or at the end of a
    run that is over.
    """
    committed = [row for row in checkpoints if row["state"] == "committed" and row["step"] == step]
    if not committed:
        return None
    return {"step": committed[-1]["step"], "age_s": max(0.0, now - began - committed[-1]["time_s"])}


def _profile(run: RunDir) -> Record | None:
    shares = read_shares(run.profile)
    if shares is None:
        return None
    parts = {name: shares.parts_s[name] for name in _PARTS if name in shares.parts_s}
    return {**dataclasses.asdict(shares), "parts_s": parts, "hidden_share": shares.hidden_share}


def _used(files: RunFiles, config: Config | None, now: float) -> Record:
    """Return what the run used so far: GPU-hours, energy and cost, or why they are not known."""
    tokens = [row["tokens"] for row in files.rows[-1:] if is_whole(row.get("tokens"))]
    until = held_until(files.state.state, now)
    used = spending(files.events, files.all_rows, tokens[0] if tokens else None, config, until)
    return used.to_json()
