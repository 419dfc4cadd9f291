"""The hang watch of one node and that of all, with real processes: who hangs is found and shows its stacks.

Time is the test's own: each look comes a second after the one before, on a clock that the test moves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers import processes
from orchestra.agents.hang_watch import Hang, HangWatch, HangWatchOfAllNodes, WatchedRanks
from orchestra.recovery import history
from orchestra.recovery.hangs import LimitRules, RankPosition, culprit
from orchestra.recovery.incidents import first_failure
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.heartbeat import FOLDER_VARIABLE, Phase, beat_file
from orchestra.run.paths import RunDir

ROOT = Path(__file__).resolve().parents[3]
RULES = LimitRules(setup_s=300.0, silent_s=60.0, storage_s=600.0, closing_s=120.0)

# Does what it reads, a line at a time: `beat PHASE STEP MICRO_BATCH`, or a way to hang.
RANK = textwrap.dedent(
    """
    import sys, threading, time
    from pathlib import Path
    from orchestra.run.heartbeat import Phase, open_heart
    from orchestra.run.paths import RunDir
    from orchestra.train.watch.inject_faults import hold_the_lock, loop_in_python

    def waiting_for_peers(_):
        sys.stdin.readline()

    threading.Thread(target=threading.Event().wait, name="another", daemon=True).start()
    heart = open_heart(RunDir(Path(sys.argv[1])), 0, int(sys.argv[2]))
    ways = {"hang": loop_in_python, "gil": hold_the_lock, "wait": waiting_for_peers}
    print("ready", flush=True)
    while words := sys.stdin.readline().split():
        if words[0] in ways:
            print("done", flush=True)
            ways[words[0]](3600)
        else:
            heart.beat(Phase[words[1]], int(words[2]), int(words[3]))
            print("done", flush=True)
    """
)


class Rank:
    """A real process with a real heart, that does what it is told."""

    def __init__(self, run: RunDir, folder: Path, number: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), FOLDER_VARIABLE: str(folder)}
        command = [sys.executable, "-c", RANK, str(run.path), str(number)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.child = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        self.number = number

    def await_word(self) -> None:
        assert self.child.stdout.readline()

    def tell(self, words: str) -> None:
        self.child.stdin.write(f"{words}\n")
        self.child.stdin.flush()
        self.await_word()

    def beat(self, phase: Phase, step: int, micro_batch: int = 0) -> None:
        self.tell(f"beat {phase.name} {step} {micro_batch}")

    def stop(self) -> None:
        self.child.send_signal(signal.SIGSTOP)
        process = processes.find(self.child.pid)
        assert process is not None
        while processes.state(process) != "T":
            pass

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        self.child.stdin.close()
        self.child.stdout.close()


class Node:
    """A node of some ranks, its watch, and the clock that both go by."""

    def __init__(self, path: Path, num_ranks: int, world_size: int | None = None, number: int = 0) -> None:
        self.run = RunDir(path / "run")
        folder, numbers = path / f"beats-{number}", tuple(range(number * num_ranks, (number + 1) * num_ranks))
        self.ranks = [Rank(self.run, folder, rank) for rank in numbers]
        for rank in self.ranks:
            rank.await_word()
        self.now = 0.0
        self.watched = WatchedRanks(self.run, 0, number, numbers, world_size or num_ranks, folder)
        events = EventWriter(self.run, node_writer(0, number), 0)
        self.watch = HangWatch(self.watched, RULES, events, clock=lambda: self.now)

    def look(self, times: int = 1, every_s: float = 1.0) -> list[Hang]:
        """Return the hangs of some looks, and stop at the first one that finds any."""
        for _ in range(times):
            self.now += every_s
            if found := self.watch.look():
                return list(found)
        return []

    def beat(self, phase: Phase, step: int) -> None:
        for rank in self.ranks:
            rank.beat(phase, step)

    def train(self, steps: range) -> None:
        """Let all ranks make some steps, one per look."""
        for step in steps:
            for phase in (Phase.step, Phase.forward, Phase.backward):
                self.beat(phase, step)
            assert self.look() == []

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["event"] == name]


Begin = Callable[..., Node]


@pytest.fixture
def node_of(tmp_path: Path) -> Iterator[Begin]:
    """Begin a node with these arguments; its ranks end with the test."""
    nodes: list[Node] = []

    def begin(num_ranks: int, world_size: int | None = None, number: int = 0) -> Node:
        nodes.append(Node(tmp_path, num_ranks, world_size, number))
        return nodes[-1]

    yield begin
    for node in nodes:
        for rank in node.ranks:
            rank.end()


@pytest.fixture
def node(node_of: Begin) -> Node:
    """A node with all ranks of the run, two, that has trained eleven steps of a second each."""
    node = node_of(2)
    node.train(range(1, 12))
    return node


@pytest.fixture
def half(node_of: Begin) -> Node:
    """The same, of a run that has two more ranks on another node."""
    node = node_of(2, world_size=4)
    node.train(range(1, 12))
    return node


@pytest.mark.parametrize(("way", "function"), [("hang", "loop_in_python"), ("gil", "hold_the_lock")])
def test_a_rank_that_loops_or_holds_the_lock_is_found_with_its_stack(
    node: Node, way: str, function: str
) -> None:
    node.ranks[0].beat(Phase.reduce, 12)
    node.ranks[0].tell("wait")
    node.ranks[1].beat(Phase.step, 12)
    node.ranks[1].tell(way)
    found = node.look(40)
    assert [hang.rank for hang in found] == [1]
    # The median step took a second: ten of them.
    assert (found[0].limit_s, found[0].position.step) == (10.0, 12)
    assert found[0].position.silent_s <= 12.0
    assert found[0].process is not None
    assert found[0].process.pid == node.ranks[1].child.pid
    text = node.run.rank_stacks(0, 1).read_text()
    assert function in text
    # All threads of the one that hangs, of the others that one which trains.
    assert text.count("hread 0x") == 2
    other = node.run.rank_stacks(0, 0).read_text()
    assert "waiting_for_peers" in other
    assert other.count("hread 0x") == 1
    assert node.look(5) == []


def test_a_stopped_rank_is_found_in_whatever_phase_and_its_silence_explained(half: Node) -> None:
    half.beat(Phase.reduce, 12)
    half.ranks[1].stop()
    found = half.look(40)
    assert [(hang.rank, hang.position.state, hang.limit_s) for hang in found] == [(1, "T", 10.0)]
    text = half.run.rank_stacks(0, 1).read_text()
    assert "it is stopped (SIGSTOP)" in text
    assert "State: T (stopped)" in text
    (event,) = half.events("hang_detected")
    assert (event["rank"], event["step"], event["phase"], event["state"]) == (1, 12, "reduce", "T")
    assert event["stacks"] == str(half.run.rank_stacks(0, 1))
    assert event["seconds"] > event["limit"] == 10.0
    verdict = first_failure(history.attempt_of(read_events(half.run), 0))
    assert verdict is not None
    assert (verdict["rank"], verdict["cause"]) == (1, "hang in reduce")
    assert "SIGSTOP" in verdict["message"]
    named = culprit(read_events(half.run))
    assert named is not None
    assert (named.rank, named.host) == (1, event["host"])


def test_ranks_that_wait_for_another_node_are_left_alone_until_the_outer_limit(half: Node) -> None:
    half.beat(Phase.reduce, 12)
    assert half.look(55) == []
    (stall,) = half.events("step_stalled")
    assert (stall["step"], stall["phase"], stall["limit"]) == (12, "reduce", 10.0)
    assert [position["rank"] for position in stall["ranks"]] == [0, 1]
    assert {hang.rank for hang in half.look(10)} == {0, 1}


def test_a_stall_that_ends_is_told_once_and_the_next_one_again(half: Node) -> None:
    assert half.look(11) == []
    assert len(half.events("step_stalled")) == 1
    half.train(range(12, 16))
    assert len(half.events("step_stalled")) == 1
    assert half.look(40) == []
    assert len(half.events("step_stalled")) == 2


def test_when_all_ranks_are_in_sight_the_one_behind_is_found_soon(node: Node) -> None:
    node.ranks[0].beat(Phase.backward, 12, 1)
    node.ranks[1].beat(Phase.backward, 12, 0)
    assert [(hang.rank, hang.limit_s) for hang in node.look(40)] == [(1, 10.0)]


def collectives(node: Node, *entered: int) -> None:
    """Let all ranks have recorded the same collectives, and be in the next one, or not there yet."""
    last = {"backend": "gloo", "retired": True, "state": "scheduled", "is_p2p": False}
    for rank in range(node.watched.world_size):
        done = [{**last, "profiling_name": "gloo:all_reduce", "process_group": ["0", ""]}]
        done += [{**done[0], "retired": False}] if rank in entered else []
        entries = [{**each, "collective_seq_id": 7 + place} for place, each in enumerate(done)]
        file = node.run.rank_collectives(0, rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"entries": entries}))


def stand_in_backward(node: Node) -> None:
    node.beat(Phase.backward, 12)
    # They fall silent in the same step; what they recorded is there as soon as that is seen.
    assert node.look(11) == []


def test_of_ranks_in_one_backward_pass_the_one_is_named_that_the_others_wait_for(node: Node) -> None:
    stand_in_backward(node)
    collectives(node, 0)
    assert [hang.rank for hang in node.look(40)] == [1]
    (event,) = node.events("hang_detected")
    assert (event["rank"], event["is_awaited"]) == (1, True)
    assert [each["rank"] for each in event["ranks"]] == [0, 1]
    named = culprit(read_events(node.run))
    assert named is not None
    assert named.rank == 1
    assert node.look(5) == []


def test_where_their_records_tell_nothing_all_of_them_are_named(node: Node) -> None:
    stand_in_backward(node)
    collectives(node, 0, 1)
    assert [hang.rank for hang in node.look(40)] == [0, 1]
    assert not any("is_awaited" in event for event in node.events("hang_detected"))
    named = culprit(read_events(node.run))
    assert named is not None
    assert named.rank is None


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_ranks_that_wait_for_one_of_another_node_leave_that_to_its_agent_for_a_while(
    half: Node, is_elsewhere: bool
) -> None:
    half.beat(Phase.backward, 12)
    assert half.look(55) == []
    collectives(half, 0, 1, 2) if is_elsewhere else collectives(half, 0, 1, 2, 3)
    began = half.now
    assert {hang.rank for hang in half.look(30)} == {0, 1}
    assert (half.now - began > 16.0) is is_elsewhere


def test_slow_ranks_that_move_and_a_slow_first_step_are_no_hang(node_of: Begin) -> None:
    node = node_of(2)
    node.beat(Phase.step, 1)
    assert node.look(250) == []
    # Steps of nine seconds, and then one of fifty.
    for step in range(2, 12):
        node.beat(Phase.step, step)
        assert node.look(9) == []
    assert node.look(50) == []
    assert node.events("hang_detected") == []


def test_steps_that_passed_before_anybody_looked_end_the_patience_with_the_first_one(node_of: Begin) -> None:
    node = node_of(1)
    for step in range(31, 37):
        node.beat(Phase.step, step)
    assert node.look() == []
    (hang,) = node.look(62)
    assert (hang.rank, hang.position.step) == (0, 36)


def test_a_rank_that_never_beats_is_found_after_the_time_for_setup(node_of: Begin) -> None:
    node = node_of(1)
    beat_file(node.watched.folder, 0, 0).unlink()
    assert node.look(299) == []
    (hang,) = node.look(3)
    assert (hang.rank, hang.position.phase, hang.process, hang.stacks) == (0, Phase.setup, None, None)


def test_time_in_which_the_agent_did_not_run_is_no_silence(node: Node) -> None:
    for _ in range(3):
        assert node.look(every_s=100_000.0) == []
    assert node.look(every_s=-5_000.0) == []
    # It is told, for the accounts of the run's time.
    assert [event["seconds"] for event in node.events("stood_still")] == [99_999.0] * 3
    node.train(range(12, 14))


def test_ranks_that_have_ended_are_no_hang(node: Node) -> None:
    node.ranks[1].child.kill()
    node.ranks[1].child.wait()
    for step in range(12, 80):
        node.ranks[0].beat(Phase.step, step)
        assert node.look() == []


def test_the_summary_says_where_the_ranks_stand_and_is_all_that_stays(node: Node) -> None:
    node.ranks[1].beat(Phase.save, 11)
    node.look(12)
    summary = json.loads(node.run.heartbeat(0).read_text())
    assert summary["step"] == {"min": 11, "max": 11}
    assert summary["phases"] == {"backward": [0], "save": [1]}
    assert summary["attempt"] == 0
    assert summary["processes"] == {str(rank.number): rank.child.pid for rank in node.ranks}
    # Of what ended it tells at once.
    node.ranks[1].end()
    node.look()
    assert json.loads(node.run.heartbeat(0).read_text())["processes"] == {"0": node.ranks[0].child.pid}
    node.watch.close()
    assert not node.watched.folder.exists()


# A rank of another node that hangs where its peers wait for it is found by the attempt's first node, at the
# limit that steps have taught.

TRAINED = 12


class TwoNodes:
    """Two nodes with two ranks each, and what the first one finds out."""

    def __init__(self, node_of: Begin) -> None:
        self.nodes = [node_of(2, 4, number) for number in range(2)]
        self.run = self.nodes[0].run
        self.ranks = [rank for node in self.nodes for rank in node.ranks]
        self.watch = HangWatchOfAllNodes(self.run, 0, [1], 4, RULES)

    def beat(self, phase: Phase, step: int, *but: int) -> None:
        for rank in self.ranks:
            if rank.number not in but:
                rank.beat(phase, step)

    def look(self, seconds: int) -> list[tuple[RankPosition, float]]:
        """Let both nodes look once a second; return what the first one finds out, and stop there."""
        for _ in range(seconds):
            for node in self.nodes:
                assert node.look() == []
            if found := self.watch.look(self.nodes[0].watch.stall):
                return found
        return []

    def train(self, steps: range) -> None:
        for step in steps:
            self.beat(Phase.step, step)
            self.beat(Phase.reduce, step)
            assert self.look(1) == []


@pytest.fixture
def two_nodes(node_of: Begin) -> TwoNodes:
    two_nodes = TwoNodes(node_of)
    two_nodes.train(range(1, TRAINED))
    return two_nodes


def test_who_hangs_in_a_collective_on_another_node_is_found_and_shows_its_stack(two_nodes: TwoNodes) -> None:
    two_nodes.beat(Phase.reduce, TRAINED, 3)
    two_nodes.ranks[3].beat(Phase.backward, TRAINED)
    two_nodes.ranks[3].tell("wait")
    began = two_nodes.nodes[0].now
    ((found, limit_s),) = two_nodes.look(59)
    assert (found.rank, found.phase, limit_s) == (3, Phase.backward, 20.0)
    assert two_nodes.nodes[0].now - began <= 26.0
    first, second = (node.watch for node in two_nodes.nodes)
    assert first.record_hangs({3: limit_s}) == ()
    (hang,) = second.record_hangs({3: limit_s})
    assert hang.rank == 3
    assert "waiting_for_peers" in two_nodes.run.rank_stacks(0, 3).read_text()
    named = culprit(read_events(two_nodes.run))
    assert named is not None
    assert named.rank == 3
    assert second.record_hangs({3: limit_s}) == (), "it is written once"


def test_a_silence_that_ends_is_no_hang_however_often_it_comes(two_nodes: TwoNodes) -> None:
    for step in range(TRAINED, TRAINED + 80, 20):
        # All wait for the network, longer than a step's own limit; then they go on.
        two_nodes.beat(Phase.reduce, step)
        assert two_nodes.look(18) == []
        two_nodes.train(range(step + 1, step + 20))
    names = [event["event"] for event in read_events(two_nodes.run) if event["event"].startswith("step_")]
    assert names.count("step_stalled") == names.count("step_went_on") > 0


def test_what_a_node_said_of_an_earlier_silence_accuses_nobody(two_nodes: TwoNodes) -> None:
    two_nodes.beat(Phase.reduce, TRAINED, 3)
    two_nodes.ranks[3].beat(Phase.backward, TRAINED)
    assert two_nodes.look(11) == []
    two_nodes.train(range(TRAINED + 1, TRAINED + 10))
    # Now the first node alone is silent for a while: the others have not said anything of it.
    two_nodes.beat(Phase.reduce, TRAINED + 10, 2, 3)
    for _ in range(14):
        two_nodes.ranks[2].beat(Phase.backward, TRAINED + 10)
        two_nodes.ranks[3].beat(Phase.backward, TRAINED + 10)
        assert two_nodes.look(1) == []


def test_who_moves_within_the_silence_is_not_taken_for_who_hangs_on_the_first_node(
    two_nodes: TwoNodes,
) -> None:
    two_nodes.beat(Phase.reduce, TRAINED, 3, 1)
    two_nodes.ranks[1].beat(Phase.backward, TRAINED)
    two_nodes.ranks[3].beat(Phase.backward, TRAINED)
    assert two_nodes.look(11) == []
    two_nodes.ranks[3].beat(Phase.reduce, TRAINED)
    assert [position.rank for position, _ in two_nodes.look(16)] == [1]
