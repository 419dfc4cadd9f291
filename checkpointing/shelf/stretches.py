"""How a file is cut to be read from front to back in blocks: its chunks, the pieces of large chunks, and what
lies between them. Pure; it reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from checkpointing.format.boxes import Box, contiguous_parts
from checkpointing.format.dtypes import ITEM_BYTES
from checkpointing.format.manifest import Chunk
from checkpointing.planning.read_plan import Part

# Read at once: enough for a disk's or a bucket's bandwidth.
BLOCK_BYTES = 8 << 20
_NO_BOX = Box((), ())


@dataclass(frozen=True)
class Stretch:
    """Bytes of a file that are looked at together: those of `box` of a chunk, or bytes of no tensor."""

    begin: int
    num_bytes: int
    box: Box = _NO_BOX
    part: Part | None = None

    @property
    def ends_chunk(self) -> bool:
        if self.part is None:
            return False
        return not self.num_bytes or self.begin + self.num_bytes == end_of(self.part.chunk)


def end_of(chunk: Chunk) -> int:
    """Return where in its file a chunk ends."""
    return chunk.begin + chunk.num_bytes


def stretches_of(parts: Iterable[Part], size: int) -> Iterator[Stretch]:
    """Cut a file of `size` bytes, with these chunks in order, into stretches that lie behind each other, none
    larger than a block.
    """
    end = 0
    for part in parts:
        if not part.chunk.num_bytes:
            # Nothing of it lies anywhere: where it is said to begin means nothing.
            yield Stretch(end, 0, part.chunk.box, part)
            continue
        yield from _gap(end, part.chunk.begin)
        end = part.chunk.begin
        item_bytes = ITEM_BYTES[part.dtype]
        for box in contiguous_parts(part.chunk.box, BLOCK_BYTES // item_bytes):
            yield Stretch(end, box.num_elements * item_bytes, box, part)
            end += box.num_elements * item_bytes
    yield from _gap(end, size)


def _gap(begin: int, end: int) -> Iterator[Stretch]:
    for first in range(begin, end, BLOCK_BYTES):
        yield Stretch(first, min(BLOCK_BYTES, end - first))


def blocks(stretches: Iterable[Stretch]) -> Iterator[list[Stretch]]:
    """Join neighbours to what is read at once."""
    block: list[Stretch] = []
    size = 0
    for stretch in stretches:
        if block and size + stretch.num_bytes > BLOCK_BYTES:
            yield block
            block, size = [], 0
        block.append(stretch)
        size += stretch.num_bytes
    if block:
        yield block


def contents(
    block: memoryview, stretches: Sequence[Stretch]
) -> Iterator[tuple[Stretch, Part | None, memoryview]]:
    """Yield each stretch of a block with its chunk and its bytes."""
    for stretch in stretches:
        begin = stretch.begin - stretches[0].begin
        yield stretch, stretch.part, block[begin : begin + stretch.num_bytes]
