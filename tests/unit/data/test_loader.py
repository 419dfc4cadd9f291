"""Batches: the same global batch for every world size, read ahead by a thread that never hides or hangs."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from orchestra.data.loader import Batch, BatchPlan, Loader
from orchestra.data.order import Int64, sample_ids
from orchestra.data.source import TokenSamples
from orchestra.errors import DataError

SEQ_LEN = 4
GLOBAL_BATCH = 8
SOURCE = TokenSamples(np.arange(1001, dtype=np.uint32), SEQ_LEN, 2000, "array")


def plan(micro_batch: int, dp_coordinate: int = 0, dp_size: int = 1) -> BatchPlan:
    accumulation = GLOBAL_BATCH // (micro_batch * dp_size)
    return BatchPlan(GLOBAL_BATCH, micro_batch, accumulation, dp_coordinate, dp_size, SEQ_LEN)


def batches(plan: BatchPlan, count: int, position: int = 0) -> list[Batch]:
    loader = Loader(SOURCE, plan, seed=7, position=position)
    try:
        return [loader.next_batch() for _ in range(count)]
    finally:
        loader.close()


class Slow:
    """A source whose reads wait for a signal; or fail."""

    vocab_size = 10

    def __init__(self, error: Exception | None = None, fails_from: int = 0) -> None:
        self.error = error
        self.fails_from = fails_from
        self.num_reads = 0

    def ids_at(self, position: int, count: int, seed: int) -> Int64:  # noqa: ARG002  its order is the plain one
        return np.arange(position, position + count)

    def read(self, sample_id: int, out: Int64) -> None:
        self.num_reads += 1
        if self.error is not None and sample_id >= self.fails_from:
            raise self.error
        out[:] = sample_id


def test_batch_holds_the_samples_that_its_ids_name() -> None:
    (batch,) = batches(plan(2), 1)
    assert batch.tokens.dtype == torch.int64
    assert batch.tokens.shape == (4, 2, SEQ_LEN + 1)
    assert batch.sample_ids.shape == (4, 2)
    starts = torch.from_numpy(batch.sample_ids * SEQ_LEN)
    assert torch.equal(batch.tokens, starts[..., None] + torch.arange(SEQ_LEN + 1))


@pytest.mark.parametrize(("micro_batch", "dp_size"), [(8, 1), (1, 1), (1, 8), (2, 2), (4, 2), (1, 4)])
def test_all_ranks_together_see_the_same_global_batch(micro_batch: int, dp_size: int) -> None:
    ranks = [batches(plan(micro_batch, rank, dp_size), 3) for rank in range(dp_size)]
    for step in range(3):
        # [A, dp, B]: micro-batch, then rank, then sequence is the order of the global batch.
        together = np.stack([rank[step].sample_ids for rank in ranks], axis=1).reshape(-1)
        expected = sample_ids(step * GLOBAL_BATCH, GLOBAL_BATCH, num_samples=SOURCE.num_samples, seed=7)
        assert np.array_equal(together, expected)


def test_two_ranks_see_the_micro_batches_of_one_rank_with_two() -> None:
    alone = batches(plan(4), 2)
    ranks = [batches(plan(4, rank, 2), 2) for rank in range(2)]
    for step in range(2):
        for rank in range(2):
            assert torch.equal(alone[step].tokens[rank], ranks[rank][step].tokens[0])


def test_position_resumes_where_a_batch_ended() -> None:
    whole = batches(plan(2), 4)
    assert [batch.position for batch in whole] == [8, 16, 24, 32]
    resumed = batches(plan(2), 2, position=whole[1].position)
    assert torch.equal(resumed[0].tokens, whole[2].tokens)
    assert torch.equal(resumed[1].tokens, whole[3].tokens)


def test_an_epoch_ends_inside_a_batch_without_losing_a_sample() -> None:
    num_batches = -(-SOURCE.num_samples // GLOBAL_BATCH)
    seen = np.concatenate([batch.sample_ids.reshape(-1) for batch in batches(plan(8), num_batches)])
    assert np.array_equal(np.sort(seen[: SOURCE.num_samples]), np.arange(SOURCE.num_samples))


def test_error_of_the_thread_is_raised_with_its_type_after_the_good_batches_and_again() -> None:
    loader = Loader(Slow(DataError("corpus.bin: offset 17"), fails_from=GLOBAL_BATCH), plan(8), seed=0)
    loader.next_batch()
    for _ in range(2):
        with pytest.raises(DataError, match=r"corpus\.bin: offset 17"):
            loader.next_batch()
    loader.close()


def test_reads_ahead_no_further_than_asked() -> None:
    source = Slow()
    loader = Loader(source, plan(8), seed=0, prefetch_batches=2)
    deadline = time.monotonic() + 5
    while source.num_reads < 3 * GLOBAL_BATCH and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    # Two wait, and a third is ready in the thread's hands.
    assert source.num_reads == 3 * GLOBAL_BATCH
    loader.close()


def test_close_ends_the_thread_and_whoever_still_waits() -> None:
    loader = Loader(Slow(), plan(8), seed=0, prefetch_batches=1)
    loader.next_batch()
    loader.close()
    loader.close()
    assert not any(thread.name == "loader" and thread.is_alive() for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        loader.next_batch()
