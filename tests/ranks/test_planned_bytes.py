"""On a network that carries a byte a second, the seconds which a plan takes for messages are the bytes that
ranks send for a layer.
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

LATENTS = replace(
    EVEN, num_key_value_heads=4, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=6
)
MIXTURE = replace(EVEN, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
SHARED = replace(MIXTURE, shared_expert_intermediate_size=24)


def planned(config: Config, world: int) -> float:
    """Return the seconds that a plan takes for what the layers send, and for sums of gradients."""
    shape = training_shape(config, layout(config.parallelism, world), is_gpu=False)
    same = {field.name: getattr(shape, field.name) for field in fields(shape)}
    time = step_time(PlanCase(**same, device=DEVICE, devices_per_node=9, network=NETWORK, framework=TRAINER))
    return time.tensor_parallel + time.reduction


@pytest.mark.parametrize(
    ("model", "world", "recompute", "parallelism"),
    [
        (EVEN, 2, "full", {"tp": 2}),
        (EVEN, 2, "selective", {"tp": 2, "sequence_parallel": True}),
        (EVEN, 2, "full", {"tp": 2, "sequence_parallel": True}),
        (LATENTS, 2, "selective", {"tp": 2, "sequence_parallel": True}),
        (replace(LATENTS, q_lora_rank=12), 2, "none", {"tp": 2}),
        (SHARED, 2, "full", {"tp": 2, "sequence_parallel": True}),
        (MIXTURE, 4, "selective", {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True}),
    ],
)
def test_a_layer_sends_what_is_planned(
    ranks: Ranks, model: ModelConfig, world: int, recompute: str, parallelism: dict[str, Any]
) -> None:
    assert_sends_what_is_planned(ranks, model, world, {"recompute": Recompute(recompute)}, parallelism)


@pytest.mark.parametrize(
    ("zero", "precision", "reduce_dtype"),
    [
        (0, "bf16", "fp32"),
        (1, "bf16_fp32_grad", None),
        (2, "bf16", "fp32"),
        (3, "bf16", "fp32"),
        (3, "bf16_fp32_grad", None),
    ],
)
def test_gradients_are_planned_to_travel_as_they_do(
    ranks: Ranks, zero: int, precision: str, reduce_dtype: str | None
) -> None:
    others = {"precision": precision, "reduce_dtype": reduce_dtype, "zero": zero}
    assert_sends_what_is_planned(ranks, EVEN, 2, {}, others)


def assert_sends_what_is_planned(
    ranks: Ranks, model: ModelConfig, world: int, train: dict[str, Any], others: dict[str, Any]
) -> None:
    """Compare what two layers more make the ranks send, in the mean."""
    train = {"seq_len": 128, "global_batch_size": 4, "micro_batch_size": 2, "compile": False, **train}
    sent, plans = [], []
    for num_layers in (2, 4):
        config = config_of(replace(model, num_hidden_layers=num_layers), train=train, **others)
        of_ranks = ranks(world).run(bytes_sent, config=config)
        sent.append(sum(sum(found.values()) for found in of_ranks) / world)
        plans.append(planned(config, world))
    # Sums of the few gradients that every rank has parts of are not planned, and tokens go as they like.
    assert plans[1] - plans[0] == pytest.approx(sent[1] - sent[0], rel=0.05)
