"""A rank of another node that hangs where its peers wait for it is found by the attempt's first node, at the
limit that steps have taught: real ranks, real heartbeats, event files of both nodes; time is the test's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_hang_watch import RULES, Rank

from orchestra.agents.hang_watch import HangWatch, WatchedRanks
from orchestra.agents.hang_watch_all_nodes import HangWatchOfAllNodes
from orchestra.recovery.hangs import RankPosition, culprit
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.heartbeat import Phase
from orchestra.run.paths import RunDir

TRAINED = 12


class Nodes:
    """Two nodes with two ranks each, and what they go by."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path / "run")
        self.now = 0.0
        self.ranks = [Rank(self.run, path / f"beats-{number // 2}", number) for number in range(4)]
        for rank in self.ranks:
            rank.await_word()
        self.watches = [self._watch(path, node) for node in range(2)]
        self.all_nodes = HangWatchOfAllNodes(self.run, 0, [1], 4, RULES)

    def _watch(self, path: Path, node: int) -> HangWatch:
        watched = WatchedRanks(self.run, 0, node, (2 * node, 2 * node + 1), 4, path / f"beats-{node}")
        events = EventWriter(self.run, node_writer(0, node), 0)
        return HangWatch(watched, RULES, events, clock=lambda: self.now)

    def beat(self, phase: Phase, step: int, *but: int) -> None:
        for rank in self.ranks:
            if rank.number not in but:
                rank.beat(phase, step)

    def look(self, seconds: int) -> list[tuple[RankPosition, float]]:
        """Let both nodes look once a second; return what the first one finds out, and stop there."""
        for _ in range(seconds):
            self.now += 1.0
            for watch in self.watches:
                assert watch.look() == ()
            if found := self.all_nodes.look(self.watches[0].stall):
                return found
        return []

    def train(self, steps: range) -> None:
        for step in steps:
            self.beat(Phase.step, step)
            self.beat(Phase.reduce, step)
            assert self.look(1) == []


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    made.train(range(1, TRAINED))
    yield made
    for rank in made.ranks:
        rank.child.kill()
        rank.child.wait()
        for pipe in (rank.child.stdin, rank.child.stdout):
            pipe.close()


def test_who_hangs_in_a_collective_on_another_node_is_found_and_shows_its_stack(nodes: Nodes) -> None:
    nodes.beat(Phase.reduce, TRAINED, 3)
    nodes.ranks[3].beat(Phase.backward, TRAINED)
    nodes.ranks[3].tell("wait")
    began = nodes.now
    ((found, limit_s),) = nodes.look(59)
    assert (found.rank, found.phase, limit_s) == (3, Phase.backward, 20.0)
    assert nodes.now - began <= 26.0
    assert nodes.watches[0].record_hangs({3: limit_s}) == ()
    (hang,) = nodes.watches[1].record_hangs({3: limit_s})
    assert hang.rank == 3
    assert "waiting_for_peers" in nodes.run.rank_stacks(0, 3).read_text()
    named = culprit(read_events(nodes.run))
    assert named is not None
    assert named.rank == 3
    assert nodes.watches[1].record_hangs({3: limit_s}) == (), "it is written once"


def test_who_hangs_on_the_first_node_itself_is_found_too(nodes: Nodes) -> None:
    nodes.beat(Phase.reduce, TRAINED, 1)
    nodes.ranks[1].beat(Phase.backward, TRAINED)
    assert [it.rank for it, _ in nodes.look(26)] == [1]


def test_a_silence_that_ends_is_no_hang_however_often_it_comes(nodes: Nodes) -> None:
    for step in range(TRAINED, TRAINED + 80, 20):
        # All wait for the network, longer than a step's own limit; then they go on.
        nodes.beat(Phase.reduce, step)
        assert nodes.look(18) == []
        nodes.train(range(step + 1, step + 20))
    names = [event["event"] for event in read_events(nodes.run) if event["event"].startswith("step_")]
    assert names.count("step_stalled") == names.count("step_went_on") > 0


def test_what_a_node_said_of_an_earlier_silence_accuses_nobody(nodes: Nodes) -> None:
    nodes.beat(Phase.reduce, TRAINED, 3)
    nodes.ranks[3].beat(Phase.backward, TRAINED)
    assert nodes.look(11) == []
    nodes.train(range(TRAINED + 1, TRAINED + 10))
    # Now the first node alone is silent for a while: the others have not said anything of it.
    nodes.beat(Phase.reduce, TRAINED + 10, 2, 3)
    for _ in range(14):
        nodes.ranks[2].beat(Phase.backward, TRAINED + 10)
        nodes.ranks[3].beat(Phase.backward, TRAINED + 10)
        assert nodes.look(1) == []


def test_a_rank_that_moves_within_the_silence_is_not_taken_for_the_one_that_hangs(nodes: Nodes) -> None:
    nodes.beat(Phase.reduce, TRAINED, 3, 1)
    nodes.ranks[1].beat(Phase.backward, TRAINED)
    nodes.ranks[3].beat(Phase.backward, TRAINED)
    assert nodes.look(11) == []
    nodes.ranks[3].beat(Phase.reduce, TRAINED)
    assert [it.rank for it, _ in nodes.look(16)] == [1]
