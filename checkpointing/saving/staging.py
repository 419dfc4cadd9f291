"""Host memory in which a save's files are put together: the only part of a save that training waits for.

Taken once and used again by every save; page-locked where the tensors lie on a GPU.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from checkpointing.errors import MismatchError
from checkpointing.planning.write_plan import Piece
from checkpointing.saving.images import Image
from checkpointing.shards import Shard, torch_dtype
from checkpointing.storage.local import ALIGNMENT


def staging_bytes(images: Sequence[Image]) -> int:
    """Return the host memory that files take together while they are written."""
    return sum(-(-image.num_bytes // ALIGNMENT) * ALIGNMENT for image in images)


class Staging:
    """The memory of a rank's files, each from an aligned address on."""

    def __init__(self, images: Sequence[Image], *, pinned: bool) -> None:
        """Take the memory, touch all of it, and write the headers, which never change."""
        self.images = images
        self._begins = [staging_bytes(images[:index]) for index in range(len(images))]
        self._memory = _aligned_memory(staging_bytes(images), pinned=pinned)
        self._pinned = pinned
        self._copies: list[tuple[Tensor, int, tuple[slice, ...]]] = []
        for index, image in enumerate(images):
            self.content(index)[: len(image.header)] = image.header

    def content(self, index: int) -> memoryview:
        """Return the bytes of file `index`, writable."""
        begin = self._begins[index]
        return memoryview(cast(Any, self._memory.numpy()))[begin : begin + self.images[index].num_bytes]

    def copy_in(self, shards: Sequence[Shard]) -> None:
        """Copy this rank's pieces out of its shards; returns when the shards may change again.

        The shards are those that the images were planned for, in the same order at every call.
        """
        if not self._copies:
            self._copies = list(self._planned(shards))
        with torch.no_grad():
            for target, index, part in self._copies:
                target.copy_(shards[index].tensor.detach()[part], non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()

    def _planned(self, shards: Sequence[Shard]) -> Iterator[tuple[Tensor, int, tuple[slice, ...]]]:
        """Yield where each piece goes, the shard that holds it, and the part of that shard."""
        holders: dict[str, list[int]] = {}
        for index, shard in enumerate(shards):
            holders.setdefault(shard.name, []).append(index)
        for file_begin, image in zip(self._begins, self.images, strict=True):
            for piece, begin in zip(image.pieces, image.begins, strict=True):
                index = _holder(piece, holders, shards)
                place = self._memory[file_begin + begin :][: piece.num_bytes]
                target = place.view(torch_dtype(piece.dtype)).view(piece.box.shape)
                yield target, index, piece.box.within(shards[index].box)


def _holder(piece: Piece, holders: Mapping[str, Sequence[int]], shards: Sequence[Shard]) -> int:
    for index in holders.get(piece.name, ()):
        box = shards[index].box
        if box == piece.box or box.overlap(piece.box) == piece.box:
            return index
    raise MismatchError(f"{piece.name}: prepare was told of a shard that save was not given")


def _aligned_memory(num_bytes: int, *, pinned: bool) -> Tensor:
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
