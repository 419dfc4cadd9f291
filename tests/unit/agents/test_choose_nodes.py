"""Which nodes train and which are left out, from what they say of themselves and of each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launchers.node_group import GroupMember
from orchestra.agents.choose_nodes import (
    are_checked,
    by_preference,
    doubts,
    preferred,
    slow,
    words_of,
    write_findings,
)
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir

GB = 1e9


def members(*facts: dict[str, Any]) -> dict[int, GroupMember]:
    return {
        node: GroupMember(node, f"node{node + 1}", "10.0.0.1", "x", 1, it) for node, it in enumerate(facts)
    }


def in_ring(*rates: list[float]) -> dict[int, GroupMember]:
    """Members of which node n measured rates[n] on the way to the next one."""
    last = len(rates)
    return members(*({"ring": {"to": (node + 1) % last, "bytes_per_s": it}} for node, it in enumerate(rates)))


def of_cores(*seconds: float) -> dict[int, GroupMember]:
    return members(*({"checked": {"core_s": it}} for it in seconds))


def test_a_node_whose_both_links_are_slow_is_named() -> None:
    fast, bad = [1.1 * GB, 1.0 * GB], [0.11 * GB, 0.12 * GB]
    found = slow(in_ring(fast, bad, bad, fast, fast))
    assert list(found) == [2]
    assert "120 MB/s" in found[2]


def test_a_neighbour_of_a_slow_node_is_not_blamed() -> None:
    fast, bad = [1.1 * GB] * 2, [0.05 * GB] * 2
    assert list(slow(in_ring(bad, fast, fast, bad))) == [0]
    # A single slow link has two ends.
    assert slow(in_ring(bad, fast, fast, fast)) == {}


@pytest.mark.parametrize(
    "ring",
    [
        # One good round is enough.
        in_ring([GB] * 2, [0.1 * GB, GB], [0.1 * GB, GB], [GB] * 2),
        # Busy hosts that share cores: far apart, and none of them slow.
        in_ring([2.1 * GB] * 2, [0.4 * GB, 0.6 * GB], [0.3 * GB] * 2, [1.7 * GB] * 2),
        # Everything is slow: no single node is.
        in_ring(*[[0.01 * GB] * 2] * 4),
        # Too few to compare.
        in_ring([GB] * 2, [0.01 * GB] * 2, [GB] * 2),
        in_ring(),
        members({}, {"ring": None}, {"ring": {"to": "x"}}, {"ring": {"to": 9, "bytes_per_s": "many"}}),
    ],
)
def test_no_node_is_slow_without_reason(ring: dict[int, GroupMember]) -> None:
    assert slow(ring) == {}


def test_a_node_that_nobody_reaches_is_slow() -> None:
    ring = in_ring([GB], [GB], [GB], [GB], [GB])
    for node in (1, 2):
        ring[node].facts["ring"].clear()  # type: ignore[attr-defined]
        ring[node].facts["ring"].update({"to": node + 1, "error": "timed out"})  # type: ignore[attr-defined]
    assert list(slow(ring)) == [2]


def test_a_throttled_processor_is_named_and_an_older_one_is_not() -> None:
    assert list(slow(of_cores(0.002, 0.002, 0.009, 0.0021))) == [2]
    assert slow(of_cores(0.002, 0.002, 0.004, 0.0021)) == {}
    assert slow(of_cores(0.002, 0.009, 0.002)) == {}


def shrink_to(least: int | None, multiple: int = 1) -> Any:
    def shrink(nodes: Any) -> tuple[int, ...] | None:
        count = len(nodes) // multiple * multiple
        return tuple(nodes[:count]) if least is not None and count >= least else None

    return shrink


@pytest.mark.parametrize(
    ("fit", "slow_nodes", "doubtful", "least", "expected"),
    [
        # All well: the scheduler's order, the last ones are spares.
        ([0, 1, 2, 3], {}, {}, None, (0, 1, 2)),
        # A spare in the place of a slow or a doubtful one.
        ([0, 1, 2, 3], {1}, {}, None, (0, 2, 3)),
        ([0, 1, 2, 3], {}, {0}, None, (1, 2, 3)),
        # No spare: the slow one is used, even where fewer would do; a doubtful one only where they would not.
        ([0, 1, 2], {1}, {}, 2, (0, 1, 2)),
        ([0, 1, 2], {}, {1}, 2, (0, 2)),
        ([0, 1, 2], {}, {1}, None, (0, 1, 2)),
        ([0, 1, 2], {}, {1, 2}, 2, (0, 1, 2)),
        # A slow one rather than a doubtful one.
        ([0, 1, 2, 3], {1}, {3}, None, (0, 1, 2)),
        ([0, 1, 2, 3], {1, 2}, {0}, None, (1, 2, 3)),
        # Too few are fit.
        ([0, 1], {}, {}, None, None),
        ([0, 1], {}, {1}, 1, (0,)),
        ([0, 1], {}, {0, 1}, 1, (0, 1)),
        ([], {}, {}, 1, None),
    ],
)
def test_the_better_nodes_are_taken(
    fit: list[int], slow_nodes: set[int], doubtful: set[int], least: int | None, expected: Any
) -> None:
    chosen = preferred(fit, 3, dict.fromkeys(slow_nodes, ""), dict.fromkeys(doubtful, ""), shrink_to(least))
    assert chosen == expected


def test_the_sound_spare_steps_in_first() -> None:
    assert by_preference([1, 2, 3, 4], {2: "slow"}, {1: "listed"}) == [3, 4, 2, 1]


def test_the_first_attempt_waits_for_the_looks_but_not_for_ever() -> None:
    done = {"looks": True, "ring_port": 1, "checked": {}, "ring": {}}
    assert are_checked(members(done, done), 2, 0.0)
    assert not are_checked(members(done, {"looks": True, "ring_port": 1, "checked": {}}), 2, 0.0)
    assert not are_checked(members(done, {"looks": True}), 2, 0.0)
    assert are_checked(members(done, {"looks": True}), 2, 11.0)
    # Who does not look, and who has no neighbour, is not waited for.
    assert are_checked(members({}, {}), 2, 0.0)
    alone = {"looks": True, "ring_port": 1, "checked": {}}
    assert are_checked(members(alone), 2, 0.0)


def test_the_events_and_the_words_say_who_is_left_out_and_why(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    facts: list[dict[str, Any]] = [{"checked": {"seconds": 0.2, "clock_ahead_s": 0.0}} for _ in range(4)]
    facts[1]["unfit"] = "/tmp is no folder here"
    facts[2]["checked"]["clock_ahead_s"] = 40.0
    there = members(*facts)
    listed = {"node4": "node4 failed twice"}
    assert doubts(there, listed) == {3: "node4 failed twice"}
    write_findings(EventWriter(run, "test", 0), there, listed, taken=(0, 2))
    (event,) = read_events(run, ("node_checked",))
    assert event["unfit"] == {"node2": "/tmp is no folder here"}
    assert event["doubt"] == {"node4": "node4 failed twice"}
    assert event["left_out"] == ["node2", "node4"]
    assert event["clock_off_s"] == {"node3": 40.0}
    assert words_of(there, listed, taken=(0, 2, 3)) == [
        "node2: /tmp is no folder here (left out)",
        "node4: node4 failed twice (used all the same)",
        "node3: its clock differs from the others' by 40.0 s",
    ]
    assert json.dumps(event)
