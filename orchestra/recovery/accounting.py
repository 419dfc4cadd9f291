"""Where a run's wall time went: a pure function of its events, its metrics rows and perhaps the time now.

A cursor moves through the run's life and only forward: each stretch that it passes is booked once, so that
the seconds sum to the wall time whatever the records say, or however much the hosts' clocks differ. What is
in the records decides only which account a stretch goes to. It reads no file and knows no policy.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from orchestra.run.events import is_number, is_whole
from orchestra.run.files import Record

# What a run's records say about each attempt's course: when it began to train, saved, failed and ended.
#
# A reading of events and metrics rows in the terms that `accounting` books by. It judges nothing.


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


# A step under way in a run that lives counts as trained for so many times what a row's steps usually take;
# what goes beyond is the time in which a failure is not yet noticed.
_PATIENCE = 3.0
# An attempt that ended with one of these codes saved its last step before it ended: done, stopped on request.
_ENDED_WITH_A_SAVE = (0, 75)
# What decides whether a run without an attempt waits for the scheduler.
_OF_THE_QUEUE = ("submitted", "requeued", "cancelled")


class Account(Enum):
    """What a second of a run's wall time can have gone to."""

    # Steps whose result counts: the wait for data, and steps whose update was left out, included.
    productive = "productive"
    # Steps that are trained again, or would be.
    lost = "lost"
    # Between steps: saves, copies in memory and records, as far as the training waited for them.
    checkpoint = "checkpoint"
    # Starts, ends and replaces processes: from a failure to the ranks' next step, less the restore; the first
    # start too.
    restart = "restart"
    # Reads a checkpoint or a copy in memory.
    restore = "restore"
    # Waits for the scheduler.
    queue = "queue"
    # Ended, until a person went on with it.
    idle = "idle"


@dataclass(frozen=True)
class Accounts:
    """Seconds by account; they sum to `wall_s`."""

    productive_s: float = 0.0
    lost_s: float = 0.0
    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    restore_s: float = 0.0
    queue_s: float = 0.0
    idle_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds from the first submission or start to the run's end, or to now."""
        return math.fsum(dataclasses.astuple(self))

    @property
    def goodput(self) -> float | None:
        """The productive share of the wall time; None before any time passed."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else None

    def to_json(self) -> Record:
        """Return all numbers as `--json` prints them."""
        return {"wall_s": self.wall_s, **dataclasses.asdict(self), "goodput": self.goodput}


def account(
    events: Iterable[Record], rows: Iterable[Record], *, began: float | None = None, now: float | None = None
) -> Accounts:
    """Book every second from `began` to `now`.

    `events` are all of a run, ordered by time; `rows` all of its metrics.jsonl in the order of the file, with
    those that a rollback made void. `began` is the first submission where that is no event (Unix seconds).
    `now` is None for a run that has ended: its last record then is its end.
    """
    events = list(events)
    attempts = attempts_of(events, rows)
    begins = [it["time"] for it in events if it["event"] in ("submitted", "attempt_started")]
    begins += [] if began is None else [began]
    if not begins:
        return Accounts()
    end = max((it["time"] for it in events), default=min(begins)) if now is None else now
    book = _Book(min(begins), math.inf if now is None else now)
    kept = _kept_until(attempts, is_alive=now is not None)
    words = [it for it in events if it["event"] in _OF_THE_QUEUE]
    _wait(book, words, None, attempts[0].started if attempts else end)
    for index, attempt in enumerate(attempts):
        following = attempts[index + 1] if index + 1 < len(attempts) else None
        _book_attempt(book, attempt, kept[index], now if following is None else None)
        if following is not None:
            _book_gap(book, words, attempt, following)
    if attempts and now is not None:
        # It has ended and is to go on, or its agents died and nobody has said so yet.
        _wait(book, words, attempts[-1], now)
    return book.accounts()


class _Book:
    """The cursor and what was booked so far. Nothing is booked behind `end`: clocks may be ahead of it."""

    def __init__(self, began: float, end: float) -> None:
        self.cursor = began
        self._end = end
        self._seconds = dict.fromkeys(Account, 0.0)

    def until(self, time: float, to: Account) -> None:
        """Book everything up to `time`."""
        seconds = max(0.0, min(time, self._end) - self.cursor)
        self._seconds[to] += seconds
        self.cursor += seconds

    def share(self, time: float, seconds: float, to: Sequence[tuple[Account, float]], rest: Account) -> None:
        """Book everything up to `time`: at most `seconds` of it by the given shares, the others to `rest`."""
        whole = max(0.0, min(time, self._end) - self.cursor)
        given = min(max(0.0, seconds), whole)
        for name, part in to:
            self._seconds[name] += given * part
        self._seconds[rest] += whole - given
        self.cursor += whole

    def accounts(self) -> Accounts:
        return Accounts(**{f"{name.value}_s": seconds for name, seconds in self._seconds.items()})


def _kept_until(attempts: Sequence[Attempt], *, is_alive: bool) -> list[float]:
    """Return for each attempt the last step of it that counts: what no later attempt went back behind."""
    if not attempts:
        return []
    newest = attempts[-1]
    is_training = is_alive and newest.ended is None and newest.begin is not None
    limit = math.inf if newest.code == 0 or is_training else _point_to_go_on_from(attempts)
    kept: list[float] = []
    for attempt in reversed(attempts):
        kept.append(limit)
        if attempt.begin is not None:
            limit = min(limit, attempt.begin)
    return kept[::-1]


def _point_to_go_on_from(attempts: Sequence[Attempt]) -> int:
    """Return the step behind which whoever goes on with the run will begin."""
    point = 0
    for attempt in attempts:
        if attempt.begin is not None:
            point = attempt.begin
        point = max([point, *attempt.committed])
    return point


def _book_attempt(book: _Book, attempt: Attempt, kept_until: float, now: float | None) -> None:
    """Book an attempt from its start to its end; to `now` where it lives and is the last one."""
    if attempt.restored_at is not None:
        book.until(attempt.restored_at - attempt.restore_s, Account.restart)
        book.until(attempt.restored_at, Account.restore)
    if attempt.training_at is not None:
        book.until(attempt.training_at, Account.restart)
    before = attempt.begin or 0
    for row in attempt.rows:
        step, step_time_s = row["step"], row.get("step_time_s")
        seconds = (step - before) * step_time_s if is_number(step_time_s) else math.inf
        if attempt.training_at is None and row is attempt.rows[0] and math.isfinite(seconds):
            # Nothing else says when the start was over.
            book.until(row["time"] - seconds, Account.restart)
        book.share(row["time"], seconds, _kept_and_lost(before, step, kept_until), Account.checkpoint)
        before = max(before, step)
    if attempt.ended is None and now is not None:
        _book_present(book, attempt, now)
        return
    _book_tail(book, attempt, before, kept_until)


def _kept_and_lost(before: int, step: int, kept_until: float) -> list[tuple[Account, float]]:
    """Return the shares of the steps after `before` up to `step` that count, and that do not."""
    if step <= before:
        return [
            (Account.productive, 0.0 if step > kept_until else 1.0),
            (Account.lost, float(step > kept_until)),
        ]
    share = min(1.0, max(0.0, (kept_until - before) / (step - before)))
    return [(Account.productive, share), (Account.lost, 1.0 - share)]


def _book_tail(book: _Book, attempt: Attempt, before: int, kept_until: float) -> None:
    """Book what came behind the last row of an attempt that is over: steps without a row, the last save, and
    then the failure and its detection, or the end of the processes.
    """
    end = attempt.end
    if attempt.code in _ENDED_WITH_A_SAVE:
        saved = [time for step, time in attempt.concluded_saves if step >= before]
        book.until(min(max(saved, default=book.cursor), end), Account.checkpoint)
    for step, time, blocked_s in attempt.saves:
        if step > before:
            seconds = max(0.0, min(time, end) - book.cursor) - blocked_s
            shares = _kept_and_lost(before, step, kept_until)
            book.share(min(time, end), seconds, shares, Account.checkpoint)
            before = step
    unseen = (attempt.failed_step or 0) - 1 - before
    step_time_s = attempt.step_time_s
    if unseen > 0 and step_time_s is not None:
        failure = min(attempt.failed_at or end, end)
        reached = min(book.cursor + unseen * step_time_s, failure)
        shares = _kept_and_lost(before, before + unseen, kept_until)
        book.share(reached, math.inf, shares, Account.restart)
    book.until(end, Account.restart)


def _book_present(book: _Book, attempt: Attempt, now: float) -> None:
    """Book what a living attempt does now: it trains, or starts, or hangs and nobody has noticed yet."""
    if attempt.training_at is None and not attempt.rows:
        book.until(now, Account.restart)
        return
    usual = attempt.row_time_s
    limit = now if usual is None else book.cursor + _PATIENCE * usual
    book.until(min(now, limit), Account.productive)
    book.until(now, Account.restart)


def _book_gap(book: _Book, words: Sequence[Record], ended: Attempt, following: Attempt) -> None:
    """Book the time between two attempts: a restart in place, the queue, or a person's absence."""
    if following.is_same_start(ended):
        book.until(following.started, Account.restart)
    else:
        _wait(book, words, ended, following.started, in_queue=following.is_requeued_job_of(ended))


def _wait(
    book: _Book, words: Sequence[Record], ended: Attempt | None, until: float, *, in_queue: bool = False
) -> None:
    """Book the wait for an attempt: in the queue from a submission on, idle before it and once cancelled.

    A submission or a requeue from within the attempt that `ended` counts from its end on.
    """
    since = -math.inf if ended is None else ended.started
    state = Account.queue if in_queue else Account.idle
    if ended is not None and ended.will_restart and not in_queue:
        state = Account.restart
    for event in words:
        name, time = event["event"], event["time"]
        if not since <= time <= until:
            continue
        if name == "submitted" and ended is not None and event.get("job") in (ended.job, None):
            # It brought about the attempt that has ended, and was written down late.
            continue
        # Whoever requeued it was about to do so.
        book.until(time, Account.restart if name == "requeued" and state is Account.idle else state)
        state = Account.idle if name == "cancelled" else Account.queue
    if ended is None and state is Account.idle:
        # Before its first attempt a run waits for what was submitted, though no event says so.
        state = Account.queue
    book.until(until, state)
