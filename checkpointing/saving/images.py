"""Files as they will lie on storage: a safetensors header and the pieces behind it, byte for byte. Pure.

A file is staged in memory in exactly this form, so it is written without another copy. The header is padded
with spaces (safetensors allows it) to a multiple of 4 KiB, so that the whole is aligned for direct writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.format.dtypes import ITEM_BYTES
from checkpointing.planning.write_plan import Piece

# Object stores and some tools handle larger files badly; a rank writes as many as it needs.
_MAX_FILE_BYTES = 4 << 30
_HEADER_ALIGNMENT = 4096
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Image:
    """One file: its name, its header, and its pieces with the offset in the file at which each begins."""

    name: str
    header: bytes
    pieces: tuple[Piece, ...]
    begins: tuple[int, ...]
    num_bytes: int


def images(pieces: Sequence[Piece], rank: int) -> list[Image]:
    """Return the files that `rank` writes."""
    return [
        _image(f"{rank:05d}-{index:02d}.safetensors", group) for index, group in enumerate(_groups(pieces))
    ]


def _groups(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Share the pieces out to files, wide dtypes first: every piece is then aligned to its own width."""
    group: list[Piece] = []
    size = 0
    for piece in sorted(pieces, key=lambda it: (-ITEM_BYTES[it.dtype], it)):
        if group and size + piece.num_bytes > _MAX_FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.num_bytes
    if group:
        yield group


def _image(name: str, pieces: Iterable[Piece]) -> Image:
    entries: dict[str, Any] = {}
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + piece.num_bytes)
        entries[piece.key] = {"dtype": piece.dtype, "shape": piece.box.shape, "data_offsets": ends[-2:]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _HEADER_ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    begins = tuple(len(header) + end for end in ends[:-1])
    return Image(name, header, tuple(pieces), begins, len(header) + ends[-1])
