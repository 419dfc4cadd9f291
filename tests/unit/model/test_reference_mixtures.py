"""Mixtures of experts, norms of heads and latent attention against transformers with the same weights."""

from __future__ import annotations

import pytest
import torch

from conf.schema import ModelConfig
from orchestra.model.transformer import Transformer, fill_initial_values
from tests.support.reference_mixtures import (
    DEEPSEEK_V3,
    MIXTRAL,
    QWEN3,
    QWEN3_MOE,
    reference_mixture,
    with_their_names,
)

FAMILIES = {
    "mixtral": MIXTRAL,
    "qwen3": QWEN3,
    "qwen3 moe": QWEN3_MOE,
    "deepseek v3": DEEPSEEK_V3,
}


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
def test_logits_and_gradients_equal_transformers(model: ModelConfig) -> None:
    ours, theirs = Transformer(model), reference_mixture(model)
    fill_initial_values(ours, seed=3)
    generator = torch.Generator().manual_seed(1)
    state = dict(ours.state_dict())
    for value in state.values():
        if value.dim() == 1:  # gains and biases that do nothing would hide where they are used
            value += 0.2 * torch.randn(value.shape, generator=generator)
    if model.kv_lora_rank is None:  # nobody but DeepSeek has one
        state = {name: value for name, value in state.items() if not name.endswith("_bias")}
        for value in ours.buffers():
            value.zero_()
    theirs.load_state_dict(with_their_names(state))
    tokens = torch.randint(0, model.vocab_size, (2, 65), generator=generator)
    expected = theirs(tokens[:, :-1]).logits
    torch.testing.assert_close(ours(tokens[:, :-1]), expected, atol=1e-5, rtol=1e-5)

    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    ).backward()
    grads = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    for name, grad in with_their_names(
        {name: grad for name, grad in grads.items() if grad is not None}
    ).items():
        twin = theirs.get_parameter(name).grad
        assert twin is not None
        scale = twin.abs().max()
        torch.testing.assert_close(grad / scale, twin / scale, atol=2e-5, rtol=0, msg=name)
