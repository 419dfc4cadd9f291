"""Mixtures of experts in fp8 over the ranks: they follow bf16, and every layout trains alike."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from mixture_trainings import MIXTURE, MixtureTrained, mixed, trained_alone, trained_mixture
from pool import Ranks
from small_trainings import Trained, assert_goes_on_bit_for_bit, joined
from torch import Tensor

from conf.schema import Config, ModelConfig, Scaling
from tests.support.torch_features import NEEDS_ROW_PRODUCTS

# Experts' products have scales of rows.
pytestmark = NEEDS_ROW_PRODUCTS

STEPS = 3
# Sizes that 16 divides, two ranks' parts of them too. Five experts on two ranks are uneven.
EXPERTS = replace(
    MIXTURE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_experts=5,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    init_std=0.1,
)
# An expert takes no more than its even share of a sequence's tokens: what is left belongs to nobody.
TIGHT = replace(EXPERTS, moe_capacity_factor=1.0)
LATENT = replace(
    EXPERTS,
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=16,
    v_head_dim=8,
)


def fp8(
    model: ModelConfig = EXPERTS,
    scaling: Scaling = Scaling.row,
    *,
    is_delayed: bool = False,
    **others: object,
) -> Config:
    config = mixed(model, precision="fp8", **others)  # type: ignore[arg-type]
    precision = replace(config.precision, fp8_scaling=scaling, fp8_delayed_scaling=is_delayed)
    return replace(config, precision=precision)


@functools.cache
def reference(model: ModelConfig = EXPERTS) -> MixtureTrained:
    return trained_alone(fp8(model), STEPS)


def gradients_of(found: Sequence[MixtureTrained]) -> Mapping[str, Tensor]:
    return joined([Trained([], of_rank.gradients) for of_rank in found])


@pytest.mark.parametrize(
    ("model", "scaling"), [(EXPERTS, Scaling.tensor), (LATENT, Scaling.row)], ids=["experts", "latents"]
)
def test_losses_follow_those_of_bf16(model: ModelConfig, scaling: Scaling) -> None:
    expected = trained_alone(mixed(model, precision="bf16"), 20)
    found = trained_alone(fp8(model, scaling), 20)
    for row, row_expected in zip(found.rows, expected.rows, strict=True):
        assert row[0] == pytest.approx(row_expected[0], rel=0.01)
        assert row[:2] != row_expected[:2]
    # The same products, once rounded: of a wrong one nothing would be left.
    of_bf16 = gradients_of([expected])
    for name, gradient in gradients_of([found]).items():
        assert (gradient - of_bf16[name]).norm() < 0.35 * of_bf16[name].norm(), name


# Rows go to the rank of their expert in the order in which one process sorts them.
SHARED_OUT = (
    *(fp8(dp=2, ep=2, zero=zero) for zero in range(4)),
    fp8(dp=2, ep=2, recompute="selective"),
    fp8(dp=2, ep=2, zero=3, recompute="full"),
)


def test_every_stage_trains_with_the_same_bits_and_experts_get_the_gradients_of_one_process(
    ranks: Ranks,
) -> None:
    of_one = gradients_of([reference()])
    rows = []
    for config in SHARED_OUT:
        found = ranks(2).run(trained_mixture, config=config, choices=reference().choices, steps=STEPS)
        gradients = gradients_of(found)
        rows.append([row[0] for row in found[0].rows])
        for name in (name for name in of_one if ".experts." in name):
            assert bool((gradients[name] == of_one[name]).all()), name
    assert all(of_config == rows[0] for of_config in rows)
    assert rows[0] == pytest.approx([row[0] for row in reference().rows], rel=0.003)


LAYOUTS: tuple[tuple[int, Config], ...] = (
    (2, fp8(ep=1, tp=2)),
    (2, fp8(LATENT, ep=1, tp=2, sequence_parallel=True)),
    (2, fp8(LATENT, ep=1, cp=2, zero=3)),
    (2, fp8(TIGHT, dp=2, ep=1, zero=3, accumulation=2)),
    (4, fp8(dp=2, ep=2, tp=2, sequence_parallel=True, zero=3, accumulation=2)),
    (4, fp8(dp=2, ep=2, pp=2, accumulation=2, zero=1)),
    # Two replicas of a shard group that has all experts.
    (4, fp8(dp=4, ep=2, zero=3, shard_degree=2)),
)


def test_every_layout_trains_what_one_process_does(ranks: Ranks) -> None:
    for num_ranks, config in LAYOUTS:
        expected = reference(config.model)
        found = ranks(num_ranks).run(trained_mixture, config=config, choices=expected.choices, steps=STEPS)
        rows = [row[0] for row in found[0].rows]
        assert rows == pytest.approx([row[0] for row in expected.rows], rel=0.005)
        of_one = gradients_of([expected])
        for name, gradient in gradients_of(found).items():
            assert (gradient - of_one[name]).norm() < 0.35 * of_one[name].norm(), name


def test_a_run_with_delayed_scaling_beside_its_experts_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path
) -> None:
    config = fp8(LATENT, Scaling.tensor, is_delayed=True, dp=2, ep=2, zero=1)
    assert_goes_on_bit_for_bit(ranks(2), config, tmp_path, saved=2, last=3)
