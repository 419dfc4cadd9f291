"""What compiled blocks keep for their backward pass in fp8, beside the planner's closed form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conf.schema import Config, Recompute
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.parallel.mesh import make_mesh
from orchestra.plan.assemble import case_of
from orchestra.sizes.memory.layer_memory import kept_in_fp8, layer_of
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training
from tests.support.graph_cut import cut_and_run
from tests.support.torch_features import NEEDS_ROW_PRODUCTS


def config_of(*overrides: str) -> Config:
    cluster = ("cluster.device=cuda", "cluster.hardware=h100", "cluster.nodes=1", "cluster.gpus_per_node=1")
    sizes = ("model.num_hidden_layers=2", "train.seq_len=32", "train.micro_batch_size=2")
    words = (*cluster, *sizes, "train.global_batch_size=2", "precision=fp8", *overrides)
    return compose(words, Situation("plan", num_gpus=1)).config


def keep_account(block: nn.Module, no_activations: set[int]) -> dict[int, int]:
    """Compile a block, and return the bytes of what it will keep, by where it lies; not of what lies there
    already.
    """
    kept: dict[int, int] = {}
    forward = torch.compile(block.forward, backend=cut_and_run, dynamic=False)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in no_activations and tensor.dim():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def watched(*inputs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*inputs)

    block.forward = watched
    return kept


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Find nothing compiled, and leave nothing: past a limit of forms, a function runs as it is."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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
    kept = keep_account(model.layers[1], addresses(held(model)))
    training.step.run(1, torch.randint(0, config.model.vocab_size, (1, 2, 33)))
    training.parallelized.stage.close()
    case = case_of(config)
    expected = layer_of(case).kept_bytes(Recompute.none) - kept_in_fp8(case, has_experts=False)
    assert sum(kept.values()) == pytest.approx(expected, rel=0.01)
