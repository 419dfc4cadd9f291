"""Builds one rank of a configuration at its real size without memory and without other ranks, and counts what
it holds.

Under torch's fake tensors and a fake process group the code that trains makes every tensor of one rank: with
its shape and data type and without values. So a layout is checked on any machine, and what it holds is
counted instead of estimated. Tensors are counted, of a GPU too: not what libraries, allocators and the
interpreter take.

`python -m orchestra.train.dry_build CONFIG.yaml --world-size N [--rank R] [--step | --exact [--as-gpu]]`
prints the bytes as JSON; `orchestra plan --exact` starts it. The process does nothing else, because it joins
a fake process group. The search for a micro-batch size (`micro_batch`) uses the same counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from conf.schema import Config, Offload, PipelineSchedule
from orchestra.errors import ConfigError
from orchestra.model.initial import fakes_on_gpu
from orchestra.model.logits import CompiledPasses
from orchestra.parallel.mesh import Mesh, make_mesh
from orchestra.precision.policies import policy
from orchestra.run.config_file import read_config
from orchestra.run.heartbeat import Phase
from orchestra.sizes.compilation import is_wanted
from orchestra.sizes.memory.loss_memory import chunk_tokens, logit_bytes
from orchestra.sizes.pipeline_check import fewer_micro_batches, held_states
from orchestra.sizes.pipeline_schedule import pipeline_shape
from orchestra.sizes.topology import Layout, batch_shape, layout
from orchestra.train.build import Training, build_training
from orchestra.train.hooks import StepHook, StepHooks
from orchestra.train.watch.replay import rehearse

_FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"
# The second one adds to the first one's gradients; more of them need no more.
_MICRO_BATCHES = 2
_TAKING_TURNS = 2


@dataclass(frozen=True)
class HeldBytes:
    """The bytes that one rank holds between steps, and what a micro-batch adds to them.

    `parameters`: those that it keeps, in the type of the products, and their copies in fp8. `gradients`:
    those that are kept from one micro-batch to the next. `optimizer`: masters where they are others than the
    parameters, and moments.
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
    # Masters and moments that lie on disk; `optimizer` is then what memory holds of them.
    on_disk: int = 0

    @property
    def state(self) -> int:
        """Parameters, gradients and the optimizer's state, as the formulas of ZeRO count."""
        return self.parameters + self.gradients + self.optimizer


def dry_build(config: Config, world_size: int, rank: int = 0, *, with_step: bool = False) -> HeldBytes:
    """Build one rank of `world_size` ranks and count; with `with_step` take one step of one micro-batch too.

    For a process that has joined no process group. Raises ConfigError where the degrees do not multiply
    out.
    """
    with _one_of(world_size, rank, config) as mesh:
        training = build_training(config, mesh)
        held = held_bytes(training)
        return dataclasses.replace(held, passing=step_bytes(training, mesh, 1)) if with_step else held


@contextmanager
def _one_of(world_size: int, rank: int, config: Config) -> Iterator[Mesh]:
    """Return the place of one rank in a mesh of ranks that are not there; its tensors are fake.

    Its process group has no other members: its collectives end at once and move nothing.
    """
    degrees = layout(config.parallelism, world_size)
    if world_size > 1:
        allow_fake_groups()
        store = importlib.import_module(_FAKE_GROUP).FakeStore()
        dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        with FakeTensorMode():
            yield make_mesh(rank, degrees, torch.device("cpu"))
    finally:
        if world_size > 1:
            dist.destroy_process_group()


def allow_fake_groups() -> None:
    """Register the backend `fake`, and the shapes that its collectives return for fake tensors."""
    # Both modules register themselves when they are imported.
    importlib.import_module(_FAKE_GROUP)
    importlib.import_module("torch.distributed._tools.fake_collectives")


def held_bytes(training: Training) -> HeldBytes:
    """Count what a training holds between steps. *Any rank*; fake tensors or real ones."""
    units = training.parallelized.units
    wholes = [unit.whole for unit in units.units]
    owned = [unit.owned for unit in units.units]
    state_file = units.state_file
    masters = [unit.masters for unit in units.units if unit.masters is not unit.owned]
    moments = [
        moment
        for state in training.optimizer.state.values()
        for moment in state.values()
        if isinstance(moment, Tensor)
    ]
    return HeldBytes(
        parameters=bytes_of(owned if units.is_split else wholes) + training.parallelized.stage.rounded_bytes,
        gradients=training.parallelized.stage.gradients.num_bytes,
        optimizer=bytes_of([*masters, *moments] if state_file is None else state_file.buffers),
        gathered_units=bytes_of(unit.whole for unit in units.units if unit.is_split),
        masters=bytes_of(masters) if state_file is None else 0,
        on_disk=0 if state_file is None else bytes_of(moments),
    )


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of some tensors; several views of one storage count once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def step_bytes(training: Training, mesh: Mesh, num_micro_batches: int) -> int:
    """Take one step with so many micro-batches of fake tensors; return the most bytes that it added at a
    time.
    """
    with LiveBytes() as live:
        take_step(training, mesh, 1, num_micro_batches)
    return int(live.most)


def enough_micro_batches(config: Config, accumulation: int) -> int:
    """Return with how many micro-batches a step takes as much memory as with `accumulation` of them."""
    if config.parallelism.pp == 1:
        return _MICRO_BATCHES
    kind = config.parallelism.schedule
    if kind is PipelineSchedule["afab"]:
        return accumulation
    shape = pipeline_shape(config.parallelism)
    as_many = fewer_micro_batches(kind, shape, accumulation)
    filling = [
        num for num in range(1, as_many) if held_states(kind, shape, num) == held_states(kind, shape, as_many)
    ]
    # After those that fill the pipeline some take turns in it: what arrives is then on its way beside them.
    return next((num for num in filling if num >= filling[0] + _TAKING_TURNS), as_many)


def take_step(training: Training, mesh: Mesh, step: int, num_micro_batches: int) -> None:
    """Take a step of at most so many micro-batches, all of whose tokens are 0, and where the run computes
    steps again one more that is. *Collective*.
    """
    batch = training.batch
    num = min(num_micro_batches, batch.accumulation)
    shape = (num, batch.micro_batch_size, batch.seq_len + 1)
    tokens = torch.zeros(shape, dtype=torch.int64).to(mesh.device)
    if training.replays:
        rehearse(training.parallelized, tokens[0], as_gpu=mesh.counts_as_gpu)
    training.step.run(step, tokens)


@dataclass(frozen=True)
class ExactBytes:
    """Bytes of one rank on its device, but for `host`, which lies in host memory, and `disk`.

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
    disk: int = 0

    @property
    def peak(self) -> int:
        """The most at one time, from the second step on."""
        held = self.parameters + self.gradients + self.masters + self.optimizer + self.gathered
        return held + self.later_steps


def exact_bytes(config: Config, world_size: int, rank: int = 0, *, as_gpu: bool = False) -> ExactBytes:
    """Build one rank of `world_size` ranks, take a step or two and count both; `as_gpu`: as it would be on a
    GPU.

    For a process that has joined no process group. Raises ConfigError where the degrees do not multiply out,
    or a budget for activations is too small.
    """
    if as_gpu:
        # A GPU's attention needs no mask to stay inside of documents.
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, document_masks=False))
        config = _with_chunk_of_gpu(config, layout(config.parallelism, world_size))
    with _one_of(world_size, rank, config) as mesh, fakes_on_gpu(is_wanted=as_gpu):
        mesh = dataclasses.replace(mesh, counts_as_gpu=as_gpu)
        moment = _FirstBackward()
        training = build_training(config, mesh, StepHooks((moment,)))
        if is_wanted(config.train.compile, "cuda" if as_gpu else "cpu"):
            training.parallelized.model.logits_passes = CompiledPasses()
        watched = _LossWatch(training)
        enough = enough_micro_batches(config, training.batch.accumulation)
        peaks = []
        with LiveBytes() as live:
            moment.live = live
            for step in (1, 2):
                live.most = before = live.now
                with watched.by(live, before):
                    take_step(training, mesh, step, enough)
                peaks.append(live.most)
                if as_gpu and _repeats_itself(config):
                    peaks.append(live.most_again())
                    break
        # A pipeline's ranks keep what several micro-batches need, most of them without a loss.
        activations = moment.at_first if mesh.layout.pp > 1 else watched.activations
        return _counted(config, training, activations, watched.logits, *peaks, as_gpu=as_gpu)


def _repeats_itself(config: Config) -> bool:
    """Whether a GPU's second step is the first one but for what that has made and kept: from ZeRO-2 on, and
    where gloo sums, memory for sums is used in turns; and a plug-in may do anything.
    """
    return config.parallelism.zero < 2 and config.optim.target is None


def _with_chunk_of_gpu(config: Config, degrees: Layout) -> Config:
    """Set how many tokens' logits exist at once to a GPU's number, where the configuration leaves it open."""
    if config.train.loss_chunk_tokens is not None:
        return config
    batch = batch_shape(config.train, degrees.dp)
    words = -(-config.model.vocab_size // degrees.tp)
    width = policy(config.precision).parameter.itemsize
    bytes_each = logit_bytes(width, is_wanted(config.train.compile, "cuda"))
    num_tokens = batch.micro_batch_size * batch.seq_len // degrees.cp
    chunk = chunk_tokens(num_tokens, words, bytes_each, on_gpu=True)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, loss_chunk_tokens=chunk))


class _FirstBackward(StepHook):
    """Records how many bytes are alive where the first backward pass begins."""

    def __init__(self) -> None:
        self.live: LiveBytes | None = None
        self.at_first = 0

    def enter(self, phase: Phase, step: int, micro_batch: int, turn: int) -> None:  # noqa: ARG002
        if phase is Phase.backward and self.live is not None:
            self.at_first = self.at_first or self.live.now


class _LossWatch:
    """Records how many bytes are alive where the loss begins, and the most that it adds."""

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


def _counted(
    config: Config, training: Training, activations: int, logits: int, first: int, later: int, *, as_gpu: bool
) -> ExactBytes:
    held = held_bytes(training)
    units = training.parallelized.units
    offload = config.parallelism.offload
    moments, on_host = held.optimizer - held.masters, 0
    if offload is Offload.optimizer_disk:
        on_host = moments if as_gpu else 0
    elif offload is not Offload.none:
        # Parameters leave the host from memory of their own where they are no masters.
        kept = [tensor for unit in units.units for tensor in (unit.masters, unit.outgoing)]
        on_host = moments + bytes_of(kept)
    is_all = offload is Offload.all and units.is_split
    # One rank's gradients, which are made in a step, are counted as held.
    made_in_step = held.gradients if training.parallelized.stage.gradients.is_alone else 0
    return ExactBytes(
        num_parameters=sum(parameter.numel() for parameter in training.parallelized.model.parameters()),
        parameters=0 if is_all else held.parameters,
        gradients=held.gradients,
        masters=0 if on_host else held.masters,
        optimizer=0 if on_host else moments,
        gathered=held.gathered_units,
        activations=activations,
        logits=logits,
        first_step=first - made_in_step,
        later_steps=later - made_in_step,
        host=on_host,
        disk=held.on_disk,
    )


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors, fake ones too, that operators have made since it was entered and that
    are still alive: `now`, and their peak so far in `most`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        # What is alive, by the address of its memory, which others have later: its number, and what to call
        # when it goes; and what came and went, in order.
        self._known: dict[int, tuple[int, Callable[[], object]]] = {}
        self._changes: list[tuple[int, int]] = []

    def most_again(self) -> int:
        """Return the most that the same operators would reach if what they have left alive were there from
        the start.
        """
        now = most = self.now
        alive = {number for number, _ in self._known.values()}
        for number, size in self._changes:
            if number not in alive:
                now += size
                most = max(most, now)
        return most

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        given = [*_tensors((*arguments, *options.values()))]
        before = {_key(tensor) for tensor in given}
        made = operator(*arguments, **options)
        for tensor in _tensors((made,)):
            if _key(tensor) not in before:
                self._add(tensor)
        for tensor in given:
            # An operator may spend what it is given, and leave no memory to whoever keeps it.
            if not tensor.untyped_storage().nbytes() and _key(tensor) in self._known:
                self._known[_key(tensor)][1]()
        return made

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            number = len(self._changes)
            self._changes.append((number, size))
            self.now += size
            self.most = max(self.most, self.now)
            self._known[key] = number, weakref.finalize(storage, self._remove, key, number, size)

    def _remove(self, key: int, number: int, size: int) -> None:
        self._known.pop(key, None)
        self._changes.append((number, -size))
        self.now -= size


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def main(arguments: list[str] | None = None) -> None:
    """Print what one rank of a frozen configuration holds, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m orchestra.train.dry_build", description=__doc__)
    parser.add_argument("config", type=Path, help="a resolved configuration, such as <run>/config.yaml")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", action="store_true", help="take one step of one micro-batch too")
    parser.add_argument("--exact", action="store_true", help="count two steps by component")
    parser.add_argument("--as-gpu", action="store_true", help="with --exact: as on a GPU, on any machine")
    options = parser.parse_args(arguments)
    try:
        config = read_config(options.config)
        counted: HeldBytes | ExactBytes
        if options.exact:
            counted = exact_bytes(config, options.world_size, options.rank, as_gpu=options.as_gpu)
            others = {"num_parameters": counted.num_parameters, "peak_bytes": counted.peak}
        else:
            counted = dry_build(config, options.world_size, options.rank, with_step=options.step)
            others = {"state_bytes": counted.state}
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"error: {problem}\n")
        raise SystemExit(error.exit_code) from None
    row = {f"{name}_bytes": value for name, value in dataclasses.asdict(counted).items()}
    row.pop("num_parameters_bytes", None)
    sys.stdout.write(json.dumps({**row, **others}) + "\n")


if __name__ == "__main__":
    main()
