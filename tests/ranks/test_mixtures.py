"""Mixtures of experts and latent attention on several ranks: the training of one process, and its state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Ranks
from small_trainings import (
    GRAPHS,
    ODD,
    alone,
    assert_goes_on_bit_for_bit,
    assert_same_training,
    config_of,
    joined,
    restore_and_go_on,
    start,
    take_steps,
    trained_by_graphs,
    trained_on,
)

from conf.schema import Config, ModelConfig, MoeAuxScope, MoeBalance, Recompute, ScoringFunc

STEPS = 3
# A bias that moves fast enough to change who is chosen.
MIXTURE = replace(
    ODD,
    num_hidden_layers=3,
    init_std=0.1,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=13,
    shared_expert_intermediate_size=11,
    first_k_dense_replace=1,
    moe_bias_update_rate=0.02,
    qk_norm=True,
)
LATENT = replace(
    MIXTURE,
    qk_norm=False,
    num_key_value_heads=3,
    kv_lora_rank=7,
    q_lora_rank=9,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=3,
    scoring_func=ScoringFunc.sigmoid,
    routed_scaling_factor=1.5,
    num_experts=6,
    n_group=3,
    topk_group=2,
    router_aux_loss_coef=0.01,
)
AUX = replace(MIXTURE, moe_balance=MoeBalance.aux, router_aux_loss_coef=0.1, router_z_loss_coef=0.01)
# What ranks train, and what one process does beside it.
CASES: dict[str, tuple[ModelConfig, dict[str, Any], dict[str, Any]]] = {
    "bias, zero 0": (MIXTURE, {"zero": 0}, {}),
    "latents, zero 2, full": (LATENT, {"zero": 2}, {"recompute": Recompute.full}),
    "capacity, zero 3, selective": (
        replace(AUX, moe_capacity_factor=0.9),
        {"zero": 3},
        {"recompute": Recompute.selective},
    ),
    # A micro-batch of both ranks is one of one process.
    "batch, zero 1, selective": (
        replace(AUX, moe_aux_scope=MoeAuxScope.batch, num_experts=4),
        {"zero": 1},
        {"micro_batch_size": 1, "recompute": Recompute.selective},
    ),
}


def on_ranks(name: str) -> Config:
    model, parallelism, train = CASES[name]
    return config_of(model, train=train, **parallelism)


def test_two_ranks_train_what_one_process_does(ranks: Ranks) -> None:
    found = trained_on(ranks(2), [on_ranks(name) for name in CASES], STEPS)
    for (model, *_), of_ranks in zip(CASES.values(), found, strict=True):
        expected = alone(config_of(model), STEPS)
        assert_same_training(of_ranks, expected)
        biases = {name: value for name, value in joined([expected]).items() if name.endswith("_bias")}
        has_bias = model.moe_balance is MoeBalance.bias
        assert len(biases) == (2 if has_bias else 0)
        assert all(value.abs().max() > 0.01 and value.sum().abs() < 1e-6 for value in biases.values())


def loads(rank: int, world: int, config: Config) -> dict[str, Any]:
    """Return what the rows of metrics say of a step."""
    training, mesh = start(rank, world, config)
    take_steps(config, training, mesh, [1])
    training.parallelized.stage.settle()
    balance = training.parallelized.expert_balance
    assert balance is not None
    return balance.columns()


def test_counters_are_those_of_all_ranks_and_of_each_token_once(ranks: Ranks) -> None:
    of_ranks = ranks(2).run(loads, config=on_ranks("capacity, zero 3, selective"))
    model = CASES["capacity, zero 3, selective"][0]
    expected = loads(0, 1, config_of(model))
    assert of_ranks[0] == of_ranks[1]
    assert of_ranks[0].keys() == expected.keys()
    for key in ("moe/layer_1/tokens_per_expert", "moe/dropped_tokens", "moe/load"):
        assert of_ranks[0][key] == expected[key]
    assert abs(of_ranks[0]["moe/entropy"] - expected["moe/entropy"]) < 1e-5
    # 12 sequences of 16 tokens go through two experts in each layer.
    assert sum(expected["moe/layer_2/tokens_per_expert"]) == 12 * 16 * 2
    assert "moe/layer_0/load" not in expected


def loads_of_graphs(rank: int, world: int, config: Config) -> dict[str, Any]:
    torch.compiler.reset()
    with patch.object(torch, "compile", GRAPHS):
        return loads(rank, world, config)


def test_compiled_blocks_with_exchanges_that_are_recomputed_count_each_token_once(
    ranks: Ranks,
) -> None:
    """An exchange divides what is compiled, and a repetition may then be an eager one."""
    train = {"compile": True, "recompute": Recompute.full}
    model = replace(MIXTURE, num_hidden_layers=2)
    of_ranks = ranks(2).run(loads_of_graphs, config=config_of(model, train=train, zero=1, ep=2))
    expected = loads(0, 1, config_of(model))
    key = "moe/layer_1/tokens_per_expert"
    assert sum(of_ranks[0][key]) == sum(expected[key]) == 12 * 16 * 2


@pytest.mark.parametrize("layout", [{"zero": 3, "ep": 2}, {"ep": 2, "tp": 2}], ids=["ep", "ep and tp"])
def test_compiled_blocks_of_mixtures_train_what_one_process_does(
    ranks: Ranks, layout: dict[str, int]
) -> None:
    """What reaches the router's input has to be summed over tp also where a graph ends behind it."""
    model = replace(AUX, num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2)
    model = replace(model, intermediate_size=24, moe_intermediate_size=12, shared_expert_intermediate_size=8)
    train = {"compile": True, "micro_batch_size": 6}
    config = config_of(model, train=train, **layout)
    found = ranks(2 * layout.get("tp", 1)).run(trained_by_graphs, config=config, steps=2)
    assert_same_training(found, alone(config_of(model), steps=2))


def test_a_run_goes_on_bit_for_bit_and_on_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    config = on_ranks("latents, zero 2, full")
    assert_goes_on_bit_for_bit(ranks(2), config, tmp_path / "two", saved=2, last=4)
    other = config_of(LATENT, zero=3)
    expected = alone(config_of(LATENT), steps=4).rows[2:]
    for rows, _, digest, again in ranks(3).run(
        restore_and_go_on, config=other, place=tmp_path / "two", topic="three", last=4
    ):
        assert digest == again
        for row, row_expected in zip(rows, expected, strict=True):
            assert row[:2] == pytest.approx(row_expected[:2], rel=1e-5)
