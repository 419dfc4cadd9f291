"""Where a run's wall time went: a pure function of its events, its metrics rows and perhaps the time now.

A cursor moves through the run's life and only forward: each stretch that it passes is booked once, so that
the seconds sum to the wall time whatever the records say, or however much the hosts' clocks differ. What is
in the records decides only which account a stretch goes to. It reads no file and knows no policy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from orchestra.events import is_number
from orchestra.jsonl import Record
from orchestra.recovery.attempt_history import Attempt, attempts_of

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
