"""Who is slow: what a rank's own step time is, how all of them are judged, and that rank 0 says who it is."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpointing.peers import Peers
from conf.schema import RecoveryConfig
from orchestra.parallel.marks import marked, time_communication
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.step_times import ratios_to_others
from orchestra.sizes.step_shares import Part
from orchestra.train.watch.stragglers import (
    HostClock,
    StepTimes,
    StragglerChanges,
    straggler_changes,
)
from tests.support.waiting import eventually

FACTOR, WINDOWS = 1.3, 5
WAIT_S = 0.05


def windows_of(num_ranks: int, num_windows: int, slow: dict[int, float], seed: int) -> list[list[float]]:
    """Return times of about 1 s with noise, of some ranks so many times as long."""
    chance = random.Random(seed)
    return [
        [slow.get(rank, 1.0) * max(0.05, chance.gauss(1.0, 0.1)) for rank in range(num_ranks)]
        for _ in range(num_windows)
    ]


def judged(history: list[list[float]], known: set[int] | None = None) -> StragglerChanges:
    return straggler_changes(history, known or set(), factor=FACTOR, windows=WINDOWS)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_no_even_rank_is_found_in_ten_thousand_windows_with_noise(num_ranks: int) -> None:
    history = windows_of(num_ranks, 10_000 // num_ranks + WINDOWS, {}, seed=num_ranks)
    for end in range(WINDOWS, len(history)):
        assert judged(history[end - WINDOWS : end]) == StragglerChanges()


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_a_rank_that_takes_twice_as_long_is_found_with_its_ratio(num_ranks: int) -> None:
    history = windows_of(num_ranks, WINDOWS, {1: 2.0}, seed=7)
    (straggler,) = judged(history).found
    assert straggler.rank == 1
    assert straggler.ratio == pytest.approx(2.0, rel=0.25)


def test_a_whole_slow_node_is_found_as_long_as_most_are_not_slow() -> None:
    history = windows_of(32, WINDOWS, dict.fromkeys(range(8), 1.8), seed=1)
    assert [straggler.rank for straggler in judged(history).found] == list(range(8))


def test_who_is_known_is_not_found_again_and_gone_after_as_many_good_windows() -> None:
    slow = windows_of(4, WINDOWS, {2: 2.0}, seed=3)
    assert judged(slow, known={2}) == StragglerChanges()
    recovered = windows_of(4, WINDOWS, {}, seed=4)
    assert judged([*slow[1:], recovered[0]], known={2}) == StragglerChanges()
    assert judged(recovered, known={2}) == StragglerChanges(gone=(2,))


def test_one_hiccup_too_few_windows_or_a_rank_alone_say_nothing() -> None:
    history = windows_of(8, WINDOWS, {}, seed=2)
    history[2][3] = 50.0
    assert judged(history) == StragglerChanges()
    assert judged(windows_of(4, WINDOWS - 1, {2: 9.0}, seed=5)) == StragglerChanges()
    assert judged([[1.0]] * WINDOWS) == StragglerChanges()


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 8])
def test_ratios_compare_with_the_median_of_the_others(num_ranks: int) -> None:
    chance = random.Random(num_ranks)
    window = [chance.choice((1.0, 1.0, 2.0, 3.0, 0.5)) for _ in range(num_ranks)]
    expected = [
        value / statistics.median(window[:rank] + window[rank + 1 :]) for rank, value in enumerate(window)
    ]
    assert ratios_to_others(window) == pytest.approx(expected)


def test_waiting_for_others_is_not_the_ranks_own_time() -> None:
    def own_time_s(*parts: Part) -> float | None:
        clock = HostClock()
        time_communication(clock.communicating)
        clock.begin()
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(marked(part))
            time.sleep(WAIT_S)
        clock.end()
        time_communication(None)
        return clock.own_time_s()

    communicated, computed = own_time_s(Part.communication, Part.communication), own_time_s(Part.backward)
    assert communicated is not None
    assert computed is not None
    assert 0 <= communicated < WAIT_S <= computed


class GivenTimes(HostClock):
    """A clock that says what the test says: real times are another test's."""

    seconds = 1.0

    def own_time_s(self) -> float:
        return self.seconds


class ThreeRanks:
    """Three ranks that tell rank 0 their times, and what it wrote about them."""

    def __init__(self, run: RunDir, every_steps: int | None = 2) -> None:
        self._run = run
        self._clocks = [GivenTimes() for _ in range(3)]
        config = RecoveryConfig(straggler_every_steps=every_steps, straggler_windows=3)
        store = dist.HashStore()  # type: ignore[attr-defined]
        writers = [EventWriter(run, rank_writer(0, 0), 0, rank=0), None, None]
        self.times = [
            StepTimes(config, Peers(rank, 3, store), clock, writer)
            for rank, (clock, writer) in enumerate(zip(self._clocks, writers, strict=True))
        ]

    def train(self, steps: range, slow: int | None = None, ranks: Sequence[int] = (2, 1, 0)) -> None:
        """Take steps, one rank after the other; the slow one takes twice as long."""
        for step in steps:
            for rank in ranks:
                self.times[rank].begin(step)
                self._clocks[rank].seconds = 2.0 if rank == slow else 1.0
                self.times[rank].end()

    def stragglers(self, number: int = 0) -> list[Record]:
        """Return the events of stragglers when there are so many."""

        def events() -> list[Record]:
            return [event for event in read_events(self._run) if event["event"].startswith("straggler")]

        assert eventually(lambda: len(events()) >= number, 20)
        return events()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[ThreeRanks]:
    three = ThreeRanks(RunDir(tmp_path))
    yield three
    for times in three.times:
        times.close()


def test_a_slow_rank_is_told_once_with_its_host_and_told_again_when_it_is_gone(three: ThreeRanks) -> None:
    three.train(range(1, 13), slow=1)
    (found,) = three.stragglers(1)
    assert (found["event"], found["rank"], found["steps"]) == ("straggler_found", 1, 6)
    assert found["ratio"] == 2.0
    assert found["host"]
    three.train(range(13, 19), slow=1)
    three.train(range(19, 31))
    names = [event["event"] for event in three.stragglers(2)]
    assert names == ["straggler_found", "straggler_gone"]


def test_nobody_is_judged_before_all_have_told_and_rank_0_can_be_the_slow_one(three: ThreeRanks) -> None:
    three.train(range(1, 13), slow=0, ranks=[0])
    assert three.stragglers() == []
    three.train(range(13, 25), slow=0)
    (found,) = three.stragglers(1)
    assert found["rank"] == 0
    # Three windows that all have told of.
    assert found["step"] >= 18


def test_nothing_is_timed_where_nobody_wants_it(tmp_path: Path) -> None:
    three = ThreeRanks(RunDir(tmp_path), every_steps=None)
    three.train(range(1, 13), slow=1)
    assert three.stragglers() == []
