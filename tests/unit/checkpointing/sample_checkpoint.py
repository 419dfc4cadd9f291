"""Writes small checkpoints without torch, by the library's own plan, images and commit; and large files."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpointing import catalog
from checkpointing.box import Box
from checkpointing.integrity import checksums
from checkpointing.integrity.shard_digest import part_digest
from checkpointing.lineage import Base
from checkpointing.manifest import Chunk, File, Manifest, Tensor
from checkpointing.plans import Image, TensorPiece, images, write_plan
from checkpointing.storage import Storage, open_storage

Arrays = Mapping[str, npt.NDArray[Any]]

_DTYPES = {"float32": "F32", "uint16": "BF16", "int64": "I64", "uint8": "U8"}


def memory() -> Storage:
    """Return an empty storage in memory."""
    return open_storage(f"memory://{uuid.uuid4()}/checkpoints")


def send(storage: Storage, path: str, content: bytes | bytearray, block_bytes: int = 3 << 20) -> None:
    """Write a large file, a block at a time."""
    file = storage.create(path, len(content))
    for begin in range(0, len(content), block_bytes):
        file.write(memoryview(content)[begin : begin + block_bytes])
    file.commit()


def arrays(seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Return a state: odd shapes, four widths, a scalar and an empty tensor."""
    random = np.random.default_rng(seed)
    return {
        "model.rows": random.standard_normal((37, 13)).astype(np.float32),
        "model.embedding": random.standard_normal((300, 40)).astype(np.float32),
        "model.half": random.integers(0, 1 << 16, (25, 4, 3), dtype=np.uint16),
        "optimizer.step": np.array(random.integers(1, 1 << 60), dtype=np.int64),
        "rng.cpu": random.integers(0, 256, 5056, dtype=np.uint8),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }


def write(
    storage: Storage, step: int, values: Arrays | None = None, *, generation: int = 0, **more: Any
) -> Manifest:
    """Write and commit the checkpoint of `step`: each rank holds its rows of every tensor."""
    draft = catalog.draft(storage, step, generation, 0)
    manifest = write_draft(storage, draft, values, generation=generation, **more)
    catalog.commit(storage, draft, manifest)
    return manifest


def write_draft(
    storage: Storage,
    draft: catalog.Draft,
    values: Arrays | None = None,
    *,
    world_size: int = 2,
    generation: int = 0,
    state: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a checkpoint's files and return the manifest, which is not written."""
    values = arrays() if values is None else values
    plan = write_plan([_held(values, rank, world_size) for rank in range(world_size)])
    files: dict[str, File] = {}
    parts: dict[str, list[tuple[Chunk, int]]] = {name: [] for name in values}
    for rank, pieces in enumerate(plan):
        for image in images(pieces, rank):
            name = draft.prefix + image.name
            content = _content(image, values)
            send(storage, f"{draft.folder}/{name}", content)
            files[name] = File(len(content), checksums.of_file(content))
            for piece, begin in zip(image.pieces, image.begins, strict=True):
                part = content[begin : begin + piece.num_bytes]
                chunk = Chunk(piece.box, name, begin, len(part), checksums.of_chunk(part))
                parts[piece.name].append((chunk, part_digest(part, piece.dtype, piece.box)))
    tensors = {
        name: Tensor(
            _DTYPES[str(values[name].dtype)],
            values[name].shape,
            checksums.written(checksums.combined(digest for _, digest in chunks)),
            tuple(chunk for chunk, _ in chunks),
        )
        for name, chunks in parts.items()
    }
    layout, state = {"dp": world_size}, dict(state or {})
    return Manifest(
        draft.step, generation, 1.5, layout, tensors, files, state, attempt=generation, base=Base(0)
    )


def _held(values: Arrays, rank: int, world_size: int) -> Sequence[TensorPiece]:
    pieces = []
    for name, array in values.items():
        box = Box.whole(array.shape)
        if array.ndim and array.size:
            begin, end = (len(array) * number // world_size for number in (rank, rank + 1))
            box = Box((begin, *box.offsets[1:]), (end - begin, *box.shape[1:]))
        pieces.append(TensorPiece(name, box, _DTYPES[str(array.dtype)], array.shape))
    return pieces


def _content(image: Image, values: Arrays) -> bytearray:
    content = bytearray(image.num_bytes)
    content[: len(image.header)] = image.header
    for piece, begin in zip(image.pieces, image.begins, strict=True):
        whole = Box.whole(piece.shape)
        content[begin : begin + piece.num_bytes] = values[piece.name][piece.box.within(whole)].tobytes()
    return content
