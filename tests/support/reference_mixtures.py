"""Small models with experts, norms of heads or latent attention, and the same in transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from conf.schema import ModelConfig, ScoringFunc
from tests.support.reference_llama import small

MIXTRAL = small(num_experts=4, num_experts_per_tok=2)
QWEN3 = small(qk_norm=True, head_dim=16, norm_eps=1e-6)
QWEN3_MOE = small(
    qk_norm=True,
    head_dim=16,
    norm_eps=1e-6,
    num_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=28,
    norm_topk_prob=False,
)
DEEPSEEK_V3 = small(
    num_key_value_heads=6,
    norm_eps=1e-6,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=48,
    first_k_dense_replace=1,
    scoring_func=ScoringFunc.sigmoid,
    routed_scaling_factor=2.5,
    n_group=4,
    topk_group=2,
)


def reference_mixture(model: ModelConfig) -> nn.Module:
    """Return transformers' own model of the family that has what this one has."""
    values: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "max_position_embeddings": model.max_position_embeddings,
        "attn_implementation": "sdpa",
    }
    if model.num_experts:
        values |= {"num_experts_per_tok": model.num_experts_per_tok}
    if model.kv_lora_rank is not None:
        assert model.moe_intermediate_size is not None
        values |= {
            **{key: getattr(model, key) for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")},
            **{
                key: getattr(model, key)
                for key in ("qk_rope_head_dim", "v_head_dim", "n_group", "topk_group")
            },
            **{key: getattr(model, key) for key in ("first_k_dense_replace", "routed_scaling_factor")},
            "moe_intermediate_size": model.moe_intermediate_size,
            "n_routed_experts": model.num_experts,
            "n_shared_experts": model.shared_expert_intermediate_size // model.moe_intermediate_size,
            "norm_topk_prob": model.norm_topk_prob,
        }
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**values)).eval()
    if model.qk_norm:
        values |= {"head_dim": model.head_dim}
        if not model.num_experts:
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values)).eval()
        values |= {
            "num_experts": model.num_experts,
            "moe_intermediate_size": model.moe_intermediate_size,
            "norm_topk_prob": model.norm_topk_prob,
            "mlp_only_layers": list(range(model.first_k_dense_replace)),
        }
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**values)).eval()
    values |= {"num_local_experts": model.num_experts}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**values)).eval()


def with_their_names(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of our model by the names of transformers in memory, where gate and up are one."""
    theirs = {}
    for name, value in ours.items():
        if name.endswith("experts.up_proj"):
            continue
        if name.endswith("experts.gate_proj"):
            up = ours[name.replace("gate_proj", "up_proj")]
            name, value = name.replace("gate_proj", "gate_up_proj"), torch.cat([value, up], dim=1)
        theirs[name if name.startswith("lm_head") else f"model.{name}"] = value
    return theirs
