"""The hang watch of one node, with real processes: who hangs is found and shows its stacks, and nobody else.

Time is the test's own: each look comes a second after the one before, on a clock that the test moves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers import processes
from orchestra.agents.hang_watch import Hang, HangWatch, WatchedRanks
from orchestra.recovery import history
from orchestra.recovery.hangs import LimitRules, culprit
from orchestra.recovery.incidents import first_failure
from orchestra.run.events import EventWriter, read_events
from orchestra.run.heartbeat import FOLDER_VARIABLE, Phase, beat_file
from orchestra.run.paths import RunDir

ROOT = Path(__file__).resolve().parents[3]
RULES = LimitRules(setup_s=300.0, silent_s=60.0, storage_s=600.0, closing_s=120.0)

# Does what it reads, a line at a time: `beat PHASE STEP [MICRO_BATCH]`, or a way to hang.
RANK = textwrap.dedent(
    """
    import sys, threading, time
    from pathlib import Path
    from orchestra.run.heartbeat import Phase, open_heart
    from orchestra.run.paths import RunDir
    from orchestra.train.watch.inject_faults import hold_the_lock, loop_in_python

    def waiting_for_peers():
        sys.stdin.readline()

    threading.Thread(target=threading.Event().wait, name="another", daemon=True).start()
    heart = open_heart(RunDir(Path(sys.argv[1])), 0, int(sys.argv[2]))
    ways = {"hang": loop_in_python, "gil": hold_the_lock}
    print("ready", flush=True)
    while words := sys.stdin.readline().split():
        if words[0] in ways:
            print("done", flush=True)
            ways[words[0]](3600)
        elif words[0] == "wait":
            print("done", flush=True)
            waiting_for_peers()
        else:
            heart.beat(Phase[words[1]], int(words[2]), int((words + ["0"])[3]))
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


class Node:
    """A node of some ranks, its watch, and the clock that both go by."""

    def __init__(self, path: Path, num_ranks: int, world_size: int | None = None) -> None:
        self.run = RunDir(path / "run")
        folder = path / "beats"
        self.ranks = [Rank(self.run, folder, number) for number in range(num_ranks)]
        for rank in self.ranks:
            rank.await_word()
        self.now = 0.0
        self.watched = WatchedRanks(self.run, 0, 0, tuple(range(num_ranks)), world_size or num_ranks, folder)
        events = EventWriter(self.run, "agent", 0)
        self.watch = HangWatch(self.watched, RULES, events, clock=lambda: self.now)

    def look(self, times: int = 1, every_s: float = 1.0) -> list[Hang]:
        """Return the hangs of some looks, and stop at the first one that finds any."""
        for _ in range(times):
            self.now += every_s
            if found := self.watch.look():
                return list(found)
        return []

    def train(self, steps: range, every_s: float = 1.0) -> None:
        """Let all ranks make some steps, one per look."""
        for step in steps:
            for phase in (Phase.step, Phase.forward, Phase.backward):
                for rank in self.ranks:
                    rank.beat(phase, step)
            assert self.look(every_s=every_s) == []

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["event"] == name]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Any]:
    made: list[Node] = []

    def make(num_ranks: int, world_size: int | None = None) -> Node:
        made.append(Node(tmp_path, num_ranks, world_size))
        return made[-1]

    yield make
    for rank in (rank for node in made for rank in node.ranks):
        rank.child.kill()
        rank.child.wait()
        rank.child.stdin.close()
        rank.child.stdout.close()


@pytest.mark.parametrize(("way", "function"), [("hang", "loop_in_python"), ("gil", "hold_the_lock")])
def test_a_rank_that_loops_or_holds_the_lock_is_found_with_its_stack(
    nodes: Any, way: str, function: str
) -> None:
    node = nodes(2)
    node.train(range(1, 12))
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


def test_a_stopped_rank_is_found_in_whatever_phase_and_its_silence_explained(nodes: Any) -> None:
    node = nodes(2, world_size=4)
    node.train(range(1, 12))
    node.ranks[0].beat(Phase.reduce, 12)
    node.ranks[1].beat(Phase.reduce, 12)
    node.ranks[1].stop()
    found = node.look(40)
    assert [(hang.rank, hang.position.state, hang.limit_s) for hang in found] == [(1, "T", 10.0)]
    text = node.run.rank_stacks(0, 1).read_text()
    assert "it is stopped (SIGSTOP)" in text
    assert "State: T (stopped)" in text
    (event,) = node.events("hang_detected")
    assert (event["rank"], event["step"], event["phase"], event["state"]) == (1, 12, "reduce", "T")
    assert event["stacks"] == str(node.run.rank_stacks(0, 1))
    assert event["seconds"] > event["limit"] == 10.0
    verdict = first_failure(history.attempt_of(read_events(node.run), 0))
    assert verdict is not None
    assert (verdict["rank"], verdict["cause"]) == (1, "hang in reduce")
    assert "SIGSTOP" in verdict["message"]
    named = culprit(read_events(node.run))
    assert named is not None
    assert (named.rank, named.host) == (1, event["host"])


def test_ranks_that_wait_for_another_node_are_left_alone_until_the_outer_limit(nodes: Any) -> None:
    node = nodes(2, world_size=4)
    node.train(range(1, 12))
    for rank in node.ranks:
        rank.beat(Phase.reduce, 12)
    assert node.look(55) == []
    (stall,) = node.events("step_stalled")
    assert (stall["step"], stall["phase"], stall["limit"]) == (12, "reduce", 10.0)
    assert [it["rank"] for it in stall["ranks"]] == [0, 1]
    assert {hang.rank for hang in node.look(10)} == {0, 1}


def test_a_stall_that_ends_is_told_once_and_the_next_one_again(nodes: Any) -> None:
    node = nodes(2, world_size=4)
    node.train(range(1, 12))
    assert node.look(11) == []
    assert len(node.events("step_stalled")) == 1
    node.train(range(12, 16))
    assert len(node.events("step_stalled")) == 1
    assert node.look(40) == []
    assert len(node.events("step_stalled")) == 2


def test_when_all_ranks_are_in_sight_the_one_behind_is_found_soon(nodes: Any) -> None:
    node = nodes(3)
    node.train(range(1, 12))
    for rank in node.ranks:
        rank.beat(Phase.backward, 12, 1 if rank.number != 1 else 0)
    assert [(hang.rank, hang.limit_s) for hang in node.look(40)] == [(1, 10.0)]


def test_slow_ranks_that_move_and_a_slow_first_step_are_no_hang(nodes: Any) -> None:
    node = nodes(2)
    for rank in node.ranks:
        rank.beat(Phase.step, 1)
    assert node.look(250) == []
    # Steps of nine seconds, and then one of fifty.
    for step in range(2, 12):
        for rank in node.ranks:
            rank.beat(Phase.step, step)
        assert node.look(9) == []
    assert node.look(50) == []
    assert node.events("hang_detected") == []


def test_steps_that_passed_before_anybody_looked_end_the_patience_with_the_first_one(nodes: Any) -> None:
    node = nodes(1)
    for step in range(31, 37):
        node.ranks[0].beat(Phase.step, step)
    assert node.look() == []
    (hang,) = node.look(62)
    assert (hang.rank, hang.position.step) == (0, 36)


def test_a_rank_that_never_beats_is_found_after_the_time_for_setup(nodes: Any, tmp_path: Path) -> None:
    node = nodes(1)
    beat_file(node.watched.folder, 0, 0).unlink()
    assert node.look(299) == []
    (hang,) = node.look(3)
    assert (hang.rank, hang.position.phase, hang.process, hang.stacks) == (0, Phase.setup, None, None)


def test_time_in_which_the_agent_did_not_run_is_no_silence(nodes: Any) -> None:
    node = nodes(1)
    node.train(range(1, 12))
    for _ in range(3):
        assert node.look(every_s=100_000.0) == []
    assert node.look(every_s=-5_000.0) == []
    node.train(range(12, 14))


def test_ranks_that_have_ended_are_no_hang(nodes: Any) -> None:
    node = nodes(2)
    node.train(range(1, 12))
    node.ranks[1].child.kill()
    node.ranks[1].child.wait()
    for step in range(12, 80):
        node.ranks[0].beat(Phase.step, step)
        assert node.look() == []


def test_the_summary_says_where_the_ranks_stand(nodes: Any) -> None:
    node = nodes(2)
    node.train(range(1, 12))
    node.ranks[1].beat(Phase.save, 11)
    node.look(12)
    summary = json.loads(node.run.heartbeat(0).read_text())
    assert summary["step"] == {"min": 11, "max": 11}
    assert summary["phases"] == {"backward": [0], "save": [1]}
    assert summary["attempt"] == 0


def test_the_records_are_removed_when_all_is_over(nodes: Any) -> None:
    node = nodes(1)
    node.train(range(1, 3))
    node.watch.close()
    assert not node.watched.folder.exists()
