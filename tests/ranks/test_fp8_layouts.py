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
    Trained,
    alone,
    assert_goes_on_bit_for_bit,
    assert_same_bits,
    bytes_sent,
    config_of,
    start,
    take_steps,
    trained,
    trained_on,
)

from conf.schema import Config, Family, ModelConfig, Recompute, Scaling
from orchestra.sizes.flops import num_parameters
from tests.support.torch_features import NEEDS_ROW_PRODUCTS

FEW = 3


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


# Layers are gathered again for the backward pass, in buffers of two.
DEEP = replace(EVEN, num_hidden_layers=4)
GATHERED: dict[str, tuple[int, ModelConfig, dict[str, Any]]] = {
    "two micro-batches": (2, DEEP, {}),
    "recomputed, biases": (2, replace(DEEP, family=Family.gpt), {"recompute": Recompute.full}),
    "four ranks": (4, DEEP, {}),
    "tied, with replicas": (4, replace(DEEP, tie_word_embeddings=True), {"shard_degree": 2}),
    "tensor parallel, padding": (4, replace(DEEP, vocab_size=63), {"tp": 2}),
}


def gathered_fp8(
    model: ModelConfig, world: int, recompute: Recompute = Recompute.none, **others: Any
) -> Config:
    train = {"global_batch_size": 4 * world // others.get("tp", 1), "recompute": recompute}
    config = fp8(train, zero=3, **others)
    return replace(config, model=model)


def rounded_before_and_after(rank: int, world: int, config: Config) -> list[Trained]:
    """Train with matrices that travel in fp8, and with such as are rounded where they are used."""
    before = trained(rank, world, config, FEW)
    with patch("orchestra.parallel.apply.gathered_in_fp8", return_value=[]):
        return [before, trained(rank, world, config, FEW)]


@pytest.mark.parametrize("name", GATHERED)
def test_matrices_that_travel_in_fp8_train_the_same_bits(ranks: Ranks, name: str) -> None:
    world, model, others = GATHERED[name]
    config = gathered_fp8(model, world, **others)
    found = ranks(world).run(rounded_before_and_after, config=config)
    before, after = zip(*found, strict=True)
    assert [of_rank.rows for of_rank in before] == [of_rank.rows for of_rank in after]
    assert_same_bits(before, after)


@NEEDS_ROW_PRODUCTS
@pytest.mark.parametrize("world", [2, 4])
def test_matrices_travel_in_one_byte_an_element(ranks: Ranks, world: int) -> None:
    """But the embedding, the blocks that stay in 16 bits, and all with scales by row."""
    config = gathered_fp8(replace(DEEP, hidden_size=64, intermediate_size=128), world)
    by_row = replace(config.precision, fp8_scaling=Scaling.row)
    some = replace(config.precision, fp8_bf16_blocks=1)
    gathered = []
    for precision in (by_row, config.precision, some):
        sent = ranks(world).run(bytes_sent, config=replace(config, precision=precision))
        assert sent[0] == sent[-1]
        gathered.append(sent[0]["all_gather"] * world / (world - 1))
    model = config.model
    size, table = num_parameters(model), model.vocab_size * model.hidden_size
    layer = (size - num_parameters(replace(model, num_hidden_layers=1))) / 3
    # Two micro-batches of four layers, of which the turns and the second one find two in place.
    num_layers, num_tables = 4 + 2 + 2 + 2, 2
    layers = num_layers * layer
    assert gathered[0] == pytest.approx(2 * (layers + 2 * num_tables * table), rel=0.02)
    assert gathered[1] == pytest.approx(layers + (2 + 1) * num_tables * table, rel=0.02)
    # The first layer and the last one.
    assert gathered[1] < gathered[2] < gathered[0]


def kept_whole(rank: int, world: int, config: Config, piece_bytes: int) -> tuple[list[Row], int, int]:
    """Train with what is no matrix put together in pieces; return the rows, the bytes that are kept beside
    the ranges and the buffers, and what sums have sent in a step.
    """
    with patch("orchestra.parallel.zero.zero_collectives.PIECE_BYTES", piece_bytes):
        training, mesh = start(rank, world, config)
        rows = take_steps(config, training, mesh, range(1, FEW))
        mesh.traffic.bytes_sent.clear()
        rows += take_steps(config, training, mesh, [FEW])
        training.parallelized.stage.settle()
    sent = mesh.traffic.bytes_sent["all_reduce"]
    return rows, training.parallelized.stage.rounded_bytes, sent


def test_what_is_no_matrix_takes_its_own_bytes_alone_and_comes_in_pieces(ranks: Ranks) -> None:
    """All of it lies in the ranges of few ranks: parts as long as the longest one would be mostly empty."""
    world = 2
    config = gathered_fp8(DEEP, world)
    in_one = ranks(world).run(kept_whole, config=config, piece_bytes=2**20)
    in_pieces = ranks(world).run(kept_whole, config=config, piece_bytes=100)
    assert in_pieces == in_one
    norms = 2 * DEEP.num_hidden_layers + 1
    for _, kept, sent in in_one:
        assert kept == 2 * norms * DEEP.hidden_size
        # And the scale of each matrix, and some numbers of the step.
        assert 2 * kept * (world - 1) / world < sent < 1.5 * 2 * kept * (world - 1) / world


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
