"""Products in fp8 over the ranks: rounded weights follow updates, and every layout trains alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pool import Ranks
from small_trainings import (
    EVEN,
    Row,
    alone,
    assert_goes_on_bit_for_bit,
    config_of,
    start,
    take_steps,
    trained,
    trained_on,
)

from conf.schema import Config

FEW = 5


def fp8(
    train: dict[str, Any], *, is_clipped: bool = True, is_delayed: bool = False, **parallelism: Any
) -> Config:
    optim = {} if is_clipped else {"clip_norm": None}
    config = config_of(EVEN, precision="fp8", optim=optim, train=train, **parallelism)
    return replace(
        config, precision=replace(config.precision, fp8_output=True, fp8_delayed_scaling=is_delayed)
    )


def kept_and_not(rank: int, world: int, config: Config) -> list[list[Row]]:
    """Train with weights that are kept rounded, and with weights rounded at each use; return both's rows."""
    kept = trained(rank, world, config, FEW)
    with patch("orchestra.parallel.apply.keep_rounded", return_value=None):
        return [kept.rows, trained(rank, world, config, FEW).rows]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_weights_that_are_kept_rounded_follow_each_update(ranks: Ranks, zero: int) -> None:
    for kept, anew in ranks(2).run(kept_and_not, config=fp8({"global_batch_size": 8}, zero=zero)):
        assert kept == anew


@pytest.mark.parametrize("is_delayed", [False, True])
def test_every_stage_trains_with_the_same_bits(ranks: Ranks, is_delayed: bool) -> None:
    """Of one micro-batch: stages sum several in other orders. Unclipped: squares of ranges are summed in
    another order than of wholes.
    """
    configs = [
        fp8({"global_batch_size": 4}, is_clipped=False, is_delayed=is_delayed, zero=zero)
        for zero in (0, 1, 3)
    ]
    first, *others = [of_ranks[0] for of_ranks in trained_on(ranks(2), configs, steps=FEW)]
    for stage in others:
        assert [row[0] for row in stage.rows] == [row[0] for row in first.rows]


@pytest.mark.parametrize("is_delayed", [False, True])
def test_a_model_cut_over_ranks_trains_as_one_that_is_not(ranks: Ranks, is_delayed: bool) -> None:
    # Two chunks of the loss.
    train = {"global_batch_size": 4, "loss_chunk_tokens": 16}
    whole = alone(fp8(train, is_delayed=is_delayed), steps=FEW)
    configs = [
        fp8(train, is_delayed=is_delayed, tp=2, sequence_parallel=is_sequence)
        for is_sequence in (False, True)
    ]
    for of_ranks in trained_on(ranks(2), configs, steps=FEW):
        assert of_ranks[0].rows == of_ranks[1].rows
        for found, expected in zip(of_ranks[0].rows, whole.rows, strict=True):
            assert found[0] == pytest.approx(expected[0], rel=0.01)


def sizes_after(rank: int, world: int, config: Config, steps: int) -> dict[str, float]:
    """Return what delayed scaling knows after some steps."""
    training, mesh = start(rank, world, config)
    take_steps(config, training, mesh, range(1, steps + 1))
    assert training.step.scale_history is not None
    return training.step.scale_history.state


def test_ranks_share_the_sizes_that_one_rank_finds_in_their_micro_batches(ranks: Ranks) -> None:
    # After one step: then sums over ranks and over micro-batches are rounded in other ways.
    config = fp8({"global_batch_size": 4}, is_delayed=True)
    of_one = sizes_after(0, 1, config, 1)
    assert len(of_one) == 2 * 11
    assert min(of_one.values()) > 0
    for found in ranks(2).run(sizes_after, config=config, steps=1):
        assert found == of_one
    first, second = ranks(2).run(sizes_after, config=config, steps=3)
    assert first == second != of_one


def test_a_run_with_delayed_scaling_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    config = fp8({"global_batch_size": 4}, is_delayed=True, zero=1)
    assert_goes_on_bit_for_bit(ranks(2), config, tmp_path)
