"""Hangs: how long a rank may be silent, which ranks hold up a run over all nodes, and whom events blame."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from conf.schema import Config, ParallelismConfig, RecoveryConfig
from orchestra.recovery import hangs
from orchestra.recovery.hangs import (
    Culprit,
    LimitRules,
    RankPosition,
    RankTimes,
    culprit,
    hanging_on_all_nodes,
    limit,
    limit_rules,
)
from orchestra.run.heartbeat import Phase

RULES = LimitRules(setup_s=900.0, silent_s=60.0, storage_s=600.0, closing_s=120.0)


def rank_times(step_s: float, number: int = 100, silence_s: float = 0.0) -> RankTimes:
    seen = RankTimes()
    seen.add_steps(1, 500.0)
    seen.add_steps(1, 40.0)
    for _ in range(number):
        seen.add_steps(1, step_s)
    seen.add_silence(silence_s)
    return seen


def test_an_attempt_that_made_no_step_yet_has_the_time_of_its_setup() -> None:
    for phase in (Phase.setup, Phase.step, Phase.forward):
        assert limit(phase, RankTimes(), RULES) == 900.0
    for phase in (Phase.backward, Phase.agree):
        assert limit(phase, RankTimes(), RULES) == 903.0


@pytest.mark.parametrize(
    ("step_s", "silence_s", "expected"),
    [(0.05, 0.0, 10.0), (2.0, 0.0, 20.0), (2.0, 9.0, 27.0), (5.9, 0.0, 59.0), (30.0, 0.0, 60.0)],
)
def test_the_limit_of_a_step_follows_its_history(step_s: float, silence_s: float, expected: float) -> None:
    assert limit(Phase.forward, rank_times(step_s, silence_s=silence_s), RULES) == pytest.approx(expected)


def test_few_steps_teach_nothing_and_what_is_configured_bounds_even_the_floor() -> None:
    assert limit(Phase.forward, rank_times(0.1, number=2), RULES) == 60.0
    assert limit(Phase.forward, rank_times(0.1), dataclasses.replace(RULES, silent_s=3.0)) == 3.0


def test_who_may_wait_for_others_or_for_storage_is_waited_for_longer() -> None:
    seen = rank_times(0.1)
    for phase in (Phase.backward, Phase.reduce, Phase.update, Phase.agree):
        assert limit(phase, seen, RULES) == 63.0
        assert limit(phase, seen, RULES, is_last=True) == 10.0
    for phase in (Phase.data, Phase.record):
        assert limit(phase, seen, RULES, is_last=True) == 60.0


def test_a_stopped_process_is_waited_for_as_a_step_is_and_needs_no_allowance_for_busy_cores() -> None:
    seen = rank_times(0.1)
    for phase in Phase:
        if phase >= Phase.step:
            assert limit(phase, seen, RULES, is_stopped=True) == 5.0
        # A debugger that looks at a rank of long steps for a moment stops it too.
        if phase >= Phase.step:
            assert limit(phase, rank_times(3.0), RULES, is_stopped=True) == 30.0
        assert limit(phase, RankTimes(), RULES, is_stopped=True) == 60.0


def test_saves_and_restores_are_learned_from_earlier_ones() -> None:
    seen = RankTimes()
    assert limit(Phase.save, seen, RULES) == limit(Phase.restore, seen, RULES) == 600.0
    seen.saves_s.append(2.0)
    seen.restores_s.append(20.0)
    assert (limit(Phase.save, seen, RULES), limit(Phase.restore, seen, RULES)) == (60.0, 200.0)
    assert limit(Phase.commit, seen, RULES) == 1200.0
    seen.saves_s.append(1000.0)
    assert limit(Phase.save, seen, RULES) == 600.0


def test_many_steps_at_first_sight_teach_without_the_first_and_more_than_are_kept_at_once() -> None:
    seen = RankTimes()
    seen.add_steps(6, 12.0)
    assert list(seen.steps_s) == [2.0] * 5
    seen.add_steps(10**9, 10**9 * 3.0)
    assert limit(Phase.step, seen, RULES) == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("shape", "is_own_work"),
    [({}, True), ({"zero": 2}, True), ({"zero": 3}, False), ({"tp": 2}, False)],
)
def test_a_forward_pass_with_collectives_is_no_work_of_its_own(
    shape: dict[str, Any], is_own_work: bool
) -> None:
    rules = limit_rules(Config(parallelism=ParallelismConfig(**shape)))
    assert (Phase.forward in rules.own_work) is is_own_work


def test_the_bounds_come_from_the_configuration() -> None:
    recovery = RecoveryConfig(heartbeat_timeout_s=7.0, setup_timeout_s=70.0, stop_timeout_s=700.0)
    rules = limit_rules(Config(recovery=recovery))
    assert (rules.silent_s, rules.setup_s, rules.closing_s) == (7.0, 70.0, 700.0)


# Which ranks hold up a run over several nodes: those that stand no further than anybody else's last position.


def at(
    rank: int, phase: Phase, step: int = 8, micro_batch: int = 0, silent_s: float = 12.0, state: str = "S"
) -> RankPosition:
    return RankPosition(rank, f"node{rank // 2}", phase, step, micro_batch, silent_s, state)


def stopped(rank: int, phase: Phase, **place: Any) -> RankPosition:
    return at(rank, phase, state="T", **place)


def hanging(*positions: RankPosition, step_s: float = 0.1) -> list[tuple[RankPosition, float]]:
    return hanging_on_all_nodes(positions, 3, rank_times(step_s), RULES)


def ranks(*positions: RankPosition, step_s: float = 0.1) -> list[int]:
    return [position.rank for position, _ in hanging(*positions, step_s=step_s)]


WAITING = (at(0, Phase.reduce), at(2, Phase.reduce))


def test_the_rank_that_all_wait_for_is_found_at_a_steps_own_limit() -> None:
    behind = stopped(1, Phase.backward, micro_batch=1)
    assert hanging(*WAITING, behind) == [(behind, 10.0)]
    assert ranks(*WAITING, stopped(1, Phase.backward, silent_s=9.0)) == []
    # Slow steps are waited for as long as they take.
    behind = stopped(1, Phase.backward, silent_s=29.0)
    assert ranks(*WAITING, behind, step_s=3.0) == []
    assert ranks(*WAITING, behind, step_s=2.0) == [1]


def test_on_one_node_nobody_is_blamed_while_whom_he_waits_for_is_nearly_as_long_silent() -> None:
    waiting, behind = at(0, Phase.forward, 8, silent_s=10.1), at(1, Phase.forward, 7, silent_s=9.8)
    limits = {0: 10.0, 1: 10.0}
    assert hangs.hanging([waiting, behind], limits) == []
    later = [dataclasses.replace(waiting, silent_s=10.4), dataclasses.replace(behind, silent_s=10.1)]
    assert hangs.hanging(later, limits) == [later[1]]
    # One that still works is not what it waits for.
    assert hangs.hanging([waiting, dataclasses.replace(behind, silent_s=0.2)], limits) == [waiting]


def test_of_several_at_the_same_place_none_is_named_before_the_others() -> None:
    """In one backward pass with collectives inside whoever beat first may only wait for who beat last."""
    first, last = at(0, Phase.backward, silent_s=10.1), at(1, Phase.backward, silent_s=9.8)
    limits = {0: 10.0, 1: 10.0}
    assert hangs.hanging([first, last], limits) == []
    both = [dataclasses.replace(rank, silent_s=rank.silent_s + 1.0) for rank in (first, last)]
    assert hangs.hanging(both, limits) == both
    # One that still works is waited for by nobody.
    assert hangs.hanging([first, dataclasses.replace(last, silent_s=0.2)], limits) == [first]


def test_so_it_is_over_all_nodes() -> None:
    early = [at(rank, Phase.backward, silent_s=20.5) for rank in (0, 2)]
    assert ranks(*early, at(1, Phase.backward, silent_s=19.5)) == []
    assert ranks(*early, at(1, Phase.backward, silent_s=20.1)) == [0, 2, 1]
    assert ranks(*early, stopped(1, Phase.backward, silent_s=10.5)) == [0, 2, 1]


@pytest.mark.parametrize("own_phase", [Phase.step, Phase.data])
def test_where_all_limits_are_what_is_configured_a_node_whose_rank_waits_looks_after_the_one_it_waits_for(
    own_phase: Phase,
) -> None:
    rules, seen = dataclasses.replace(RULES, silent_s=6.0), rank_times(0.1)

    def found(phase: Phase, silent_s: float) -> bool:
        here = [at(0, phase, 18, silent_s=silent_s)]
        limits = hangs.limits_on_node(here, {0: seen}, rules, is_whole=False)
        return bool(hangs.hanging(here, limits))

    # Both fell silent in the same moment, and whichever agent looks first ends the attempt.
    assert found(own_phase, 6.5)
    assert not found(Phase.reduce, 8.5)
    assert found(Phase.reduce, 9.5)


def test_whom_an_outage_of_the_network_catches_behind_the_others_has_twice_as_long() -> None:
    assert ranks(*WAITING, at(1, Phase.backward, silent_s=19.0)) == []
    assert ranks(*WAITING, at(1, Phase.backward, silent_s=21.0)) == [1]


def test_nobody_is_found_before_all_ranks_are_in_sight() -> None:
    assert ranks(at(0, Phase.reduce), at(1, Phase.backward)) == []


@pytest.mark.parametrize("phase", [Phase.data, Phase.record, Phase.save, Phase.commit, Phase.restore])
def test_whoever_waits_for_storage_has_the_time_that_storage_takes(phase: Phase) -> None:
    behind = at(1, phase, step=7, silent_s=59.0)
    assert ranks(at(0, Phase.reduce, silent_s=59.0), behind, at(2, Phase.reduce, silent_s=59.0)) == []


def test_where_all_stand_at_the_same_place_the_network_has_time_to_come_back() -> None:
    for silent_s, hanging_ranks in ((12.0, []), (19.0, []), (21.0, [0, 1, 2])):
        same = [at(rank, Phase.reduce, silent_s=silent_s) for rank in range(3)]
        assert ranks(*same) == hanging_ranks
    same = [at(rank, Phase.reduce, silent_s=61.0) for rank in range(3)]
    assert ranks(*same, step_s=5.9) == [0, 1, 2], "never longer than without a look at the others"


def test_an_old_word_of_somebody_further_is_enough_and_one_of_somebody_behind_is_not_believed_alone() -> None:
    """Positions only grow: rank 0 is behind what rank 2 said long ago."""
    first = at(0, Phase.reduce, 8, silent_s=21.0)
    assert ranks(first, at(1, Phase.reduce, 9), at(2, Phase.step, 9, silent_s=500.0)) == [0]
    assert ranks(at(0, Phase.reduce, 8, silent_s=2.0), at(1, Phase.reduce, 9), at(2, Phase.reduce, 9)) == []


# Whom an attempt's events blame.


def stalled(*positions: RankPosition, event: str = "step_stalled") -> dict[str, Any]:
    ranks = [position.record() for position in positions]
    return {"event": event, "time": 1.0, "attempt": 0, "host": positions[0].host, "ranks": ranks}


def named(*events: dict[str, Any]) -> Culprit:
    found = culprit(events)
    assert found is not None
    return found


def test_the_rank_with_the_least_progress_is_named_over_all_nodes() -> None:
    found = named(
        stalled(at(0, Phase.reduce), at(1, Phase.reduce)),
        stalled(at(2, Phase.reduce), at(3, Phase.forward, micro_batch=1)),
        stalled(at(4, Phase.backward, micro_batch=1), at(5, Phase.reduce)),
    )
    assert (found.rank, found.host) == (3, "node1")
    assert "in forward of micro-batch 1 of step 8" in found.why


@pytest.mark.parametrize(
    ("positions", "rank", "why"),
    [
        ((at(0, Phase.forward), at(1, Phase.save, state="T")), 1, "stopped"),
        ((at(0, Phase.step, step=9), at(1, Phase.save, step=8)), 1, "step 8"),
        ((at(0, Phase.forward),), 0, "is silent"),
        ((at(0, Phase.reduce), at(1, Phase.forward), at(2, Phase.forward)), 1, "(and 1 more)"),
        (tuple(at(rank, Phase.reduce) for rank in range(4)), None, "all 4 silent ranks stand"),
    ],
    ids=["stopped", "an earlier step", "one alone", "several", "all at one place"],
)
def test_whom_the_others_wait_for(positions: tuple[RankPosition, ...], rank: int | None, why: str) -> None:
    found = named(stalled(*positions))
    assert (found.rank, found.host) == (rank, None if rank is None else "node0")
    assert why in found.why


def test_of_several_at_one_place_the_one_is_named_that_the_others_collectives_wait_for() -> None:
    same = tuple(at(rank, Phase.backward) for rank in range(4))
    hang = {**stalled(*same, event="hang_detected"), "rank": 2, "is_awaited": True}
    found = named(stalled(*same), hang)
    assert (found.rank, found.host) == (2, "node0")
    assert found.why == "others wait in a collective for rank 2, in backward of micro-batch 0 of step 8"
    # A word of the records is no evidence against what the positions say, nor is a wait without it.
    assert named({**hang, "is_awaited": None}).rank is None
    behind = stalled(*same[:3], at(3, Phase.forward))
    assert named(hang, {**behind, "host": "node1"}).rank == 3


def test_of_each_rank_the_last_word_counts() -> None:
    later = (at(0, Phase.reduce, step=20), at(1, Phase.step, step=20))
    first = stalled(at(0, Phase.forward), at(1, Phase.reduce))
    assert named(first, stalled(*later, event="hang_detected")).rank == 1


@pytest.mark.parametrize(
    "damage",
    [{"rank": "one"}, {"phase": "lunch"}, {"step": None}, {"seconds": "long"}, {"micro_batch": 1.5}],
)
def test_damaged_positions_are_passed_over(damage: dict[str, Any]) -> None:
    good, bad = stalled(at(1, Phase.forward)), stalled(at(0, Phase.step))
    bad["ranks"][0].update(damage)
    assert named(bad, good).rank == 1
    assert culprit([{**good, "ranks": "many"}]) is None


def test_no_report_of_a_hang_names_nobody() -> None:
    assert culprit([]) is culprit([{"event": "finished", "time": 1.0, "attempt": 0}]) is None
