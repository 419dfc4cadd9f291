"""What compiled blocks keep for their backward pass in fp8, beside the planner's closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx

from conf.schema import Config, Recompute
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.parallel.mesh import make_mesh
from orchestra.plan.assemble import case_of
from orchestra.sizes.memory import kept_in_fp8, layer_of
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training
from tests.support.torch_features import NEEDS_ROW_PRODUCTS


def config_of(*overrides: str) -> Config:
    cluster = ("cluster.device=cuda", "cluster.hardware=h100", "cluster.nodes=1", "cluster.gpus_per_node=1")
    sizes = ("model.num_hidden_layers=2", "train.seq_len=32", "train.micro_batch_size=2")
    words = (*cluster, *sizes, "train.global_batch_size=2", "precision=fp8", *overrides)
    return compose(words, Situation("plan", num_gpus=1)).config


@contextmanager
def kept_by(block: nn.Module, no_activations: set[int]) -> Iterator[dict[int, int]]:
    """Yield the bytes of what the block keeps by where it lies, but for the tensors that lie there."""
    kept: dict[int, int] = {}
    inside = False

    def enter(_: nn.Module, __: object) -> None:
        nonlocal inside
        inside = True

    def leave(_: nn.Module, __: object, ___: object) -> None:
        nonlocal inside
        inside = False

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in no_activations and tensor.dim():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = block.register_forward_pre_hook(enter), block.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
    for hook in hooks:
        hook.remove()


def without_code(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
    """Cut a graph into forward and backward as inductor does, and run both as they are."""
    return compile_fx(graph, inputs, inner_compile=lambda part, *_, **__: make_boxed_func(part.forward))


def addresses(tensors: Iterator[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def held(model: nn.Module) -> Iterator[Tensor]:
    """Yield what is no activation: parameters with their rounded copies, and buffers."""
    for parameter in model.parameters():
        yield from (parameter, *(value for value in vars(parameter).values() if isinstance(value, Tensor)))
    yield from model.buffers()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="llama"),
        pytest.param(("precision.fp8_scaling=row",), id="llama-rows", marks=NEEDS_ROW_PRODUCTS),
        pytest.param(("model.family=gpt",), id="gpt"),
    ],
)
def test_the_closed_form_is_what_compiled_blocks_keep_in_fp8(overrides: tuple[str, ...]) -> None:
    config = config_of("model=debug", *overrides)
    training = build_training(config, make_mesh(0, Layout(dp=1), torch.device("cpu")))
    model = training.parallelized.model
    block = model.layers[1]
    block.forward = torch.compile(block.forward, backend=without_code, dynamic=False)
    tokens = torch.randint(0, config.model.vocab_size, (1, 2, 33))
    with kept_by(block, addresses(held(model))) as kept:
        training.step.run(1, tokens)
    case = case_of(config)
    expected = layer_of(case).kept_bytes(Recompute.none) - kept_in_fp8(case, has_experts=False)
    assert sum(kept.values()) == pytest.approx(expected, rel=0.01)
