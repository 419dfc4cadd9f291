"""Attempts of a run on one rank without a loop, in a real folder: the test says what was trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpointing import catalog
from checkpointing.storage import open_storage
from conf.schema import CheckpointConfig, Config, ModelConfig, TrainConfig
from orchestra.parallel.mesh import Mesh, RankEnvironment, open_peers
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.run_lineage import read_lineage
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training
from orchestra.train.checkpoints import build_checkpoints
from orchestra.train.metrics import Totals
from orchestra.train.state import CheckpointContext, Position, TensorState
from orchestra.train.trainer import RankAttempt, checkpoint_context
from orchestra.train.watch.inject_faults import Faults

STEPS = 20
# What `Attempt.save` says that a step consumes.
SIZE = 16


def config_of(steps: int = STEPS, hidden_size: int = 16, **checkpoint: Any) -> Config:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64}
    return Config(
        model=ModelConfig(**sizes, num_attention_heads=2, num_key_value_heads=2),
        train=TrainConfig(steps=steps, seq_len=8),
        checkpoint=CheckpointConfig(
            **{"every_steps": 5, "timeout_s": 20.0, "restore_patience_s": 0.2, **checkpoint}
        ),
    )


def context_of(path: Path, number: int, config: Config) -> CheckpointContext:
    run, degrees, ranks = RunDir(path), Layout(dp=1), RankEnvironment()
    run.path.mkdir(parents=True, exist_ok=True)
    if not run.record.exists():
        run.record.write_text(json.dumps({"wandb_id": f"id-of-{path.name}"}))
    mesh = Mesh(0, degrees, degrees.coordinates(0), torch.device("cpu"), None)
    events = EventWriter(run, rank_writer(number, 0), number, rank=0)
    peers = open_peers(mesh, ranks, number, config.checkpoint.timeout_s)
    return checkpoint_context(config, mesh, ranks, peers, RankAttempt(run, number, events))


class Attempt:
    """One attempt of a run, which has saved nothing and restored nothing."""

    def __init__(self, path: Path, number: int, config: Config, faults: Faults | None = None) -> None:
        context = context_of(path, number, config)
        training = build_training(config, context.mesh)
        self.state = TensorState(training.parallelized, training.optimizer, context.mesh)
        at_phase = (faults or Faults([], number, 0)).strike
        self.checkpoints = build_checkpoints(config, context, self.state, None, at_phase)

    def save(self, step: int, *, is_last: bool = False, score: float | None = None, **options: Any) -> None:
        """Save with every element of the state set to `step`."""
        for shard in self.state.snapshot():
            if shard.name.startswith(("model.", "optimizer.")):
                shard.tensor.fill_(step)
        totals = Totals(1.0, step * 128, 0.5)
        position = Position(step=step, samples=step * SIZE, totals=totals, score=score or 1.0 / step)
        self.checkpoints.save(position, is_last=is_last, **options)

    def holds(self, value: float) -> bool:
        shards = (shard for shard in self.state.snapshot() if not shard.name.startswith("rng."))
        return all(bool((shard.tensor == value).all()) for shard in shards)


def begun(
    path: Path,
    number: int = 0,
    config: Config | None = None,
    saves: Sequence[int] = (),
    faults: Faults | None = None,
) -> Attempt:
    """Return an attempt that has found where to begin and made some saves, by default synchronous ones."""
    attempt = Attempt(path, number, config or config_of(async_save=False), faults)
    attempt.checkpoints.begin()
    for step in saves:
        attempt.save(step)
    return attempt


def steps_of(path: Path) -> list[int]:
    return catalog.committed_steps(open_storage(path / "checkpoints"), read_lineage(RunDir(path)))


def events(path: Path, name: str) -> list[Record]:
    return [event for event in read_events(RunDir(path)) if event["event"] == name]
