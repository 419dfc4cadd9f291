"""What the checkpoint benchmark measures with: a training, the limits, and the kernel's counters.

It knows nothing of checkpoints. All ranks call everything here together unless it says otherwise.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

_STEP_S = 0.05
# Steps on either side of a save that tell what a step takes without one.
_QUIET_STEPS = 12
_REDUCED_ELEMENTS = 1 << 18
_BLOCK_BYTES = 16 << 20
_SETTLE_S = 0.1


@dataclass(frozen=True)
class Loss:
    """What one save took from training, in seconds; the slowest rank's."""

    blocked_s: float
    lost_s: float
    whole_s: float
    step_s: float
    num_steps: int


class Training:
    """Steps of matrix products for about 50 ms and an all-reduce on the default group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size = 4096 if device.type == "cuda" else 512
        self._left = torch.randn(size, size, device=device)
        self._right = torch.randn(size, size, device=device)
        self._product = torch.empty(size, size, device=device)
        self._reduced = torch.zeros(_REDUCED_ELEMENTS, device=device)
        self._num_products = 8
        for _ in range(4):
            took = torch.tensor([statistics.median(self.steps(9))], device=device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            self._num_products = max(1, round(self._num_products * _STEP_S / took.item()))

    def step(self, is_done: bool) -> bool:
        """Do one step; return whether all ranks said that they are done."""
        for _ in range(self._num_products):
            torch.mm(self._left, self._right, out=self._product)
        self._reduced.fill_(float(is_done))
        dist.all_reduce(self._reduced)
        return int(self._reduced[0].item()) == dist.get_world_size()

    def steps(self, count: int) -> list[float]:
        """Do steps; return the seconds of each."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self.step(False)
            times.append(time.perf_counter() - began)
        return times

    def loss_by(self, save: Callable[[], Callable[[], None]], control: dist.ProcessGroup) -> Loss:
        """Return what `save` takes: it blocks, and what it returns is waited for while training goes on."""
        quiet = self.steps(_QUIET_STEPS)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(control)
        began = time.perf_counter()
        finish = save()
        blocked = time.perf_counter() - began
        rest = _Rest(finish)
        num_steps = 1
        while not self.step(rest.is_over):
            num_steps += 1
        elapsed = time.perf_counter() - began
        rest.check()
        quiet += self.steps(_QUIET_STEPS)
        step_s = statistics.median(quiet)
        lost = elapsed - num_steps * step_s
        blocked, lost, whole, step_s = slowest([blocked, lost, rest.ended - began, step_s], control)
        return Loss(blocked, lost, whole, step_s, num_steps)


class _Rest:
    """The rest of a save, waited for by a thread that does nothing else."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.is_over = False
        self.ended = 0.0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._wait, args=[finish])
        self._thread.start()
        # What was done while training was blocked is over now, not after a first step.
        self._thread.join(0.001)

    def _wait(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except Exception as error:  # noqa: BLE001  raised again by `check`, after the other ranks' steps
            self._error = error
        self.ended = time.perf_counter()
        self.is_over = True

    def check(self) -> None:
        self._thread.join()
        if self._error:
            raise self._error


def slowest(values: list[float], control: dist.ProcessGroup) -> list[float]:
    """Return the largest of each value over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=control)
    return tensor.tolist()


def summed(values: list[float], control: dist.ProcessGroup) -> list[float]:
    """Return the sum of each value over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, group=control)
    return tensor.tolist()


def timed(act: Callable[[], Any], control: dist.ProcessGroup) -> tuple[float, Any]:
    """Let all ranks act at once; return the slowest one's seconds and this one's result."""
    dist.barrier(control)
    began = time.perf_counter()
    result = act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return slowest([time.perf_counter() - began], control)[0], result


def copy_seconds(tensors: list[Tensor], num_bytes: int, control: dist.ProcessGroup) -> float:
    """Return the seconds of copying the first `num_bytes` of the tensors into host memory that is there.

    From a GPU into pinned memory: then it is the limit of PCIe.
    """
    pinned = tensors[0].is_cuda
    target = torch.empty(num_bytes // 4, dtype=torch.float32, pin_memory=pinned).zero_()
    pairs = []
    begin = 0
    for tensor in tensors:
        part = tensor.reshape(-1)[: target.numel() - begin]
        pairs.append((target[begin : begin + part.numel()], part))
        begin += part.numel()

    def copy() -> None:
        for place, part in pairs:
            place.copy_(part, non_blocking=pinned)

    return min(timed(copy, control)[0] for _ in range(3))


def write_seconds(folder: Path, num_bytes: int, control: dist.ProcessGroup, *, direct: bool) -> float | None:
    """Return the seconds of writing and syncing `num_bytes` in all, shared by the ranks.

    None where the file system knows no direct writes.
    """
    path = folder / f"limit-{dist.get_rank()}"
    block = mmap.mmap(-1, _BLOCK_BYTES)
    block.write(os.urandom(_BLOCK_BYTES))
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        path.unlink(missing_ok=True)
        return None

    def write() -> None:
        left = num_bytes // dist.get_world_size() // mmap.PAGESIZE * mmap.PAGESIZE
        while left:
            left -= os.write(descriptor, memoryview(block)[: min(left, _BLOCK_BYTES)])
        os.fsync(descriptor)

    seconds = timed(write, control)[0]
    os.close(descriptor)
    path.unlink()
    dist.barrier(control)
    return seconds


class MemoryPeak:
    """How far this process's resident memory rises above what it was when this was made. *Any rank*."""

    def __init__(self) -> None:
        # Freed memory that a thread or the allocator still holds would hide what is taken next.
        before, self._before = 0, _status("VmRSS")
        while before != self._before:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            time.sleep(_SETTLE_S)
            before, self._before = self._before, _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def rise(self) -> int:
        """Return the bytes."""
        return max(0, _status("VmHWM") - self._before)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def kernel_bytes(key: str) -> int:
    """Return a counter of /proc/self/io: `read_bytes` from the disk, `rchar` asked for. *Any rank*."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def can_drop_caches() -> bool:
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def drop_caches() -> None:
    """Drop the whole machine's page cache; what is not on the disk yet stays. *Rank 0 only*, as root."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


def warm_caches(folder: Path) -> None:
    """Read every file once. *Rank 0 only*."""
    block = bytearray(_BLOCK_BYTES)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass


class CountingFileSystem(LocalFileSystem):
    """Local files by fsspec, `counted://`, with the bytes that were read by this process."""

    protocol = "counted"
    num_bytes = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.removeprefix("counted://"))
        return stripped

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_options: Any) -> bytes:
        with LocalFileSystem(auto_mkdir=False).open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin, stop, _ = slice(start, end).indices(size)
            file.seek(begin)
            content: bytes = file.read(max(0, stop - begin))
        CountingFileSystem.num_bytes += len(content)
        return content

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        file = super()._open(path, mode, block_size, **options)
        return _CountingFile(file) if "r" in mode else file


class _CountingFile:
    """A file that counts what is read of it, and is otherwise the file itself."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _CountingFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def read(self, size: int = -1) -> bytes:
        content: bytes = self._file.read(size)
        CountingFileSystem.num_bytes += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.f.readinto(buffer)
        CountingFileSystem.num_bytes += count
        return count
