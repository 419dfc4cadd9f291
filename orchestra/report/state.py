"""The state of a run as its own records tell it: alive or how it ended, how far, how fast. Read-only.

A run without a verdict counts as running while the process that leads it lives; on another host, while its
files still grow. One that was prepared here and whose preparing process is gone died before it started. A
scheduler's word is not asked for.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import Config
from launchers import processes
from orchestra.errors import ConfigError
from orchestra.events import is_number, is_whole, read_events
from orchestra.frozen import read_config
from orchestra.jsonl import Record
from orchestra.metrics_file import rows_that_count
from orchestra.report.checkpoints import newest_checkpoint
from orchestra.report.verdict import Verdict, first_failure, judge, last_attempt, node_verdict, of_attempt
from orchestra.rundir import RunDir

# A run led from another host counts as running until its files have been silent for this long.
_SILENCE_S = 600.0
# Rows at the end of metrics.jsonl that are read: enough for medians, and independent of the run's length.
_TAIL_BYTES = 1 << 16
# Rows whose median step time extrapolates the time left.
_RECENT_ROWS = 20


@dataclass(frozen=True)
class RunState:
    """One row of `orchestra status`; None where the records do not say."""

    name: str
    path: str
    state: str
    attempts: int
    steps: int | None = None
    step: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    eta_s: float | None = None
    age_s: float | None = None
    code: int | None = None
    cause: str | None = None
    # The step that a resume would go on from.
    checkpoint_step: int | None = None
    # The scheduler's job and its word for it, where it was asked (orchestra.report.scheduler).
    job: str | None = None
    job_state: str | None = None


def is_run(path: Path) -> bool:
    """Tell whether a directory is a run's; one that may not be read counts as none."""
    try:
        return RunDir(path).record.is_file() or RunDir(path).config.is_file()
    except OSError:
        return False


def read_record(run: RunDir) -> dict[str, Any]:
    """Return run.json; empty when it is missing or torn."""
    try:
        record = json.loads(run.record.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def read_state(run: RunDir, now: float) -> RunState:
    """Read the state of a run at Unix time `now`; damaged records make fields None, never an error.

    A run whose files may not be read has the state "unreadable", and the cause says why.
    """
    try:
        return _read_state(run, now)
    except OSError as error:
        return RunState(run.name, str(run.path), "unreadable", attempts=0, cause=str(error))


def _read_state(run: RunDir, now: float) -> RunState:
    events = read_events(run)
    rows = recent_rows(run)
    state, verdict = read_ending(run, events, now)
    config = _config(run)
    steps = config.train.steps if config is not None else None
    last = rows[-1] if rows else {}
    created = read_record(run).get("created")
    return RunState(
        name=run.name,
        path=str(run.path),
        state=state,
        attempts=len({event["attempt"] for event in events if event.get("event") == "attempt_started"}),
        steps=steps,
        step=last.get("step"),
        loss=last.get("loss"),
        tokens_per_s=median_of(rows[-_RECENT_ROWS:], "tokens_per_s"),
        mfu=median_of(rows[-_RECENT_ROWS:], "mfu"),
        eta_s=seconds_left(rows, steps) if state == "running" else None,
        age_s=now - created if is_number(created) else None,
        code=verdict.code if verdict is not None else None,
        cause=verdict.cause if verdict is not None else None,
        checkpoint_step=newest_checkpoint(events),
    )


def _config(run: RunDir) -> Config | None:
    try:
        return read_config(run.config)
    except ConfigError:
        return None


def recent_rows(run: RunDir) -> list[Record]:
    """Return the last rows of metrics.jsonl that count."""
    try:
        with run.metrics.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    # The last piece is no whole line, and neither is the first one when it was cut into.
    whole = lines[1 if start else 0 : -1]
    return rows_that_count(row for line in whole if (row := _parsed(line)) is not None)


def _parsed(line: bytes) -> Record | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def median_of(rows: Sequence[Record], key: str) -> float | None:
    """Return the median of a key over the rows that have a number there."""
    values = [row[key] for row in rows if is_number(row.get(key))]
    return statistics.median(values) if values else None


def seconds_left(rows: Sequence[Record], steps: int | None) -> float | None:
    """Extrapolate the recent median step time to the end of the run."""
    step_time_s = median_of(rows[-_RECENT_ROWS:], "step_time_s")
    if step_time_s is None or steps is None:
        return None
    return max(0, steps - int(rows[-1]["step"])) * step_time_s


def read_ending(run: RunDir, events: list[Record], now: float) -> tuple[str, Verdict | None]:
    """Return a run's state in a word, and the verdict of its last attempt where there is one."""
    attempt = last_attempt(events)
    if attempt is None:
        return ("not started" if _may_still_start(read_record(run)) else "died"), None
    current = of_attempt(events, attempt)
    verdict = node_verdict(current)
    if verdict is not None:
        return verdict.state, verdict
    start = next(event for event in current if event["event"] == "attempt_started")
    if not _is_of_this_host(start):
        return ("running" if now - _last_sign_of_life(run) < _SILENCE_S else "unknown"), None
    if _leader_lives(start):
        return "running", None
    return _without_leader(current)


def _without_leader(events: list[Record]) -> tuple[str, Verdict | None]:
    """The leading process died without a verdict of its own; what the ranks wrote still counts."""
    is_finished = any(event["event"] == "finished" and event.get("rank") == 0 for event in events)
    if is_finished or first_failure(events) is not None:
        verdict = judge(events, exit_code=0 if is_finished else 1, interruption=None)
        return verdict.state, verdict
    return "died", None


def _is_of_this_host(record: Record) -> bool:
    return record.get("host") == socket.gethostname()


def _may_still_start(record: Record) -> bool:
    """Whoever prepares a run starts it; whether that process is gone can be told on its own host only."""
    if not _is_of_this_host(record) or not is_whole(record.get("pid")):
        return True
    return _leader_lives(record)


def _leader_lives(start: Record) -> bool:
    """Tell whether the process that `start` names (`pid`, `pid_started`) still runs on this host."""
    pid, started = start.get("pid"), start.get("pid_started")
    if not is_whole(pid):
        return False
    process = processes.find(pid)
    return process is not None and (started is None or process.started == started)


def _last_sign_of_life(run: RunDir) -> float:
    return max((_modified(file) for file in [run.metrics, *run.events.glob("*.jsonl")]), default=0.0)


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
