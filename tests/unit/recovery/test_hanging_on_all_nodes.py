"""Which ranks hold up a run over several nodes: those that stand no further than anybody else's last word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestra.recovery.hangs import LimitRules, RankPosition, RankTimes, hanging_on_all_nodes
from orchestra.run.heartbeat import Phase

RULES = LimitRules(setup_s=300.0, silent_s=60.0, storage_s=600.0, closing_s=120.0)


def rank_times(step_s: float = 0.1) -> RankTimes:
    found = RankTimes()
    found.add_steps(1, 5.0)
    found.add_steps(20, 20 * step_s)
    return found


def at(rank: int, phase: Phase, step: int = 8, micro_batch: int = 0, silent_s: float = 12.0) -> RankPosition:
    return RankPosition(rank, f"node{rank}", phase, step, micro_batch, silent_s, "S")


def stopped(rank: int, phase: Phase, **more: float) -> RankPosition:
    return replace(at(rank, phase, **more), state="T")  # type: ignore[arg-type]


def ranks(*positions: RankPosition, world_size: int = 3, step_s: float = 0.1) -> list[int]:
    return [it.rank for it, _ in hanging_on_all_nodes(positions, world_size, rank_times(step_s), RULES)]


def test_the_rank_that_all_wait_for_is_found_at_a_steps_own_limit() -> None:
    behind = stopped(1, Phase.backward, micro_batch=1)
    assert ranks(at(0, Phase.reduce), behind, at(2, Phase.reduce)) == [1]
    ((_, limit_s),) = hanging_on_all_nodes(
        [at(0, Phase.reduce), behind, at(2, Phase.reduce)], 3, rank_times(), RULES
    )
    assert limit_s == 10.0
    assert ranks(at(0, Phase.reduce), stopped(1, Phase.backward, silent_s=9.0), at(2, Phase.reduce)) == []


def test_whom_an_outage_of_the_network_catches_behind_the_others_has_twice_as_long() -> None:
    others = (at(0, Phase.reduce), at(2, Phase.reduce))
    assert ranks(*others, at(1, Phase.backward, silent_s=19.0)) == []
    assert ranks(*others, at(1, Phase.backward, silent_s=21.0)) == [1]


def test_nobody_is_found_before_all_ranks_are_in_sight() -> None:
    assert ranks(at(0, Phase.reduce), at(1, Phase.backward)) == []


def test_slow_steps_are_waited_for_as_long_as_they_take() -> None:
    behind, others = stopped(1, Phase.backward, silent_s=29.0), (at(0, Phase.reduce), at(2, Phase.reduce))
    assert ranks(*others, behind, step_s=3.0) == []
    assert ranks(*others, behind, step_s=2.0) == [1]


@pytest.mark.parametrize("phase", [Phase.data, Phase.record, Phase.save, Phase.commit, Phase.restore])
def test_whoever_waits_for_storage_has_the_time_that_storage_takes(phase: Phase) -> None:
    behind = at(1, phase, step=7, silent_s=59.0)
    assert ranks(at(0, Phase.reduce, silent_s=59.0), behind, at(2, Phase.reduce, silent_s=59.0)) == []


def test_where_all_stand_at_the_same_place_the_network_has_time_to_come_back() -> None:
    for silent_s, found in ((12.0, []), (19.0, []), (21.0, [0, 1, 2])):
        same = [at(rank, Phase.reduce, silent_s=silent_s) for rank in range(3)]
        assert ranks(*same) == found
    same = [at(rank, Phase.reduce, silent_s=61.0) for rank in range(3)]
    assert ranks(*same, step_s=5.9) == [0, 1, 2], "never longer than without a look at the others"


def test_an_old_word_of_somebody_further_is_enough_and_one_of_somebody_behind_is_not_believed_alone() -> None:
    """Positions only grow: rank 0 is behind what rank 2 said long ago."""
    first = at(0, Phase.reduce, 8, silent_s=21.0)
    assert ranks(first, at(1, Phase.reduce, 9), at(2, Phase.step, 9, silent_s=500.0)) == [0]
    assert ranks(at(0, Phase.reduce, 8, silent_s=2.0), at(1, Phase.reduce, 9), at(2, Phase.reduce, 9)) == []
