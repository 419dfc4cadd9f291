"""What follows a roll-back: where the run goes on, how often, and which host goes for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from incident_logs import Log

from conf.schema import RecoveryConfig, RollBackConfig
from orchestra.recovery import history
from orchestra.recovery.copies import HeldCopy, begins, is_of_history
from orchestra.recovery.incidents import Incident, Kind, incidents
from orchestra.recovery.policy import Action, Decision, Resources, Rules, decide
from orchestra.run.rollback import BROKEN_DEVICE, EVENT, NOT_FINITE, SPIKE, RollBack, Stretch

HOSTS = ("node1", "node2", "node3", "node4")
FOUR = Resources(wanted_nodes=4, min_nodes=None, hosts=HOSTS, can_requeue=True)
SPIKED = Incident(
    attempt=0,
    kind=Kind.loss,
    cause=SPIKE,
    time=0.0,
    code=1,
    step=150,
    step_is_exact=True,
    began=0,
    committed=140,
    num_nodes=4,
    roll_back=RollBack(0, 150, 50, SPIKE, (Stretch(400, 2000),), (51, 250)),
)
BROKEN = replace(
    SPIKED, kind=Kind.replay, cause=BROKEN_DEVICE, roll_back=RollBack(0, 150, 100, BROKEN_DEVICE)
)


def after(*found: Incident, resources: Resources = FOUR, rules: Rules | None = None) -> Decision:
    log = [replace(it, attempt=number, by_hand=number == 0) for number, it in enumerate(found)]
    return decide(log, resources, rules or Rules())


def test_a_run_that_is_rolled_back_starts_again_at_once_and_is_charged() -> None:
    decision = after(SPIKED)
    assert (decision.action, decision.rule, decision.wait_s) == (Action.restart, "roll_back", 0.0)
    assert decision.charged
    assert decision.reason == "it goes back to step 50; the data of steps 51 to 250 is left out"
    assert after(SPIKED, SPIKED, SPIKED).wait_s == 0.0
    assert after(SPIKED, resources=replace(FOUR, in_place=False)).action is Action.requeue


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_bad_losses_that_stay_end_the_run_with_93_wherever_they_come(limit: int) -> None:
    rules = Rules.of(RecoveryConfig(roll_back=RollBackConfig(max_in_a_row=limit)))
    found = [replace(SPIKED, step=150 - number) for number in range(limit)]
    assert after(*found, rules=rules).action is Action.restart
    last = after(*found, SPIKED, rules=rules)
    assert (last.action, last.code, last.rule) == (Action.give_up, 93, "rolled_back_too_often")
    assert f"recovery.roll_back.max_in_a_row={limit}" in last.reason


def test_fewer_restarts_than_roll_backs_end_it_the_same_way() -> None:
    last = after(SPIKED, SPIKED, rules=Rules(max_restarts=1))
    assert (last.code, last.rule) == (93, "rolled_back_too_often")
    assert "recovery.max_restarts=1" in last.reason


def test_the_same_step_again_is_another_one_with_other_data() -> None:
    assert after(SPIKED, SPIKED).rule == "roll_back"


def test_only_a_checkpoint_of_a_later_step_than_ever_is_progress() -> None:
    found = [replace(SPIKED, committed=committed) for committed in (140, 60, 130, 140)]
    assert after(*found).code == 93
    assert after(*found[:3], replace(SPIKED, committed=150)).action is Action.restart


def test_a_host_that_computed_wrongly_is_left_out_at_once_and_listed() -> None:
    blamed = replace(BROKEN, blamed=("node2",))
    decision = after(blamed)
    assert (decision.action, decision.rule) == (Action.requeue, "broken_device")
    assert (decision.exclude, decision.listed, decision.charged) == (("node2",), ("node2",), False)
    assert "step 150" in decision.reason
    spare = after(blamed, resources=replace(FOUR, spares=("node5",)))
    assert (spare.action, spare.exclude) == (Action.replace, ("node2",))
    assert after(replace(blamed, rehearsed=True)).listed == ()
    assert after(blamed, rules=Rules(excludes=False)).rule == "roll_back"
    # With nowhere else to go it trains on where it is.
    assert after(blamed, resources=replace(FOUR, can_requeue=False)).rule == "roll_back"


def test_without_a_third_rank_nobody_is_left_out() -> None:
    decision = after(BROKEN)
    assert (decision.action, decision.exclude, decision.charged) == (Action.restart, (), True)


# From the events.


def rolled(cause: str, **evidence: object) -> Log:
    log = Log().start(0)
    told = {"step": 150, "to": 100, "cause": cause, **evidence}
    return log.write(0, EVENT, **told).fail(0, cause="RollBackError")


def test_the_events_say_what_was_rolled_back_and_where_to() -> None:
    (found,) = incidents(
        history.read(rolled(NOT_FINITE, left_out=[[8, 16]], data_steps=[2, 2]).end(0).events)
    )
    assert (found.kind, found.cause, found.step, found.blamed) == (Kind.loss, NOT_FINITE, 150, ())
    assert found.roll_back == RollBack(0, 150, 100, NOT_FINITE, (Stretch(8, 16),), (2, 2))


def test_a_lost_node_comes_before_the_roll_back_that_it_had_a_part_in() -> None:
    log = rolled(SPIKE).write(0, "node_lost", node=1, host="node2").end(0)
    (found,) = incidents(history.read(log.events))
    assert (found.kind, found.blamed) == (Kind.node_lost, ("node2",))


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_replay_blames_the_host_of_the_rank_by_the_name_that_the_attempt_knows(is_settled: bool) -> None:
    log = Log()
    log.write(0, "attempt_started", node=0, nodes=4, job="7", hosts=["a", "b", "c", "d"])
    log.write(0, "training_started", rank=0, world_size=8)
    log.write(0, "replay_differs", rank=5, host="c.cluster", step=150, is_settled=is_settled)
    log.write(0, EVENT, step=150, to=100, cause=BROKEN_DEVICE).fail(0, cause="RollBackError").end(0)
    (found,) = incidents(history.read(log.events))
    assert (found.kind, found.cause) == (Kind.replay, BROKEN_DEVICE)
    assert found.blamed == (("c",) if is_settled else ())
    assert found.rank == (5 if is_settled else None)


def test_copies_behind_a_roll_back_are_of_no_history() -> None:
    found = begins(rolled(SPIKE).events)
    assert not is_of_history(HeldCopy(149, 0, 0, "{}"), found)
    assert is_of_history(HeldCopy(100, 0, 0, "{}"), found)
    assert is_of_history(HeldCopy(149, 1, 0, "{}"), found)
