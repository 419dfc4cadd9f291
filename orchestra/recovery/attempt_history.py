"""What a run's records say about each attempt's course: when it began to train, saved, failed and ended.

A reading of events and metrics rows in the terms that `accounting` books by. It judges nothing.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestra.events import is_number, is_whole
from orchestra.jsonl import Record

# Events that a command writes about a run, at any time.
_OF_COMMANDS = ("submitted", "cancelled", "requeued", "checkpoint_verified")
_ENDS = ("finished", "failed")
_FAILURES = ("failed", "rank_failed")
# What the control plane writes when it has decided how to go on; some decisions start no ranks here.
_DECIDED = "restarting"
_STARTS_NOTHING = ("give_up", "requeue")


@dataclass
class Attempt:
    """One attempt as its records tell it; times in Unix seconds, None where nothing says it."""

    number: int
    started: float
    job: Any = None
    job_start: Any = None
    leader: tuple[Any, ...] = ()
    # The step behind which it began to train, once that is known: 0 for a run's first attempt.
    begin: int | None = None
    restored_at: float | None = None
    restore_s: float = 0.0
    training_at: float | None = None
    rows: list[Record] = field(default_factory=list)
    # Saves that began (step, time, seconds the training waited), committed steps, and when saves were over.
    saves: list[tuple[int, float, float]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    concluded_saves: list[tuple[int, float]] = field(default_factory=list)
    failed_step: int | None = None
    failed_at: float | None = None
    ended: float | None = None
    code: int | None = None
    will_restart: bool = False
    last_sign: float = 0.0

    @property
    def end(self) -> float:
        """When it ended, as its verdict says, or as the silence after its last record does."""
        return self.last_sign if self.ended is None else self.ended

    @property
    def step_time_s(self) -> float | None:
        """The usual time of a step, from what was logged or saved; None where nothing was."""
        recent = self.rows[-20:]
        times = [float(row["step_time_s"]) for row in recent if is_number(row.get("step_time_s"))]
        if times:
            return statistics.median(times)
        if self.saves and self.training_at is not None:
            step, time, blocked_s = self.saves[-1]
            num_steps = step - (self.begin or 0)
            return max(0.0, time - self.training_at - blocked_s) / num_steps if num_steps > 0 else None
        return None

    @property
    def row_time_s(self) -> float | None:
        """The usual time from one row to the next; None before the second one."""
        times = [later["time"] - earlier["time"] for earlier, later in itertools.pairwise(self.rows[-21:])]
        return statistics.median(times) if times else None

    def is_same_start(self, before: Attempt) -> bool:
        """Whether the ranks were started again by the agents of the attempt before, without a wait."""
        if self.job is not None or before.job is not None:
            return (self.job, self.job_start) == (before.job, before.job_start)
        return before.will_restart or (bool(self.leader) and self.leader == before.leader)

    def is_requeued_job_of(self, before: Attempt) -> bool:
        """Whether the scheduler started the job of the attempt before once more."""
        return self.job is not None and self.job == before.job and self.job_start != before.job_start


def attempts_of(events: Iterable[Record], rows: Iterable[Record]) -> list[Attempt]:
    """Return the attempts that were started, by their number. `events` are ordered by time."""
    events = list(events)
    found: dict[int, Attempt] = {}
    for event in events:
        if event["event"] == "attempt_started" and event["attempt"] not in found:
            found[event["attempt"]] = _started(event)
    attempts = [found[number] for number in sorted(found)]
    for event in events:
        if event["attempt"] in found:
            _follow(found[event["attempt"]], event)
    if attempts and attempts[0].begin is None:
        attempts[0].begin = 0
    _spread(attempts, rows)
    for attempt, following in itertools.pairwise(attempts):
        if attempt.ended is None or attempt.ended > following.started:
            attempt.ended = min(attempt.end, following.started)
    return attempts


def _started(event: Record) -> Attempt:
    time = float(event["time"])
    leader = tuple(event.get(key) for key in ("host", "pid", "pid_started"))
    return Attempt(
        number=event["attempt"],
        started=time,
        job=event.get("job"),
        job_start=event.get("job_start"),
        leader=leader if is_whole(event.get("pid")) else (),
        last_sign=time,
    )


def _follow(attempt: Attempt, event: Record) -> None:
    name, time, step = event["event"], float(event["time"]), event.get("step")
    if name == _DECIDED:
        attempt.will_restart = event.get("decision") not in _STARTS_NOTHING
    if name in _OF_COMMANDS or name == _DECIDED:
        return
    if attempt.ended is None:
        attempt.last_sign = max(attempt.last_sign, time)
    if name == "restored" and is_whole(step):
        seconds = event.get("seconds")
        attempt.begin, attempt.restored_at = step, time
        attempt.restore_s = float(seconds) if is_number(seconds) else 0.0
    elif name == "training_started" and attempt.training_at is None:
        attempt.training_at = time
    elif name == "checkpoint_started" and is_whole(step):
        blocked_s = event.get("blocked_s")
        attempt.saves.append((step, time, float(blocked_s) if is_number(blocked_s) else 0.0))
    elif name in ("checkpoint_committed", "checkpoint_failed") and is_whole(step):
        attempt.concluded_saves.append((step, time))
        attempt.committed += [step] if name == "checkpoint_committed" else []
    elif name in _FAILURES and "rank" in event:
        attempt.failed_step = max(attempt.failed_step or 0, step) if is_whole(step) else attempt.failed_step
        attempt.failed_at = time if attempt.failed_at is None else attempt.failed_at
    elif name in _ENDS and "rank" not in event:
        code = event.get("code")
        attempt.ended = time if attempt.ended is None else attempt.ended
        attempt.code = code if is_whole(code) else attempt.code


def _spread(attempts: Sequence[Attempt], rows: Iterable[Record]) -> None:
    """Give each row to the attempt that wrote it: rows carry a time, and attempts follow one another."""
    starts = [attempt.started for attempt in attempts]
    for row in rows:
        if not attempts or not is_whole(row.get("step")) or not is_number(row.get("time")):
            continue
        attempt = attempts[max(0, bisect.bisect_right(starts, row["time"]) - 1)]
        attempt.rows.append(row)
        if attempt.ended is None:
            attempt.last_sign = max(attempt.last_sign, row["time"])
