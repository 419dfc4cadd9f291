"""Maximal update: shares by name, and the same training as with its multipliers written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from conf.schema import Family, ModelConfig, MupConfig, OptimConfig, Parametrization, ScoringFunc
from orchestra.model.parametrization import ParameterShare as Share
from orchestra.model.parametrization import share_of, standard
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.optim.adamw import AdamW, Trained, squared_norm

WIDTH, DEPTH, QUERIES = 4, 3, math.sqrt(1 / 2)
MODEL = ModelConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4, vocab_size=64
)
MUP = OptimConfig(
    lr=0.01,
    eps=1e-20,
    clip_norm=None,
    parametrization=Parametrization.mup,
    mup=MupConfig(base_hidden=16, base_layers=2, base_head_dim=8, embedding_rate=3.0),
)


def model_of(optim: OptimConfig = MUP) -> Transformer:
    with torch.device("meta"):
        model = Transformer(MODEL)
    model.share_of = share_of(MODEL, optim)
    model.to_empty(device="cpu")
    fill_initial_values(model, seed=1)
    return model


def test_at_the_base_sizes_it_is_the_standard_parametrization() -> None:
    assert share_of(MODEL, OptimConfig()) is standard
    share = share_of(MODEL, OptimConfig(parametrization=Parametrization.mup))
    assert {share(name) for name, _ in model_of().named_parameters()} == {Share()}


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        (MODEL, "embed_tokens.weight", Share(1, 3)),
        (MODEL, "lm_head.weight", Share(1 / 4, 1 / 4)),
        (MODEL, "layers.0.mlp.up_proj.weight", Share(1 / 2, 1 / 4)),
        (MODEL, "layers.5.input_layernorm.weight", Share()),
        (MODEL, "layers.5.mlp.down_proj.weight", Share(1 / 2 / 3**0.5, 1 / 12)),
        (MODEL, "layers.0.self_attn.q_proj.weight", Share(QUERIES / 2, QUERIES / 4)),
        (replace(MODEL, qk_norm=True), "layers.0.self_attn.q_proj.weight", Share(1 / 2, 1 / 4)),
        (replace(MODEL, qk_norm=True), "layers.0.self_attn.q_norm.weight", Share(QUERIES, QUERIES)),
        (replace(MODEL, family=Family.gpt), "embed_positions.weight", Share(1, 3)),
        (
            replace(MODEL, family=Family.gpt),
            "layers.1.self_attn.o_proj.bias",
            Share(1 / 3**0.5, 1 / 3),
        ),
        (replace(MODEL, num_experts=4), "layers.1.mlp.gate.weight", Share(1 / 4, 1 / 4)),
        (replace(MODEL, num_experts=4), "layers.1.mlp.experts.up_proj", Share(1 / 2, 1 / 4)),
        (
            replace(MODEL, num_experts=4),
            "layers.1.mlp.experts.down_proj",
            Share(1 / 2 / 3**0.5, 1 / 12),
        ),
    ],
)
def test_a_parameter_has_the_share_of_its_kind(model: ModelConfig, name: str, expected: Share) -> None:
    model = replace(model, scoring_func=ScoringFunc.sigmoid)
    names = {each for each, _ in Transformer(model).named_parameters()}
    assert name in names
    found = share_of(model, MUP)(name)
    assert (found.initial, found.rate) == pytest.approx((expected.initial, expected.rate))


def multiplier_of(name: str) -> float:
    """Return what muP multiplies a product with, where it writes that out."""
    if name == "lm_head.weight":
        return 1 / WIDTH
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 1 / DEPTH
    return QUERIES if name.endswith("q_proj.weight") else 1.0


def rate_of(name: str, num_dims: int) -> float:
    """Return Adam's rate there: 1/m for matrices of the layers alone (Yang et al., table 8)."""
    if name == "embed_tokens.weight":
        return 3.0
    return 1 / WIDTH if num_dims == 2 and name != "lm_head.weight" else 1.0


def test_it_trains_as_with_multipliers_and_rates_written_out() -> None:
    ours, theirs = model_of(), model_of()
    trained = [
        Trained(name, value, value.detach(), 0, value.numel()) for name, value in ours.named_parameters()
    ]
    rates = {item.name: ours.share_of(item.name).rate for item in trained}
    optimizer = AdamW(trained, MUP, 0, lambda _, start, stop: torch.arange(start, stop), rates=rates)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            value.div_(multiplier_of(name))
    groups = [
        {
            "params": [value],
            "lr": MUP.lr * rate_of(name, value.dim()),
            # Independent of the rate; norms do not decay.
            "weight_decay": MUP.weight_decay / rate_of(name, 2) if value.dim() == 2 else 0.0,
        }
        for name, value in theirs.named_parameters()
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=MUP.eps)

    def loss_of_theirs(tokens: Tensor) -> Tensor:
        scaled = {name: value * multiplier_of(name) for name, value in theirs.named_parameters()}
        logits: Tensor = functional_call(theirs, scaled, (tokens[:, :-1],))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    for step in range(1, 6):
        tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(step)) // 3
        ours.zero_grad()
        ours(tokens[:, :-1], tokens[:, 1:], 1 / 64).backward()
        gradients = [item.parameter.grad for item in trained]
        assert all(each is not None for each in gradients)
        found = [each for each in gradients if each is not None]
        optimizer.begin_step(step, squared_norm(found).sqrt().float(), torch.tensor(data=False))
        optimizer.update(trained, found, [item.master for item in trained])
        reference.zero_grad()
        loss_of_theirs(tokens).backward()
        reference.step()
    for name, value in theirs.named_parameters():
        mine = ours.get_parameter(name)
        difference = (value * multiplier_of(name) - mine).norm() / mine.norm()
        assert difference < 1e-4, name
