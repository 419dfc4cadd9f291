"""Recomputation changes memory and work, and no bit; what it keeps is what the formulas say."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conf.schema import Config, Family, ModelConfig, ParallelismConfig, Recompute, TrainConfig
from orchestra.errors import ConfigError
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.model.weight_gradients import WeightGradient, attach
from orchestra.parallel.blocks import recompute_blocks, recomputed
from orchestra.parallel.mesh import Mesh, make_mesh
from orchestra.sizes.activations import (
    LayerActivations,
    cheapest_within,
    every_kth,
    kinds_of_layers,
    peak_bytes,
)
from orchestra.sizes.flops import hardware_flops_per_token
from orchestra.sizes.topology import Layout
from orchestra.sizes.units import GIB
from orchestra.train.dry_build import LiveBytes, dry_build
from tests.support.called_operators import called

BATCH, SEQUENCE, LAYERS = 2, 128, 3
LLAMA = ModelConfig(
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=64,
)
MODELS = {
    "llama gqa": LLAMA,
    "llama mha": replace(LLAMA, num_key_value_heads=8),
    "gpt": replace(LLAMA, family=Family.gpt, num_key_value_heads=8, intermediate_size=256),
}
MESH = make_mesh(0, Layout(dp=1), torch.device("cpu"))
for_each_model = pytest.mark.parametrize("name", list(MODELS))


def config_of(name: str, **train: Any) -> Config:
    size = {"seq_len": SEQUENCE, "micro_batch_size": BATCH, "global_batch_size": BATCH}
    return Config(model=MODELS[name], train=TrainConfig(**{**size, **train}))


def model_of(config: Config, mesh: Mesh = MESH) -> Transformer:
    model = Transformer(config.model)
    fill_initial_values(model, 0)
    recompute_blocks(model, config, mesh)
    return model


def tokens() -> tuple[Tensor, Tensor]:
    both = torch.randint(0, 64, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    return both[:, :-1], both[:, 1:]


def gradients(config: Config) -> tuple[Tensor, list[Tensor]]:
    model = model_of(config)
    loss = model(*tokens())
    loss.backward()
    return loss.detach(), [weight.grad for weight in model.parameters() if weight.grad is not None]


@for_each_model
@pytest.mark.parametrize(
    "train",
    [
        {"recompute": Recompute.selective},
        {"recompute": Recompute.full},
        {"recompute": Recompute.full, "recompute_every": 2},
        {"recompute_budget_gib": 2e6 / GIB},
    ],
    ids=str,
)
def test_recomputation_changes_no_bit(name: str, train: dict[str, Any]) -> None:
    loss, expected = gradients(config_of(name))
    again, found = gradients(config_of(name, **train))
    assert torch.equal(loss, again)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def blocks_bytes(config: Config) -> tuple[int, int]:
    """Return what the blocks keep after a forward pass, and the most that is alive up to the end of the
    backward pass, gradients of parameters left out.
    """
    model = model_of(config)
    x = model.embed_tokens(tokens()[0]).detach()
    rotary = model._rotary_tables(SEQUENCE, x)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop_gradient)  # type: ignore[no-untyped-call]
    with LiveBytes() as live:
        out = first = x.clone().requires_grad_()
        for layer in model.layers:
            out = layer(out, rotary)
        kept = live.now - out.nbytes
        torch.autograd.backward(out.sum())
    assert first.grad is not None
    return kept, live.most


def drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize("kind", list(Recompute), ids=lambda kind: kind.name)
@for_each_model
def test_kept_bytes_are_those_of_the_formula(name: str, kind: Recompute) -> None:
    layer = LayerActivations(MODELS[name], BATCH, SEQUENCE, element_bytes=4)
    kept, most = blocks_bytes(config_of(name, recompute=kind))
    assert kept == LAYERS * layer.kept_bytes(kind)
    # At the peak there are the gradients of one layer's inner tensors besides: less than its activations.
    predicted = peak_bytes(layer, [kind] * LAYERS)
    assert predicted <= most <= predicted + layer.kept_bytes(Recompute.none)


def test_formulas_are_the_published_ones_but_for_what_fused_functions_save() -> None:
    """Korthikanti et al. (2022), table 2, with flash attention; its Llama form in elements per token."""
    size, tokens_bytes = LLAMA.hidden_size, 2 * BATCH * SEQUENCE
    softmax_bytes = 4 * BATCH * SEQUENCE * 8
    llama = LayerActivations(MODELS["llama gqa"], BATCH, SEQUENCE, element_bytes=2)
    published = tokens_bytes * (6 * size + 2 * size * 2 // 8 + 4 * LLAMA.intermediate_size) + softmax_bytes
    fused = tokens_bytes * LLAMA.intermediate_size
    norms = 2 * 4 * BATCH * SEQUENCE
    assert llama.kept_bytes(Recompute.none) == published - fused + norms
    assert llama.kept_bytes(Recompute.full) == tokens_bytes * size
    gpt = LayerActivations(MODELS["gpt"], BATCH, SEQUENCE, element_bytes=2)
    # 34·sbh, of which 2·sbh are masks of dropout.
    published = 34 * BATCH * SEQUENCE * size - 2 * BATCH * SEQUENCE * size
    assert gpt.kept_bytes(Recompute.none) == published + softmax_bytes + 2 * norms


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_sequence_parallelism_cuts_all_activations(tp: int) -> None:
    model = replace(LLAMA, num_key_value_heads=8)
    alone = LayerActivations(model, BATCH, SEQUENCE, element_bytes=2)
    for kind in Recompute:
        cut = replace(alone, tp=tp, is_sequence_parallel=True)
        assert cut.kept_bytes(kind) * tp == alone.kept_bytes(kind)
        kept = replace(cut, gathers_again=False).kept_bytes(kind)
        extra = 2 * 2 * BATCH * SEQUENCE * 64 * (tp - 1) // tp if kind is Recompute.none else 0
        assert kept == cut.kept_bytes(kind) + extra
        without = replace(alone, tp=tp, gathers_again=False).kept_bytes(kind)
        assert kept <= without <= alone.kept_bytes(kind)


@pytest.mark.parametrize("cp", [1, 2])
def test_a_budget_gets_the_cheapest_choice_that_fits(cp: int) -> None:
    layer = LayerActivations(LLAMA, BATCH, SEQUENCE, element_bytes=4, cp=cp)
    num_layers = 6
    kinds = (Recompute.full, Recompute.selective, Recompute.none)
    choices = list(combinations_with_replacement(kinds, num_layers))
    least = peak_bytes(layer, [Recompute.full] * num_layers)
    most = peak_bytes(layer, [Recompute.none] * num_layers)
    assert cheapest_within(layer, num_layers, least - 1) is None
    assert cheapest_within(layer, num_layers, most) == (Recompute.none,) * num_layers

    def cost(choice: tuple[Recompute, ...]) -> tuple[int, int]:
        """Operations, and how many layers are recomputed at all: what is repeated of them is not free."""
        again = [kind for kind in choice if kind is not Recompute.none]
        return sum(layer.recomputed_flops(kind) for kind in again), len(again)

    for budget in range(least, most, (most - least) // 40):
        found = cheapest_within(layer, num_layers, budget)
        assert found is not None
        assert peak_bytes(layer, found) <= budget
        assert cost(found) == min(cost(choice) for choice in choices if peak_bytes(layer, choice) <= budget)
    with pytest.raises(ConfigError, match=r"recompute_budget_gib=0\.0001 is below the 0\.0\d+ GiB"):
        kinds_of_layers(config_of("gpt", recompute_budget_gib=1e-4), 1, is_gpu=False)


def test_every_kth_layer_is_recomputed() -> None:
    none, full = Recompute.none, Recompute.full
    assert every_kth(full, 2, 5) == (full, none, full, none, full)
    assert every_kth(full, 1, 2) == (full, full)
    without, third, whole = (
        hardware_flops_per_token(LLAMA, SEQUENCE, kinds)
        for kinds in (none, every_kth(full, LAYERS, LAYERS), full)
    )
    assert LAYERS * (third - without) == whole - without


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrix products, and how often attention is computed."""

    num_products = num_attentions = 0

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        self.num_products += operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.num_attentions += operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return operator(*arguments, **(options or {}))


def _nothing() -> None:
    """End a gradient."""


@for_each_model
def test_selective_repeats_no_product_and_full_not_the_last(name: str) -> None:
    """Attention is repeated by `full` alone, unless sequences are cut over ranks."""
    products, attentions = {}, {}
    whole, cut = MESH, replace(MESH, layout=Layout(dp=1, cp=2))
    for kind, mesh in (*((kind, whole) for kind in Recompute), (Recompute.selective, cut)):
        model = model_of(config_of(name, recompute=kind), mesh)
        with Counted() as counted:  # type: ignore[no-untyped-call]
            model(*tokens()).backward()
        products[kind, mesh.layout.cp] = counted.num_products
        attentions[kind, mesh.layout.cp] = counted.num_attentions
    none, selective, full = ((kind, 1) for kind in (Recompute.none, Recompute.selective, Recompute.full))
    num_products = 6 if name == "gpt" else 7
    assert products[selective] == products[Recompute.selective, 2] == products[none]
    assert products[full] == products[none] + LAYERS * (num_products - 1)
    assert attentions[none] == attentions[selective] == LAYERS
    assert attentions[full] == attentions[Recompute.selective, 2] == 2 * LAYERS


def test_a_compiler_repeats_the_same_products_where_gradients_have_a_place_to_go() -> None:
    """What is written by hand for that is a function that torch 2.11 would keep the results of. What ranks
    exchange divides graphs of mixtures alone: cp decides here about attention alone.
    """
    counts, attentions = {}, {}
    kinds = ((Recompute.none, 1), (Recompute.selective, 2), (Recompute.selective, 1), (Recompute.full, 2))
    for kind, cp in kinds:
        mesh = replace(MESH, layout=Layout(dp=1, cp=cp))
        torch.compiler.reset()
        model = model_of(config_of("llama gqa", recompute=kind, compile=True), mesh)
        matrices = [weight for weight in model.layers[0].parameters() if weight.dim() == 2]
        memory = {weight: (torch.empty_like(weight), False) for weight in matrices}
        takers = [WeightGradient(functools.partial(memory.get, weight), _nothing) for weight in matrices]
        for weight, taker in zip(matrices, takers, strict=True):
            attach(weight, taker)
        forward = torch.compile(model.layers[0].forward, backend="aot_eager_decomp_partition")
        x = torch.randn(BATCH, SEQUENCE, LLAMA.hidden_size, requires_grad=True)
        out = forward(x, (torch.ones(SEQUENCE, 1, 8), torch.zeros(SEQUENCE, 1, 4)))
        operators = called(out.sum().backward)
        counts[kind, cp] = operators["aten::mm"]
        attentions[kind, cp] = operators["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert counts[Recompute.selective, 1] == counts[Recompute.selective, 2] == counts[Recompute.none, 1]
    assert counts[Recompute.full, 2] == counts[Recompute.none, 1] + 6
    assert list(attentions.values()) == [0, 1, 0, 1]
    torch.compiler.reset()


@pytest.mark.parametrize("kind", [Recompute.selective, Recompute.full], ids=lambda kind: kind.name)
def test_hooks_of_a_block_run_once_and_parameters_are_there_when_it_is_recomputed(kind: Recompute) -> None:
    """As whoever gathers parameters does it: before the forward, and before the backward of the block."""
    model = model_of(config_of("llama gqa", recompute=kind))
    calls: list[str] = []
    layer = model.get_submodule("layers.1")
    layer.register_forward_pre_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_pre_hook(lambda *_: calls.append("backward"))
    layer.get_submodule("self_attn").register_forward_pre_hook(lambda *_: calls.append("attention"))
    model(*tokens()).backward()
    assert calls == ["forward", "attention", "backward", "attention"]


def test_random_numbers_are_drawn_again_as_they_were() -> None:
    linear = nn.Linear(16, 16)
    block = nn.Sequential(nn.Dropout(0.5), linear, nn.Dropout(0.5))
    x = torch.randn(8, 16).requires_grad_()
    found = []
    for kind in Recompute:
        forward = block.forward if kind is Recompute.none else recomputed(block, kind)
        torch.manual_seed(3)
        (gradient,) = torch.autograd.grad(forward(x).square().sum(), linear.weight)
        found.append((gradient, torch.rand(1)))
    for gradient, following in found[1:]:
        assert torch.equal(gradient, found[0][0])
        assert torch.equal(following, found[0][1])


def test_sums_that_an_older_torch_cannot_tell_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.11 does: of its own, and of one that says what operators make."""
    monkeypatch.setattr("orchestra.parallel.blocks.TELLS_OUTPUTS", False)
    model = replace(LLAMA, num_key_value_heads=8, num_experts=4, moe_intermediate_size=32)
    sizes = {"seq_len": 16, "micro_batch_size": 1, "global_batch_size": 1}
    for recompute in Recompute:
        train = TrainConfig(recompute=recompute, **sizes)
        config = Config(model=model, parallelism=ParallelismConfig(tp=2), train=train)
        if recompute is Recompute.selective:
            with pytest.raises(ConfigError, match=r"parallelism\.tp needs a newer torch than .* use .*full"):
                dry_build(config, 2)
        else:
            dry_build(config, 2)
