"""train.micro_batch_size=auto: finds the largest micro-batch that fits, before the training is built.

Each rank tries for itself, with the code that trains, in fake process groups: their collectives end at once
and move nothing. So no rank waits for one that runs out, and after each trial all ranks exchange whether it
fitted. Two steps are taken of each size, since the first one allocates what later ones keep.

On a GPU the steps are real, within a share of the device's memory. On the CPU there is no error to catch: the
kernel would end the process. There two sizes are counted with fake tensors, and the others follow, since
activations grow with the number of sequences. The choice is made once an attempt; the global batch stays.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from conf.schema import Config
from orchestra.errors import ConfigError
from orchestra.parallel.mesh import Mesh, RankEnvironment, make_mesh
from orchestra.run.events import EventWriter
from orchestra.sizes.topology import batch_shape
from orchestra.sizes.training_shape import open_micro_batch_sizes
from orchestra.train.build import build_training
from orchestra.train.dry_build import (
    allow_fake_groups,
    enough_micro_batches,
    held_bytes,
    step_bytes,
    take_step,
)
from orchestra.train.memory.host_memory import available_host_bytes
from orchestra.train.memory.out_of_memory import is_out_of_memory

# Of a GPU's memory, for all ranks on it together; the rest is for what is in no tensor: buffers of NCCL,
# workspaces, fragments.
_GPU_SHARE = 0.93
# Of the host's memory that is free: the rest is for the loader, libraries and files in the cache.
_CPU_SHARE = 0.8


@dataclass(frozen=True)
class MicroBatchChoice:
    """A micro-batch size in sequences, and why it was chosen: the peak of each size that was tried, in bytes,
    or null where memory ran out; `limit_bytes` is this rank's.
    """

    size: int
    limit_bytes: int
    peak_bytes: dict[int, int | None]


def with_micro_batch_size(config: Config, mesh: Mesh, ranks: RankEnvironment, events: EventWriter) -> Config:
    """Return the configuration with a number where it says auto. *Collective*; rank 0 records the choice."""
    if config.train.micro_batch_size != "auto":
        return config
    began = time.monotonic()
    choice = choose_micro_batch_size(config, mesh, ranks)
    chosen = _with_size(config, choice.size)
    batch = batch_shape(chosen.train, mesh.layout.dp)
    if mesh.rank == 0:
        events.write(
            "micro_batch_chosen",
            size=batch.micro_batch_size,
            accumulation=batch.accumulation,
            limit_bytes=choice.limit_bytes,
            peak_bytes={str(size): peak for size, peak in choice.peak_bytes.items()},
            seconds=time.monotonic() - began,
        )
    return chosen


def choose_micro_batch_size(config: Config, mesh: Mesh, ranks: RankEnvironment) -> MicroBatchChoice:
    """Return the largest size that fits on every rank, of those that divide a rank's share of each global
    batch.

    The smallest of them where none fits, though the training itself may then run out of memory. *Collective*.
    """
    # Raises where not even one sequence a micro-batch would do.
    batch_shape(_with_size(config, 1).train, mesh.layout.dp)
    # Of fp8 on ranks that are fewer than its rule knew of, a single sequence: its product says what is wrong.
    sizes = open_micro_batch_sizes(config, mesh.layout.dp) or [1]
    with _fake_mesh(mesh) as fake_mesh:
        if mesh.device.type == "cuda":
            return _chosen_on_gpu(config, fake_mesh, sizes, _GPU_SHARE / mesh.ranks_on_device)
        return _chosen_on_cpu(config, fake_mesh, sizes, host_limit_bytes(ranks.local_world_size))


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return the largest of some growing sizes that fits, or the first: grown until one does not, then
    halved in between. What is larger than a size that does not fit must not fit either.
    """
    good, bad, step = -1, len(sizes), 1
    while good + step < bad:
        if fits(sizes[good + step]):
            good, step = good + step, 2 * step
        else:
            bad, step = good + step, 1
            break
        step = min(step, max(1, len(sizes) - 1 - good))
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(sizes[middle]):
            good = middle
        else:
            bad = middle
    return sizes[max(good, 0)]


def _with_size(config: Config, size: int) -> Config:
    return replace(config, train=replace(config.train, micro_batch_size=size))


def _on_all_ranks(claim: bool, num_ranks: int) -> bool:
    """Return whether a claim holds on every rank: so all try the same sizes. *Collective*."""
    held = torch.tensor([int(claim)])
    if num_ranks > 1:
        dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return bool(held)


@contextmanager
def _fake_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Return this rank's place in a mesh of fake process groups. *Collective*, for the groups' names."""
    opened: list[dist.ProcessGroup] = []

    def open_group(members: Sequence[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            list(members), backend="fake", use_local_synchronization=True
        )
        opened.append(group)
        return group

    allow_fake_groups()
    yield make_mesh(mesh.rank, mesh.layout, mesh.device, open_group)
    for group in opened:
        dist.destroy_process_group(group)


def _chosen_on_gpu(config: Config, fake_mesh: Mesh, sizes: Sequence[int], share: float) -> MicroBatchChoice:
    """Find the largest size by taking steps on the GPU, in this share of its memory."""
    device = fake_mesh.device
    peaks: dict[int, int | None] = {}
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(share, device)

    def fits(size: int) -> bool:
        torch.cuda.reset_peak_memory_stats(device)
        try:
            _take_two_steps(_with_size(config, size), fake_mesh)
            peaks[size] = torch.cuda.max_memory_reserved(device)
        except (ConfigError, RuntimeError) as error:
            # Of a larger micro-batch a budget for activations may hold nothing, as memory may not.
            if not (isinstance(error, ConfigError) or is_out_of_memory(error)):
                raise
            peaks[size] = None
        # Outside of the handler: its traceback holds the frames, and these the tensors.
        gc.collect()
        torch.cuda.empty_cache()
        return _on_all_ranks(peaks[size] is not None, fake_mesh.world_size)

    try:
        return MicroBatchChoice(largest_that_fits(sizes, fits), round(total * share), peaks)
    finally:
        if config.train.compile is True:
            # Dynamo keeps eight compilations of a block, and none for the ninth: these were of other sizes.
            torch.compiler.reset()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.reset_peak_memory_stats(device)


def _take_two_steps(config: Config, fake_mesh: Mesh) -> None:
    training = build_training(config, fake_mesh)
    try:
        for step in (1, 2):
            enough = enough_micro_batches(config, training.batch.accumulation)
            take_step(training, fake_mesh, step, enough)
        training.parallelized.stage.settle()
        torch.cuda.synchronize(fake_mesh.device)
    finally:
        training.parallelized.stage.close()


def _chosen_on_cpu(
    config: Config, fake_mesh: Mesh, sizes: Sequence[int], limit_bytes: int
) -> MicroBatchChoice:
    """Find the largest size from the peaks of two steps that are taken without memory."""
    peaks: dict[int, int | None] = {}

    def fits(size: int) -> bool:
        peak = _extrapolated(peaks, size) if config.train.recompute_budget_gib is None else None
        if peak is None:
            peak = peaks[size] = _dry_peak(_with_size(config, size), fake_mesh)
        return _on_all_ranks(peak is not None and peak <= limit_bytes, fake_mesh.world_size)

    return MicroBatchChoice(largest_that_fits(sizes, fits), limit_bytes, peaks)


def _extrapolated(peaks: Mapping[int, int | None], size: int) -> float | None:
    """Return the peak of a size on the line through two known ones; None before there are two."""
    known = [(at, peak) for at, peak in peaks.items() if peak is not None][:2]
    if len(known) < 2:
        return None
    (first, low), (second, high) = known
    return low + (high - low) * (size - first) / (second - first)


def _dry_peak(config: Config, fake_mesh: Mesh) -> int | None:
    """Return the most bytes that a rank holds in its second step, with an image of the state while it is
    saved; None where the budget for activations allows no such micro-batch.
    """
    with FakeTensorMode():
        try:
            training = build_training(config, fake_mesh)
        except ConfigError:
            return None
        # Of one rank's micro-batches one takes as much as several: what adds to gradients is there already.
        accumulation = training.batch.accumulation
        number = 1 if config.parallelism.pp == 1 else enough_micro_batches(config, accumulation)
        step_bytes(training, fake_mesh, number)
        held, passing = held_bytes(training), step_bytes(training, fake_mesh, number)
        training.parallelized.stage.close()
    is_staged = config.checkpoint.async_save and config.checkpoint.every_steps is not None
    # State on disk is staged there.
    image = held.optimizer + held.parameters if is_staged and not held.on_disk else 0
    return held.state + held.gathered_units + passing + image


def host_limit_bytes(num_ranks: int) -> int:
    """Return the bytes of this host's memory that one of `num_ranks` ranks on it may take."""
    free = available_host_bytes()
    if free is None:
        raise ConfigError(
            "train.micro_batch_size=auto: this system does not say how much memory is free; use a number"
        )
    free //= num_ranks
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        free = min(free, soft - mapped)
    return round(_CPU_SHARE * free)
