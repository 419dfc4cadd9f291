"""What is decided: the documented table row by row, and what holds for every log of incidents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import RecoveryConfig
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED
from orchestra.recovery import policy_table
from orchestra.recovery.incidents import Incident, Kind
from orchestra.recovery.policy import (
    FEWEST_STEPS_OF_PROGRESS,
    MOST_NOT_CHARGED,
    RULES,
    Action,
    Decision,
    Resources,
    Rules,
    decide,
    is_charged,
)

ROOT = Path(__file__).resolve().parents[3]
HOSTS = ("node1", "node2", "node3", "node4")
FOUR = Resources(wanted_nodes=4, min_nodes=None, hosts=HOSTS, can_requeue=True)
FOREGROUND = Resources(wanted_nodes=1, min_nodes=None, hosts=("here",))
KILLED = Incident(0, Kind.rank_failed, "killed by SIGKILL", 0.0, 1, rank=1, step=150, num_nodes=4)
ERROR = replace(KILLED, cause="ValueError in a/b.py:f", step_is_exact=True)


def log(*parts: Incident) -> tuple[Incident, ...]:
    """Return incidents of attempts 0, 1 …, of which a person started the first."""
    return tuple(
        replace(it, attempt=number, time=100.0 * number, by_hand=it.by_hand or number == 0)
        for number, it in enumerate(parts)
    )


def after(*parts: Incident, resources: Resources = FOUR, rules: Rules | None = None) -> Decision:
    return decide(log(*parts), resources, rules or Rules())


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


def test_the_table_shows_every_rule_once_at_least() -> None:
    assert {row.decision().rule for row in policy_table.ROWS} == {rule.__name__ for rule in RULES} - {
        "restarts_are_off"
    }


def test_the_manual_shows_the_table() -> None:
    assert policy_table.markdown() in (ROOT / "docs" / "recovery.md").read_text(), (
        "paste what orchestra.recovery.policy_table.markdown() returns"
    )


# What counts as progress.


def test_a_new_checkpoint_begins_the_count_anew_however_often_it_fails() -> None:
    creeping = [replace(KILLED, committed=100 * number, step=100 * number + 50) for number in range(100)]
    decision = after(*creeping)
    assert (decision.action, decision.wait_s) == (Action.restart, 0.0)


def test_steps_restored_from_memory_are_progress() -> None:
    kept = [replace(KILLED, began=60 * number, step=60 * number + 61) for number in range(50)]
    assert after(*kept).action is Action.restart


def test_steps_that_no_attempt_began_from_are_none() -> None:
    lost = [replace(KILLED, step=100 + 60 * number) for number in range(4)]
    assert after(*lost).rule == "no_progress"


def test_creeping_on_by_a_few_steps_is_none() -> None:
    few = FEWEST_STEPS_OF_PROGRESS - 1
    creeping = [replace(ERROR, began=few * number, step=few * number + 2) for number in range(4)]
    assert after(*creeping).rule == "no_progress"


def test_going_back_and_up_again_is_none() -> None:
    found = [replace(KILLED, committed=100 if number % 2 else 200) for number in range(4)]
    assert after(*found).rule == "no_progress"


def test_whoever_resumes_a_run_has_seen_what_was_before() -> None:
    assert after(ERROR, ERROR).action is Action.give_up
    assert after(ERROR, replace(ERROR, by_hand=True)).action is Action.restart


# Whose fault it is.


def test_the_same_error_at_the_same_step_is_found_over_other_failures_between() -> None:
    assert after(ERROR, replace(KILLED, step=120), ERROR).rule == "fails_at_same_step"


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


def test_a_rehearsed_failure_puts_no_host_on_the_clusters_list() -> None:
    decision = after(replace(BAD, rehearsed=True), BAD)
    assert (decision.exclude, decision.listed) == (("node2",), ())


def test_with_nowhere_else_to_go_a_host_is_kept_and_charged() -> None:
    decision = after(BAD, replace(BAD, step=90), resources=replace(FOUR, can_requeue=False))
    assert (decision.action, decision.exclude, decision.charged) == (Action.restart, (), True)


def test_a_left_out_host_is_not_charged_to_those_that_stay() -> None:
    out = replace(BAD, excluded=("node2",))
    assert not is_charged(out)
    others = [replace(KILLED, blamed=(host,)) for host in ("node1", "node3")]
    assert after(BAD, out, *others).action is Action.restart


LOST = replace(BAD, kind=Kind.node_lost, cause="node lost")
LEFT = replace(FOUR, hosts=("node1", "node3", "node4"))


@pytest.mark.parametrize(
    ("resources", "action", "exclude"),
    [
        (replace(LEFT, spares=("node5",), min_nodes=2), Action.replace, ("node2",)),
        (replace(LEFT, min_nodes=2), Action.shrink, ("node2",)),
        (LEFT, Action.requeue, ("node2",)),
        (replace(LEFT, min_nodes=2, in_place=False), Action.requeue, ("node2",)),
        (replace(LEFT, can_requeue=False), Action.give_up, ()),
        (FOUR, Action.restart, ()),
    ],
)
def test_a_lost_node_is_replaced_or_done_without(
    resources: Resources, action: Action, exclude: tuple[str, ...]
) -> None:
    decision = after(LOST, resources=resources)
    assert (decision.action, decision.exclude, decision.charged) == (action, exclude, False)


def test_a_node_that_is_not_fit_any_more_is_replaced_whatever_ended_the_attempt() -> None:
    decision = after(KILLED, resources=replace(LEFT, spares=("node5",)))
    assert (decision.action, decision.charged) == (Action.replace, True)


def test_a_shrunk_run_goes_on_as_it_is() -> None:
    shrunk = replace(KILLED, num_nodes=3)
    assert after(shrunk, resources=replace(LEFT, min_nodes=2)).action is Action.restart


def test_in_the_foreground_it_starts_again_here() -> None:
    here = replace(KILLED, num_nodes=1, host="here")
    assert after(here, resources=FOREGROUND).action is Action.restart
    assert after(*[here] * 4, resources=FOREGROUND).code == EXIT_FAILED


def test_no_restarts_means_none_but_slurm_may_take_a_job_and_bring_it_back() -> None:
    rules = Rules(max_restarts=0)
    assert after(LOST, rules=rules).rule == "restarts_are_off"
    assert after(replace(KILLED, kind=Kind.time_limit, code=75), rules=rules).action is Action.requeue


def test_waits_grow_threefold_to_ten_minutes_and_differ_between_runs() -> None:
    rules = Rules(max_restarts=9)
    waits = [after(*[KILLED] * number, rules=rules).wait_s for number in range(1, 9)]
    for wait_s, nominal in zip(waits, (0, 10, 30, 90, 270, 600, 600, 600), strict=True):
        assert 0.8 * nominal <= wait_s <= 1.2 * nominal
    assert len(set(waits)) == len(waits)
    others = [replace(LOST, blamed=(f"node{number}",)) for number in range(5, 10)]
    waits = [after(*others[:number]).wait_s for number in range(1, 6)]
    assert [wait_s > 0 for wait_s in waits] == [False, False, False, True, True]


def test_the_rules_come_from_the_configuration() -> None:
    assert Rules.of(RecoveryConfig()) == Rules()
    assert Rules.of(RecoveryConfig(max_restarts=7, backoff_s=1.0, exclude_hours=0)) == Rules(7, 1.0, False)


# Whatever happens.

CAUSES = ("ValueError in a/b.py:f", "KeyError in a/b.py:f", "killed by SIGKILL", "killed by SIGSEGV", "hang")
BLAMING = (Kind.rank_failed, Kind.hang, Kind.node_lost, Kind.agent_lost)


@st.composite
def some_incidents(draw: st.DrawFn, kept: int | None = None) -> Incident:
    """Any incident; with `kept` one that ended nothing, and behind which that step is the newest kept one."""
    ends = (Kind.finished,) if kept is None else (Kind.finished, Kind.stopped, Kind.refused)
    kind = draw(st.sampled_from([it for it in Kind if it not in ends]))
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
some_logs = st.lists(some_incidents(), min_size=1, max_size=12).map(lambda parts: log(*parts))


@settings(deadline=None)
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


@settings(deadline=None)
@given(some_logs, some_resources, some_rules)
def test_no_host_is_left_out_for_an_error_of_the_users(
    found: Sequence[Incident], resources: Resources, rules: Rules
) -> None:
    decision = decide(found, resources, rules)
    assert set(decision.exclude) <= set(found[-1].blamed)
    assert set(decision.listed) <= set(decision.exclude)
    if "Error" in found[-1].cause or decision.code == EXIT_DO_NOT_RESTART:
        assert decision.exclude == ()


@settings(deadline=None)
@given(st.data(), some_rules)
def test_without_progress_every_run_comes_to_an_end(data: st.DataObject, rules: Rules) -> None:
    kept = data.draw(st.integers(0, 300))
    most = MOST_NOT_CHARGED + rules.max_restarts + 1
    found: list[Incident] = []
    for _ in range(most):
        found.append(data.draw(some_incidents(kept)))
        decision = decide(log(*found), data.draw(some_resources), rules)
        if decision.action in (Action.end, Action.give_up):
            return
        found[-1] = replace(found[-1], excluded=decision.exclude)
    pytest.fail(f"{most} attempts without progress, and another one would follow")
