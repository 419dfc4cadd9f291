"""What a rank's own step time is, and that rank 0 hears of all and tells who is slow."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpointing.peers import Peers
from conf.schema import RecoveryConfig
from orchestra.parallel.marks import marked, time_communication
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.sizes.step_shares import Part
from orchestra.train.watch.stragglers import HostClock, StepTimes

CONFIG = RecoveryConfig(straggler_every_steps=2, straggler_windows=3)
WAIT_S = 0.05


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


class GivenTimes:
    """A clock that says what the test says: real times are another test's."""

    def __init__(self) -> None:
        self.seconds = 1.0

    def begin(self) -> None:
        """Nothing is measured."""

    def communicating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def end(self) -> None:
        """Nothing is measured."""

    def own_time_s(self) -> float | None:
        return self.seconds


@dataclass(frozen=True)
class Rank:
    clock: GivenTimes
    times: StepTimes


def ranks_of(run: RunDir, config: RecoveryConfig = CONFIG) -> list[Rank]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    made = []
    for rank in range(3):
        clock = GivenTimes()
        events = EventWriter(run, rank_writer(0, 0), 0, rank=0) if rank == 0 else None
        made.append(Rank(clock, StepTimes(config, Peers(rank, 3, store), clock, events)))
    return made


def train(ranks: list[Rank], steps: range, slow: tuple[int, ...] = ()) -> None:
    """Take steps on all ranks, one rank after the other; those that are slow take twice as long."""
    for step in steps:
        for index, rank in reversed(list(enumerate(ranks))):
            rank.times.begin(step)
            rank.clock.seconds = 2.0 if index in slow else 1.0
            rank.times.end()


def stragglers(run: RunDir) -> list[Record]:
    return [event for event in read_events(run) if event["event"].startswith("straggler")]


def await_events(run: RunDir, number: int) -> list[Record]:
    deadline = time.monotonic() + 20
    while len(found := stragglers(run)) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_waiting_for_others_is_not_the_ranks_own_time() -> None:
    clock = HostClock()
    time_communication(clock.communicating)
    clock.begin()
    with marked(Part.communication), marked(Part.communication):
        time.sleep(WAIT_S)
    clock.end()
    own_time_s = clock.own_time_s()
    assert own_time_s is not None
    assert 0 <= own_time_s < WAIT_S
    clock.begin()
    with marked(Part.backward):
        time.sleep(WAIT_S)
    clock.end()
    own_time_s = clock.own_time_s()
    assert own_time_s is not None
    assert own_time_s >= WAIT_S
    time_communication(None)


def test_a_slow_rank_is_told_once_with_its_host_and_told_again_when_it_is_gone(run: RunDir) -> None:
    ranks = ranks_of(run)
    train(ranks, range(1, 13), slow=(1,))
    (found,) = await_events(run, 1)
    assert (found["event"], found["rank"], found["steps"]) == ("straggler_found", 1, 6)
    assert found["ratio"] == 2.0
    assert found["host"]
    train(ranks, range(13, 19), slow=(1,))
    train(ranks, range(19, 31), slow=())
    names = [event["event"] for event in await_events(run, 2)]
    assert names == ["straggler_found", "straggler_gone"]
    for rank in ranks:
        rank.times.close()


def test_rank_0_can_be_the_slow_one(run: RunDir) -> None:
    ranks = ranks_of(run)
    train(ranks, range(1, 13), slow=(0,))
    (found,) = await_events(run, 1)
    assert found["rank"] == 0
    for rank in ranks:
        rank.times.close()


def test_a_rank_that_has_told_nothing_leaves_all_unjudged(run: RunDir) -> None:
    ranks = ranks_of(run)
    train(ranks[:1], range(1, 13), slow=(0,))
    assert stragglers(run) == []
    for rank in ranks:
        rank.times.close()


def test_nothing_is_timed_where_nobody_wants_it(run: RunDir) -> None:
    ranks = ranks_of(run, config=RecoveryConfig(straggler_every_steps=None))
    train(ranks, range(1, 13), slow=(1,))
    assert stragglers(run) == []
