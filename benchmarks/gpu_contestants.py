"""The contestants of `gpu.py`: orchestra's step in several settings, its peers, and the limit.

All train the same model from the same initial values on the same tokens: AdamW, clipping, several
micro-batches a step, fp32 masters. The peers are written as their users write them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_first_step import observed
from gpu_shapes import Shape
from peers import product_shapes, transformers_llama, transformers_mixture
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from conf.model_schema import Family
from conf.schema import (
    Config,
    ModelConfig,
    Offload,
    OptimConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    Recompute,
    Scaling,
    TrainConfig,
)
from orchestra.errors import OrchestraError
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.parallel.blocks import refuse_missing_hardware
from orchestra.parallel.mesh import make_mesh
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training, set_numerics

# Trains a step and returns its loss.
Step = Callable[[], Tensor]
SEED = 0
_WARMUP_STEPS = 2
_COMPILE_NOTHING = ("eager", "sustained")
_CLIP_NORM = 1.0
# Of one operation of the limit; the first calls choose its kernel.
_TIMED_CALLS, _FIRST_CALLS = 10, 3


class LeftOutError(Exception):
    """Raised where a contestant cannot run here."""


def serve(name: str, arguments: argparse.Namespace, shape: Shape) -> None:
    """Be one contestant: take a turn for each line on standard input and answer it with a line of JSON."""
    # Whatever libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    for _ in sys.stdin:
        try:
            found = turn(name, arguments, shape, device)
        except (LeftOutError, OrchestraError) as error:
            found = {"error": str(error)}
        except Exception as error:  # noqa: BLE001  whatever it is, the others go on
            found = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
        # Outside of the handler: its traceback holds the tensors. What was compiled is read from the disk.
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def turn(name: str, arguments: argparse.Namespace, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Build, warm up, time some steps; return what was measured."""
    is_gpu = device.type == "cuda"
    if is_gpu and not torch.cuda.is_available():
        raise LeftOutError("torch sees no CUDA device; --device cpu shows whether it works at all")
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    facts = {"device": torch.cuda.get_device_name() if is_gpu else "cpu", "torch": torch.__version__}
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    if name == "limit":
        seconds = limit_s(shape, device, dtype)
        answer = {"seconds": seconds, "first_step_s": 0.0, "first_loss": None}
    else:
        step, close = builder(name)(name, config_of(name, arguments, shape), device, dtype)
        try:
            answer = timed(step, arguments.steps, device, compiles=name not in _COMPILE_NOTHING)
        finally:
            close()
        if name == "sustained":
            answer["first_loss"] = None  # it trains nothing
    return {**answer, "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else 0, "facts": facts}


def timed(step: Step, num_steps: int, device: torch.device, *, compiles: bool) -> dict[str, Any]:
    """Return the seconds of a step, the mean of some that follow each other; and those of the first one, with
    its loss and, where it compiles, where its time went.
    """

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    began = now()
    # What watching imports is imported by compiling too.
    with observed() if compiles else nullcontext({}) as first_step:
        first_loss = float(step())
    first_step_s = now() - began
    for _ in range(_WARMUP_STEPS - 1):
        step()
    began = now()
    for _ in range(num_steps):
        step()
    return {
        "seconds": (now() - began) / num_steps,
        "first_step_s": first_step_s,
        "first_loss": first_loss,
        "first_step": first_step,
    }


def config_of(name: str, arguments: argparse.Namespace, shape: Shape) -> Config:
    """Return what orchestra is configured with; the peers take model, sizes and learning rate from it."""
    precision = PrecisionName.fp8 if name.startswith("fp8") else PrecisionName(arguments.precision)
    recomputes = {"selective": Recompute.selective, "full": Recompute.full, "offload": Recompute.full}
    scaling = Scaling.row if name == "fp8_rows" else Scaling.tensor
    return Config(
        model=shape.model,
        precision=PrecisionConfig(precision, fp8_scaling=scaling, fp8_output=name == "fp8_output"),
        parallelism=ParallelismConfig(offload=Offload.optimizer if name == "offload" else Offload.none),
        optim=OptimConfig(clip_norm=_CLIP_NORM),
        train=replace(
            TrainConfig(),
            steps=1000,
            seq_len=shape.seq_len,
            micro_batch_size=shape.micro_batch,
            global_batch_size=shape.micro_batch * shape.accumulation,
            recompute=recomputes.get(name, Recompute.none),
            compile=name != "eager",
            seed=SEED,
        ),
    )


def tokens_of(config: Config, device: torch.device) -> Tensor:
    """Return the tokens that everybody trains on, in every step: [A, B, S + 1]."""
    generator = torch.Generator().manual_seed(SEED)
    train = config.train
    size, micro_batch = train.global_batch_size, train.micro_batch_size
    assert isinstance(size, int)
    assert isinstance(micro_batch, int)
    shape = (size // micro_batch, micro_batch, train.seq_len + 1)
    return torch.randint(0, config.model.vocab_size, shape, generator=generator).to(device)


Built = tuple[Step, Callable[[], None]]


def builder(name: str) -> Callable[[str, Config, torch.device, torch.dtype], Built]:
    """Return what builds a contestant: its step, and what ends it."""
    from gpu_torchtitan import torchtitan_step  # it imports this module

    others = {
        "transformers": transformers_step,
        "fully_shard": fully_shard_step,
        "torchtitan": torchtitan_step,
        "sustained": sustained_step,
    }
    return others.get(name, orchestra_step)


def orchestra_step(_: str, config: Config, device: torch.device, __: torch.dtype) -> Built:
    """Build orchestra's own step, as its trainer does."""
    refuse_missing_hardware(config, device)
    set_numerics(config, device)
    training = build_training(config, make_mesh(0, Layout(dp=1), device))
    tokens, count = tokens_of(config, device), iter(range(1, 1_000_000))
    return lambda: training.step.run(next(count), tokens).loss, training.parallelized.stage.close


def transformers_model(config: Config, device: torch.device) -> Any:
    """Return transformers' model in fp32 with orchestra's initial values. Raises LeftOutError without it."""
    if config.model.family is not Family.llama:
        raise LeftOutError(f"written for Llamas and mixtures, not for the family {config.model.family.name}")
    make = transformers_mixture if config.model.num_experts else transformers_llama
    try:
        with device:
            inner = make(config.model)
    except ImportError as error:
        raise LeftOutError("transformers is not installed: pip install transformers") from error
    inner.load_state_dict(their_names(initial_values(config.model, device)))
    inner.train()
    return inner


def initial_values(model: ModelConfig, device: torch.device) -> dict[str, Tensor]:
    """Return orchestra's initial values by their names."""
    with device:
        source = Transformer(model)
    fill_initial_values(source, SEED)
    return source.state_dict()


def their_names(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return orchestra's values by transformers' names, which has gate and up of experts in one tensor."""
    theirs = {}
    for name, value in values.items():
        name = name if name.startswith("lm_head") else f"model.{name}"
        if name.endswith("experts.gate_proj"):
            up = values[name.removeprefix("model.").replace("gate_proj", "up_proj")]
            theirs[name.replace("gate_proj", "gate_up_proj")] = torch.cat([value, up], dim=1)
        elif not name.endswith("experts.up_proj"):
            theirs[name] = value
    return theirs


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def plain_step(
    module: nn.Module,
    logits_of: Callable[[Tensor], Tensor],
    config: Config,
    device: torch.device,
    loss_of: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Step:
    """Return the plain loop's step: micro-batches, clipping, fused AdamW, gradients set to None. The loss is
    `mean_loss`, compiled, unless another is given.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=config.optim.lr, fused=True)
    tokens, loss_of = tokens_of(config, device), loss_of or torch.compile(mean_loss)
    micro_batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens]

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for inputs, targets in micro_batches:
            loss = loss_of(logits_of(inputs), targets) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(module.parameters(), _CLIP_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def nothing() -> None:
    """End what needs no end."""


def transformers_step(_: str, config: Config, device: torch.device, dtype: torch.dtype) -> Built:
    """Build transformers' Llama under autocast with fp32 weights, each layer and the loss compiled."""
    inner = transformers_model(config, device)
    for layer in inner.model.layers:
        layer.compile()

    def logits_of(inputs: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            return inner(inputs).logits  # type: ignore[no-any-return]

    return plain_step(inner, logits_of, config, device), nothing


def fully_shard_step(_: str, config: Config, device: torch.device, dtype: torch.dtype) -> Built:
    """Build the same under fully_shard and its mixed precision, on one rank."""
    inner = transformers_model(config, device)
    layers = inner.model.layers
    for layer in layers:
        layer.compile()
    shard_over_one_rank(inner, layers, device, dtype)
    return plain_step(inner, lambda inputs: inner(inputs).logits, config, device), dist.destroy_process_group


def shard_over_one_rank(module: nn.Module, layers: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Apply fully_shard to each layer and to the whole, parameters in `dtype`, sums in fp32."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*layers, module):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def limit_s(shape: Shape, device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of the step's matrix products and attention, each timed by itself."""
    operations = step_operations(shape, device, dtype)
    return shape.accumulation * sum(count * call_s(act, device) for act, count in operations)


def sustained_step(_: str, config: Config, device: torch.device, dtype: torch.dtype) -> Built:
    """Build a step of the same operations alone, one after the other: a GPU that is at its limit of power
    for a whole step multiplies slower than in the short bursts of `limit_s`.
    """
    train = config.train
    assert isinstance(train.global_batch_size, int)
    assert isinstance(train.micro_batch_size, int)
    shape = Shape(config.model, train.seq_len, train.micro_batch_size)
    operations = step_operations(shape, device, dtype)
    nothing_lost = torch.zeros((), device=device)

    def step() -> Tensor:
        for _ in range(train.global_batch_size // train.micro_batch_size):
            for act, count in operations:
                for _ in range(count):
                    act()
        return nothing_lost

    return step, nothing


def step_operations(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> list[tuple[Callable[[], object], int]]:
    """Return the matrix products and the attention of a micro-batch, and how often it has each. Raises
    LeftOutError for a mixture of experts, whose products nobody knows before it routes.
    """
    model, num_tokens = shape.model, shape.micro_batch * shape.seq_len
    if model.num_experts:
        raise LeftOutError("what a mixture multiplies depends on where its tokens go")
    if model.family is not Family.llama:
        raise LeftOutError(f"its products are listed for Llamas, not for the family {model.family.name}")
    operations: list[tuple[Callable[[], object], int]] = []
    for (inputs, outputs), count in product_shapes(model).items():
        x, weight, grad = (
            torch.randn(size, device=device, dtype=dtype)
            for size in ((num_tokens, inputs), (outputs, inputs), (num_tokens, outputs))
        )
        y, grad_x, grad_weight = torch.empty_like(grad), torch.empty_like(x), torch.empty_like(weight)
        operations += [
            (lambda x=x, weight=weight, y=y: torch.mm(x, weight.t(), out=y), count),
            (lambda grad=grad, weight=weight, out=grad_x: torch.mm(grad, weight, out=out), count),
            (lambda grad=grad, x=x, out=grad_weight: torch.mm(grad.t(), x, out=out), count),
        ]
    return [*operations, (attention_of(shape, device, dtype), model.num_hidden_layers)]


def attention_of(shape: Shape, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Return one layer's attention, forward and backward."""
    model = shape.model
    width = model.hidden_size // model.num_attention_heads
    q, k, v = (
        torch.randn(
            shape.micro_batch, heads, shape.seq_len, width, device=device, dtype=dtype, requires_grad=True
        )
        for heads in (model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads)
    )
    grad = torch.randn_like(q)

    def attention() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), grad)

    return attention


def call_s(act: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one of several calls that follow each other."""
    for _ in range(_FIRST_CALLS):
        act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_TIMED_CALLS):
        act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / _TIMED_CALLS
