"""Where a run's time went: known histories to the second, and any history to the sum."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from orchestra.recovery.accounting import Accounts, account
from orchestra.run.files import Record


def event(time: float, name: str, attempt: int = 0, **evidence: Any) -> Record:
    return {"time": time, "attempt": attempt, "event": name, **evidence}


def rows_of(began: float, steps: range, step_time_s: float = 1.0, every: int = 1) -> list[Record]:
    """Return the rows of steps trained without a pause from `began` on, one for each `every` steps."""
    return [
        {"step": step, "time": began + (step - steps.start + 1) * step_time_s, "step_time_s": step_time_s}
        for step in steps
        if step % every == 0
    ]


def booked(accounts: Accounts) -> dict[str, float]:
    """Return the accounts that hold something, without rounding errors."""
    found = accounts.to_json()
    del found["wall_s"], found["goodput"]
    return {name.removesuffix("_s"): round(value, 6) for name, value in found.items() if round(value, 6)}


WITHOUT_FAILURE = [
    event(0, "submitted", job="7"),
    event(100, "attempt_started", job="7", job_start=0),
    event(120, "training_started", rank=0),
    event(132, "checkpoint_committed", rank=0, step=10),
    event(133, "finished", rank=0, step=10),
    event(135, "finished", code=0),
]


def test_a_run_without_a_failure_waits_starts_trains_and_saves() -> None:
    rows = rows_of(120, range(1, 11))
    accounts = account(WITHOUT_FAILURE, rows)
    expected = {"queue": 100, "restart": 23, "productive": 10, "checkpoint": 2}
    assert booked(accounts) == expected
    assert accounts.wall_s == pytest.approx(135)
    assert accounts.goodput == pytest.approx(10 / 135)
    # The submission of a sweep's member is no event.
    assert booked(account(WITHOUT_FAILURE[1:], rows, began=40)) == {**expected, "queue": 60}


FAILED_AND_RESTARTED = [
    event(0, "attempt_started", pid=5, pid_started=1),
    event(10, "training_started", rank=0),
    event(15, "checkpoint_started", rank=0, step=5, blocked_s=0.0),
    event(15.5, "checkpoint_committed", rank=0, step=5),
    event(21, "rank_failed", rank=1, signal="SIGKILL"),
    event(22, "failed", code=1),
    event(22, "restarting"),
    event(24, "attempt_started", 1, pid=5, pid_started=1),
    event(34, "restored", 1, rank=0, step=5, seconds=3.0),
    event(36, "training_started", 1, rank=0),
    event(52, "finished", 1, code=0),
]


def test_steps_that_are_trained_again_are_lost_work() -> None:
    rows = [*rows_of(10, range(1, 9)), *rows_of(36, range(6, 21))]
    accounts = account(FAILED_AND_RESTARTED, rows)
    # 3 s of detection, 1 to the verdict … until step 6 begins, less 3 s of restore; 10 s and 1 s at the ends.
    restart_s = 10 + 4 + 2 + 9 - 2 + 2 + 1
    assert booked(accounts) == {"productive": 5 + 15, "lost": 3, "restart": restart_s, "restore": 3}
    assert accounts.wall_s == pytest.approx(52)


def test_the_time_in_which_a_job_was_suspended_was_not_trained() -> None:
    # Step 6 took 61 s, of which its nodes stood still for 60.
    rows = [*rows_of(120, range(1, 6)), *rows_of(185, range(6, 11))]
    rows[5]["step_time_s"] = 61.0
    events = [{**each, "time": each["time"] + 60} if each["time"] > 125 else each for each in WITHOUT_FAILURE]
    told = [event(185.8, "stood_still", node=node, seconds=60.0) for node in (0, 1)]
    expected = {"queue": 160, "restart": 23, "productive": 10, "checkpoint": 2}
    assert booked(account(sorted([*events, *told], key=lambda each: each["time"]), rows)) == expected
    # It lives, and has not logged since.
    alive = [*events[:3], event(186, "stood_still", node=0, seconds=60.0)]
    assert booked(account(alive, rows[:5], now=187)) == {"queue": 160, "restart": 20, "productive": 7}


def test_ranks_that_trained_while_their_agent_alone_stood_still_count() -> None:
    rows = rows_of(120, range(1, 11))
    events = sorted(
        [*WITHOUT_FAILURE, event(129.5, "stood_still", node=0, seconds=9.0)], key=lambda each: each["time"]
    )
    assert booked(account(events, rows)) == booked(account(WITHOUT_FAILURE, rows))


def test_a_row_of_many_steps_is_lost_only_as_far_as_it_is_trained_again() -> None:
    rows = [*rows_of(10, range(1, 9), every=4), *rows_of(36, range(6, 21), every=5)]
    accounts = booked(account(FAILED_AND_RESTARTED, rows))
    assert (accounts["productive"], accounts["lost"]) == (20, 3)


def test_steps_that_were_never_logged_are_known_from_saves_and_from_who_failed() -> None:
    events = list(FAILED_AND_RESTARTED)
    events[4] = {**events[4], "step": 10}
    # The row of step 100 was never reached; the failure came in step 10.
    accounts = booked(account(events, rows_of(36, range(6, 21), every=20)))
    assert (accounts["productive"], accounts["lost"]) == (20, 4)


def test_what_a_failed_run_would_train_again_is_lost_until_somebody_goes_on() -> None:
    ended = FAILED_AND_RESTARTED[:6]
    rows = rows_of(10, range(1, 9))
    assert booked(account(ended, rows)) == {"productive": 5, "lost": 3, "restart": 14}
    without_a_save = [record for record in ended if "checkpoint" not in record["event"]]
    assert booked(account(without_a_save, rows)) == {"lost": 8, "restart": 14}


def test_going_back_before_an_earlier_attempts_begin_makes_its_steps_lost_too() -> None:
    events = [
        *FAILED_AND_RESTARTED[:-1],
        event(46, "failed", 1, code=1),
        event(46.5, "attempt_started", 2, pid=5, pid_started=1),
        event(47, "restored", 2, rank=0, step=0, seconds=0.0),
        event(47, "training_started", 2, rank=0),
        event(67, "finished", 2, code=0),
    ]
    rows = [*rows_of(10, range(1, 9)), *rows_of(36, range(6, 16)), *rows_of(47, range(1, 21))]
    accounts = booked(account(events, rows))
    assert (accounts["productive"], accounts["lost"]) == (20, 8 + 10)


def test_waiting_between_steps_is_checkpoint_stall() -> None:
    rows = [*rows_of(120, range(1, 6)), *rows_of(129, range(6, 11))]
    events = [
        {**record, "time": record["time"] + 4} if record["time"] > 120 else record
        for record in WITHOUT_FAILURE
    ]
    assert booked(account(events, rows)) == {"queue": 100, "restart": 23, "productive": 10, "checkpoint": 6}


def test_evaluations_between_the_steps_are_no_saves() -> None:
    rows = [*rows_of(124, range(1, 6)), *rows_of(133, range(6, 11))]
    events = [
        *({**each, "time": each["time"] + 8} if each["time"] > 120 else each for each in WITHOUT_FAILURE),
        event(124, "evaluated", rank=0, step=0, seconds=3.0),
        event(130, "evaluated", rank=0, step=6, seconds=2.5),
    ]
    events.sort(key=lambda each: float(each["time"]))
    expected = {"queue": 100, "restart": 23, "productive": 10, "evaluation": 5.5, "checkpoint": 1 + 1.5 + 2}
    assert booked(account(events, rows)) == expected


# Stopped at 24 s, and trained again from 124 s on.
STOPPED = [
    event(0, "attempt_started", job="7", job_start=0),
    event(10, "training_started", rank=0),
    event(21, "checkpoint_committed", rank=0, step=10),
    event(22, "failed", rank=0, code=75, step=10),
    event(24, "failed", code=75),
]
CONTINUED = [
    event(131, "restored", 1, rank=0, step=10, seconds=1.0),
    event(131, "training_started", 1, rank=0),
    event(141, "checkpoint_committed", 1, rank=0, step=20),
    event(141, "finished", 1, code=0),
]
ROWS = [*rows_of(10, range(1, 11)), *rows_of(131, range(11, 21))]


def submitted(time: float, job: str) -> Record:
    return event(time, "submitted", 1, job=job)


def started(job: str, job_start: int = 0) -> Record:
    return event(124, "attempt_started", 1, job=job, job_start=job_start)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        # A requeued job waits in the queue.
        ([event(26, "requeued", job="7"), started("7", 1)], {"queue": 100}),
        # Slurm may do it by itself, after the loss of a node: nobody writes an event then.
        ([started("7", 1)], {"queue": 100}),
        # A run that a person went on with was idle until then.
        ([submitted(84, "8"), started("8")], {"idle": 60, "queue": 40}),
        # A job that was cancelled in the queue leaves the run idle.
        (
            [submitted(84, "8"), event(94, "cancelled", 1, job="8"), submitted(104, "9"), started("9")],
            {"idle": 70, "queue": 30},
        ),
        # A new attempt in the same start of a job is a restart.
        ([started("7")], {"restart": 100}),
        # A job that was submitted before the end waits from the end on.
        ([submitted(23, "8"), started("8")], {"queue": 100}),
    ],
)
def test_the_time_between_two_attempts_is_that_of_the_queue_of_nobody_or_of_a_restart(
    between: list[Record], expected: dict[str, float]
) -> None:
    events = sorted([*STOPPED, *between, *CONTINUED], key=lambda record: float(record["time"]))
    restart_s = 10 + 3 + 6 + expected.get("restart", 0)
    in_training = {"productive": 20, "checkpoint": 1, "restore": 1}
    assert booked(account(events, ROWS)) == {**in_training, **expected, "restart": restart_s}


def test_a_local_run_that_is_resumed_by_another_process_was_idle() -> None:
    local = [{key: record[key] for key in record if key != "job"} for record in STOPPED]
    local[0].update(pid=4, pid_started=1)
    start = event(124, "attempt_started", 1, pid=9, pid_started=2)
    found = booked(account([*local, start, *CONTINUED], ROWS))
    assert (found["idle"], found["restart"]) == (100, 10 + 3 + 6)


def test_a_living_run_trains_now_but_not_for_longer_than_its_steps_take() -> None:
    events = WITHOUT_FAILURE[:3]
    rows = rows_of(120, range(1, 9))
    assert booked(account(events, rows, now=129.5)) == {"queue": 100, "restart": 20, "productive": 9.5}
    silent = account(events, rows, now=228.0)
    assert booked(silent) == {"queue": 100, "restart": 20 + 97, "productive": 11}


def test_a_run_that_waits_for_its_first_start_spends_its_time_in_the_queue() -> None:
    assert booked(account(WITHOUT_FAILURE[:1], [], now=50)) == {"queue": 50}
    assert booked(account(WITHOUT_FAILURE[:2], [], now=110)) == {"queue": 100, "restart": 10}
    assert booked(account([], [], began=10, now=30)) == {"queue": 20}
    assert account([], []).wall_s == account([], [], began=10).wall_s == 0


@pytest.mark.parametrize("seed", range(200))
def test_any_history_sums_to_the_wall_time(seed: int) -> None:
    """Events and rows at random, in no sensible order, from clocks that differ, some values missing."""
    chance = random.Random(seed)
    names = (
        *("submitted", "requeued", "cancelled", "restarting", "attempt_started", "training_started"),
        *("restored", "checkpoint_started", "checkpoint_committed", "rank_failed", "failed", "finished"),
    )
    evidence: dict[str, Callable[[], Any]] = {
        "step": lambda: chance.randrange(50),
        "seconds": lambda: chance.uniform(0, 30),
        "blocked_s": lambda: chance.uniform(0, 5),
        "job": lambda: chance.choice("78"),
        "job_start": lambda: chance.randrange(2),
        "rank": lambda: chance.randrange(2),
        "code": lambda: chance.choice((0, 1, 75)),
    }
    events = [
        event(
            chance.uniform(0, 1000),
            chance.choice(names),
            chance.randrange(3),
            **{key: value() for key, value in evidence.items() if chance.random() < 0.7},
        )
        for _ in range(chance.randrange(40))
    ]
    events.sort(key=lambda record: float(record["time"]))
    rows = [
        {"step": chance.randrange(50), "time": chance.uniform(0, 1000), "step_time_s": chance.uniform(0, 9)}
        for _ in range(chance.randrange(30))
    ]
    began = min(
        [record["time"] for record in events if record["event"] in ("submitted", "attempt_started")],
        default=None,
    )
    accounts = account(events, rows, now=1000.0)
    assert all(value >= 0 for value in booked(accounts).values())
    assert accounts.wall_s == pytest.approx(0 if began is None else 1000 - began, abs=1e-6)
