"""How a run came back from planned faults, read from its events and rows: what answered, how fast, what it
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


def only(events: list[Record], rows: list[Record] = ROWS, fault: PlannedFault = KILLED) -> Recovery:
    (recovery,) = recoveries([fault], events, rows)
    return recovery


def test_the_seconds_from_the_fault_to_the_next_new_step_are_told_and_sum_up() -> None:
    recovery = only([*BEFORE, *AFTER])
    assert (recovery.decision, recovery.rule, recovery.host) == ("restart", "start_again", "node1")
    assert recovery.problem is None
    # Step 13 was trained at 23.5; steps 11 and 12 were trained again.
    assert (recovery.seconds, recovery.lost_steps) == (10.5, 2)
    assert recovery.stretches == dict(zip(STRETCHES, (1.0, 1.0, 2.0, 3.0, 3.5), strict=True))
    assert sum(recovery.stretches.values()) == recovery.seconds


def test_what_nothing_tells_of_takes_no_time_of_its_own() -> None:
    events = [event for event in [*BEFORE, *AFTER] if event["event"] not in ("restored", "restarting")]
    recovery = only(events)
    assert (recovery.stretches["decided"], recovery.stretches["restored"]) == (0.0, 0.0)
    assert sum(recovery.stretches.values()) == recovery.seconds == 10.5
    assert recovery.lost_steps == 12, "without a restore it began with the first step"


def test_a_start_that_failed_in_between_belongs_to_the_recovery() -> None:
    again = [
        started(17.0, 1),
        event(18.0, 1, "failed", node=0, code=1, cause="LaunchError"),
        event(18.5, 1, "restarting", decision="restart", rule="start_again", reason="LaunchError"),
        started(19.0, 2),
        event(21.0, 2, "restored", step=10, seconds=1.0, source="checkpoint"),
    ]
    recovery = only([*BEFORE, *AFTER[:3], *again])
    assert recovery.is_passed
    assert (recovery.stretches["decided"], recovery.stretches["begun"]) == (4.5, 0.5)


def test_a_fault_that_no_new_step_follows_says_why() -> None:
    gave_up = event(15.0, 0, "restarting", decision="give_up", rule="no_progress", reason="4 failures")
    recovery = only([*BEFORE, *AFTER[:2], gave_up], ROWS[:12])
    assert (recovery.decision, recovery.rule, recovery.seconds) == ("give_up", "no_progress", None)
    assert recovery.problem == "no attempt followed: 4 failures"
    assert only(BEFORE, [*ROWS[:12], row(13, 14.0)]).problem == "no attempt followed"
    assert only([*BEFORE, *AFTER], ROWS[:14]).problem == "no step after 12 followed"


def test_steps_that_were_trained_on_after_the_fault_are_lost_ones() -> None:
    """Whoever kills its agent trains on until it is killed with it."""
    killer = PlannedFault(13, 1, attempt=0, fault=Fault.agent_kill)
    events = [*BEFORE[:-1], {**BEFORE[-1], "fault": "agent_kill"}, *AFTER]
    recovery = only(events, [*ROWS[:12], row(13, 13.2), *ROWS[12:]], killer)
    assert (recovery.seconds, recovery.lost_steps) == (11.5, 3)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (PlannedFault(99, 1, attempt=1), "attempt 1 ended before step 99"),
        (PlannedFault(16, 5, attempt=1), "attempt 1 had only 2 ranks"),
        (PlannedFault(16, 1, attempt=2), "there was no attempt 2"),
        (PlannedFault(13, 1, attempt=0, fault=Fault.hang), "attempt 0 ended before step 13"),
    ],
)
def test_a_fault_that_never_struck_has_not_passed(fault: PlannedFault, reason: str) -> None:
    recovery = only([*BEFORE, *AFTER], fault=fault)
    assert not recovery.is_passed
    assert recovery.problem == f"it never struck: {reason}"


def test_what_slurm_started_again_by_itself_has_no_rule() -> None:
    """No agent was left to decide: the same job's next start follows."""
    events = [*BEFORE, started(60.0, 1), event(65.0, 1, "restored", step=10, seconds=1.0)]
    rows = [*ROWS[:12], *(row(step, 60.0 + step) for step in (11, 12, 13))]
    recovery = only(events, rows)
    assert (recovery.is_passed, recovery.rule, recovery.decision) == (
        True,
        None,
        "Slurm started the job again",
    )
    assert recovery.seconds == 60.0
