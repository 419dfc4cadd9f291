"""The process that reads a DCP folder and writes what it holds as a checkpoint of ours.

    python -m checkpointing.dcp.dcp_import  < request.json  > answer.json

It is a process of its own since what it reads was written by others: whatever that does to it, it does to
nobody else. Parts are read and written one after the other, so its memory is a few times the largest one.
The answer is one line of JSON; where the folder cannot be taken, a sentence on stderr and exit code 3.

The request: `act` (`describe`: what the model's tensors are; `import`: write it), `source`, `target`, `step`,
`model` (the key of the model's state dict), `model_only`, and `renames`, which names the tensors of the model
that are written, each as `to`; with `split` and `order` as `view(split).permute(order)`, in its own shape.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from checkpointing import catalog
from checkpointing.box import ITEM_BYTES, Box, contiguous_parts
from checkpointing.catalog import Draft
from checkpointing.checkpoint_errors import CheckpointError, MismatchError, StorageError
from checkpointing.dcp.dcp_folder import DcpChunk, DcpFolder, open_dcp
from checkpointing.dcp.loop_state import LoopState, loop_state, steps_in
from checkpointing.integrity import checksums
from checkpointing.integrity.shard_digest import part_digest
from checkpointing.lineage import Base
from checkpointing.manifest import Chunk, File, Manifest, Tensor
from checkpointing.plans import Image, TensorPiece, grouped, image
from checkpointing.shards import as_bytes
from checkpointing.storage import Storage, open_storage

EXIT_REFUSED = 3
# A storage that is no local folder remembers what it was sent until the file is whole.
_MAX_FILE_BYTES = 1 << 30
_MAX_PIECE_BYTES = 32 << 20
_HEADER_ALIGNMENT = 4096
_STEP_IN_NAME = re.compile(r"step\D?(\d+)/?$")


@dataclass(frozen=True)
class _Part:
    """What is read as one: a part of tensor `source` that becomes the elements `box` of tensor `name`; with
    `view`, the whole tensor, its elements in another order.
    """

    name: str
    source: str
    chunk: DcpChunk | None
    box: Box
    view: tuple[Sequence[int], Sequence[int]] | None = None

    def read(self, folder: DcpFolder) -> torch.Tensor:
        if self.chunk is not None:
            return folder.chunk(self.source, self.chunk)
        whole = folder.whole(self.source)
        if self.view is None:
            return whole
        split, order = self.view
        return whole.view(*split).permute(*order).reshape(whole.shape).contiguous()


def main() -> int:
    """Do what the request on stdin asks for, and return the exit code."""
    try:
        answer = answered(json.load(sys.stdin))
    except (CheckpointError, MemoryError, RecursionError) as error:
        said = " ".join(str(error).split()) or f"too large or too deep ({type(error).__name__})"
        sys.stderr.write(f"{said}\n")
        return EXIT_REFUSED
    sys.stdout.write(f"{json.dumps(answer)}\n")
    return 0


def answered(request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what is asked for and return the answer. Raises CheckpointError."""
    folder = open_dcp(open_storage(request["source"]))
    return _describe(folder, request) if request["act"] == "describe" else _import(folder, request)


def _describe(folder: DcpFolder, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an import would write, and what the model's tensors are."""
    state = loop_state(folder, request["model"], model_only=request["model_only"])
    parts = list(_parts(folder, state.tensors, request.get("renames")))
    num_bytes = sum(piece.num_bytes for part in parts for piece in _pieces(part, folder))
    tensors = {
        ours.removeprefix("model."): [folder.tensors[name].dtype, folder.tensors[name].shape]
        for ours, name in state.tensors.items()
        if ours.startswith("model.")
    }
    return {**_about(state, _step(request, state.extra), num_bytes), "tensors": tensors}


def _import(folder: DcpFolder, request: Mapping[str, Any]) -> dict[str, Any]:
    state = loop_state(folder, request["model"], model_only=request["model_only"])
    step = _step(request, state.extra)
    parts = list(_parts(folder, state.tensors, request.get("renames")))
    document = {"optimizer": state.optimizer, "extra": state.extra}
    manifest = _write(folder, parts, open_storage(request["target"]), step, document)
    return _about(state, step, sum(tensor.num_bytes for tensor in manifest.tensors.values()))


def _about(state: LoopState, step: int, num_bytes: int) -> dict[str, Any]:
    return {
        "step": step,
        "num_bytes": num_bytes,
        "num_tensors": len(state.tensors),
        "has_optimizer": state.optimizer is not None,
        "extra": list(state.extra),
        "left_out": list(state.left_out),
    }


def _step(request: Mapping[str, Any], extra: Mapping[str, Any]) -> int:
    if request["step"] is not None:
        return int(request["step"])
    found = steps_in(extra)
    in_name = _STEP_IN_NAME.search(request["source"])
    if not found and in_name is not None:
        found = {int(in_name[1])}
    if len(found) != 1:
        steps = ", ".join(map(str, sorted(found)))
        said = f"says several steps ({steps})" if found else "does not say its step"
        raise MismatchError(f"{request['source']} {said}: give --step N")
    return found.pop()


def _parts(
    folder: DcpFolder, tensors: Mapping[str, str], renames: Mapping[str, Any] | None
) -> Iterator[_Part]:
    for ours, source in tensors.items():
        tensor, short = folder.tensors[source], ours.removeprefix("model.")
        rename: dict[str, Any] | None = {"to": short} if renames is None else renames.get(short)
        if rename is None:
            continue
        name = ours if renames is None else f"model.{rename['to']}"
        if tensor.dtype not in ITEM_BYTES:
            raise MismatchError(
                f"{source} is {tensor.dtype}, for which safetensors has no dtype: expected one of "
                f"{', '.join(ITEM_BYTES)}"
            )
        if "split" in rename:
            yield _Part(name, source, None, Box.whole(tensor.shape), (rename["split"], rename["order"]))
        elif not tensor.chunks:
            yield _Part(name, source, None, Box.whole(tensor.shape))
        else:
            yield from (_Part(name, source, chunk, chunk.box) for chunk in tensor.chunks)


def _write(
    folder: DcpFolder, parts: Iterable[_Part], storage: Storage, step: int, state: Mapping[str, Any]
) -> Manifest:
    """Write the parts as the checkpoint of a step, in a place that has none, and return its manifest."""
    there = catalog.committed_steps(storage)
    if there:
        raise MismatchError(
            f"{storage.place} holds checkpoints already (of step {there[-1]}): give an empty place"
        )
    # Wide dtypes first, so that each is aligned to its own width.
    ordered = sorted(parts, key=lambda part: -ITEM_BYTES[folder.tensors[part.source].dtype])
    pieces = [(part, piece) for part in ordered for piece in _pieces(part, folder)]
    num_bytes, free = sum(piece.num_bytes for _, piece in pieces), storage.free_bytes()
    if free is not None and free < num_bytes:
        raise StorageError(f"{storage.place}: {free:,} bytes are free, the checkpoint takes {num_bytes:,}")
    catalog.remove_leftovers(storage)
    draft = catalog.draft(storage, step, 1, 0)
    written = _Written(folder, storage, draft)
    try:
        for index, group in enumerate(grouped(pieces, lambda each: each[1].num_bytes, _MAX_FILE_BYTES)):
            name = f"{draft.prefix}00000-{index:02d}.safetensors"
            written.add(image(name, [piece for _, piece in group], _HEADER_ALIGNMENT), [p for p, _ in group])
        storage.sync(draft.folder)
        manifest = Manifest(
            step=step,
            generation=1,
            created=time.time(),
            layout={"imported_from": folder.storage.place},
            tensors=written.tensors(),
            files=written.files,
            state=state,
            attempt=1,
            base=Base(0),
        )
        catalog.commit(storage, draft, manifest)
    except BaseException:
        catalog.discard(storage, draft)
        raise
    return manifest


def _pieces(part: _Part, folder: DcpFolder) -> Iterator[TensorPiece]:
    tensor = folder.tensors[part.source]
    for box in contiguous_parts(part.box, _MAX_PIECE_BYTES // ITEM_BYTES[tensor.dtype]):
        yield TensorPiece(part.name, box, tensor.dtype, tensor.shape)


class _Written:
    """The files of a draft as they are written, and what the manifest says of them."""

    def __init__(self, folder: DcpFolder, storage: Storage, draft: Draft) -> None:
        self.files: dict[str, File] = {}
        self._folder = folder
        self._storage = storage
        self._draft = draft
        self._chunks: dict[str, list[Chunk]] = {}
        self._digests: dict[str, list[int]] = {}
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        # The part that was read last: its pieces follow each other.
        self._current: tuple[_Part | None, torch.Tensor] = (None, torch.empty(0))

    def add(self, image: Image, parts: Sequence[_Part]) -> None:
        """Write one file, whose pieces come from these parts."""
        whole = checksums.FileChecksum(image.header)
        file = self._storage.create(f"{self._draft.folder}/{image.name}", image.num_bytes)
        try:
            file.write(memoryview(image.header))
            for piece, begin, part in zip(image.pieces, image.begins, parts, strict=True):
                content = self._content(piece, part)
                whole.update(content)
                chunk = Chunk(piece.box, image.name, begin, piece.num_bytes, checksums.of_chunk(content))
                self._chunks.setdefault(piece.name, []).append(chunk)
                digest = part_digest(content, piece.dtype, piece.box)
                self._digests.setdefault(piece.name, []).append(digest)
                self._kinds[piece.name] = (piece.dtype, piece.shape)
                file.write(content)
            file.commit()
        except BaseException:
            file.discard()
            raise
        self.files[image.name] = File(image.num_bytes, whole.hexdigest())

    def tensors(self) -> dict[str, Tensor]:
        digests = {name: checksums.combined(parts) for name, parts in self._digests.items()}
        return {
            name: Tensor(dtype, shape, checksums.written(digests[name]), tuple(self._chunks[name]))
            for name, (dtype, shape) in sorted(self._kinds.items())
        }

    def _content(self, piece: TensorPiece, part: _Part) -> memoryview:
        if self._current[0] is not part:
            self._current = (None, torch.empty(0))
            self._current = (part, part.read(self._folder))
        values = self._current[1][piece.box.within(part.box)]
        return memoryview(cast(Any, as_bytes(values).numpy()))


if __name__ == "__main__":
    sys.exit(main())
