"""How parameters lie in flat buffers and who owns which range of them. Integers only: no torch, no ranks.

A unit is a group of parameters that is communicated as one: one after the other in a flat buffer, which is
cut into as many equal ranges as there are ranks to share it. Each parameter and each range begins at a
multiple of the alignment, so that no kernel meets memory that it has to treat in another way; the gaps hold
zeros that nobody trains.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

# Elements: 64 bytes of a 16-bit type, a line of the cache and more than any vector load.
ALIGNMENT = 32
_BLOCK_NAME = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Member:
    """A parameter of `size` elements that begins at the element `begin` of its unit."""

    name: str
    begin: int
    size: int


@dataclass(frozen=True)
class UnitLayout:
    """The members of one unit; the buffer has num_ranges · range_size elements."""

    members: tuple[Member, ...]
    num_ranges: int
    range_size: int

    @property
    def size(self) -> int:
        """Elements of the whole buffer, gaps included."""
        return self.num_ranges * self.range_size

    def range_of(self, index: int) -> tuple[int, int]:
        """Return begin and end of the range that belongs to the rank `index` of the sharing group."""
        return index * self.range_size, (index + 1) * self.range_size

    def part_of(self, member: Member, index: int) -> tuple[int, int]:
        """Return which elements [start, stop) of a member lie in a range: counted from the member's begin,
        start = stop where none do.
        """
        begin, end = self.range_of(index)
        start = min(max(begin - member.begin, 0), member.size)
        return start, min(max(end - member.begin, start), member.size)


def lay_out(sizes: Sequence[tuple[str, int]], num_ranges: int) -> UnitLayout:
    """Lay parameters, given by name and number of elements, one after the other."""
    members = []
    end = 0
    for name, size in sizes:
        members.append(Member(name, end, size))
        end = _rounded_up(end + size, ALIGNMENT)
    return UnitLayout(tuple(members), num_ranges, _rounded_up(-(-end // num_ranges), ALIGNMENT))


def in_buckets(sizes: Sequence[tuple[str, int]], min_elements: int) -> list[list[tuple[str, int]]]:
    """Group parameters in the reverse of their order into buckets of at least so many elements.

    The backward pass finishes them in about this order. The last bucket may be smaller.
    """
    buckets: list[list[tuple[str, int]]] = []
    current: list[tuple[str, int]] = []
    for entry in reversed(sizes):
        current.append(entry)
        if sum(size for _, size in current) >= min_elements:
            buckets.append(current)
            current = []
    return [*buckets, current] if current else buckets


def in_blocks(sizes: Sequence[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Group parameters by the blocks of the model: what stands before the layers, each layer, the rest."""
    return [list(entries) for _, entries in groupby(sizes, key=lambda entry: _block(entry[0]))]


def _block(name: str) -> str:
    found = _BLOCK_NAME.search(name)
    return found.group(1) if found else ""


def slots(units: Sequence[UnitLayout], *, share_ends: bool) -> list[int]:
    """Return the number of the buffer that each unit is gathered into, for units by blocks in either order.

    Layers take turns in two buffers, so that one can be filled while the other computes. What stands before
    the layers and what stands behind them share a third, unless one needs the other's parameters (tied).
    """
    found = []
    layers_before = 0
    for number, unit in enumerate(units):
        if _block(unit.members[0].name):
            found.append(layers_before % 2)
            layers_before += 1
        else:
            found.append(2 if share_ends or number == 0 else 3)
    return found


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
