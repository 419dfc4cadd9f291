"""Batches: the same global batch for every world size, without what the run leaves out, and read ahead by a
thread that never hides or hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.waiting import eventually

from conf.schema import BatchStage, TrainConfig
from orchestra.data.loader import Batch, Loader
from orchestra.data.order import Int64, sample_ids
from orchestra.data.source import TokenSamples
from orchestra.errors import DataError
from orchestra.run.rollback import Stretch, merged
from orchestra.sizes.topology import StepBatches

SEQ_LEN = 4
GLOBAL_BATCH = 8
SOURCE = TokenSamples(np.arange(1001, dtype=np.uint32), SEQ_LEN, 2000, "array")


OUT = merged([Stretch(GLOBAL_BATCH, 3 * GLOBAL_BATCH), Stretch(4 * GLOBAL_BATCH + 3, 4 * GLOBAL_BATCH + 5)])


def share(
    micro_batch: int, dp_coordinate: int = 0, dp: int = 1, ramp: Sequence[BatchStage] = ()
) -> tuple[StepBatches, int]:
    train = TrainConfig(
        seq_len=SEQ_LEN, global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch, batch_ramp=list(ramp)
    )
    return StepBatches(train, dp), dp_coordinate


def batches(
    share: tuple[StepBatches, int],
    count: int,
    position: int = 0,
    left_out: tuple[Stretch, ...] = (),
    step: int = 0,
) -> list[Batch]:
    loader = Loader(SOURCE, *share, seed=7, step=step, position=position, left_out=left_out)
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
    (batch,) = batches(share(2), 1)
    assert batch.tokens.dtype == torch.int64
    assert batch.tokens.shape == (4, 2, SEQ_LEN + 1)
    assert batch.sample_ids.shape == (4, 2)
    starts = torch.from_numpy(batch.sample_ids * SEQ_LEN)
    assert torch.equal(batch.tokens, starts[..., None] + torch.arange(SEQ_LEN + 1))


@pytest.mark.parametrize(("micro_batch", "dp_size"), [(8, 1), (1, 1), (1, 8), (2, 2), (4, 2), (1, 4)])
def test_all_ranks_together_see_the_same_global_batch(micro_batch: int, dp_size: int) -> None:
    alone = batches(share(GLOBAL_BATCH), 3)
    ranks = [batches(share(micro_batch, rank, dp_size), 3) for rank in range(dp_size)]
    for step, whole in enumerate(alone):
        expected = sample_ids(step * GLOBAL_BATCH, GLOBAL_BATCH, num_samples=SOURCE.num_samples, seed=7)
        # [A, dp, B]: micro-batch, then rank, then sequence is the order of the global batch.
        together = np.stack([rank[step].sample_ids for rank in ranks], axis=1).reshape(-1)
        assert np.array_equal(together, expected)
        tokens = torch.stack([rank[step].tokens for rank in ranks], dim=1)
        assert torch.equal(tokens.reshape(whole.tokens.shape), whole.tokens)


def ids(found: list[Batch]) -> list[int]:
    return np.concatenate([batch.sample_ids.ravel() for batch in found]).tolist()


def test_no_sample_that_is_left_out_is_read_and_every_other_one_is() -> None:
    whole = ids(batches(share(8), 8))
    is_out = [any(out.begin <= place < out.end for out in OUT) for place in range(len(whole))]
    kept = [sample for sample, out in zip(whole, is_out, strict=True) if not out]
    found = ids(batches(share(8), 5, left_out=OUT))
    assert found == kept[: len(found)]


@pytest.mark.parametrize(
    ("left_out", "positions"),
    [((), [8, 16, 24, 32, 40]), (OUT, [8, 32, 42, 50, 58])],
    ids=["everything", "left out"],
)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_going_on_from_a_position_gives_and_passes_over_the_same(
    steps: int, left_out: tuple[Stretch, ...], positions: list[int]
) -> None:
    whole = batches(share(2), 5, left_out=left_out)
    assert [batch.position for batch in whole] == positions
    rest = batches(share(2), 5 - steps, position=whole[steps - 1].position, left_out=left_out)
    assert ids(rest) == ids(whole[steps:])
    assert torch.equal(rest[0].tokens, whole[steps].tokens)


def test_error_of_the_thread_is_raised_with_its_type_after_the_good_batches_and_again() -> None:
    loader = Loader(Slow(DataError("corpus.bin: offset 17"), fails_from=GLOBAL_BATCH), *share(8), seed=0)
    loader.next_batch()
    for _ in range(2):
        with pytest.raises(DataError, match=r"corpus\.bin: offset 17"):
            loader.next_batch()
    loader.close()


def test_reads_ahead_no_further_than_asked() -> None:
    source = Slow()
    loader = Loader(source, *share(8), seed=0, prefetch_batches=2)
    # Two wait, and a third is ready in the thread's hands.
    assert eventually(lambda: source.num_reads >= 3 * GLOBAL_BATCH, limit_s=60)
    time.sleep(0.05)
    assert source.num_reads == 3 * GLOBAL_BATCH
    loader.close()


def test_close_ends_the_thread_and_whoever_still_waits() -> None:
    loader = Loader(Slow(), *share(8), seed=0, prefetch_batches=1)
    loader.next_batch()
    loader.close()
    loader.close()
    assert not any(thread.name == "loader" and thread.is_alive() for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        loader.next_batch()
