"""Counts what one rank of a configuration holds, component by component, from the modules that would train.

The tensors are fake (see `dry_build`): real shapes and types, no memory and no other ranks. Two steps of two
micro-batches are taken, forward, backward and update, with the recomputation that the configuration asks for.
`python -m orchestra.train.memory.exact CONFIG.yaml --world-size N [--rank R] [--as-gpu]` prints the count as
JSON.

It counts tensors and times nothing: what libraries, allocators and the interpreter take is not in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from conf.schema import Config, Offload
from orchestra.errors import ConfigError
from orchestra.parallel.mesh import Mesh, make_mesh
from orchestra.parallel.zero.stages import Alone
from orchestra.run.config_file import read_config
from orchestra.sizes.memory import chunk_tokens
from orchestra.sizes.topology import Layout, batch_shape, layout
from orchestra.train.build import Training, build_training
from orchestra.train.dry_build import bytes_of, fake_ranks, held_bytes
from orchestra.train.memory.live_bytes import LiveBytes

# The second one adds to the first one's gradients; more of them need no more.
_MICRO_BATCHES = 2


@dataclass(frozen=True)
class ExactBytes:
    """Bytes of one rank on its device, but for `host`, which lies in host memory.

    `parameters`, `gradients`, `masters` and `optimizer` (moments) are held between steps, and so are
    `gathered` (buffers of ZeRO-3). `activations` are alive when the last layer ends, and `logits` are what
    the loss adds at its worst. `first_step` and `later_steps` are the most that a step adds to what is held,
    activations and logits in it, and with them messages, gradients on their way and temporary tensors.
    """

    num_parameters: int
    parameters: int
    gradients: int
    masters: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    first_step: int
    later_steps: int
    host: int

    @property
    def held(self) -> int:
        """What is held between steps on the device."""
        return self.parameters + self.gradients + self.masters + self.optimizer + self.gathered

    @property
    def peak(self) -> int:
        """The most at one time, from the second step on."""
        return self.held + self.later_steps


def exact_bytes(config: Config, world_size: int, rank: int = 0, *, as_gpu: bool = False) -> ExactBytes:
    """Build one rank of `world_size` ranks, take two steps and count; `as_gpu`: as it would be on a GPU.

    For a process that has joined no process group. Raises ConfigError where the degrees do not multiply out,
    are of axes that the trainer does not have, or a budget for activations is too small.
    """
    degrees = layout(config.parallelism, world_size)
    _refuse_other_axes(degrees)
    if as_gpu:
        config = _with_chunk_of_gpu(config, degrees)
    with fake_ranks(world_size, rank), FakeTensorMode():
        mesh = dataclasses.replace(make_mesh(rank, degrees, torch.device("cpu")), counts_as_gpu=as_gpu)
        training = build_training(config, mesh)
        watched = _Watched(training)
        with LiveBytes() as live:
            first, later = (_step(training, mesh, watched, live, number) for number in (1, 2))
        return _counted(config, training, watched, first, later)


def _refuse_other_axes(degrees: Layout) -> None:
    found = [f"{axis}={getattr(degrees, axis)}" for axis in ("pp", "cp", "ep") if getattr(degrees, axis) > 1]
    if found:
        raise ConfigError(
            f"parallelism.{' and parallelism.'.join(found)}: the trainer has no pipeline, context or expert "
            "parallelism yet, so there is nothing to count; use pp=cp=ep=1, or plan without --exact"
        )


def _with_chunk_of_gpu(config: Config, degrees: Layout) -> Config:
    """Write down how many tokens' logits exist at once on a GPU, where the configuration leaves it open."""
    if config.train.loss_chunk_tokens is not None:
        return config
    batch = batch_shape(config.train, degrees.dp)
    words = -(-config.model.vocab_size // degrees.tp)
    chunk = chunk_tokens(batch.micro_batch_size * batch.seq_len, words, on_gpu=True)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, loss_chunk_tokens=chunk))


class _Watched:
    """Notes how much is alive where the loss begins, and the most that it adds."""

    def __init__(self, training: Training) -> None:
        self._model = training.parallelized.model
        self.activations = self.logits = 0

    @contextmanager
    def by(self, live: LiveBytes, held_before: int) -> Iterator[None]:
        """Watch one step, before which `held_before` of what `live` counts was alive."""
        loss = self._model.loss

        def watched(*arguments: Any, **options: Any) -> Tensor:
            before, most = live.now, live.most
            live.most = before
            total = loss(*arguments, **options)
            # Of the first micro-batch: later ones find what earlier ones left.
            self.activations = self.activations or before - held_before
            self.logits = max(self.logits, live.most - before)
            live.most = max(most, live.most)
            return total

        self._model.loss = watched
        try:
            yield
        finally:
            self._model.loss = loss


def _step(training: Training, mesh: Mesh, watched: _Watched, live: LiveBytes, number: int) -> int:
    """Take a step of fake tensors; return the most bytes alive in it beside what was built."""
    batch = training.batch
    live.most = before = live.now
    shape = (min(_MICRO_BATCHES, batch.accumulation), batch.micro_batch_size, batch.seq_len + 1)
    tokens_ABS = torch.zeros(shape, dtype=torch.int64).to(mesh.device)
    with watched.by(live, before):
        training.step.run(number, tokens_ABS)
    return live.most


def _counted(config: Config, training: Training, watched: _Watched, first: int, later: int) -> ExactBytes:
    held = held_bytes(training)
    units = training.parallelized.units
    offload = config.parallelism.offload
    moments, on_host = held.optimizer - held.masters, 0
    if offload is not Offload.none:
        # Parameters leave the host from memory of their own where they are no masters.
        places = [it for unit in units.units for it in (unit.masters, unit.outgoing)]
        on_host = moments + bytes_of(places)
    is_all = offload is Offload.all and units.is_split
    return ExactBytes(
        num_parameters=sum(parameter.numel() for parameter in training.parallelized.model.parameters()),
        parameters=0 if is_all else held.parameters,
        gradients=held.gradients,
        masters=0 if on_host else held.masters,
        optimizer=0 if on_host else moments,
        gathered=held.gathered_units,
        activations=watched.activations,
        logits=watched.logits,
        first_step=_beside(held.gradients, first, training),
        later_steps=_beside(held.gradients, later, training),
        host=on_host,
    )


def _beside(gradients: int, alive: int, training: Training) -> int:
    """Leave out gradients that autograd itself makes in a step: they are counted as held."""
    return alive - gradients if isinstance(training.parallelized.stage, Alone) else alive


def main(arguments: list[str] | None = None) -> None:
    """Print what one rank of a frozen configuration holds, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m orchestra.train.memory.exact", description=__doc__)
    parser.add_argument("config", type=Path, help="a resolved configuration, such as <run>/config.yaml")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--as-gpu", action="store_true", help="as on a GPU, wherever this process runs")
    asked = parser.parse_args(arguments)
    try:
        found = exact_bytes(read_config(asked.config), asked.world_size, asked.rank, as_gpu=asked.as_gpu)
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"error: {problem}\n")
        raise SystemExit(error.exit_code) from None
    row = {f"{name}_bytes": value for name, value in dataclasses.asdict(found).items()}
    row["num_parameters"] = row.pop("num_parameters_bytes")
    sys.stdout.write(json.dumps({**row, "peak_bytes": found.peak}) + "\n")


if __name__ == "__main__":
    main()
