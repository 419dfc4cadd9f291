"""Small Llamas of all kinds, and the same in transformers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import transformers

from conf.schema import ModelConfig, RopeScaling

SCALED = RopeScaling(enabled=True, factor=4.0, original_max_position_embeddings=32)


def small(**changes: Any) -> ModelConfig:
    """Return a Llama with odd sizes, grouped queries, and weights large enough to matter."""
    values: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "init_std": 0.2,
    }
    return ModelConfig(**{**values, **changes})


MODELS = [
    pytest.param(small(), id="grouped-query"),
    pytest.param(small(num_key_value_heads=1), id="multi-query"),
    pytest.param(small(num_key_value_heads=6), id="multi-head"),
    pytest.param(small(tie_word_embeddings=True), id="tied"),
    pytest.param(small(head_dim=16), id="own-head-width"),
    pytest.param(small(rope_theta=500.0, rope_scaling=SCALED), id="scaled-rope"),
    pytest.param(small(norm_eps=1e-6, rope_theta=5e5, max_position_embeddings=4096), id="other-numbers"),
]


def reference_llama(model: ModelConfig) -> transformers.LlamaForCausalLM:
    """Return transformers' own model, made without any of our files."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling.enabled:
        rope = {**asdict(model.rope_scaling), "rope_type": "llama3"}
        del rope["enabled"]
    config = transformers.LlamaConfig(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        rope_parameters={**rope, "rope_theta": model.rope_theta},
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_word_embeddings,
        max_position_embeddings=model.max_position_embeddings,
        initializer_range=model.init_std,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)
