"""What is decided: the documented table row by row, and what holds for every log of incidents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import policy_table
import pytest
from hypothesis import given
from hypothesis import strategies as st
from incident_logs import FOUR, HOSTS, after, in_a_row

from conf.schema import RecoveryConfig, RollBackConfig
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED
from orchestra.recovery.incidents import Incident, Kind
from orchestra.recovery.policy import (
    FEWEST_STEPS_OF_PROGRESS,
    MOST_NOT_CHARGED,
    RULES,
    Action,
    Resources,
    Rules,
    decide,
    is_charged,
)
from orchestra.run.rollback import BROKEN_DEVICE, SPIKE, RollBack, Stretch

ROOT = Path(__file__).resolve().parents[3]
KILLED = Incident(0, Kind.rank_failed, "killed by SIGKILL", 0.0, 1, rank=1, step=150, num_nodes=4)
ERROR = replace(KILLED, cause="ValueError in a/b.py:f", step_is_exact=True)


# The table.


@pytest.mark.parametrize("row", policy_table.ROWS, ids=lambda row: row.situation)
def test_each_situation_of_the_table_is_decided_as_it_says(row: policy_table.Row) -> None:
    decision = row.decision()
    assert decision.action is row.action, decision
    assert decision.charged is row.charged
    is_end = decision.action in (Action.end, Action.give_up)
    assert (decision.code if is_end else None) == row.code
    first_wait = re.match(r"none|(\d+) s|$", row.wait)
    assert first_wait is not None, row.wait
    nominal = float(first_wait[1] or 0)
    assert 0.8 * nominal <= decision.wait_s <= 1.2 * nominal
    assert decision.reason
    is_elsewhere = decision.action in (Action.replace, Action.shrink, Action.requeue)
    assert decision.exclude == (row.incidents[-1].blamed if is_elsewhere else ())


def test_the_manual_shows_the_table_and_that_shows_every_rule() -> None:
    shown = {row.decision().rule for row in policy_table.ROWS}
    assert shown == {rule.__name__ for rule in RULES} - {"restarts_are_off"}
    assert policy_table.markdown() in (ROOT / "docs" / "recovery.md").read_text(), (
        "paste what `python tests/unit/recovery/policy_table.py` prints"
    )


FEW = FEWEST_STEPS_OF_PROGRESS - 1


@pytest.mark.parametrize(
    ("history", "is_progress"),
    [
        # A new checkpoint each time, and steps restored from memory.
        ([replace(KILLED, committed=100 * number, step=100 * number + 50) for number in range(100)], True),
        ([replace(KILLED, began=60 * number, step=60 * number + 61) for number in range(50)], True),
        # Steps that no attempt began from, a few steps each time, back and up again.
        ([replace(KILLED, step=100 + 60 * number) for number in range(4)], False),
        ([replace(ERROR, began=FEW * number, step=FEW * number + 2) for number in range(4)], False),
        ([replace(KILLED, committed=100 if number % 2 else 200) for number in range(4)], False),
    ],
)
def test_progress_alone_begins_the_count_anew(history: list[Incident], is_progress: bool) -> None:
    decision = after(*history)
    assert (decision.rule == "no_progress") is not is_progress
    assert (decision.action is Action.restart and decision.wait_s == 0.0) is is_progress


def test_whoever_resumes_a_run_has_seen_what_was_before() -> None:
    assert after(ERROR, ERROR).action is Action.give_up
    assert after(ERROR, replace(ERROR, by_hand=True)).action is Action.restart


# Whose fault it is.


def test_the_same_error_at_the_same_step_is_found_over_other_failures_between() -> None:
    assert after(ERROR, replace(KILLED, step=120), ERROR).rule == "fails_at_same_step"


def test_a_broken_device_uses_up_no_restart_and_hides_no_bug() -> None:
    broken = replace(ERROR, unfit=("node2",), of_device=True)
    assert after(*[replace(broken, step=step) for step in range(101, 110)]).charged is False
    # The same error without a broken device: only two of those are a bug.
    for early in (False, True):
        ours, theirs = (replace(it, before_first_step=early) for it in (ERROR, broken))
        assert after(ours, theirs).rule == after(theirs, ours).rule == "start_again"
        assert after(ours, theirs, ours).action is Action.give_up
    # What is no device may be what the code did, such as a disk that it filled.
    assert after(*[replace(ERROR, unfit=("node2",))] * 2).rule == "fails_at_same_step"


@pytest.mark.parametrize(
    "other",
    [
        replace(ERROR, step=151),
        replace(ERROR, cause="KeyError in a/b.py:f"),
        replace(ERROR, step_is_exact=False),
        replace(ERROR, kind=Kind.loss),
    ],
)
def test_what_differs_in_cause_or_step_goes_on(other: Incident) -> None:
    assert after(other, ERROR).action is Action.restart


@pytest.mark.parametrize(
    "cause",
    ["killed by SIGKILL", "broken device", "lost the connection to another rank", "OSError in a/b.py:f"],
)
def test_what_comes_from_outside_says_nothing_of_code_or_data(cause: str) -> None:
    outside = replace(ERROR, cause=cause)
    early = replace(outside, step=0, before_first_step=True)
    assert after(outside, outside).action is Action.restart
    assert after(early, early).action is Action.restart


def test_a_crash_in_native_code_is_suspected() -> None:
    early = replace(ERROR, cause="killed by SIGSEGV", before_first_step=True, blamed=("node2",))
    assert after(early, early).rule == "fails_before_first_step"


def test_a_hang_before_the_first_step_may_be_the_networks_and_on_one_node_is_the_codes() -> None:
    hang = replace(ERROR, kind=Kind.hang, cause="hang in setup", before_first_step=True)
    alone = replace(hang, num_nodes=1)
    assert after(alone, alone).rule == "fails_before_first_step"
    assert after(hang, hang).action is Action.restart
    blamed = replace(hang, blamed=("node2",))
    decision = after(blamed, blamed)
    assert (decision.rule, decision.exclude, decision.listed) == ("same_host_twice", ("node2",), ("node2",))


# Where it goes on.

BAD = replace(KILLED, blamed=("node2",))


def test_a_host_is_left_out_after_two_failures_in_a_row_only() -> None:
    twice = (BAD, replace(BAD, step=90))
    assert after(*twice).listed == ("node2",)
    assert after(BAD, replace(KILLED, blamed=("node3",)), BAD).exclude == ()
    preempted = replace(KILLED, kind=Kind.preempted, code=75)
    assert after(BAD, preempted, BAD).exclude == ("node2",)
    assert after(*twice, rules=Rules(excludes=False)).action is Action.restart
    # With nowhere else to go it is kept, and charged.
    decision = after(*twice, resources=replace(FOUR, can_requeue=False))
    assert (decision.action, decision.exclude, decision.charged) == (Action.restart, (), True)


def test_a_host_that_a_job_was_given_again_for_want_of_others_is_an_ordinary_failure() -> None:
    out = replace(BAD, step=90, excluded=("node2",))
    assert after(BAD, BAD).action is Action.requeue
    decision = after(BAD, out, replace(BAD, step=120))
    assert (decision.action, decision.exclude, decision.charged) == (Action.restart, (), True)
    # One that was merely gone, and is back, is left out like any other.
    gone = replace(BAD, kind=Kind.node_lost, cause="node lost", excluded=("node2",))
    assert after(gone, BAD, replace(BAD, step=120)).action is Action.requeue
    # Where another is there it is left out again.
    assert after(BAD, out, BAD, resources=replace(FOUR, spares=("node5",))).exclude == ("node2",)


def test_a_rehearsed_failure_puts_no_host_on_the_clusters_list() -> None:
    decision = after(replace(BAD, rehearsed=True), BAD)
    assert (decision.exclude, decision.listed) == (("node2",), ())


def test_a_left_out_host_is_not_charged_to_those_that_stay() -> None:
    out = replace(BAD, excluded=("node2",))
    assert not is_charged(out)
    others = [replace(KILLED, blamed=(host,)) for host in ("node1", "node3")]
    assert after(BAD, out, *others).action is Action.restart


LOST = replace(BAD, kind=Kind.node_lost, cause="node lost")
LEFT = replace(FOUR, hosts=("node1", "node3", "node4"))


def test_a_lost_node_that_is_back_is_used_and_no_place_left_here_means_another_job() -> None:
    back = after(LOST)
    assert (back.action, back.exclude, back.charged) == (Action.restart, (), False)
    assert after(LOST, resources=replace(LEFT, min_nodes=2, in_place=False)).action is Action.requeue
    ended = after(LOST, resources=replace(LEFT, can_requeue=False))
    assert (ended.action, ended.exclude) == (Action.give_up, ())


def test_a_node_that_is_lost_beside_one_that_failed_twice_is_left_out_and_not_listed() -> None:
    both = replace(LOST, blamed=("node2", "node3"))
    decision = after(LOST, both, resources=replace(FOUR, hosts=("node1", "node4")))
    assert (decision.rule, decision.exclude, decision.listed) == (
        "same_host_twice",
        ("node2", "node3"),
        ("node2",),
    )


def test_a_node_that_is_not_fit_any_more_is_replaced_but_a_shrunk_run_goes_on_as_it_is() -> None:
    decision = after(KILLED, resources=replace(LEFT, spares=("node5",)))
    assert (decision.action, decision.charged) == (Action.replace, True)
    shrunk = replace(KILLED, num_nodes=3)
    assert after(shrunk, resources=replace(LEFT, min_nodes=2)).action is Action.restart


def test_no_restarts_means_none_but_slurm_may_take_a_job_and_bring_it_back() -> None:
    rules = Rules(max_restarts=0)
    assert after(LOST, rules=rules).rule == "restarts_are_off"
    assert after(replace(KILLED, kind=Kind.time_limit, code=75), rules=rules).action is Action.requeue


def test_one_slice_without_a_save_after_good_ones_is_tried_again_and_two_in_a_row_end_the_run() -> None:
    """A good slice saved what it trained; the step after each is that of its save or of the one before."""
    good, better, idle = (
        replace(KILLED, kind=Kind.time_limit, cause="time limit", code=75, began=began, committed=committed)
        for began, committed in ((0, 2), (2, 4), (4, 4))
    )
    for history in ((good,), (good, better), (good, better, idle), (good, KILLED, idle)):
        assert after(*history).action is Action.requeue, history
    # The first save of a run that began with nothing is one, too.
    first = replace(idle, began=0, committed=0)
    assert after(first, good, replace(idle, began=2, committed=2)).action is Action.requeue
    for history in ((good, better, idle, idle), (first, first), (good, KILLED, idle, idle)):
        decision = after(*history)
        assert (decision.rule, decision.code) == ("time_limit_too_short", 93), history
    # What a preemption ended is nobody's fault.
    taken = replace(idle, kind=Kind.preempted, cause="preempted")
    assert after(good, taken, idle).action is Action.requeue


def test_waits_grow_threefold_to_ten_minutes_and_differ_between_runs() -> None:
    rules = Rules(max_restarts=9)
    waits = [after(*[KILLED] * number, rules=rules).wait_s for number in range(1, 9)]
    for wait_s, nominal in zip(waits, (0, 10, 30, 90, 270, 600, 600, 600), strict=True):
        assert 0.8 * nominal <= wait_s <= 1.2 * nominal
    assert len(set(waits)) == len(waits)
    lost = [replace(LOST, blamed=(f"node{number}",)) for number in range(5, 10)]
    waits = [after(*lost[:number]).wait_s for number in range(1, 6)]
    assert [wait_s > 0 for wait_s in waits] == [False, False, False, True, True]


def test_the_rules_come_from_the_configuration() -> None:
    assert Rules.of(RecoveryConfig()) == Rules()
    assert Rules.of(RecoveryConfig(max_restarts=7, backoff_s=1.0, exclude_hours=0)) == Rules(7, 1.0, False)


# What follows a roll-back.

TO_50 = RollBack(0, 150, 50, SPIKE, (Stretch(400, 2000),), (51, 250))
TO_100 = RollBack(0, 150, 100, BROKEN_DEVICE)
SPIKED = replace(ERROR, kind=Kind.loss, cause=SPIKE, rank=None, committed=140, roll_back=TO_50)
BROKEN = replace(SPIKED, kind=Kind.replay, cause=BROKEN_DEVICE, roll_back=TO_100)


def test_a_run_that_is_rolled_back_starts_again_at_once_and_is_charged() -> None:
    decision = after(SPIKED)
    assert (decision.action, decision.rule, decision.wait_s) == (Action.restart, "roll_back", 0.0)
    assert decision.charged
    assert decision.reason == "it goes back to step 50; the data of steps 51 to 250 is left out"
    # The same step again is another one, with other data.
    again = after(SPIKED, SPIKED, SPIKED)
    assert (again.rule, again.wait_s) == ("roll_back", 0.0)
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


def test_only_a_checkpoint_of_a_later_step_than_ever_is_progress() -> None:
    found = [replace(SPIKED, committed=committed) for committed in (140, 60, 130, 140)]
    assert after(*found).code == 93
    assert after(*found[:3], replace(SPIKED, committed=150)).action is Action.restart


def test_a_host_that_computed_wrongly_is_left_out_at_once_and_listed() -> None:
    blamed = replace(BROKEN, blamed=("node2",))
    # Nobody is charged: restarts that are used up end nothing.
    used_up = [replace(KILLED, step=step, committed=140) for step in (141, 143, 147)]
    assert after(*used_up, blamed).rule == "broken_device"
    assert after(*used_up, BROKEN).rule == "no_progress"
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


# Whatever happens.

CAUSES = ("ValueError in a/b.py:f", "KeyError in a/b.py:f", "killed by SIGKILL", "killed by SIGSEGV", "hang")
BLAMING = (Kind.rank_failed, Kind.hang, Kind.node_lost, Kind.agent_lost)


@st.composite
def some_incidents(draw: st.DrawFn, kept: int | None = None) -> Incident:
    """Any incident; with `kept` one that ended nothing, and after which that step is the newest kept one."""
    ends = (Kind.finished,) if kept is None else (Kind.finished, Kind.stopped, Kind.refused)
    kind = draw(st.sampled_from([kind for kind in Kind if kind not in ends]))
    cause = draw(st.sampled_from(CAUSES)) if kind in (Kind.rank_failed, Kind.hang, Kind.loss) else kind.value
    began = draw(st.integers(0, 300)) if kept is None else kept
    is_blaming = kind in BLAMING and "Error" not in cause
    early = draw(st.booleans())
    return Incident(
        attempt=0,
        kind=kind,
        cause=cause,
        time=float(draw(st.integers(0, 10**6))),
        code={Kind.refused: 93, Kind.stopped: 75, Kind.preempted: 75, Kind.time_limit: 75}.get(kind, 1),
        blamed=tuple(draw(st.sets(st.sampled_from(HOSTS), max_size=2))) if is_blaming else (),
        step=began if early else draw(st.none() | st.integers(began + 1, began + 400)),
        step_is_exact=early or draw(st.booleans()),
        began=began,
        committed=draw(st.integers(0, 300)) if kept is None else kept,
        before_first_step=early,
        num_nodes=draw(st.integers(1, 4)),
        by_hand=kept is None and draw(st.integers(0, 9)) == 0,
        rehearsed=draw(st.booleans()),
    )


some_resources = st.builds(
    Resources,
    wanted_nodes=st.just(4),
    min_nodes=st.none() | st.integers(1, 4),
    hosts=st.sets(st.sampled_from(HOSTS)).map(lambda hosts: tuple(sorted(hosts))),
    spares=st.sets(st.sampled_from(("node5", "node6"))).map(lambda hosts: tuple(sorted(hosts))),
    can_requeue=st.booleans(),
    in_place=st.booleans(),
)
some_rules = st.builds(Rules, max_restarts=st.integers(0, 6), excludes=st.booleans())
some_logs = st.lists(some_incidents(), min_size=1, max_size=12).map(lambda parts: in_a_row(*parts))


@given(some_logs, some_resources, some_rules)
def test_a_decision_is_sound_and_always_the_same(
    found: Sequence[Incident], resources: Resources, rules: Rules
) -> None:
    decision = decide(found, resources, rules)
    assert decision == decide(found, resources, rules)
    assert decision.rule
    assert decision.reason
    now = found[-1]
    if decision.action is Action.give_up and now.kind is not Kind.refused:
        assert decision.code in (EXIT_FAILED, EXIT_DO_NOT_RESTART)
    if decision.action is Action.end:
        assert now.kind in (Kind.stopped, Kind.preempted, Kind.time_limit)
    if decision.action is Action.requeue:
        assert resources.can_requeue
    if decision.action in (Action.restart, Action.replace, Action.shrink):
        left = {*resources.hosts, *resources.spares} - set(decision.exclude)
        assert resources.in_place
        assert len(left) >= min(resources.fewest_nodes, now.num_nodes)
        assert decision.action is not Action.replace or resources.spares
    assert 0 <= decision.wait_s <= 720
    # No host is left out for an error of the user's.
    assert set(decision.exclude) <= set(now.blamed)
    assert set(decision.listed) <= set(decision.exclude)
    if "Error" in now.cause or decision.code == EXIT_DO_NOT_RESTART:
        assert decision.exclude == ()


def test_a_lost_node_after_many_preemptions_is_replaced_as_ever() -> None:
    preempted = Incident(0, Kind.preempted, "preempted", 0.0, 75)
    lost = replace(preempted, kind=Kind.node_lost, cause="lost", code=1, blamed=("n1",))
    resources = Resources(2, None, ("n2",), spares=("n3",))
    assert (
        decide(in_a_row(*[preempted] * (MOST_NOT_CHARGED + 5), lost), resources, Rules()).action
        is not Action.give_up
    )


@given(st.data(), some_rules)
def test_without_progress_every_run_comes_to_an_end(data: st.DataObject, rules: Rules) -> None:
    kept = data.draw(st.integers(0, 300))
    most = MOST_NOT_CHARGED + rules.max_restarts + 1
    found: list[Incident] = []
    for _ in range(most):
        # Who is preempted is started again by Slurm, which is not asked here.
        found.append(data.draw(some_incidents(kept).filter(lambda one: one.kind is not Kind.preempted)))
        decision = decide(in_a_row(*found), data.draw(some_resources), rules)
        if decision.action in (Action.end, Action.give_up):
            return
        found[-1] = replace(found[-1], excluded=decision.exclude)
    pytest.fail(f"{most} attempts without progress, and another one would follow")
