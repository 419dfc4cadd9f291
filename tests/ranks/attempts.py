"""Attempts of whole runs by the ranks of a pool: trained to the end or interrupted, and what they leave."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import small_trainings
import torch
from small_trainings import EVEN, mesh_of

from checkpointing import catalog
from checkpointing.box import Box
from checkpointing.integrity import checksums
from checkpointing.integrity.shard_digest import part_digest
from checkpointing.shards import Shard, as_bytes, whole
from checkpointing.storage import open_storage
from conf.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    RecoveryConfig,
    StateDType,
)
from launchers.memory_store.store import FOLDER_VARIABLE
from orchestra.parallel.mesh import RankEnvironment
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import layout
from orchestra.train import memory_copies, trainer
from orchestra.train.state import TensorState
from orchestra.train.trainer import RankAttempt, Trainer, train_on
from orchestra.train.watch import inject_faults
from tests.support.waiting import eventually

STEPS, EVERY, GLOBAL_BATCH = 12, 5, 12
# Odd dims (37, 259), so that no number of ranks divides all tensors.
MODEL = replace(
    EVEN, hidden_size=40, intermediate_size=37, num_attention_heads=4, num_key_value_heads=2, vocab_size=259
)
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "nonfinite_steps")
_copy = memory_copies.DeviceCopier.copy


class UnevenTokens:
    """Samples with words of which some come far more often, the same ones with every Python, whose own
    library's text (`data.source=stdlib`) is another one with each version.
    """

    num_samples, vocab_size, identity = 4096, MODEL.vocab_size, "uneven tokens"

    def __init__(self, seq_len: int) -> None:
        self._length = seq_len + 1

    def sample(self, index: int) -> torch.Tensor:
        drawn = torch.rand(self._length, generator=torch.Generator().manual_seed(index))
        return (drawn**5 * self.vocab_size).long()


class Interruption(Exception):  # noqa: N818  no error, the plan
    """Stands for the end of the process, so that the pool's processes can be used again."""


def config_of(
    precision: str = "fp32",
    state_dtype: StateDType = StateDType.fp32,
    copy_every: int | None = None,
    inject: Sequence[dict[str, Any]] = (),
    checkpoint: dict[str, Any] | None = None,
    num_experts: int = 0,
    **parallelism: Any,
) -> Config:
    """Return a tiny model, whose global batch 1, 2, 3 and 4 ranks can share."""
    model = replace(MODEL, num_experts=num_experts, moe_intermediate_size=13 if num_experts else None)
    # Which experts get most tokens, and so whether they move, depends on the text.
    data = {"source": f"{__name__}:{UnevenTokens.__name__}"} if num_experts else {}
    saving = {"every_steps": EVERY, "async_save": False, "timeout_s": 60.0, **(checkpoint or {})}
    train = {"steps": STEPS, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 1}
    optim = {"state_dtype": state_dtype}
    return replace(
        small_trainings.config_of(model, precision, optim=optim, train=train, **parallelism),
        data=DataConfig(ledger=True, **data),
        checkpoint=CheckpointConfig(**saving),
        recovery=RecoveryConfig(memory_copy_every_steps=copy_every, inject=list(inject)),
    )


def kill_all(at_step: int, attempt: int = 0) -> list[dict[str, Any]]:
    return [{"at_step": at_step, "rank": "all", "attempt": attempt}]


def with_steps(config: Config, steps: int) -> Config:
    return replace(config, train=replace(config.train, steps=steps))


def attempt_of(
    rank: int,
    world: int,
    path: Path,
    attempt: int,
    config: Config,
    folders: Sequence[Path | None] = (None,),
    from_memory: int | None = None,
) -> dict[str, str] | None:
    """Train one attempt as one rank; return the digest of each tensor at its end, None if it was interrupted
    by a fault that kills. `folders`: where each node keeps copies in memory.

    Each copy begins late, when the next step is well under way: an update that did not wait would be seen.
    """
    per_node = world // len(folders)
    folder = folders[rank // per_node]
    os.environ.pop(FOLDER_VARIABLE, None)
    if folder is not None:
        os.environ[FOLDER_VARIABLE] = str(folder)
    mesh = mesh_of(rank, layout(config.parallelism, world))
    run = RunDir(path)
    events = EventWriter(run, rank_writer(attempt, rank), attempt, rank=rank)
    torch.manual_seed(attempt)  # so that only a restore can bring the generators back
    trainers: list[Trainer] = []
    assemble = trainer.assemble

    def kept(*arguments: Any) -> Trainer:
        trainers.append(assemble(*arguments))
        return trainers[-1]

    environment = RankEnvironment(rank, rank % per_node, world, per_node)
    rank_attempt = RankAttempt(run, attempt, events, from_memory)
    with (
        patch.object(inject_faults.os, "kill", _interrupt),
        patch.object(memory_copies.DeviceCopier, "copy", _late_copy),
        patch.object(trainer, "assemble", kept),
    ):
        try:
            training = train_on(mesh, config, environment, rank_attempt)
        except Interruption:
            # A process that ends leaves nothing under way. This one goes on, and the memory of messages under
            # way must not be released before they have come.
            trainers[0].built.parallelized.stage.settle()
            return None
    state = TensorState(training.parallelized, training.optimizer, mesh)
    shards = state.snapshot()
    # What ZeRO-3 gathers is not there between steps.
    if config.parallelism.zero < 3:
        shards += [whole(item.name, item.parameter) for item in training.parallelized.trained]
    return {_name(shard): _digest(shard) for shard in shards}


def _interrupt(*_: Any) -> None:
    raise Interruption


def _late_copy(self: Any, *arguments: Any) -> None:
    time.sleep(0.15)
    _copy(self, *arguments)


def _name(shard: Shard) -> str:
    """Return a tensor's name; of a part with its place."""
    is_whole = shard.box == Box.whole(shard.shape)
    return shard.name if is_whole else f"{shard.name}{shard.box.label()}"


def _digest(shard: Shard) -> str:
    content = as_bytes(shard.tensor.detach().contiguous()).numpy()
    return checksums.written(part_digest(memoryview(content), shard.dtype, Box.whole(shard.tensor.shape)))


def rows(path: Path) -> list[Record]:
    return [{key: row[key] for key in KEYS} for row in read_metrics(RunDir(path))]


def events_of(path: Path, name: str) -> list[Record]:
    return [event for event in read_events(RunDir(path)) if event["event"] == name]


def restored(path: Path) -> Record:
    (event,) = events_of(path, "restored")
    return event


def committed(path: Path) -> list[int]:
    return catalog.committed_steps(open_storage(path / "checkpoints"))


def digest_at(path: Path, step: int) -> str:
    """Return the digest of model and optimizer that a checkpoint's manifest holds."""
    manifest = catalog.read_manifest(open_storage(path / "checkpoints"), step)
    return manifest.digest_of(name for name in manifest.tensors if not name.startswith("rng."))


def await_sight(path: Path, attempt: int) -> None:
    """Wait until the request is written, and as long as rank 0 needs to see it."""
    assert eventually(lambda: stop_requests.read_request(RunDir(path), attempt) is not None, 10)
    watching = [thread for thread in threading.enumerate() if thread.name == "stop requests"]
    for thread in watching:
        thread.join(10)
