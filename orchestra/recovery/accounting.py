"""Where a run's wall time went: a pure function of its events, its metrics rows and perhaps the time now.

Called by `orchestra status` and `why`, by rehearsals and by the planner. A cursor moves through the run's
life, only forward: each stretch that it passes is booked once, so that the seconds sum to the wall time,
whatever the records say and however much the hosts' clocks differ. The records decide only which account a
stretch goes to.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from orchestra.recovery import history
from orchestra.run.events import is_number, is_whole
from orchestra.run.files import Record

# Events that a command writes about a run, at any time, and what is decided after an attempt: none is a sign
# of life of it.
_NO_SIGNS_OF_LIFE = (
    *("submitted", "cancelled", "requeued", "checkpoint_verified", "restarting"),
    *("alert_raised", "alert_ended"),
)
# Decisions after which the leader starts no ranks in its own job.
_STARTS_NOTHING = ("give_up", "requeue")
# Rows from which the usual time of a step is taken.
_RECENT_ROWS = 20
# A step under way in a run that lives counts as trained for so many times what a row's steps usually take;
# what goes beyond is the time in which a failure is not yet noticed.
_PATIENCE = 3.0
# An attempt that ended with one of these codes saved its last step before it ended: done, stopped on request.
_ENDED_WITH_A_SAVE = (0, 75)
# A node's agent did not run for so many `seconds` up to the event's time, and most likely nor did its ranks:
# the job was suspended.
STOOD_STILL = "stood_still"
# What decides whether a run without an attempt waits for the scheduler.
_QUEUE_EVENTS = ("submitted", "requeued", "cancelled")


class Account(Enum):
    """What a second of a run's wall time can have gone to."""

    # Steps whose result counts: the wait for data, and steps whose update was left out, included.
    productive = "productive"
    # Steps that are trained again, or would be.
    lost = "lost"
    # Between steps: saves, copies in memory and records, as far as the training waited for them.
    checkpoint = "checkpoint"
    # Between steps: held-out losses.
    evaluation = "evaluation"
    # Starts, ends and replaces processes: from a failure to the ranks' next step, less the restore; the first
    # start too.
    restart = "restart"
    # Reads a checkpoint or a copy in memory.
    restore = "restore"
    # Waits for the scheduler, also in the midst of an attempt: for as long as its job is suspended.
    queue = "queue"
    # Ended, until a person went on with it.
    idle = "idle"


@dataclass(frozen=True)
class Accounts:
    """Seconds by account; they sum to `wall_s`."""

    productive_s: float = 0.0
    lost_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0
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


@dataclass
class AttemptTimes:
    """When one attempt began to train, saved, failed and ended, as events and metrics rows tell it.

    Times are Unix seconds, None where nothing says it.
    """

    attempt: history.Attempt
    # The step after which it began to train, once that is known: 0 for a run's first attempt.
    begin: int | None
    ended: float | None
    rows: list[Record] = field(default_factory=list)

    @property
    def started(self) -> float:
        return float(self.attempt.start["time"])

    @property
    def restored_at(self) -> float | None:
        return _time_of(self.attempt.restored)

    @property
    def restore_s(self) -> float:
        """Seconds that the restore took; 0 where nothing was restored."""
        seconds = (self.attempt.restored or {}).get("seconds")
        return float(seconds) if is_number(seconds) else 0.0

    @property
    def training_at(self) -> float | None:
        return _time_of(self.attempt.training_started)

    @property
    def code(self) -> int | None:
        """What it ended with; None without a verdict."""
        codes = [event["code"] for event in self.attempt.verdicts if is_whole(event.get("code"))]
        return codes[-1] if codes else None

    @property
    def will_restart(self) -> bool:
        """Whether its leader decided to start ranks again."""
        decided = self.attempt.named("restarting")
        return bool(decided) and decided[-1].get("decision") not in _STARTS_NOTHING

    @property
    def end(self) -> float:
        """When it ended, as its first verdict says, or as the silence after its last record does."""
        if self.ended is not None:
            return self.ended
        signs = [
            float(event["time"]) for event in self.attempt.events if event["event"] not in _NO_SIGNS_OF_LIFE
        ]
        return max([self.started, *signs, *(float(row["time"]) for row in self.rows)])

    @property
    def step_time_s(self) -> float | None:
        """The usual time of a step, from what was logged or saved; None where nothing was."""
        recent = self.rows[-_RECENT_ROWS:]
        times = [float(row["step_time_s"]) for row in recent if is_number(row.get("step_time_s"))]
        if times:
            return statistics.median(times)
        saves = self.attempt.saves
        if saves and self.training_at is not None:
            num_steps = saves[-1].step - (self.begin or 0)
            seconds = max(0.0, saves[-1].time - self.training_at - saves[-1].blocked_s)
            return seconds / num_steps if num_steps > 0 else None
        return None

    def evaluations(self) -> list[tuple[int, float]]:
        """Return the step and the seconds of each evaluation, also of those that were left for a stop."""
        told = self.attempt.named("evaluated", "evaluation_left")
        known = [each for each in told if is_whole(each.get("step")) and is_number(each.get("seconds"))]
        return sorted((each["step"], float(each["seconds"])) for each in known)

    @property
    def row_time_s(self) -> float | None:
        """The usual time from one row to the next; None before the second one."""
        recent = self.rows[-_RECENT_ROWS - 1 :]
        times = [later["time"] - earlier["time"] for earlier, later in itertools.pairwise(recent)]
        return statistics.median(times) if times else None

    def is_same_start(self, before: AttemptTimes) -> bool:
        """Whether the ranks were started again by the agents of the attempt before, without a wait."""
        if self.job is not None or before.job is not None:
            return (self.job, self.job_start) == (before.job, before.job_start)
        return before.will_restart or (bool(self.leader) and self.leader == before.leader)

    def is_resume(self, before: AttemptTimes) -> bool:
        """Whether a person went on with the run after the attempt before: neither its agents did, nor Slurm,
        nor a job that one of them had asked for.
        """
        if self.is_same_start(before):
            return False
        # Tasks of an array that share nodes take members from each other.
        asked = {before.job, *(event.get("job") for event in before.attempt.named("requeued"))}
        return self.job is None or _array_of(self.job) not in map(_array_of, asked)

    @property
    def job(self) -> Any:
        """The Slurm job that it ran in; None in the foreground."""
        return self.attempt.start.get("job")

    @property
    def job_start(self) -> Any:
        """How often that job had been requeued before."""
        return self.attempt.start.get("job_start")

    @property
    def leader(self) -> tuple[Any, ...]:
        """Host, process id and start of the process that led it; empty where that is not known."""
        start = self.attempt.start
        is_known = is_whole(start.get("pid"))
        return tuple(start.get(key) for key in ("host", "pid", "pid_started")) if is_known else ()


def _array_of(job: Any) -> str:
    """Return a job's id without the number of its task."""
    return str(job).partition("_")[0]


def _time_of(event: Record | None) -> float | None:
    return None if event is None else float(event["time"])


def attempt_times(events: Iterable[Record], rows: Iterable[Record]) -> list[AttemptTimes]:
    """Return the times of all attempts, by their number. `events` are ordered by time."""
    times = []
    for attempt in history.read(events):
        begin = None if attempt.restored is None else int(attempt.restored["step"])
        times.append(AttemptTimes(attempt, begin, _time_of(next(iter(attempt.verdicts), None))))
    if not times:
        return []
    if times[0].begin is None:
        times[0].begin = 0
    # Rows carry a time, and attempts follow one another.
    starts = [attempt.started for attempt in times]
    for row in rows:
        if is_whole(row.get("step")) and is_number(row.get("time")):
            then = times[max(0, bisect.bisect_right(starts, row["time"]) - 1)]
            # One that had been replaced may have logged beside it.
            if row.get("attempt", then.attempt.number) == then.attempt.number:
                then.rows.append(row)
    for before, following in itertools.pairwise(times):
        if before.ended is None or before.ended > following.started:
            before.ended = min(before.end, following.started)
    return times


def account(
    events: Iterable[Record], rows: Iterable[Record], *, began: float | None = None, now: float | None = None
) -> Accounts:
    """Book every second from `began` to `now`.

    `events` are all of a run, ordered by time; `rows` all of its metrics.jsonl in the order of the file, with
    those that a rollback made void. `began` is the first submission where that is no event (Unix seconds).
    `now` is None for a run that has ended: its last record then is its end.
    """
    events = list(events)
    attempts = attempt_times(events, rows)
    begins = [event["time"] for event in events if event["event"] in ("submitted", "attempt_started")]
    begins += [] if began is None else [began]
    if not begins:
        return Accounts()
    end = max((event["time"] for event in events), default=min(begins)) if now is None else now
    book = _Book(min(begins), math.inf if now is None else now, _pauses(events))
    kept = _kept_until(attempts, is_alive=now is not None)
    queueing = [event for event in events if event["event"] in _QUEUE_EVENTS]
    _wait(book, queueing, None, attempts[0].started if attempts else end)
    for index, attempt in enumerate(attempts):
        following = attempts[index + 1] if index + 1 < len(attempts) else None
        _book_attempt(book, attempt, kept[index], now if following is None else None)
        if following is not None:
            _book_gap(book, queueing, attempt, following)
    if attempts and now is not None:
        # It has ended and is to go on, or its agents died and nobody has said so yet.
        _wait(book, queueing, attempts[-1], now)
    return book.accounts()


def _pauses(events: Iterable[Record]) -> list[tuple[float, float]]:
    """Return the stretches in which the agent of a node stood still, none in another, oldest first."""
    told = [event for event in events if event["event"] == STOOD_STILL and is_number(event.get("seconds"))]
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((event["time"] - event["seconds"], event["time"]) for event in told):
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((begin, end))
    return merged


class _Book:
    """The cursor and what was booked so far. Nothing is booked after `end`: clocks may be ahead of it.

    Of what is booked in `pauses` (begin and end, in their order) the scheduler's share goes to the queue.
    """

    def __init__(self, began: float, end: float, pauses: Sequence[tuple[float, float]] = ()) -> None:
        self.cursor = began
        self._end = end
        self._pauses = deque(pauses)
        self._seconds = dict.fromkeys(Account, 0.0)

    def until(self, time: float, to: Account) -> None:
        """Book everything up to `time`."""
        seconds = max(0.0, min(time, self._end) - self.cursor)
        paused = self.paused(self.cursor + seconds)
        self._seconds[Account.queue] += paused
        self._seconds[to] += seconds - paused
        self.cursor += seconds

    def paused(self, time: float) -> float:
        """Return the seconds from the cursor to `time` in which nothing ran."""
        if not self._pauses:
            return 0.0
        while self._pauses and self._pauses[0][1] <= self.cursor:
            self._pauses.popleft()
        inside = itertools.takewhile(lambda pause: pause[0] < time, self._pauses)
        return math.fsum(min(time, end) - max(self.cursor, begin) for begin, end in inside)

    def steps(
        self,
        time: float,
        seconds: float,
        kept: float,
        rest: Account,
        evaluation_s: float = 0.0,
        least_s: float = 0.0,
    ) -> None:
        """Book everything up to `time`: at most `seconds` of it to steps, of which a share of `kept` counts,
        at most `evaluation_s` to evaluations, the others to `rest`. The steps took `least_s`, also where an
        agent alone stood still.
        """
        all_s = max(0.0, min(time, self._end) - self.cursor)
        paused = min(self.paused(self.cursor + all_s), max(0.0, all_s - least_s))
        self._seconds[Account.queue] += paused
        self.cursor += paused
        whole = all_s - paused
        given = min(max(0.0, seconds - paused), whole)
        self._seconds[Account.productive] += given * kept
        self._seconds[Account.lost] += given * (1.0 - kept)
        evaluated = min(max(0.0, evaluation_s), whole - given)
        self._seconds[Account.evaluation] += evaluated
        self._seconds[rest] += whole - given - evaluated
        self.cursor += whole

    def accounts(self) -> Accounts:
        return Accounts(**{f"{name.value}_s": seconds for name, seconds in self._seconds.items()})


def _kept_until(attempts: Sequence[AttemptTimes], *, is_alive: bool) -> list[float]:
    """Return for each attempt the last step of it that counts: no later one went back before it."""
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


def _point_to_go_on_from(attempts: Sequence[AttemptTimes]) -> int:
    """Return the step after which whoever goes on with the run will begin."""
    point = 0
    for attempt in attempts:
        if attempt.begin is not None:
            point = attempt.begin
        point = max([point, *attempt.attempt.committed_steps])
    return point


def _book_attempt(book: _Book, attempt: AttemptTimes, kept_until: float, now: float | None) -> None:
    """Book an attempt from its start to its end; to `now` where it lives and is the last one."""
    if attempt.restored_at is not None:
        book.until(attempt.restored_at - attempt.restore_s, Account.restart)
        book.until(attempt.restored_at, Account.restore)
    if attempt.training_at is not None:
        book.until(attempt.training_at, Account.restart)
    before = attempt.begin or 0
    usual_s = attempt.step_time_s or 0.0
    evaluations = deque(attempt.evaluations())
    for row in attempt.rows:
        step, step_time_s = row["step"], row.get("step_time_s")
        seconds = (step - before) * step_time_s if is_number(step_time_s) else math.inf
        if row is attempt.rows[0] and attempt.training_at is None and math.isfinite(seconds):
            # Nothing else says when the start was over.
            book.until(row["time"] - seconds, Account.restart)
        evaluation_s = 0.0
        while evaluations and evaluations[0][0] <= step:
            evaluation_s += evaluations.popleft()[1]
        share = _kept_share(before, step, kept_until)
        least_s = (step - before) * usual_s if len(attempt.rows) > 1 else 0.0
        book.steps(row["time"], seconds, share, Account.checkpoint, evaluation_s, least_s)
        before = max(before, step)
    if attempt.ended is None and now is not None:
        _book_present(book, attempt, now)
        return
    _book_tail(book, attempt, before, kept_until)


def _kept_share(before: int, step: int, kept_until: float) -> float:
    """Return the share of the steps after `before` up to `step` that count."""
    if step <= before:
        return float(step <= kept_until)
    return min(1.0, max(0.0, (kept_until - before) / (step - before)))


def _book_tail(book: _Book, attempt: AttemptTimes, before: int, kept_until: float) -> None:
    """Book what came after the last row of an attempt that is over: steps without a row, the last save, and
    then the failure and its detection, or the end of the processes.
    """
    end = attempt.end
    if attempt.code in _ENDED_WITH_A_SAVE:
        saved = [time for step, time in attempt.attempt.concluded_saves if step >= before]
        book.until(min(max(saved, default=book.cursor), end), Account.checkpoint)
    for save in attempt.attempt.saves:
        if save.step > before:
            seconds = max(0.0, min(save.time, end) - book.cursor) - save.blocked_s
            kept = _kept_share(before, save.step, kept_until)
            book.steps(min(save.time, end), seconds, kept, Account.checkpoint)
            before = save.step
    failures = attempt.attempt.rank_failures
    failed_step = max((event["step"] for event in failures if is_whole(event.get("step"))), default=0)
    unseen = failed_step - 1 - before
    step_time_s = attempt.step_time_s
    if unseen > 0 and step_time_s is not None:
        reached = min(book.cursor + unseen * step_time_s, failures[0]["time"], end)
        book.steps(reached, math.inf, _kept_share(before, before + unseen, kept_until), Account.restart)
    book.until(end, Account.restart)


def _book_present(book: _Book, attempt: AttemptTimes, now: float) -> None:
    """Book what a living attempt does now: it trains, or starts, or hangs and nobody has noticed yet."""
    if attempt.training_at is None and not attempt.rows:
        book.until(now, Account.restart)
        return
    usual = attempt.row_time_s
    limit = now if usual is None else book.cursor + _PATIENCE * usual + book.paused(now)
    book.until(min(now, limit), Account.productive)
    book.until(now, Account.restart)


def _book_gap(book: _Book, queueing: Sequence[Record], ended: AttemptTimes, following: AttemptTimes) -> None:
    """Book the time between two attempts: a restart in place, the queue, or a person's absence."""
    if following.is_same_start(ended):
        book.until(following.started, Account.restart)
    else:
        # Of the same job the scheduler began another start.
        is_requeued = following.job is not None and following.job == ended.job
        _wait(book, queueing, ended, following.started, in_queue=is_requeued)


def _wait(
    book: _Book,
    queueing: Sequence[Record],
    ended: AttemptTimes | None,
    until: float,
    *,
    in_queue: bool = False,
) -> None:
    """Book the wait for an attempt: in the queue from a submission on, idle before it and once cancelled.

    A submission or a requeue from within the attempt that `ended` counts from its end on.
    """
    since = -math.inf if ended is None else ended.started
    state = Account.queue if in_queue else Account.idle
    if ended is not None and ended.will_restart and not in_queue:
        state = Account.restart
    for event in queueing:
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
