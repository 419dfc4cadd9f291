"""How a run came back from planned faults, read from its events and rows: who answered, how fast, what it
cost, and what is wrong where nobody did.
"""

from __future__ import annotations

from typing import Any

import pytest

from conf.schema import Fault
from orchestra.rehearsal.judge import STRETCHES, Recovery, recoveries
from orchestra.run.files import Record
from orchestra.run.planned_faults import PlannedFault

KILLED = PlannedFault(13, 1, attempt=0)


def event(time: float, attempt: int, name: str, **facts: Any) -> Record:
    return {"time": time, "attempt": attempt, "event": name, "host": "node1", **facts}


def started(time: float, attempt: int, nodes: int = 2) -> Record:
    return event(time, attempt, "attempt_started", node=0, nodes=nodes, ranks_per_node=1)


def row(step: int, time: float) -> Record:
    return {"step": step, "time": time, "loss": 1.0}


# Attempt 0 trains a step a second and is killed as step 13 begins; attempt 1 goes on from step 10.
BEFORE = [
    started(0.0, 0),
    event(0.5, 0, "training_started"),
    event(12.0, 0, "checkpoint_committed", step=10),
    event(13.0, 0, "fault_injected", step=13, rank=1, fault="sigkill", phase="step"),
]
AFTER = [
    event(14.0, 0, "rank_failed", rank=1, code=1, cause="killed by SIGKILL", signal="SIGKILL"),
    event(14.5, 0, "failed", node=0, code=1, cause="killed by SIGKILL"),
    event(15.0, 0, "restarting", decision="restart", rule="start_again", reason="killed", wait_s=2.0),
    started(17.0, 1),
    event(20.0, 1, "restored", step=10, seconds=1.0, source="checkpoint"),
    event(30.0, 1, "finished", node=0, code=0),
]
ROWS = [
    *(row(step, float(step)) for step in range(1, 13)),
    *(row(step, 10.5 + step) for step in range(11, 18)),
]


def only(faults: list[PlannedFault], events: list[Record], rows: list[Record]) -> Recovery:
    (found,) = recoveries(faults, events, rows)
    return found


def test_the_seconds_from_the_fault_to_the_next_new_step_are_told_and_sum_up() -> None:
    found = only([KILLED], [*BEFORE, *AFTER], ROWS)
    assert (found.decision, found.rule, found.host, found.problem) == (
        "restart",
        "start_again",
        "node1",
        None,
    )
    # Step 13 was trained at 23.5; steps 11 and 12 were trained again.
    assert (found.seconds, found.lost_steps) == (10.5, 2)
    assert found.stretches == dict(zip(STRETCHES, (1.0, 1.0, 2.0, 3.0, 3.5), strict=True))
    assert sum(found.stretches.values()) == found.seconds


def test_what_nothing_tells_of_takes_no_time_of_its_own() -> None:
    events = [it for it in [*BEFORE, *AFTER] if it["event"] not in ("restored", "restarting")]
    found = only([KILLED], events, ROWS)
    assert (found.stretches["decided"], found.stretches["restored"]) == (0.0, 0.0)
    assert sum(found.stretches.values()) == found.seconds == 10.5
    assert found.lost_steps == 12, "without a restore it began with the first step"


def test_a_start_that_failed_in_between_belongs_to_the_recovery() -> None:
    again = [
        started(17.0, 1),
        event(18.0, 1, "failed", node=0, code=1, cause="LaunchError"),
        event(18.5, 1, "restarting", decision="restart", rule="start_again", reason="LaunchError"),
        started(19.0, 2),
        event(21.0, 2, "restored", step=10, seconds=1.0, source="checkpoint"),
    ]
    found = only([KILLED], [*BEFORE, *AFTER[:3], *again], ROWS)
    assert found.is_passed
    assert (found.stretches["decided"], found.stretches["begun"]) == (4.5, 0.5)


def test_a_fault_that_was_given_up_on_says_by_which_rule() -> None:
    gave_up = event(15.0, 0, "restarting", decision="give_up", rule="no_progress", reason="4 failures")
    found = only([KILLED], [*BEFORE, *AFTER[:2], gave_up], ROWS[:12])
    assert (found.decision, found.rule, found.seconds) == ("give_up", "no_progress", None)
    assert found.problem == "no attempt followed: 4 failures"


def test_a_fault_that_nothing_follows_is_told() -> None:
    found = only([KILLED], BEFORE, [*ROWS[:12], row(13, 14.0)])
    assert found.problem == "no attempt followed"


def test_steps_that_were_trained_on_after_the_fault_are_lost_ones() -> None:
    """Whoever kills its agent trains on until it is killed with it."""
    killer = PlannedFault(13, 1, attempt=0, fault=Fault.agent_kill)
    events = [{**it, "fault": "agent_kill"} if it["event"] == "fault_injected" else it for it in BEFORE]
    found = only([killer], [*events, *AFTER], [*ROWS[:12], row(13, 13.2), *ROWS[12:]])
    assert (found.seconds, found.lost_steps) == (11.5, 3)


def test_an_attempt_that_gets_no_further_than_the_one_before_has_not_passed() -> None:
    found = only([KILLED], [*BEFORE, *AFTER], ROWS[:14])
    assert found.problem == "no step behind 12 followed"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (PlannedFault(99, 1, attempt=1), "attempt 1 ended before step 99"),
        (PlannedFault(16, 5, attempt=1), "attempt 1 had only 2 ranks"),
        (PlannedFault(16, 1, attempt=2), "there was no attempt 2"),
        (PlannedFault(13, 1, attempt=0, fault=Fault.hang), "attempt 0 ended before step 13"),
    ],
)
def test_a_fault_that_never_struck_has_not_passed(fault: PlannedFault, said: str) -> None:
    found = only([fault], [*BEFORE, *AFTER], ROWS)
    assert not found.is_passed
    assert found.problem == f"it never struck: {said}"


def test_what_slurm_started_again_by_itself_has_no_rule() -> None:
    """Nobody of the crew was left to decide: the same job's next start follows."""
    events = [*BEFORE, started(60.0, 1), event(65.0, 1, "restored", step=10, seconds=1.0)]
    rows = [*ROWS[:12], *(row(step, 60.0 + step) for step in (11, 12, 13))]
    found = only([KILLED], events, rows)
    assert (found.is_passed, found.rule, found.decision) == (True, None, "Slurm started the job again")
    assert found.seconds == 60.0
