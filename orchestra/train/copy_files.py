"""Where one rank's copies in memory lie: files in a folder on the node's tmpfs, written again and again.

own/rank-00003.slot-0.bin       the bytes of the rank's tensors, one after another
own/rank-00003.slot-0.copy      four lines: whose state, after which step (JSON) · the state that is no
                                tensor, rank 0's (JSON) · the table of tensors (JSON) · the checksum of the
                                three lines before

A copy exists if and only if its `.copy` does: it is removed before the bytes are written and put there, by
one rename, after them. A reader of the bytes sees afterwards whether it is still there. The agents send and
receive these files as they are (`launchers.memory_store.store` has the names too, and reads the first line,
again and again: what may be long is on those after it).
Called by `memory_copies`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.integrity import checksums
from checkpointing.shards import Shard, torch_dtype
from orchestra.sizes.training_shape import NUM_SLOTS

# Set by the agent: the folder of this run on this node.
FOLDER_VARIABLE = "ORCHESTRA_COPIES"
OWN = "own"
_SCHEMA = 2
_ALIGNMENT = 64


class UnusableCopyError(Exception):
    """Raised where a copy is not there, damaged, or not of this run's state; the message says which."""


@dataclass(frozen=True)
class CopyTable:
    """Where the bytes of each shard lie in a copy."""

    text: str
    begins: tuple[int, ...]
    num_bytes: int


def table_of(shards: Sequence[Shard]) -> CopyTable:
    """Return the table of these shards: equal texts mean that the same bytes lie at the same places."""
    begins, rows, end = [], [], 0
    for shard in shards:
        begins.append(end)
        size = shard.tensor.numel() * shard.tensor.element_size()
        place = [list(shard.shape), list(shard.offsets), list(shard.tensor.shape)]
        rows.append([shard.name, shard.dtype, *place, end, end + size])
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return CopyTable(json.dumps(rows, separators=(",", ":")), tuple(begins), end)


class Slot:
    """One pair of files and the memory that the bytes are in."""

    def __init__(self, folder: Path, rank: int, number: int) -> None:
        self._bytes_path = folder / OWN / f"rank-{rank:05d}.slot-{number}.bin"
        self._copy_path = self._bytes_path.with_suffix(".copy")
        self._memory: mmap.mmap | None = None

    @property
    def content(self) -> memoryview:
        """The bytes, after `take` or `check`."""
        assert self._memory is not None
        return memoryview(self._memory)

    def take(self, num_bytes: int) -> None:
        """Allocate all of a copy, so that writing cannot fail. Raises OSError where memory is missing."""
        self._open(num_bytes, os.O_CREAT)

    def views(self, shards: Sequence[Shard], table: CopyTable) -> list[Tensor]:
        """Return the part of the memory that belongs to each shard, in its dtype and shape."""
        memory = torch.frombuffer(self.content, dtype=torch.uint8) if table.num_bytes else torch.empty(0)
        views = []
        for shard, begin in zip(shards, table.begins, strict=True):
            size = shard.tensor.numel() * shard.tensor.element_size()
            view = memory[begin : begin + size].view(torch_dtype(shard.dtype)) if size else torch.empty(0)
            views.append(view.view(shard.tensor.shape) if size else torch.empty_like(shard.tensor))
        return views

    def remove_copy(self) -> None:
        """Remove the record of the copy, before its bytes change."""
        self._copy_path.unlink(missing_ok=True)

    def commit(self, facts: Mapping[str, Any], document: Mapping[str, Any], table: CopyTable) -> None:
        """Write the record that makes the bytes a copy. Raises OSError."""
        content = _checksum(self.content[: table.num_bytes])
        head = {"schema": _SCHEMA, **facts, "bytes": table.num_bytes, "checksum": content}
        parts = (json.dumps(part, separators=(",", ":")) for part in (head, dict(document)))
        lines = "".join(f"{part}\n" for part in (*parts, table.text))
        draft = self._copy_path.with_suffix(".draft")
        draft.write_text(f"{lines}{checksums.of_file(lines.encode())}\n")
        draft.replace(self._copy_path)

    def head(self) -> dict[str, Any]:
        """Return the copy's record. Raises UnusableCopyError without an intact one."""
        return self._read()[0]

    def document(self) -> dict[str, Any]:
        """Return the state that is no tensor; none of ranks but 0. Raises UnusableCopyError."""
        return self._read()[1]

    def age(self) -> tuple[int, int]:
        """Return attempt and step of the copy; −1 twice without an intact one."""
        with contextlib.suppress(UnusableCopyError):
            head = self.head()
            return int(head.get("attempt", -1)), int(head.get("step", -1))
        return -1, -1

    def check(self, table: CopyTable) -> None:
        """Open the bytes and compare all of them with their checksum. Raises UnusableCopyError."""
        head, _, text = self._read()
        if text != table.text:
            raise UnusableCopyError("its tensors are not those that this rank has")
        try:
            num_bytes = self._bytes_path.stat().st_size
            if num_bytes != table.num_bytes:
                raise UnusableCopyError(f"it is cut off: {num_bytes} of {table.num_bytes} bytes are there")
            self._open(table.num_bytes)
        except OSError as error:
            raise UnusableCopyError(f"its bytes cannot be read: {error}") from error
        checksum = _checksum(self.content[: table.num_bytes])
        if checksum != head.get("checksum"):
            raise UnusableCopyError(f"it is damaged: its checksum is {checksum}, not {head.get('checksum')}")

    def _read(self) -> tuple[dict[str, Any], dict[str, Any], str]:
        try:
            *lines, checksum = self._copy_path.read_text().splitlines()
            record = json.loads(lines[0]) if lines else None
        except (OSError, ValueError) as error:
            raise UnusableCopyError(f"its record cannot be read: {error}") from error
        if checksums.of_file("".join(f"{line}\n" for line in lines).encode()) != checksum:
            raise UnusableCopyError("its record is damaged")
        if not isinstance(record, dict) or record.get("schema") != _SCHEMA:
            found = record.get("schema") if isinstance(record, dict) else None
            raise UnusableCopyError(f"it has schema {found}, not {_SCHEMA}")
        _, document, text = lines
        return record, json.loads(document), text

    def _open(self, num_bytes: int, flags: int = 0) -> None:
        size = max(num_bytes, 1)
        if self._memory is not None and len(self._memory) == size:
            return
        descriptor = os.open(self._bytes_path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            if flags & os.O_CREAT:
                os.ftruncate(descriptor, num_bytes)
                # Without it a full tmpfs would end the process by SIGBUS while it copies.
                os.posix_fallocate(descriptor, 0, size)
            self._memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)


def slots_of(folder: Path, rank: int) -> list[Slot]:
    """Return a rank's slots: first those without a copy, then those with older ones."""
    return sorted((Slot(folder, rank, number) for number in range(NUM_SLOTS)), key=lambda slot: slot.age())


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the copies in a node's folder. Raises OSError."""
    folders = [parent for parent in folder.iterdir() if parent.is_dir()]
    return sum(path.stat().st_size for parent in folders for path in parent.glob("*.bin"))


def _checksum(content: memoryview) -> str:
    # The training has the interpreter's lock meanwhile: it waited 11 ms at most for 2 GiB (xxhash 4.1).
    checksum = checksums.FileChecksum()
    checksum.update(content)
    return checksum.hexdigest()
