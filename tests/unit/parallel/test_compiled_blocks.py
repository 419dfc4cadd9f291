"""Equal blocks are compiled once, and nothing is compiled again while a run goes on.

Compiled as far as graphs of torch's operators: what follows adds no graph, and takes a C++ compiler a minute.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from conf.schema import (
    Config,
    Family,
    ModelConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    Recompute,
    TrainConfig,
)
from orchestra.model.transformer import Transformer
from orchestra.parallel.blocks import _is_random, compile_blocks
from orchestra.parallel.mesh import make_mesh
from orchestra.sizes.topology import Layout, layout
from orchestra.train.build import build_training
from orchestra.train.dry_build import allow_fake_groups, take_step
from tests.support.graph_cut import cut_and_run

LAYERS = 3
# Of the loss: what it reads of the logits, and their gradient.
LOSS_GRAPHS = 2


@dataclass(frozen=True)
class Case:
    """One way to train, and how many kinds of blocks it has."""

    zero: int = 0
    tp: int = 1
    recompute: str = "none"
    recompute_every: int = 1
    precision: str = "fp32"
    family: str = "llama"
    ranks: int = 2
    kinds: int = 1
    is_delayed: bool = False


CASES = {
    "zero 0": Case(),
    "zero 2, full": Case(zero=2, recompute="full"),
    "zero 3, selective": Case(zero=3, recompute="selective"),
    "every second block": Case(ranks=1, recompute="full", recompute_every=2, kinds=2),
    "tensor parallel, selective": Case(tp=2, recompute="selective"),
    "gpt": Case(ranks=1, family="gpt", precision="bf16"),
    "fp8, zero 1": Case(precision="fp8", zero=1),
    "fp8, zero 3, full": Case(precision="fp8", zero=3, recompute="full"),
    "fp8 delayed, full": Case(ranks=1, precision="fp8", recompute="full", is_delayed=True),
}


def config_of(case: Case) -> Config:
    return Config(
        model=ModelConfig(
            family=Family(case.family),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=64,
        ),
        parallelism=ParallelismConfig(zero=case.zero, tp=case.tp, bucket_mib=0.01),
        precision=PrecisionConfig(PrecisionName(case.precision), fp8_delayed_scaling=case.is_delayed),
        train=TrainConfig(
            seq_len=16,
            micro_batch_size=2,
            global_batch_size=6 * case.ranks // case.tp,
            recompute=Recompute(case.recompute),
            recompute_every=case.recompute_every,
            compile=True,
        ),
    )


@pytest.fixture
def graphs_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile to graphs, and forget them afterwards."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """A case whose other ranks are not there: collectives end at once and move nothing."""
    found: Case = CASES[request.param]
    if found.ranks > 1:
        allow_fake_groups()
        store: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
        dist.init_process_group("fake", store=store, rank=0, world_size=found.ranks)
    yield found
    if found.ranks > 1:
        dist.destroy_process_group()


@pytest.mark.usefixtures("graphs_alone")
@pytest.mark.parametrize("case", CASES, indirect=True)
def test_equal_blocks_are_compiled_once_whatever_the_step_and_the_micro_batch(case: Case) -> None:
    config = config_of(case)
    mesh = make_mesh(0, layout(config.parallelism, case.ranks), torch.device("cpu"))
    training = build_training(config, mesh)
    for step, accumulation in enumerate((1, 1, 3, 3), start=1):
        take_step(training, mesh, step, accumulation)
        # Delayed scaling has no scales in the first step.
        kinds = case.kinds + (case.is_delayed and step > 1)
        assert counters["stats"]["unique_graphs"] == kinds + LOSS_GRAPHS, f"step {step}"
    training.parallelized.stage.settle()
    training.parallelized.stage.close()


def test_a_further_start_finds_blocks_on_the_disk() -> None:
    """Those that are recomputed by a policy too."""
    assert_found_on_disk(torch.device("cpu"), Recompute.selective)


def assert_found_on_disk(device: torch.device, recompute: Recompute) -> None:
    """Start twice: nothing is traced, planned and compiled again."""
    train = TrainConfig(seq_len=8, micro_batch_size=1, global_batch_size=1, compile=True, recompute=recompute)
    model = ModelConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    config = Config(model=model, train=train)
    found = []
    with fresh_cache():
        for _ in range(2):
            torch.compiler.reset()
            counters.clear()
            training = build_training(config, make_mesh(0, Layout(1), device))
            training.step.run(1, torch.zeros(1, 1, 9, dtype=torch.int64))
            training.parallelized.stage.close()
            found.append(dict(counters["aot_autograd"]))
            assert "fxgraph_cache_bypass" not in counters["inductor"]
    torch.compiler.reset()
    assert all("autograd_cache_bypass" not in each for each in found)
    assert found[0]["autograd_cache_miss"] == found[1]["autograd_cache_hit"] == 1 + LOSS_GRAPHS


@pytest.mark.usefixtures("graphs_alone")
def test_attention_that_is_computed_again_keeps_no_state_of_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: set[str] = set()

    def see(part: fx.GraphModule) -> None:
        called.update(str(node.target) for node in part.graph.nodes)

    backend = functools.partial(cut_and_run, see=see)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    mesh = make_mesh(0, Layout(1), torch.device("cpu"))
    training = build_training(config_of(Case(ranks=1, recompute="full")), mesh)
    take_step(training, mesh, 1, 1)
    training.parallelized.stage.close()
    assert any("attention" in name for name in called)
    assert not {name for name in called if "rng" in name}


@pytest.mark.parametrize(
    ("given", "expected"), [((), False), ((0.0,), False), ((0.1,), True), ((0.0, True), False)]
)
def test_attention_is_random_where_it_drops_something_out(given: tuple[object, ...], expected: bool) -> None:
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(name) for name in "qkv")
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert _is_random(graph.call_function(attention, (*inputs, *given))) is expected
    named = dict(zip(("dropout_p", "is_causal"), given, strict=False))
    assert _is_random(graph.call_function(attention, inputs, named)) is expected
    assert _is_random(graph.call_function(torch.ops.aten.rand_like.default, inputs[:1]))
    assert not _is_random(graph.call_function(torch.ops.aten.mm.default, inputs[:2]))


class _Numbered(torch.nn.Module):
    """A block of a kind of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.number + 1)


def test_more_kinds_of_blocks_than_the_compilers_own_limit_are_all_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is over the limit runs eager without an error."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    num_kinds = 12
    shape = ModelConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=num_kinds, vocab_size=8)
    model = Transformer(shape, make_block=lambda _, number: _Numbered(number))
    ones = torch.ones(2)
    # Not by monkeypatch, which would delete what it set.
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        compile_blocks(model, Config(model=shape, train=TrainConfig(compile=True)))
        found = [float(layer(ones)[0]) for layer in model.layers]
    assert found == [number + 1.0 for number in range(num_kinds)]
