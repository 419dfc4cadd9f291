"""Builds a rank of a configuration at its real size without memory and without other ranks, and counts
bytes.

Under torch's fake tensors and a fake process group the very code that trains makes every tensor of one rank:
with its shape, its data type and no values. So a layout is checked on any machine, and what it holds is
counted instead of estimated. `python -m orchestra.train.dry_build CONFIG.yaml --world-size N [--rank R]
[--step]` prints it as JSON; the process is one that does nothing else, because it joins a group that is
none.

It times nothing, and of a GPU's memory it knows tensors only: not what libraries take for themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from conf.schema import Config
from orchestra.errors import ConfigError
from orchestra.parallel.mesh import Mesh, make_mesh
from orchestra.run.config_file import read_config
from orchestra.sizes.topology import layout
from orchestra.train.build import Training, build_training
from orchestra.train.memory.live_bytes import LiveBytes

_FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"


@dataclass(frozen=True)
class HeldBytes:
    """What one rank holds between steps, in bytes, and what a micro-batch adds.

    `parameters`: those that it keeps, in the type of the products. `gradients`: those that are kept from one
    micro-batch to the next. `optimizer`: masters where they are others than the parameters, and moments.
    `gathered_units`: buffers into which ZeRO-3 gathers the parameters of others. `passing`: the most that
    activations, gradients on their way and messages take at a time in a step; null where none was tried.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered_units: int
    passing: int | None = None
    # How much of `optimizer` are masters.
    masters: int = 0

    @property
    def state(self) -> int:
        """Parameters, gradients and the optimizer's state, as the formulas of ZeRO count."""
        return self.parameters + self.gradients + self.optimizer


def dry_build(config: Config, world_size: int, rank: int = 0, *, with_step: bool = False) -> HeldBytes:
    """Build one rank of `world_size` ranks and count; with `with_step` take one step of one micro-batch too.

    For a process that has joined no process group. Raises ConfigError where the degrees do not multiply out
    or are of axes that the trainer does not have.
    """
    degrees = layout(config.parallelism, world_size)
    if max(degrees.pp, degrees.cp, degrees.ep) > 1:
        raise ConfigError("the trainer has no pipeline, context or expert parallelism yet; use pp=cp=ep=1")
    with fake_ranks(world_size, rank), FakeTensorMode():
        mesh = make_mesh(rank, degrees, torch.device("cpu"))
        training = build_training(config, mesh)
        held = held_bytes(training)
        return dataclasses.replace(held, passing=step_bytes(training, mesh)) if with_step else held


@contextmanager
def fake_ranks(world_size: int, rank: int) -> Iterator[None]:
    """Join a group in which nobody else is: its collectives end at once and move nothing."""
    if world_size == 1:
        yield
        return
    allow_fake_groups()
    store = importlib.import_module(_FAKE_GROUP).FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def allow_fake_groups() -> None:
    """Let torch know groups of the backend `fake`, and what their collectives make of fake tensors."""
    # Both teach torch by being imported.
    importlib.import_module(_FAKE_GROUP)
    importlib.import_module("torch.distributed._tools.fake_collectives")


def held_bytes(training: Training) -> HeldBytes:
    """Count what a training holds between steps. *Any rank*; fake tensors or real ones."""
    units = training.parallelized.units
    wholes = [unit.whole for unit in units.units]
    owned = [unit.owned for unit in units.units]
    masters = [unit.masters for unit in units.units if unit.masters is not unit.owned]
    moments = [
        moment
        for state in training.optimizer.state.values()
        for moment in state.values()
        if isinstance(moment, Tensor)
    ]
    return HeldBytes(
        parameters=bytes_of(owned if units.is_split else wholes),
        gradients=training.parallelized.stage.gradient_bytes(),
        optimizer=bytes_of([*masters, *moments]),
        gathered_units=bytes_of(wholes) if units.is_split else 0,
        masters=bytes_of(masters),
    )


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory behind some tensors; views of the same memory count it once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def step_bytes(training: Training, mesh: Mesh) -> int:
    """Take one step with one micro-batch of fake tensors; return the most bytes that it added at a time."""
    batch = training.batch
    with LiveBytes() as live:
        tokens_ABS = torch.zeros(1, batch.micro_batch_size, batch.seq_len + 1, dtype=torch.int64)
        training.step.run(1, tokens_ABS.to(mesh.device))
    return int(live.most)


def main(arguments: list[str] | None = None) -> None:
    """Print what one rank of a frozen configuration holds, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m orchestra.train.dry_build", description=__doc__)
    parser.add_argument("config", type=Path, help="a resolved configuration, such as <run>/config.yaml")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", action="store_true", help="take one step of one micro-batch too")
    asked = parser.parse_args(arguments)
    try:
        held = dry_build(read_config(asked.config), asked.world_size, asked.rank, with_step=asked.step)
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"error: {problem}\n")
        raise SystemExit(error.exit_code) from None
    row = {f"{name}_bytes": value for name, value in dataclasses.asdict(held).items()}
    sys.stdout.write(json.dumps({**row, "state_bytes": held.state}) + "\n")


if __name__ == "__main__":
    main()
