"""On a network that carries a byte a second, the seconds which a plan takes for messages are the bytes that
ranks send in a step.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from pool import Ranks
from small_trainings import EVEN, bytes_sent, config_of

from conf.schema import Config, ModelConfig, Recompute
from orchestra.plan.case import PlanCase
from orchestra.plan.devices import Accelerator, Network
from orchestra.plan.frameworks import OWN, framework
from orchestra.plan.predict import step_time
from orchestra.sizes.topology import layout
from orchestra.sizes.training_shape import training_shape

# Figures are positional: shares, points, no limit, no latency.
NETWORK = Network("", 1.0, 1.0, ((2, 1.0), (9, 1.0)), ((2, 1.0), (9, 1.0)), None, 0.0, 0.0, False, "")
DEVICE = Accelerator("", 1e30, 1e30, 1e30, 1.0, 1e30, 1e30)
# Nothing is hidden, and tokens are taken to go everywhere alike.
TRAINER = replace(framework(OWN), exposed_reduction=1.0, uneven_routing=1.0)

FOUR = replace(EVEN, num_hidden_layers=4)
LATENTS = replace(
    FOUR, num_key_value_heads=4, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=6
)
MIXTURE = replace(FOUR, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
SHARED = replace(MIXTURE, shared_expert_intermediate_size=24)


def planned(config: Config, world: int) -> float:
    """Return the seconds that a plan takes for what layers and ends send, and for sums of gradients."""
    shape = training_shape(config, layout(config.parallelism, world), is_gpu=False)
    same = {field.name: getattr(shape, field.name) for field in fields(shape)}
    time = step_time(PlanCase(**same, device=DEVICE, devices_per_node=9, network=NETWORK, framework=TRAINER))
    return time.tensor_parallel + time.hand_over + time.reduction


@pytest.mark.parametrize(
    ("model", "world", "recompute", "parallelism"),
    [
        (FOUR, 2, "full", {"tp": 2}),
        (FOUR, 2, "selective", {"tp": 2, "sequence_parallel": True}),
        (FOUR, 2, "full", {"tp": 2, "sequence_parallel": True}),
        (LATENTS, 2, "selective", {"tp": 2, "sequence_parallel": True}),
        (replace(LATENTS, q_lora_rank=12), 2, "none", {"tp": 2}),
        (SHARED, 2, "full", {"tp": 2, "sequence_parallel": True}),
        (MIXTURE, 4, "selective", {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True}),
    ],
)
def test_a_cut_model_sends_what_is_planned(
    ranks: Ranks, model: ModelConfig, world: int, recompute: str, parallelism: dict[str, Any]
) -> None:
    assert_sends_what_is_planned(ranks, model, world, {"recompute": Recompute(recompute)}, parallelism)


@pytest.mark.parametrize(
    ("zero", "precision", "reduce_dtype", "is_tied", "batch"),
    [
        (0, "bf16", "fp32", False, 4),
        (1, "bf16_fp32_grad", None, False, 4),
        (2, "bf16", "fp32", False, 8),
        (3, "bf16", "fp32", False, 4),
        (3, "bf16_fp32_grad", None, True, 8),
    ],
)
def test_parameters_and_gradients_are_planned_to_travel_as_they_do(
    ranks: Ranks, zero: int, precision: str, reduce_dtype: str | None, is_tied: bool, batch: int
) -> None:
    others = {"precision": precision, "reduce_dtype": reduce_dtype, "zero": zero}
    model = replace(FOUR, tie_word_embeddings=is_tied)
    assert_sends_what_is_planned(ranks, model, 2, {"global_batch_size": batch}, others)


@pytest.mark.parametrize(
    ("model", "num_layers", "parallelism"),
    [
        (MIXTURE, 4, {"dp": 4, "zero": 3, "ep": 2}),
        (EVEN, 4, {"dp": 2, "zero": 3, "cp": 2}),
        (EVEN, 8, {"dp": 2, "zero": 3, "pp": 2}),
    ],
)
def test_several_micro_batches_of_four_ranks_send_what_is_planned(
    ranks: Ranks, model: ModelConfig, num_layers: int, parallelism: dict[str, Any]
) -> None:
    model = replace(model, num_hidden_layers=num_layers)
    assert_sends_what_is_planned(ranks, model, 4, {"global_batch_size": 16}, parallelism)


def assert_sends_what_is_planned(
    ranks: Ranks, model: ModelConfig, world: int, train: dict[str, Any], others: dict[str, Any]
) -> None:
    """Compare what the layers and a table of 256 words make the rank send that sends most."""
    train = {"seq_len": 128, "global_batch_size": 4, "micro_batch_size": 2, "compile": False, **train}
    config = config_of(replace(model, vocab_size=256), train=train, **others)
    of_ranks = ranks(world).run(bytes_sent, config=config)
    sent = max(sum(found.values()) for found in of_ranks)
    # Sums of the few gradients that every rank has parts of are not planned, nor the loss' few numbers a
    # token, and tokens go as they like.
    assert planned(config, world) == pytest.approx(sent, rel=0.05)
