"""What to say when a rank runs out of memory: what takes how much, and which changes would help most.

Called by the trainer on *any rank*, with next to nothing allocated, so that it still works when no memory is
left. The numbers are those of `orchestra.sizes.memory`: what training keeps and what a micro-batch adds;
libraries, kernels' workspaces and fragments of memory are not in them.
"""

from __future__ import annotations

import torch

from conf.schema import Config
from orchestra.errors import EXIT_DO_NOT_RESTART, ConfigError, TrainingError
from orchestra.sizes.advice import SAME_NODES, MemoryNeed, Remedy, unless_refused, what_saves_most
from orchestra.sizes.memory.rank_memory import RankBytes, rank_bytes
from orchestra.sizes.topology import Layout, batch_shape, layout
from orchestra.sizes.training_shape import training_shape
from orchestra.sizes.units import GIB

_NUM_REMEDIES = 3
# What torch's allocator for the CPU says, which has no exception type of its own.
_CPU_WORDS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "std::bad_alloc")


class OutOfMemoryError(TrainingError):
    """Raised when a rank's memory did not suffice; starting again helps only where it had sufficed before."""

    def __init__(self, message: str, *, had_trained: bool) -> None:
        super().__init__(message)
        if not had_trained:
            self.exit_code = EXIT_DO_NOT_RESTART


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(known in words for known in _CPU_WORDS)


def out_of_memory(
    error: BaseException, config: Config, degrees: Layout, device: torch.device, *, step: int, begin: int
) -> OutOfMemoryError:
    """Return what explains `error`, the end of a rank in `step`; its attempt began after step `begin`."""
    had_trained = step > begin + 1
    words = str(error).strip().splitlines()
    where = f"step {step}" if step > begin else "the build, before the first step"
    lines = [f"out of memory on {device} in {where}: {words[0] if words else type(error).__name__}"]
    is_gpu = device.type == "cuda"
    try:
        need = bytes_needed(config, degrees, is_gpu=is_gpu)
    except ConfigError as problem:
        return OutOfMemoryError("\n".join([*lines, str(problem)]), had_trained=had_trained)
    batch = batch_shape(config.train, degrees.dp)
    lines.append(
        f"a rank of this layout needs about {_gib(need.total)}, with micro-batches of "
        f"{batch.micro_batch_size} × {batch.seq_len} tokens:"
    )
    lines += [f"  {name:<22} {_gib(size):>12}" for name, size in need.components.items()]
    if is_gpu:
        free, total = torch.cuda.mem_get_info(device)
        most = _gib(torch.cuda.max_memory_allocated(device))
        lines.append(f"  the device has {_gib(total)}, {_gib(free)} free; tensors took at most {most}")
    lines.append("what would help most:")
    for remedy in best_remedies(config, degrees, is_gpu=is_gpu):
        note = f" ({remedy.way.note})" if remedy.way.note else ""
        lines.append(f"  {remedy.overrides}{note} (about {_gib(need.total - remedy.peak_bytes)} less)")
    return OutOfMemoryError("\n".join(lines), had_trained=had_trained)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.1f} MiB"


def bytes_needed(config: Config, degrees: Layout, *, is_gpu: bool) -> RankBytes:
    """Return what the fullest rank of a layout needs. Raises ConfigError where the batch does not divide."""
    shape = training_shape(config, degrees, is_gpu=is_gpu)
    return max((rank_bytes(shape, stage) for stage in shape.stages), key=lambda need: need.total)


def best_remedies(config: Config, degrees: Layout, *, is_gpu: bool) -> list[Remedy]:
    """Return the three changes of the configuration that would save most, each taken by itself."""

    def need_of(candidate: Config) -> MemoryNeed | None:
        again = layout(candidate.parallelism, degrees.world_size)
        if candidate.parallelism.zero != config.parallelism.zero and again.dp * again.cp == 1:
            # Nobody to divide the state with.
            return None
        return MemoryNeed(bytes_needed(candidate, again, is_gpu=is_gpu).total, fits=False)

    return what_saves_most(config, degrees.world_size, unless_refused(need_of), SAME_NODES, _NUM_REMEDIES)
