"""The order of samples: a permutation per epoch, the same however it is asked for, cheap at any size; and the
record of what was trained on, in which what a later attempt trained again counts once.
"""

from __future__ import annotations

import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestra.data.order import Ledger, read_ledger, sample_ids
from orchestra.run.events import EventWriter
from orchestra.run.paths import RunDir

BILLION = 1_000_000_007


def chi_square(counts: np.ndarray) -> float:
    """Return Pearson's statistic against equal counts."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected)


@pytest.mark.parametrize("num_samples", [*range(1, 70), 255, 256, 257, 1000, 4097, 65_537])
def test_every_sample_comes_once_per_epoch(num_samples: int) -> None:
    for epoch in range(2):
        ids = sample_ids(epoch * num_samples, num_samples, num_samples=num_samples, seed=3)
        assert np.array_equal(np.sort(ids), np.arange(num_samples))


@settings(max_examples=50)
@given(
    num_samples=st.integers(1, 1 << 45),
    position=st.integers(0, 1 << 50),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_order_does_not_depend_on_how_the_range_is_cut(
    num_samples: int, position: int, cuts: list[int]
) -> None:
    whole = sample_ids(position, sum(cuts), num_samples=num_samples, seed=1)
    starts = np.cumsum([0, *cuts])
    parts = [
        sample_ids(position + int(start), int(end - start), num_samples=num_samples, seed=1)
        for start, end in pairwise(starts)
    ]
    assert np.array_equal(whole, np.concatenate(parts))
    assert whole.dtype == np.int64
    assert ((whole >= 0) & (whole < num_samples)).all()


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = [
        sample_ids(epoch * 1000, 1000, num_samples=1000, seed=seed) for seed in range(3) for epoch in range(3)
    ]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            # Two random permutations agree in one place on average.
            assert (order == other).sum() < 10


def test_all_permutations_of_three_are_equally_likely() -> None:
    found = [tuple(sample_ids(0, 3, num_samples=3, seed=seed).tolist()) for seed in range(3000)]
    _, counts = np.unique(found, axis=0, return_counts=True)
    assert counts.size == 6
    assert chi_square(counts) < 30  # 5 degrees of freedom: 1 in 70,000


@pytest.mark.parametrize("num_samples", [2, 4, 5, 16, 17, 40])
def test_each_place_holds_each_sample_equally_often(num_samples: int) -> None:
    num_seeds = 400
    counts = np.zeros((num_samples, num_samples), dtype=np.int64)
    for seed in range(num_seeds):
        counts[np.arange(num_samples), sample_ids(0, num_samples, num_samples=num_samples, seed=seed)] += 1
    freedom = (num_samples - 1) ** 2
    assert chi_square(counts) < freedom + 5 * np.sqrt(2 * freedom) + 10


def test_neighbours_are_independent_and_spread_over_a_large_source() -> None:
    ids = sample_ids(0, 20_000, num_samples=BILLION, seed=0)
    assert len(np.unique(ids)) == len(ids)
    bins = np.histogram(ids, bins=100, range=(0, BILLION))[0]
    assert chi_square(bins) < 99 + 5 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(ids, np.arange(ids.size))[0, 1]) < 0.03


@pytest.mark.parametrize("num_samples", [1 << 32, (1 << 33) + 7, 15_000_000_000_000])
def test_sources_of_trillions_of_samples_are_permuted(num_samples: int) -> None:
    ids = sample_ids(num_samples - 500, 1000, num_samples=num_samples, seed=0)
    assert len(np.unique(ids[:500])) == len(np.unique(ids[500:])) == 500
    assert ids.max() < num_samples
    assert ids.max() > num_samples // 2


def test_impossible_requests_are_refused() -> None:
    for position, num_samples in ((0, 0), (-1, 5)):
        with pytest.raises(ValueError, match="need at least"):
            sample_ids(position, 1, num_samples=num_samples, seed=0)


def test_first_batch_of_a_billion_samples_takes_under_10_ms() -> None:
    def seconds() -> float:
        began = time.process_time()
        sample_ids(0, 1024, num_samples=BILLION, seed=0)
        return time.process_time() - began

    assert min(seconds() for _ in range(5)) < 0.010


@pytest.mark.parametrize(("position", "num_samples"), [(0, BILLION), (10**15, 10**13)])
def test_memory_does_not_depend_on_the_position_or_the_size(position: int, num_samples: int) -> None:
    tracemalloc.start()
    sample_ids(position, 1024, num_samples=num_samples, seed=0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1e6


def trained(run: RunDir, attempt: int, num_ranks: int, steps: range) -> None:
    """Record that each rank of an attempt trained one sample per step: 100 · attempt + 10 · step + rank."""
    for rank in range(num_ranks):
        ledger = Ledger(run, rank, attempt)
        for step in steps:
            ledger.write(step, np.array([[100 * attempt + 10 * step + rank]]))


Trained = list[tuple[int, int, range]]


@pytest.mark.parametrize(
    ("attempts", "samples"),
    [
        pytest.param([], {}, id="no ledger"),
        pytest.param([(0, 2, range(1, 3))], {1: [10, 11], 2: [20, 21]}, id="the ranks of a step are joined"),
        pytest.param(
            # Back to after step 2, on one rank, which was killed too.
            [(0, 3, range(1, 5)), (1, 1, range(3, 4))],
            {1: [10, 11, 12], 2: [20, 21, 22], 3: [130]},
            id="a rollback voids later steps on ranks that are gone too",
        ),
        pytest.param(
            [(0, 1, range(1, 5)), (1, 1, range(4, 7)), (2, 1, range(2, 4))],
            {1: [10], 2: [220], 3: [230]},
            id="a rollback past a rollback voids both",
        ),
    ],
)
def test_each_step_counts_once(tmp_path: Path, attempts: Trained, samples: dict[int, list[int]]) -> None:
    for attempt, num_ranks, steps in attempts:
        trained(RunDir(tmp_path), attempt, num_ranks, steps)
    assert read_ledger(RunDir(tmp_path)) == samples


def test_what_a_replaced_attempt_trains_after_the_next_one_began_counts_for_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    trained(run, 0, 1, range(1, 8))
    EventWriter(run, "rank", 1).write("restored", step=4, generation=0)
    assert sorted(read_ledger(run)) == [1, 2, 3, 4]
    trained(run, 1, 1, range(5, 7))
    assert sorted(read_ledger(run)) == [1, 2, 3, 4, 5, 6]
