"""Host memory in which a save's files are put together: the only part of a save that training waits for.

Taken once and used again by every save; page-locked where the tensors lie on a GPU. With
`Options.staging_dir` it is a file's instead, which the kernel brings to the disk as it needs the memory.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from checkpointing.checkpoint_errors import MismatchError, StorageError
from checkpointing.plans import Image, TensorPiece
from checkpointing.shards import Shard, torch_dtype
from checkpointing.storage.local import ALIGNMENT, open_scratch


def staging_bytes(images: Sequence[Image]) -> int:
    """Return the host memory that files take together while they are written."""
    return sum(map(_aligned_bytes, images))


def _aligned_bytes(image: Image) -> int:
    return -(-image.num_bytes // ALIGNMENT) * ALIGNMENT


class Staging:
    """The memory of a rank's files, each from an aligned address on."""

    def __init__(
        self,
        images: Sequence[Image],
        *,
        pinned: bool,
        folder: str | None = None,
        memory: torch.Tensor | None = None,
        spare_bytes: int = 0,
    ) -> None:
        """Take the memory, `spare_bytes` more than it needs, and touch all of it, or use `memory`, which is
        large enough and nobody else's; write the headers, which never change.
        """
        self.images = images
        self._begins = list(itertools.accumulate(map(_aligned_bytes, images), initial=0))[:-1]
        if memory is None:
            size = staging_bytes(images) + spare_bytes
            memory = aligned_memory(size, pinned=pinned) if folder is None else _file_memory(size, folder)
        self.memory = memory
        self._pinned = pinned
        self._copies: list[tuple[torch.Tensor, int, tuple[slice, ...]]] = []
        self._pieces: list[TensorPiece] = []
        for index, image in enumerate(images):
            self.content(index)[: len(image.header)] = image.header

    def content(self, index: int) -> memoryview:
        """Return the bytes of file `index`, writable."""
        begin = self._begins[index]
        return memoryview(cast(Any, self.memory.numpy()))[begin : begin + self.images[index].num_bytes]

    def copy_in(self, shards: Sequence[Shard]) -> None:
        """Copy this rank's pieces out of its shards; returns when the shards may change again.

        The shards are those that the images were planned for, in the same order at every call.
        """
        pieces = [shard.piece for shard in shards]
        if not self._copies:
            self._copies, self._pieces = list(self._planned(shards)), pieces
        elif pieces != self._pieces:
            raise MismatchError("give save the shards that it was given first, in the same order")
        with torch.no_grad():
            for target, index, part in self._copies:
                target.copy_(shards[index].tensor.detach()[part], non_blocking=self._pinned)
        if self._pinned:
            # Each copy is on the stream of its tensor's device.
            for device in {shard.tensor.device for shard in shards if shard.tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()

    def _planned(self, shards: Sequence[Shard]) -> Iterator[tuple[torch.Tensor, int, tuple[slice, ...]]]:
        """Yield where each piece goes, the shard that holds it, and the part of that shard."""
        holders: dict[str, list[int]] = {}
        for index, shard in enumerate(shards):
            holders.setdefault(shard.name, []).append(index)
        for file_begin, image in zip(self._begins, self.images, strict=True):
            for piece, begin in zip(image.pieces, image.begins, strict=True):
                index = _holder(piece, holders, shards)
                place = self.memory[file_begin + begin :][: piece.num_bytes]
                target = place.view(torch_dtype(piece.dtype)).view(piece.box.shape)
                yield target, index, piece.box.within(shards[index].box)


def _holder(piece: TensorPiece, holders: Mapping[str, Sequence[int]], shards: Sequence[Shard]) -> int:
    for index in holders.get(piece.name, ()):
        box = shards[index].box
        if box == piece.box or box.overlap(piece.box) == piece.box:
            return index
    raise MismatchError(
        f"{piece.name}: prepare was given a shard of it that save was not given; give both the same shards"
    )


def aligned_memory(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Return bytes (uint8) that begin where direct I/O needs it, all of them there at once."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if pinned:
        memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
        skip = -memory.data_ptr() % ALIGNMENT
        return memory[skip : skip + num_bytes]
    pages = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    # Touched now: a save is then a copy, and memory that is not there is missed before training starts.
    return torch.frombuffer(pages, dtype=torch.uint8).zero_()


def _file_memory(num_bytes: int, folder: str) -> torch.Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        descriptor = open_scratch(folder, num_bytes)
        try:
            return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(
            f"{folder}: the file of {num_bytes:,} bytes in which this rank's saves are put together cannot "
            f"be made: {error.strerror or error}; free some of that disk, or give another folder"
        ) from error
