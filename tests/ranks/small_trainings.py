"""Small trainings on fixed random tokens, on any layout of the pool's ranks. Run by ranks and by tests."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.shards import Shard
from conf.schema import (
    Config,
    DType,
    ModelConfig,
    OptimConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    TrainConfig,
)
from orchestra.parallel.mesh import Mesh, make_mesh
from orchestra.sizes.topology import Layout, layout
from orchestra.train.build import Training, build_training
from orchestra.train.state import TensorState

SEQUENCE = 16
# Odd everywhere: nothing divides by 2, 3 or 4, and no parameter is a multiple of the alignment.
ODD = ModelConfig(
    hidden_size=18,
    intermediate_size=37,
    num_hidden_layers=5,
    num_attention_heads=3,
    num_key_value_heads=1,
    vocab_size=59,
)
EVEN = ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)


@functools.cache
def open_group(members: tuple[int, ...]) -> dist.ProcessGroup:
    """Open each group once for all tests: a new one costs threads and sockets."""
    if len(members) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(list(members), use_local_synchronization=True)
    return group


def mesh_of(rank: int, degrees: Layout) -> Mesh:
    """Return a rank's place in a layout of the pool's ranks. *Collective*."""
    return make_mesh(rank, degrees, torch.device("cpu"), lambda members: open_group(tuple(members)))


def config_of(
    model: ModelConfig = ODD,
    precision: str = "fp32",
    reduce_dtype: DType | None = None,
    optim: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **parallelism: Any,
) -> Config:
    return Config(
        model=model,
        parallelism=ParallelismConfig(**{"bucket_mib": 0.01, **parallelism}),
        precision=PrecisionConfig(
            PrecisionName(precision), None if reduce_dtype is None else DType(reduce_dtype)
        ),
        optim=OptimConfig(**{"lr": 1e-3, "warmup_steps": 0, "clip_norm": 0.5, **(optim or {})}),
        train=TrainConfig(
            **{
                "steps": 20,
                "seq_len": SEQUENCE,
                "global_batch_size": 12,
                "micro_batch_size": 2,
                **(train or {}),
            }
        ),
    )


@dataclass(frozen=True)
class Trained:
    """What a training leaves behind on one rank: a row of loss, norm and skip a step, and its shards."""

    rows: list[tuple[float, float, bool]]
    shards: list[Shard]
    sent: dict[str, int]
    tokens_per_step: int


def start(rank: int, world: int, config: Config) -> tuple[Training, Mesh]:
    mesh = mesh_of(rank, layout(config.parallelism, world))
    return build_training(config, mesh), mesh


def tokens_of(config: Config, step: int, mesh: Mesh, training: Training) -> Tensor:
    """Return this rank's micro-batches [A, B, S + 1] of a step."""
    batch = training.batch
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(
        0, config.model.vocab_size, (batch.global_batch_size, batch.seq_len + 1), generator=generator
    )
    return tokens.view(-1, batch.dp, batch.micro_batch_size, batch.seq_len + 1)[:, mesh.coordinates.dp]


def take_steps(
    config: Config, training: Training, mesh: Mesh, steps: Sequence[int]
) -> list[tuple[float, float, bool]]:
    """Train some steps, counted from 1; return the rows."""
    rows = []
    for step in steps:
        result = training.step.run(step, tokens_of(config, step, mesh, training))
        rows.append((float(result.loss), float(result.grad_norm), bool(result.was_skipped)))
    return rows


def trained(rank: int, world: int, config: Config, steps: int = 20) -> Trained:
    """Train from the start. *Collective* over the pool."""
    training, mesh = start(rank, world, config)
    rows = take_steps(config, training, mesh, range(1, steps + 1))
    state = TensorState(training.parallelized, training.optimizer, mesh)
    shards = [shard for shard in state.snapshot() if not shard.name.startswith("rng.")]
    training.parallelized.stage.settle()
    training.parallelized.stage.close()
    return Trained(rows, shards, dict(mesh.traffic.bytes_sent), training.batch.tokens_per_step)


def alone(config: Config, steps: int = 20) -> Trained:
    """Train in this process, on one thread as the ranks."""
    with one_thread():
        return trained(0, 1, config, steps)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Two threads would also wait for each other beside the ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def all_trained(rank: int, world: int, configs: Sequence[Config], steps: int = 20) -> list[Trained]:
    return [trained(rank, world, config, steps) for config in configs]


def joined(of_ranks: Sequence[Sequence[Shard]]) -> dict[str, Tensor]:
    """Put the ranks' shards together; each element must come from somewhere."""
    whole: dict[str, Tensor] = {}
    for shard in (shard for shards in of_ranks for shard in shards):
        target = whole.setdefault(shard.name, torch.full(shard.shape, torch.nan))
        target[shard.box.within(type(shard.box).whole(shard.shape))] = shard.tensor.detach()
    assert not any(bool(torch.isnan(tensor).any()) for tensor in whole.values())
    return whole
