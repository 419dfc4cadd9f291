"""Parameter and FLOP counts against published tables (conventions: orchestra/sizes/flops.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conf.schema import Family, ModelConfig, Recompute
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.model.transformer import Transformer
from orchestra.sizes import flops
from tests.support.reference_mixtures import DEEPSEEK_V3, MIXTRAL, QWEN3, QWEN3_MOE


def llama(
    hidden: int, wide: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048) -> ModelConfig:
    return ModelConfig(
        family=Family.gpt,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocab,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )


LLAMA3_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA3_70B = llama(8192, 28672, 80, 64, 8, 128256)
LLAMA3_405B = llama(16384, 53248, 126, 128, 8, 128256)


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(),
        ModelConfig(tie_word_embeddings=True, head_dim=32),
        gpt(2, 64, 4, vocab=96, positions=32),
        ModelConfig(family=Family.gpt, num_key_value_heads=2, max_position_embeddings=64),
        MIXTRAL,
        QWEN3,
        replace(QWEN3_MOE, tie_word_embeddings=True),
        replace(DEEPSEEK_V3, first_k_dense_replace=0),
        replace(DEEPSEEK_V3, first_k_dense_replace=0, q_lora_rank=None),
    ],
)
def test_counts_are_those_of_the_model_that_is_built(model: ModelConfig) -> None:
    with torch.device("meta"):
        built = Transformer(model)
    assert flops.num_parameters(model) == sum(parameter.numel() for parameter in built.parameters())
    looked_up = [] if model.tie_word_embeddings else [built.embed_tokens.weight]
    looked_up += [] if built.embed_positions is None else [built.embed_positions.weight]
    assert flops.num_embedding_parameters(model) == sum(table.numel() for table in looked_up)
    in_a_layer = sum(parameter.numel() for parameter in built.layers[0].parameters())
    assert flops.num_layer_parameters(model) == in_a_layer


def test_first_layers_without_experts_are_counted_as_they_are_built() -> None:
    with torch.device("meta"):
        built = Transformer(DEEPSEEK_V3)
    assert flops.num_parameters(DEEPSEEK_V3) == sum(parameter.numel() for parameter in built.parameters())
    experts = [parameter.numel() for name, parameter in built.named_parameters() if ".experts." in name]
    idle = (
        sum(experts) // DEEPSEEK_V3.num_experts * (DEEPSEEK_V3.num_experts - DEEPSEEK_V3.num_experts_per_tok)
    )
    assert flops.num_active_parameters(DEEPSEEK_V3) == flops.num_parameters(DEEPSEEK_V3) - idle


def test_attention_whose_values_are_narrower_costs_less() -> None:
    """Scores over 12 numbers a head and sums of 10: 2·12·s and 2·10·s a token forward."""
    seq_len, heads, layers = 4096, DEEPSEEK_V3.num_attention_heads, DEEPSEEK_V3.num_hidden_layers
    multiplied = flops.num_active_parameters(DEEPSEEK_V3) - flops.num_embedding_parameters(DEEPSEEK_V3)
    attention = 3 * layers * heads * 2 * (12 + 10) * seq_len
    assert flops.model_flops_per_token(DEEPSEEK_V3, seq_len) == 6 * multiplied + attention


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [("mixtral_8x7b", 46.7, 12.9), ("qwen3_30b_a3b", 30.5, 3.3), ("deepseek_v3", 671, 37)],
)
def test_mixtures_have_the_published_parameters_total_and_active(
    preset: str, total: float, active: float
) -> None:
    """arXiv:2401.04088, arXiv:2505.09388, arXiv:2412.19437: their digits, of which the last is rounded."""
    model = compose([f"model={preset}"], Situation("plan", num_gpus=8)).config.model
    digit = 1.0 if total > 100 else 0.1
    assert flops.num_parameters(model) / 1e9 == pytest.approx(total, abs=digit / 2)
    assert flops.num_active_parameters(model) / 1e9 == pytest.approx(active, abs=digit)


def test_parameters_of_narayanan_table_1() -> None:
    for billions, layers, hidden, heads in (
        (1.7, 24, 2304, 24),
        (3.6, 30, 3072, 32),
        (7.5, 36, 4096, 32),
        (18.4, 40, 6144, 48),
        (39.1, 48, 8192, 64),
        (76.1, 60, 10240, 80),
        (145.6, 80, 12288, 96),
        (310.1, 96, 16384, 128),
        (529.6, 105, 20480, 128),
        (1008.0, 128, 25600, 160),
    ):
        assert flops.num_parameters(gpt(layers, hidden, heads)) / 1e9 == pytest.approx(billions, abs=0.05)


def test_tflops_of_megatron_llama_examples() -> None:
    def tflops(model: ModelConfig, tokens_per_s: float) -> float:
        return tokens_per_s * flops.model_flops_per_token(model, 8192) / 1e12

    assert tflops(LLAMA3_8B, 13812) == pytest.approx(800, rel=0.001)
    assert tflops(LLAMA3_70B, 1621) == pytest.approx(780, rel=0.001)
    assert tflops(LLAMA3_405B, 315) == pytest.approx(834, rel=0.01)
    assert 1621 * flops.model_flops_per_token_causal(LLAMA3_70B, 8192) / 1e12 == pytest.approx(728, rel=0.001)


def test_mfu_of_the_playbook_for_a_tied_model_without_pipeline() -> None:
    model = llama(2048, 8192, 16, 32, 32, 131072, tied=True)
    assert 100 * 37628 * flops.model_flops_per_token(model, 4096) / 989.5e12 == pytest.approx(36.7, abs=0.05)


@pytest.mark.parametrize(
    ("model", "batch", "num_gpus", "seconds", "mfu", "hfu"),
    [
        (gpt(48, 6144, 64), 4, 8, 1.10, 41.5, 43.7),
        (gpt(96, 12288, 96), 64, 64, 13.75, 51.4, 52.8),
        (gpt(105, 20480, 128), 280, 280, 37.83, 56.0, 57.0),
        (gpt(128, 25600, 160), 512, 512, 71.49, 56.3, 57.0),
    ],
)
def test_mfu_and_hfu_of_korthikanti_table_5(
    model: ModelConfig, batch: int, num_gpus: int, seconds: float, mfu: float, hfu: float
) -> None:
    tokens_per_s = batch * 2048 / seconds / num_gpus
    per_token = flops.model_flops_per_token(model, 2048)
    repeated = flops.hardware_flops_per_token(model, 2048, Recompute.selective) - per_token
    assert 100 * tokens_per_s * per_token / 312e12 == pytest.approx(mfu, abs=0.2)
    # The paper counts the repeated attention three times (72·L·h²·s/6h for one forward pass).
    assert 100 * tokens_per_s * (per_token + 3 * repeated) / 312e12 == pytest.approx(hfu, abs=0.2)


def test_full_recomputation_is_narayanan_equation_3() -> None:
    model, seq_len = gpt(96, 12288, 96), 2048
    layers, hidden, vocab = model.num_hidden_layers, model.hidden_size, model.vocab_size
    equation = 96 * layers * hidden**2 * (1 + seq_len / (6 * hidden) + vocab / (16 * layers * hidden))
    none, full = (
        flops.hardware_flops_per_token(model, seq_len, how) for how in (Recompute.none, Recompute.full)
    )
    assert full == pytest.approx(equation, rel=0.001)
    assert none == flops.model_flops_per_token(model, seq_len)


def test_attention_counts_heads_times_head_width_where_it_differs_from_hidden() -> None:
    model = ModelConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    assert flops.attention_width(model) == 128
    per_position = flops.model_flops_per_token(model, 101) - flops.model_flops_per_token(model, 100)
    assert per_position == 12 * model.num_hidden_layers * 128
