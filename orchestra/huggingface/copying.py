"""One chunk of a checkpoint on its way into a safetensors file: read, verified, rounded, written.

A chunk may be any box of its tensor; in the file the tensor lies as a whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from checkpointing.errors import DamagedError
from checkpointing.format import checksums
from checkpointing.format.boxes import Box
from checkpointing.format.dtypes import ITEM_BYTES
from checkpointing.format.manifest import Chunk, Manifest
from checkpointing.shelf.catalog import file_path
from checkpointing.storage import Storage
from orchestra.errors import DataError
from orchestra.huggingface.parameters import CHECKPOINT_PREFIX, hugging_face_name
from orchestra.huggingface.rounding import converted, stored
from orchestra.huggingface.shard_plan import PlannedFile


@dataclass(frozen=True)
class Copy:
    """A chunk of tensor `name` (of `shape` as a whole) from the checkpoint of `step`, its numbers from type
    `source` to type `target`, into a file in which the tensor begins at byte `begin`.
    """

    name: str
    step: int
    chunk: Chunk
    shape: tuple[int, ...]
    source: str
    target: str
    begin: int


def copies_into(file: PlannedFile, manifest: Manifest, dtype: str) -> Iterator[Copy]:
    """Yield what fills a planned file."""
    names = (name for name in manifest.tensors if name.startswith(CHECKPOINT_PREFIX))
    in_checkpoint = {hugging_face_name(name.removeprefix(CHECKPOINT_PREFIX)): name for name in names}
    for tensor, begin in file.begins.items():
        name = in_checkpoint[tensor]
        found = manifest.tensors[name]
        for chunk in found.chunks:
            if chunk.num_bytes:
                yield Copy(name, manifest.step, chunk, found.shape, found.dtype, dtype, begin)


def copy_chunk(copy: Copy, storage: Storage, descriptor: int) -> None:
    """Read, verify, round and write one chunk.

    Raises DamagedError where its bytes are not the manifest's, DataError where numbers leave the range of the
    new type, StorageError, OSError.
    """
    chunk = copy.chunk
    content = bytearray(chunk.num_bytes)
    storage.read_into(file_path(copy.step, chunk.file), chunk.begin, memoryview(content))
    found = checksums.of_chunk(content)
    if found != chunk.checksum:
        what = f"the bytes from {chunk.begin} on have checksum {found}, the manifest says {chunk.checksum}"
        raise DamagedError(what, file=chunk.file, tensor=copy.name)
    numbers, num_overflowed = converted(stored(content, copy.source), copy.source, copy.target)
    if num_overflowed:
        raise DataError(
            f"{copy.name}: {num_overflowed} of its numbers are beyond the range of {copy.target}; "
            "export with --dtype bf16 or fp32"
        )
    box = chunk.box
    in_chunk = numbers.reshape(box.shape)
    for index, first in runs(box, copy.shape):
        write_at(descriptor, in_chunk[index].tobytes(), copy.begin + first * ITEM_BYTES[copy.target])


def runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the parts of a box that lie side by side in the whole row-major tensor of `shape`: the index of
    each in the box, and the flat index in the tensor of its first element.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(map(int.__mul__, box.offsets, strides))
    num_outer = len(shape)
    while num_outer > 0 and box.shape[num_outer - 1] == shape[num_outer - 1]:
        num_outer -= 1
    # The dims from `num_outer` on are whole; the one before is a stretch of them.
    num_outer = max(0, num_outer - 1)
    for index in np.ndindex(*box.shape[:num_outer]):
        yield index, first + sum(map(int.__mul__, index, strides))


def write_at(descriptor: int, content: bytes | memoryview, begin: int) -> None:
    """Write all of `content` from byte `begin` of a file on."""
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], begin + done)
