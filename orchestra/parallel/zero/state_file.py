"""The optimizer's state on disk (`parallelism.offload=optimizer_disk`): masters and moments of one rank in a
file, of which memory holds two units at a time.

An update passes over the units in one order. While a unit is updated in one buffer, a thread writes the last
one from the other buffer and reads the next one into it, past the page cache (O_DIRECT). The first two units
of the next update are read while the model computes. Each unit is read back with the checksum with which it
was written, or training ends.

Saves and restores see all of the file as tensors: a mapping of it, used between updates alone. The file is
scratch: it has no name any more once it is open, so that the disk has it back however the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from checkpointing.integrity import checksums
from checkpointing.saving.staging import aligned_memory
from checkpointing.storage.local import ALIGNMENT, open_scratch
from orchestra.errors import TrainingError
from orchestra.sizes.units import binary

NUM_BUFFERS = 2
# Bytes read at once where checksums are taken of what lies in the page cache.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class UnitState:
    """Masters and two moments of a unit's owned range, flat. `outgoing` is memory for the parameters on their
    way to a GPU that keeps them in another type than the masters', else None.
    """

    masters: Tensor
    moments: tuple[Tensor, Tensor]
    outgoing: Tensor | None = None


@dataclass(frozen=True)
class StateLayout:
    """What one rank's file holds: of each unit, by number, `sizes` elements in three parts, masters and two
    moments. `titles` name the units in errors. `outgoing` is the type of `UnitState.outgoing`.
    """

    sizes: tuple[int, ...]
    titles: tuple[str, ...]
    master: torch.dtype
    moment: torch.dtype
    outgoing: torch.dtype | None

    @property
    def region_bytes(self) -> tuple[int, ...]:
        """Bytes of each unit in the file: whole pages."""
        each = self.master.itemsize + 2 * self.moment.itemsize
        return tuple(-(-size * each // ALIGNMENT) * ALIGNMENT for size in self.sizes)

    @property
    def begins(self) -> tuple[int, ...]:
        """Where each unit begins in the file."""
        regions = self.region_bytes
        return tuple(sum(regions[:number]) for number in range(len(regions)))

    def cut(self, memory: Tensor, number: int, outgoing: Tensor | None = None) -> UnitState:
        """Return the parts of a unit's region, given as bytes."""
        size = self.sizes[number]
        end = size * self.master.itemsize
        length = size * self.moment.itemsize
        first, second = (memory[end + at : end + at + length].view(self.moment) for at in (0, length))
        kept = None if outgoing is None else outgoing[:size]
        return UnitState(memory[:end].view(self.master), (first, second), kept)


class StateFile:
    """One rank's state on disk, and the two buffers through which it is updated. *Any rank*.

    `mapped` may be written until the first `passes`, and after `reopen` until `seal`. Between `verify` and
    the next `passes` it may be read. Raises TrainingError wherever the disk fails, or gives back other bytes
    than it was given.
    """

    def __init__(self, folder: str, layout: StateLayout, *, is_fake: bool, pinned: bool) -> None:
        """Take the whole file and the memory of the buffers. With `is_fake` nothing but tensors is made."""
        self._layout = layout
        self._regions, self._begins = layout.region_bytes, layout.begins
        # The next forward pass needs the last unit first.
        self.order = tuple(reversed(range(len(layout.sizes))))
        num_bytes, largest = sum(self._regions), max(self._regions)
        self._file = None if is_fake else _ScratchFile(folder, num_bytes)
        self._pool = None if is_fake else ThreadPoolExecutor(1, thread_name_prefix="state file")
        if self._file is None:
            self._mapped = torch.zeros(num_bytes, dtype=torch.uint8)
            self._buffers = [torch.zeros(largest, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
        else:
            self._mapped = torch.frombuffer(self._file.mapping, dtype=torch.uint8)
            self._buffers = [aligned_memory(largest, pinned=pinned) for _ in range(NUM_BUFFERS)]
        self._outgoing: list[Tensor] | None = None
        if layout.outgoing is not None:
            size, is_pinned = max(layout.sizes), pinned and not is_fake
            self._outgoing = [
                torch.zeros(size, dtype=layout.outgoing, pin_memory=is_pinned) for _ in range(NUM_BUFFERS)
            ]
        self._is_pinned = pinned and not is_fake
        # What each buffer waits for, once its unit is asked for.
        self._under_way: list[Future[None] | None] = [None] * NUM_BUFFERS
        # By unit; None where the mapping may have been written since they were taken.
        self._checksums: list[str] | None = None

    @property
    def buffers(self) -> list[Tensor]:
        """The memory that is held for the state."""
        return [*self._buffers, *(self._outgoing or [])]

    def mapped(self, number: int) -> UnitState:
        """Return a unit's state as the file holds it."""
        begin = self._begins[number]
        return self._layout.cut(self._mapped[begin : begin + self._regions[number]], number)

    def passes(self) -> Iterator[UnitState]:
        """Yield each unit's state in memory, in `order`, to be updated before the next one is asked for."""
        if self._file is not None and self._checksums is None:
            self.seal()
        for place, number in enumerate(self.order):
            slot = place % NUM_BUFFERS
            self._ask(slot, place)
            self._await(slot)
            self._ask((place + 1) % NUM_BUFFERS, place + 1)
            outgoing = None if self._outgoing is None else self._outgoing[slot]
            yield self._layout.cut(self._buffers[slot], number, outgoing)
            # What follows in the same buffer, at the end the first units of the next update.
            following = place + NUM_BUFFERS if place + NUM_BUFFERS < len(self.order) else slot
            self._write(slot, number, self.order[following])

    def verify(self) -> None:
        """Make the mapping ready to be read: all of it written, and the bytes it shows checked."""
        if self._file is None or self._checksums is None:
            return
        self._await_all()
        self._file.forget_cached()
        for number, expected in enumerate(self._checksums):
            if self._checksum_of_cached(number) != expected:
                raise self._damaged(number)

    def reopen(self) -> None:
        """Make the mapping ready to be written."""
        self._await_all()
        self._under_way = [None] * NUM_BUFFERS
        self._checksums = None
        if self._file is not None:
            self._file.forget_cached()

    def seal(self) -> None:
        """Bring to the disk what was written through the mapping, and take its checksums."""
        self._await_all()
        self._under_way = [None] * NUM_BUFFERS
        if self._file is None:
            return
        with self._explained("cannot be written"):
            self._file.flush()
        self._checksums = [self._checksum_of_cached(number) for number in range(len(self._regions))]
        self._file.forget_cached()

    def close(self) -> None:
        """End the thread and give up the file; whoever has tensors of the mapping may still read them."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def _ask(self, slot: int, place: int) -> None:
        """Start to read the unit at a place of the order, if there is one, unless that is under way."""
        if self._pool is None or place >= len(self.order) or self._under_way[slot] is not None:
            return
        self._under_way[slot] = self._pool.submit(self._read, slot, self.order[place])

    def _write(self, slot: int, number: int, following: int) -> None:
        """Start to write the unit in a buffer, and then to read the `following` one into it."""
        if self._pool is None:
            return
        left: torch.cuda.Event | None = None
        if self._is_pinned:
            # Its parameters may still be on their way to the GPU.
            left = torch.cuda.Event()  # type: ignore[no-untyped-call]
            left.record()

        def replace() -> None:
            self._write_now(slot, number)
            if left is not None:
                left.synchronize()
            self._read(slot, following)

        self._under_way[slot] = self._pool.submit(replace)

    def _await(self, slot: int) -> None:
        future = self._under_way[slot]
        if future is not None:
            future.result()

    def _await_all(self) -> None:
        for slot in range(NUM_BUFFERS):
            self._await(slot)

    # In the thread.

    def _write_now(self, slot: int, number: int) -> None:
        assert self._file is not None
        assert self._checksums is not None
        content = _bytes_of(self._buffers[slot])[: self._regions[number]]
        self._checksums[number] = checksums.of_chunk(content)
        with self._explained("cannot be written", number):
            self._file.write(content, self._begins[number])

    def _read(self, slot: int, number: int) -> None:
        assert self._file is not None
        assert self._checksums is not None
        content = _bytes_of(self._buffers[slot])[: self._regions[number]]
        with self._explained("cannot be read", number):
            self._file.read(content, self._begins[number])
        if checksums.of_chunk(content) != self._checksums[number]:
            raise self._damaged(number)

    def _checksum_of_cached(self, number: int) -> str:
        """Return the checksum of a unit's bytes as the mapping shows them."""
        assert self._file is not None
        begin, length = self._begins[number], self._regions[number]
        checksum = checksums.ChunkChecksum()
        with self._explained("cannot be read", number):
            for piece in self._file.cached(begin, length):
                checksum.update(piece)
        return str(checksum.hexdigest())

    def _place(self, number: int) -> str:
        begin, end = self._begins[number], self._begins[number] + self._regions[number]
        return f"unit {number} ({self._layout.titles[number]}), bytes {begin:,} to {end:,}"

    def _damaged(self, number: int) -> TrainingError:
        assert self._file is not None
        return TrainingError(
            f"{self._file.title}: {self._place(number)}: what was read is not what was written: the disk or "
            "the memory of this node is damaged; the next attempt goes on from the newest checkpoint; if it "
            "happens again, leave the node out (cluster.exclude) or give another parallelism.offload_dir"
        )

    @contextlib.contextmanager
    def _explained(self, what: str, number: int | None = None) -> Iterator[None]:
        assert self._file is not None
        try:
            yield
        except OSError as error:
            where = "" if number is None else f": {self._place(number)}"
            raise TrainingError(
                f"{self._file.title}{where} {what}: {error.strerror or error}; check that disk, or give "
                "another folder (parallelism.offload_dir)"
            ) from error


class _ScratchFile:
    """A file without a name, all of its size taken at once.

    `write` and `read` go past the page cache where the file system lets them; `mapping` and `cached` show
    the same bytes through it. Raises OSError, on construction TrainingError.
    """

    def __init__(self, folder: str, num_bytes: int) -> None:
        self._folder = folder
        self.title = f"the optimizer's state in {folder}"
        try:
            self._descriptor = open_scratch(folder, num_bytes)
        except OSError as error:
            raise TrainingError(_not_made(folder, num_bytes, error)) from error
        self._direct = _past_the_cache(self._descriptor)
        self.close = weakref.finalize(self, _close_all, {self._descriptor, self._direct})
        if self._direct == self._descriptor:
            self._tell_cached()
        self.mapping = mmap.mmap(self._descriptor, num_bytes)

    def write(self, content: memoryview, begin: int) -> None:
        """Write whole pages from an aligned address on."""
        self._transfer(os.pwritev, content, begin)
        if self._direct == self._descriptor:
            os.fdatasync(self._descriptor)  # what is not on the disk yet stays in the cache
            os.posix_fadvise(self._descriptor, begin, len(content), os.POSIX_FADV_DONTNEED)

    def read(self, content: memoryview, begin: int) -> None:
        """Fill whole pages from an aligned address on."""
        self._transfer(os.preadv, content, begin)
        if self._direct == self._descriptor:
            os.posix_fadvise(self._descriptor, begin, len(content), os.POSIX_FADV_DONTNEED)

    def cached(self, begin: int, length: int) -> Iterator[memoryview]:
        """Yield some bytes as the page cache holds them: they are read from the disk where it does not.

        Not through the mapping: a disk that fails then gives an error, there it would end the process.
        """
        piece = memoryview(bytearray(min(length, _PIECE_BYTES)))
        for at in range(begin, begin + length, _PIECE_BYTES):
            wanted = piece[: min(_PIECE_BYTES, begin + length - at)]
            _transfer_all(os.preadv, self._descriptor, wanted, at)
            yield wanted

    def flush(self) -> None:
        """Bring what the mapping was given to the disk."""
        self.mapping.flush()

    def forget_cached(self) -> None:
        """Let the page cache go, but for what is not on the disk."""
        self.mapping.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _transfer(self, act: Any, content: memoryview, begin: int) -> None:
        try:
            _transfer_all(act, self._direct, content, begin)
        except OSError as error:
            if error.errno != errno.EINVAL or self._direct == self._descriptor:
                raise
            # It asks for larger blocks than any disk in use.
            self._direct = self._descriptor
            self._tell_cached()
            _transfer_all(act, self._direct, content, begin)

    def _tell_cached(self) -> None:
        words = "no direct I/O there: the optimizer's state goes through the page cache"
        sys.stderr.write(f"parallelism.offload_dir={self._folder}: {words}\n")


def _past_the_cache(descriptor: int) -> int:
    """Open a file again, past the page cache; return it as it is where the file system does not do that."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return descriptor


def _not_made(folder: str, num_bytes: int, error: OSError) -> str:
    """Return why there is no file, in words."""
    found = (
        f"parallelism.offload_dir={folder}: this rank's masters and moments take {binary(num_bytes)} there"
    )
    if not Path(folder).is_dir():
        return f"{found}, and it is no folder of this node; give one on this node's own disk"
    file_system = os.statvfs(folder)
    free = binary(file_system.f_bavail * file_system.f_frsize)
    return (
        f"{found}: {error.strerror} ({free} are free); free some, give another folder, or share the state "
        "among more ranks (a higher parallelism.zero, more nodes)"
    )


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _transfer_all(act: Any, descriptor: int, content: memoryview, begin: int) -> None:
    done = 0
    while done < len(content):
        count = act(descriptor, [content[done:]], begin + done)
        if count <= 0:
            raise OSError(errno.EIO, "the file is shorter than it was made")
        done += count


def _bytes_of(memory: Tensor) -> memoryview:
    return memoryview(cast(Any, memory.numpy()))
