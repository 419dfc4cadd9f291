"""Who holds up the others: the stopped rank, else the one that has come least far, over all nodes' events."""

from __future__ import annotations

from typing import Any

from orchestra.recovery.hangs import RankPosition, culprit
from orchestra.run.heartbeat import Phase


def position(rank: int, phase: Phase, step: int = 8, micro_batch: int = 0, state: str = "S") -> RankPosition:
    return RankPosition(rank, f"node{rank // 2}", phase, step, micro_batch, 12.0, state)


def stalled(*positions: RankPosition, event: str = "step_stalled") -> dict[str, Any]:
    ranks = [it.record() for it in positions]
    return {"event": event, "time": 1.0, "attempt": 0, "host": positions[0].host, "ranks": ranks}


def test_the_rank_with_the_least_progress_is_named_over_all_nodes() -> None:
    found = culprit(
        [
            stalled(position(0, Phase.reduce), position(1, Phase.reduce)),
            stalled(position(2, Phase.reduce), position(3, Phase.forward, micro_batch=1)),
            stalled(position(4, Phase.backward, micro_batch=1), position(5, Phase.reduce)),
        ]
    )
    assert found is not None
    assert (found.rank, found.host) == (3, "node1")
    assert "in forward of micro-batch 1 of step 8" in found.why


def test_a_stopped_rank_is_named_wherever_it_stands() -> None:
    found = culprit([stalled(position(0, Phase.forward), position(1, Phase.save, state="T"))])
    assert found is not None
    assert (found.rank, found.host) == (1, "node0")
    assert "stopped" in found.why


def test_an_earlier_step_is_less_progress_than_an_earlier_phase() -> None:
    found = culprit([stalled(position(0, Phase.step, step=9), position(1, Phase.save, step=8))])
    assert found is not None
    assert found.rank == 1


def test_of_each_rank_the_last_word_counts() -> None:
    found = culprit(
        [
            stalled(position(0, Phase.forward), position(1, Phase.reduce)),
            stalled(
                position(0, Phase.reduce, step=20), position(1, Phase.step, step=20), event="hang_detected"
            ),
        ]
    )
    assert found is not None
    assert found.rank == 1


def test_ranks_that_all_stand_at_the_same_place_name_nobody() -> None:
    found = culprit([stalled(*(position(rank, Phase.reduce) for rank in range(4)))])
    assert found is not None
    assert (found.rank, found.host) == (None, None)
    assert "all 4 silent ranks stand in reduce of step 8" in found.why


def test_one_rank_alone_is_its_own_culprit() -> None:
    found = culprit([stalled(position(0, Phase.forward))])
    assert found is not None
    assert found.rank == 0


def test_several_that_are_equally_far_behind_are_counted() -> None:
    ranks = [position(0, Phase.reduce), position(1, Phase.forward), position(2, Phase.forward)]
    found = culprit([stalled(*ranks)])
    assert found is not None
    assert found.rank == 1
    assert "(and 1 more)" in found.why


def test_no_report_of_a_hang_names_nobody() -> None:
    assert culprit([]) is None
    assert culprit([{"event": "finished", "time": 1.0, "attempt": 0}]) is None


def test_damaged_positions_are_passed_over() -> None:
    good = stalled(position(1, Phase.forward))
    for damage in (
        {"rank": "one"},
        {"phase": "lunch"},
        {"step": None},
        {"seconds": "long"},
        {"micro_batch": 1.5},
    ):
        bad = stalled(position(0, Phase.step))
        bad["ranks"][0].update(damage)
        found = culprit([bad, good])
        assert found is not None
        assert found.rank == 1
    assert culprit([{**good, "ranks": "many"}]) is None
