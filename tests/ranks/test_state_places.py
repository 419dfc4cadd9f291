"""Where and how the optimizer's state is kept must not show: moments in bf16 over layouts and checkpoints,
and state in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from small_trainings import EVEN, ODD, Trained, all_trained, alone, config_of, joined
from test_zero_checkpoints import go_on, save_behind

from conf.schema import Config, ModelConfig, Offload, StateDType

pytestmark = pytest.mark.ranks

Ranks = Callable[[int], RankPool]


def rounding(model: ModelConfig = EVEN, **parallelism: Any) -> Config:
    # Unclipped, without accumulation and on two ranks, all sums have one order, and all stages the same
    # gradients.
    optim = {"clip_norm": None, "state_dtype": StateDType.bf16}
    train = {"global_batch_size": 4, "micro_batch_size": 2}
    return config_of(model, optim=optim, train=train, **parallelism)


def assert_same_bits(found: list[Trained], expected: list[Trained]) -> None:
    assert [row[0] for row in found[0].rows] == [row[0] for row in expected[0].rows]
    whole = joined([of_rank.shards for of_rank in expected])
    for name, value in joined([of_rank.shards for of_rank in found]).items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize("model", [EVEN, ODD], ids=["even", "odd"])
def test_rounded_moments_have_the_same_bits_in_every_stage(ranks: Ranks, model: ModelConfig) -> None:
    configs = [rounding(model, zero=zero) for zero in (0, 1, 2, 3)]
    results = ranks(2).run(all_trained, world=2, configs=configs, steps=8)
    zero, *others = (list(of_ranks) for of_ranks in zip(*results, strict=True))
    moments = [shard for shard in zero[0].shards if shard.name.startswith("optimizer.")]
    assert all(shard.tensor.dtype == torch.bfloat16 for shard in moments)
    for stage in others:
        assert_same_bits(stage, zero)


def test_rounded_moments_of_tensor_parallel_ranks_follow_one_process(ranks: Ranks) -> None:
    config = rounding()
    expected = alone(config, steps=8)
    split = [rounding(tp=2, zero=0), rounding(tp=2, sequence_parallel=True)]
    for of_ranks in zip(*ranks(2).run(all_trained, world=2, configs=split, steps=8), strict=True):
        whole = joined([of_rank.shards for of_rank in of_ranks])
        for name, value in joined([expected.shards]).items():
            if name.startswith("model."):
                assert (whole[name] - value).norm() <= 1e-4 * value.norm(), name
                continue
            # The same random bits: all but numbers at the border of two roundings agree to the last bit.
            assert float((whole[name] == value).float().mean()) > 0.95, name


def test_a_checkpoint_of_rounded_moments_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    arguments = {"world": 2, "config": rounding(zero=2), "place": tmp_path}
    expected = ranks(2).run(save_behind, **arguments)
    found = ranks(2).run(go_on, topic="same", **arguments)
    assert [(rows, state) for rows, state, *_ in found] == expected


OFFLOADED: list[tuple[str, dict[str, Any]]] = [
    ("optimizer", {"zero": 0}),
    ("optimizer", {"zero": 1}),
    ("optimizer", {"zero": 2}),
    ("optimizer", {"zero": 3}),
    ("all", {"zero": 3}),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_fp32_grad"])
def test_state_in_host_memory_trains_with_the_same_bits(ranks: Ranks, precision: str) -> None:
    """Run on CPU, where host memory is all there is: the copies there and back are the same calls."""
    train = {"global_batch_size": 4, "micro_batch_size": 1}
    kept = [config_of(ODD, precision, train=train, **stage) for _, stage in OFFLOADED]
    moved = [
        replace(config, parallelism=replace(config.parallelism, offload=Offload(offload)))
        for config, (offload, _) in zip(kept, OFFLOADED, strict=True)
    ]
    expected = ranks(2).run(all_trained, world=2, configs=kept, steps=6)
    found = ranks(2).run(all_trained, world=2, configs=moved, steps=6)
    for of_ranks, of_ranks_expected in zip(
        zip(*found, strict=True), zip(*expected, strict=True), strict=True
    ):
        assert_same_bits(list(of_ranks), list(of_ranks_expected))
