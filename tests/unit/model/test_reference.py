"""The model against transformers' own with the same weights."""

from __future__ import annotations

import pytest
import torch
import transformers

from conf.schema import Family, ModelConfig
from orchestra.model.transformer import Transformer, fill_initial_values
from tests.support.reference_llama import MODELS, reference_llama, small


def built(model: ModelConfig, seed: int = 3) -> Transformer:
    transformer = Transformer(model)
    fill_initial_values(transformer, seed)
    return transformer


@pytest.mark.parametrize("model", MODELS)
def test_logits_and_gradients_equal_transformers_llama(model: ModelConfig) -> None:
    ours, reference = built(model), reference_llama(model)
    state = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in ours.state_dict().items()
    }
    reference.load_state_dict(state)
    tokens = torch.randint(0, model.vocab_size, (2, 65), generator=torch.Generator().manual_seed(0))
    expected = reference(tokens[:, :-1]).logits
    torch.testing.assert_close(ours(tokens[:, :-1]), expected, atol=1e-5, rtol=1e-5)

    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    ).backward()
    for name, parameter in ours.named_parameters():
        twin = reference.get_parameter(name if name.startswith("lm_head") else f"model.{name}")
        assert twin.grad is not None
        scale = twin.grad.abs().max()
        torch.testing.assert_close(parameter.grad / scale, twin.grad / scale, atol=2e-5, rtol=0, msg=name)


def test_gpt_family_equals_transformers_gpt2() -> None:
    model = small(
        family=Family.gpt, num_key_value_heads=6, tie_word_embeddings=True, max_position_embeddings=64
    )
    ours = built(model)
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=97,
            n_positions=64,
            n_embd=48,
            n_layer=3,
            n_head=6,
            n_inner=100,
            layer_norm_epsilon=1e-5,
        )
    ).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        _copy_gpt2(ours, reference.transformer)
    tokens = torch.randint(0, 97, (2, 50))
    torch.testing.assert_close(ours(tokens), reference(tokens).logits, atol=1e-5, rtol=1e-5)


def _copy_gpt2(ours: Transformer, reference: transformers.GPT2Model) -> None:
    reference.wte.weight.copy_(ours.embed_tokens.weight)
    reference.wpe.weight.copy_(ours.get_parameter("embed_positions.weight"))
    reference.ln_f.load_state_dict(ours.norm.state_dict())
    for layer, twin in zip(ours.layers, reference.h, strict=True):
        twin.ln_1.load_state_dict(layer.input_layernorm.state_dict())
        twin.ln_2.load_state_dict(layer.post_attention_layernorm.state_dict())
        attention = layer.self_attn
        joined = [attention.q_proj, attention.k_proj, attention.v_proj]
        twin.attn.c_attn.weight.copy_(torch.cat([part.weight for part in joined]).t())
        twin.attn.c_attn.bias.copy_(torch.cat([part.bias for part in joined]))
        pairs = [
            (twin.attn.c_proj, attention.o_proj),
            (twin.mlp.c_fc, layer.mlp.up_proj),
            (twin.mlp.c_proj, layer.mlp.down_proj),
        ]
        for target, source in pairs:
            target.weight.copy_(source.weight.t())
            target.bias.copy_(source.bias)
