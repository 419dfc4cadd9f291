"""Which copies in memory the next attempt goes on from, and who fetches what."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from checkpointing.lineage import Lineage
from orchestra.recovery.copies import (
    Fetch,
    FromMemory,
    HeldCopy,
    NextNodes,
    NotFromMemory,
    held_copies,
    neighbour,
    plan,
)
from orchestra.run.rollback import EVENT, SPIKE
from orchestra.run.run_lineage import lineage_of

LAYOUT = {"dp": 4, "tp": 2, "pp": 1, "cp": 1, "ep": 1, "shard": 4}


# The nodes of the next attempt where all of those before live.
SAME = NextNodes([0, 1, 2, 3], 2)


def copies(ranks: Iterable[int], *steps: int, attempt: int = 0) -> list[HeldCopy]:
    record = {"attempt": attempt, "layout": LAYOUT}
    return held_copies([{**record, "step": step, "rank": rank} for step in steps for rank in ranks])


def of_nodes(*steps: int) -> dict[int, list[HeldCopy]]:
    """Return what four nodes of two ranks hold: their own copies and those of the node before them."""
    own = [copies((2 * node, 2 * node + 1), *steps) for node in range(4)]
    return {node: own[node] + own[node - 1] for node in range(4)}


@pytest.mark.parametrize("lost", range(4))
def test_a_spare_fetches_the_lost_nodes_copies_from_its_neighbour(lost: int) -> None:
    held = {node: held_there for node, held_there in of_nodes(10, 11).items() if node != lost} | {4: []}
    order = [4 if node == lost else node for node in range(4)]
    source = (lost + 1) % 4
    expected = {4: (Fetch(2 * lost, source), Fetch(2 * lost + 1, source))}
    assert plan(held, NextNodes(order, 2), Lineage(), 5) == FromMemory(11, 0, expected)


def test_the_newest_step_that_all_ranks_have_is_taken() -> None:
    held = of_nodes(10, 11)
    held[2] = [copy for copy in held[2] if not (copy.step == 11 and copy.rank == 4)]
    held[3] = [copy for copy in held[3] if copy.step == 10]
    assert plan(held, SAME, Lineage(), 5) == FromMemory(10, 0, {})


def test_two_neighbours_lost_at_once_leave_no_step() -> None:
    held = {node: held_there for node, held_there in of_nodes(10, 11).items() if node in (0, 3)}
    found = plan(held | {4: [], 5: []}, NextNodes([0, 4, 5, 3], 2), Lineage(), 5)
    assert isinstance(found, NotFromMemory)
    assert "of the newest, step 11, those of ranks 2, 3 are lost" in found.reason
    assert plan({4: []}, NextNodes([4], 8), Lineage(), 5) == NotFromMemory(
        "no living node holds a copy in memory"
    )


@pytest.mark.parametrize(("committed", "is_memory"), [(None, True), (10, True), (11, False), (12, False)])
def test_a_checkpoint_that_is_as_new_is_preferred(committed: int | None, is_memory: bool) -> None:
    found = plan(of_nodes(10, 11), SAME, Lineage(), committed)
    assert isinstance(found, FromMemory) is is_memory


def test_copies_of_one_step_by_two_attempts_are_not_mixed_and_those_of_the_later_one_count() -> None:
    held = {0: copies(range(4), 10), 1: copies(range(4, 8), 10, attempt=1)}
    assert isinstance(plan(held, NextNodes([0, 1], 4), Lineage(), 5), NotFromMemory)
    held = {0: [*copies(range(8), 10), *copies(range(8), 10, attempt=1)]}
    assert plan(held, NextNodes([0], 8), Lineage(), 5) == FromMemory(10, 1, {})


def test_steps_before_which_the_run_went_back_are_of_another_history() -> None:
    held = {0: [*copies(range(8), 10, 20), *copies(range(8), 12, attempt=2)]}
    events = [
        {"event": "restored", "attempt": 1, "step": 20},
        {"event": "restored", "attempt": 2, "step": 10},
        {"event": "checkpoint_committed", "attempt": 2, "step": 15},
    ]
    assert plan(held, NextNodes([0], 8), lineage_of(events), 5) == FromMemory(12, 2, {})
    assert plan({0: copies(range(8), 10, 20)}, NextNodes([0], 8), lineage_of(events), 5) == FromMemory(
        10, 0, {}
    )


@pytest.mark.parametrize("order", [[0, 1, 2], [0]])
def test_another_number_of_ranks_begins_with_the_checkpoint(order: list[int]) -> None:
    found = plan(of_nodes(10, 11), NextNodes(order, 2), Lineage(), 5)
    assert isinstance(found, NotFromMemory)
    assert "another layout" in found.reason


def test_another_layout_of_as_many_ranks_begins_with_the_checkpoint() -> None:
    upcoming = NextNodes([0, 1, 2, 3], 2, {**LAYOUT, "dp": 8, "tp": 1})
    assert isinstance(plan(of_nodes(10, 11), upcoming, Lineage(), 5), NotFromMemory)
    assert isinstance(plan(of_nodes(10, 11), NextNodes([0, 1, 2, 3], 2, LAYOUT), Lineage(), 5), FromMemory)


def test_many_fetches_are_shared_out_over_those_who_have_the_copy() -> None:
    held = {node: copies(range(8), 10) for node in range(4)} | {4: []}
    found = plan(held, NextNodes([4], 8), Lineage(), 5)
    assert isinstance(found, FromMemory)
    assert [fetch.source for fetch in found.fetches[4]] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_records_that_are_none_are_passed_over() -> None:
    good = {"step": 1, "attempt": 0, "rank": 2, "layout": LAYOUT}
    assert len(held_copies([good, {**good, "step": "1"}, {**good, "layout": None}, 7, None])) == 1
    assert held_copies(None) == held_copies({"step": 1}) == []


def test_the_next_node_of_the_attempt_is_the_neighbour() -> None:
    assert [neighbour([3, 0, 7], node) for node in (3, 0, 7)] == [0, 7, 3]
    assert neighbour([3], 3) is None
    assert neighbour([3], 3, spares=[5, 6]) == 5


def test_copies_behind_a_roll_back_are_of_no_history() -> None:
    found = lineage_of([{"event": EVENT, "attempt": 0, "step": 150, "to": 100, "cause": SPIKE}])
    held = {0: [*copies(range(8), 100, 149), *copies(range(7), 149, attempt=1)]}
    assert plan(held, NextNodes([0], 8), found, 5) == FromMemory(100, 0, {})
    held = {0: [*held[0], *copies([7], 149, attempt=1)]}
    assert plan(held, NextNodes([0], 8), found, 5) == FromMemory(149, 1, {})
