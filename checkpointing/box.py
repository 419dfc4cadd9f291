"""Boxes: the part of a tensor from some offsets on with some shape. Integers only.

An empty box (a zero in its shape) is allowed and holds nothing. A box of a scalar has no dims and one
element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, order=True)
class Box:
    """Elements offsets[d] … offsets[d] + shape[d] − 1 of each dim d of a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index after the box in each dim."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.shape, strict=True))

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of `shape` has all these elements."""
        return len(shape) == len(self.shape) and all(
            offset >= 0 and size >= 0 and offset + size <= limit
            for offset, size, limit in zip(self.offsets, self.shape, shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        """Return the elements that both hold; None where there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        shape = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Box(offsets, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in the tensor that holds `outer`."""
        starts = (mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def label(self) -> str:
        """Return `[0:128,64:96]`."""
        return (
            "[" + ",".join(f"{begin}:{end}" for begin, end in zip(self.offsets, self.ends, strict=True)) + "]"
        )


def contiguous_parts(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box into parts of at most `max_elements`, in order, each contiguous in row-major memory."""
    if box.num_elements <= max_elements or not box.shape:
        yield box
        return
    row_elements = math.prod(box.shape[1:])
    if row_elements > max_elements:
        for row in range(box.shape[0]):
            inner = Box(box.offsets[1:], box.shape[1:])
            for part in contiguous_parts(inner, max_elements):
                yield Box((box.offsets[0] + row, *part.offsets), (1, *part.shape))
        return
    rows_at_once = max_elements // row_elements
    for first in range(0, box.shape[0], rows_at_once):
        num_rows = min(rows_at_once, box.shape[0] - first)
        yield Box((box.offsets[0] + first, *box.offsets[1:]), (num_rows, *box.shape[1:]))


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None, by a sweep along the first dim (near-linear)."""
    filled = sorted(box for box in boxes if box.num_elements)
    open_boxes: list[Box] = []
    for box in filled:
        if not box.shape:
            if open_boxes:
                return open_boxes[0], box
        else:
            open_boxes = [other for other in open_boxes if other.ends[0] > box.offsets[0]]
        for other in open_boxes:
            if other.overlap(box) is not None:
                return other, box
        open_boxes.append(box)
    return None


# Bytes of one element by safetensors' name of the dtype; `shards` maps the names to torch's dtypes.
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
