"""Small trainings on fixed random tokens, on any layout of the pool's ranks. Run by ranks and by tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from layouts import peers
from pool import RankPool
from torch import Tensor

from checkpointing.checkpointer import Checkpointer
from checkpointing.options import Options
from checkpointing.shards import Shard, as_bytes
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
from orchestra.parallel.places import parts_of
from orchestra.precision.policies import ScaleState
from orchestra.run.heartbeat import Phase
from orchestra.sizes.topology import Layout, layout
from orchestra.train.build import Training, build_model_and_optimizer, build_step, build_training
from orchestra.train.hooks import StepHook, StepHooks
from orchestra.train.metrics import Totals
from orchestra.train.state import Position, TensorState, digest, position_from_json, position_to_json

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


# Loss, norm of the gradients, and whether the step was skipped.
Row = tuple[float, float, bool]


@dataclass(frozen=True)
class Trained:
    """What a training leaves behind on one rank."""

    rows: list[Row]
    shards: list[Shard]


def start(rank: int, world: int, config: Config) -> tuple[Training, Mesh]:
    mesh = mesh_of(rank, layout(config.parallelism, world))
    return build_training(config, mesh), mesh


def tokens_of(config: Config, step: int, mesh: Mesh, training: Training) -> Tensor:
    """Return this rank's micro-batches [A, B, S + 1] of a step."""
    batch = training.batches.at(step)
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(
        0, config.model.vocab_size, (batch.global_batch_size, batch.seq_len + 1), generator=generator
    )
    return tokens.view(-1, batch.dp, batch.micro_batch_size, batch.seq_len + 1)[:, mesh.coordinates.dp]


def take_steps(config: Config, training: Training, mesh: Mesh, steps: Sequence[int]) -> list[Row]:
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
    return Trained(rows, shards)


# Blocks are traced and differentiated as always; to generate code takes most of the time.
GRAPHS = functools.partial(torch.compile, backend="aot_eager_decomp_partition")


def trained_by_graphs(rank: int, world: int, config: Config, steps: int) -> Trained:
    """Do the same with blocks that are compiled without generating code."""
    # What earlier tests of the same processes compiled counts against a limit.
    torch.compiler.reset()
    with patch.object(torch, "compile", GRAPHS):
        return trained(rank, world, config, steps)


class GradientsOfStep(StepHook):
    """Keeps a rank's gradients of a step, before anything is updated."""

    def __init__(self) -> None:
        self.training: Training | None = None
        self.shards: list[Shard] = []

    def enter(self, phase: Phase, step: int, micro_batch: int, turn: int) -> None:  # noqa: ARG002
        if phase is not Phase.update or self.training is None:
            return
        parallel = self.training.parallelized
        for number, unit in enumerate(parallel.units.units):
            parts = unit.owned_views(parallel.stage.gradients.owned(number))
            for item, part in zip(unit.trained, parts, strict=True):
                place = parallel.places[item.name]
                self.shards += [
                    Shard(item.name, place.shape, box.offsets, box.tensor.clone())
                    for box in parts_of(part.reshape(-1), place, item.start)
                ]


def bytes_sent(rank: int, world: int, config: Config) -> dict[str, int]:
    """Return what one step sends, after a first one."""
    training, mesh = start(rank, world, config)
    take_steps(config, training, mesh, [1])
    mesh.traffic.bytes_sent.clear()
    take_steps(config, training, mesh, [2])
    training.parallelized.stage.settle()
    return dict(mesh.traffic.bytes_sent)


def alone(config: Config, steps: int = 20) -> Trained:
    """Train in this process, on one thread as the ranks: two would also wait for each other beside them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return trained(0, 1, config, steps)
    finally:
        torch.set_num_threads(threads)


def trained_on(pool: RankPool, configs: Sequence[Config], steps: int = 20) -> list[list[Trained]]:
    """Train each configuration on a pool; return for each what its ranks have."""
    return [pool.run(trained, config=config, steps=steps) for config in configs]


def joined(found: Sequence[Trained]) -> dict[str, Tensor]:
    """Put the ranks' shards together; each element must come from somewhere, replicas with the same bits."""
    whole: dict[str, Tensor] = {}
    for shard in (shard for of_rank in found for shard in of_rank.shards):
        target = whole.setdefault(shard.name, torch.full(shard.shape, torch.nan))
        place = shard.box.within(type(shard.box).whole(shard.shape))
        mine, there = shard.tensor.detach().float(), target[place]
        assert bool(((there == mine) | there.isnan()).all()), f"{shard.name}: replicas differ"
        target[place] = mine
    assert not any(bool(torch.isnan(tensor).any()) for tensor in whole.values())
    return whole


def assert_same_rows(found: Sequence[Trained], expected: Trained, name: str = "") -> None:
    """Losses and gradient norms agree with the reference, and those of the ranks bit for bit."""
    for of_rank in found:
        assert of_rank.rows == found[0].rows, name
    for step, (row, row_expected) in enumerate(zip(found[0].rows, expected.rows, strict=True), 1):
        assert row[0] == pytest.approx(row_expected[0], rel=1e-5), f"{name}: loss of step {step}"
        assert row[1] == pytest.approx(row_expected[1], rel=1e-5), f"{name}: norm of step {step}"
        assert not row[2], f"{name}: step {step} was skipped"


def assert_equal_trainings(found: Sequence[Trained], expected: Trained, name: str) -> None:
    """Compare losses and gradient norms, step by step, and the parameters after the last one."""
    assert_same_rows(found, expected, name)
    assert distance(parameters(found), parameters([expected])) <= 1e-5, name


def parameters(found: Sequence[Trained]) -> Tensor:
    """Return all masters one after the other."""
    whole = joined(found)
    masters = {name: value for name, value in whole.items() if name.startswith("model.")}
    assert masters
    return torch.cat([masters[name].flatten() for name in sorted(masters)])


def distance(found: Tensor, expected: Tensor) -> float:
    """Return ‖Δ‖/‖θ‖."""
    return float((found - expected).norm() / expected.norm())


def assert_same_training(found: Sequence[Trained], expected: Trained) -> None:
    """Rows and the final state agree with the reference."""
    assert_same_rows(found, expected)
    whole = joined(found)
    for name, value in joined([expected]).items():
        if name.endswith("k_proj.bias"):
            continue  # shifts all scores of a query alike: its gradient is rounding, which AdamW scales up
        limit = 1e-5 if name.startswith("model.") else 1e-4  # moments are sums of squares of small numbers
        assert (whole[name] - value).norm() <= limit * value.norm(), name


def assert_same_bits(found: Sequence[Trained], expected: Sequence[Trained]) -> None:
    """Losses and the final state are the same, however the ranks share it."""
    assert [row[0] for row in found[0].rows] == [row[0] for row in expected[0].rows]
    whole = joined(expected)
    for name, value in joined(found).items():
        assert torch.equal(value, whole[name]), name


def bits(state: TensorState) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Return what this rank holds, byte by byte."""
    return [
        (shard.name, shard.offsets, as_bytes(shard.tensor.detach().contiguous()).numpy().tobytes())
        for shard in state.snapshot()
    ]


def checkpointer(rank: int, world: int, place: Path, topic: str) -> Checkpointer:
    group = dist.group.WORLD if world > 1 else None
    return Checkpointer(str(place), peers(rank, world, f"{place}/{topic}"), Options(), group=group)


def save_and_go_on(
    rank: int, world: int, config: Config, place: Path, saved: int = 3, last: int = 6
) -> tuple[list[Row], Any]:
    """Train until a step, save, and train on to the last one; return the rows after the save, and the final
    bits with the loss's factor.
    """
    training, mesh = start(rank, world, config)
    take_steps(config, training, mesh, range(1, saved + 1))
    state = TensorState(training.parallelized, training.optimizer, mesh)
    history = training.step.scale_history
    behind = Position(
        saved,
        num_updates=state.num_updates,
        totals=Totals(0.0, 0, 0.0),
        loss_scale=_scale(training),
        fp8_sizes={} if history is None else history.state,
    )
    saver = checkpointer(rank, world, place, "save")
    saver.prepare(state.snapshot())
    saver.save(saved, state.snapshot(), position_to_json(behind))
    saver.wait()
    return take_steps(config, training, mesh, range(saved + 1, last + 1)), (bits(state), _scale(training))


def restore_and_go_on(
    rank: int, world: int, config: Config, place: Path, topic: str, last: int = 6
) -> tuple[list[Row], Any, str, str]:
    """Restore in a new training, save what was restored as step 9, and train on to the last step; return the
    same, and the digests of what was restored and of what was saved.
    """
    mesh = mesh_of(rank, layout(config.parallelism, world))
    built = build_model_and_optimizer(config, mesh)
    state = TensorState(built.parallelized, built.optimizer, mesh)
    restored = checkpointer(rank, world, place, topic).restore(state.wanted)
    assert restored is not None
    begin = position_from_json(restored.state)
    state.take_back(restored.manifest, begin)
    again = checkpointer(rank, world, place / "again" / topic, "save")
    again.save(9, state.snapshot(), {})
    again.wait()
    saved = checkpointer(rank, world, place / "again" / topic, "read").restore(state.wanted)
    assert saved is not None
    step = build_step(config, mesh, built, StepHooks(), begin.loss_scale, fp8_sizes=begin.fp8_sizes)
    training = Training(built.parallelized, built.optimizer, built.batches, step)
    rows = take_steps(config, training, mesh, range(begin.step + 1, last + 1))
    return rows, (bits(state), _scale(training)), digest(restored.manifest), digest(saved.manifest)


def _scale(training: Training) -> ScaleState | None:
    return None if training.step.loss_scale is None else training.step.loss_scale.state


def assert_goes_on_bit_for_bit(
    pool: RankPool, config: Config, place: Path, saved: int = 3, last: int = 6
) -> None:
    expected = pool.run(save_and_go_on, config=config, place=place, saved=saved, last=last)
    found = pool.run(restore_and_go_on, config=config, place=place, topic="same", last=last)
    # As text: norms that are not numbers are equal.
    assert [(repr(rows), state) for rows, state, *_ in found] == [
        (repr(rows), state) for rows, state in expected
    ]
