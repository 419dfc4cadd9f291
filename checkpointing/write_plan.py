"""Who writes what: from the shards that all ranks declare to one list of pieces for each rank. Pure.

Every element is written once. A shard that several ranks hold is written by one of them; large ones are cut,
so that the replicas share the work evenly.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.box import ITEM_BYTES, Box, contiguous_parts, overlapping
from checkpointing.checkpoint_errors import MismatchError


class Loads:
    """The bytes that each rank has to read or write so far: the next piece goes to the least loaded."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def add(self, rank: int, num_bytes: int) -> None:
        self._bytes[rank] = self._bytes.get(rank, 0) + num_bytes

    def least(self, ranks: tuple[int, ...]) -> int:
        """Return which of the ranks has least. Loads only grow, so a stale entry is renewed when it comes
        up.
        """
        if ranks not in self._queues:
            self._queues[ranks] = [(0, rank) for rank in ranks]
        queue = self._queues[ranks]
        while True:
            load, rank = queue[0]
            if load == self._bytes.get(rank, 0):
                return rank
            heapq.heapreplace(queue, (self._bytes[rank], rank))


# One chunk is read, checked and sent as a whole: large enough for a disk's bandwidth, small enough to hold a
# few.
_MAX_PIECE_BYTES = 32 << 20
# Below this a piece is not worth cutting for the sake of balance.
_MIN_PIECE_BYTES = 4 << 20
# Pieces per rank that keep the shares of replicas within a few percent of each other.
_PIECES_PER_RANK = 8


@dataclass(frozen=True, order=True)
class TensorPiece:
    """Part of tensor `name` (of `dtype` and global `shape`) that is written as one chunk."""

    name: str
    box: Box
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * ITEM_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """The name that the chunk has in its safetensors file."""
        return self.name if self.box.shape == self.shape else self.name + self.box.label()


def declaration(pieces: Iterable[TensorPiece]) -> list[list[Any]]:
    """Return what a rank holds, as JSON for the other ranks."""
    return [[piece.name, piece.dtype, piece.shape, piece.box.offsets, piece.box.shape] for piece in pieces]


def declared(values: Sequence[Sequence[Any]]) -> list[TensorPiece]:
    """Return what a rank holds from its `declaration`."""
    return [
        TensorPiece(name, Box(tuple(offsets), tuple(part)), dtype, tuple(shape))
        for name, dtype, shape, offsets, part in values
    ]


def write_plan(held: Sequence[Sequence[TensorPiece]]) -> list[list[TensorPiece]]:
    """Return the pieces that each rank writes, from what each rank holds (both by rank).

    Raises MismatchError where the shards of a tensor disagree in dtype or shape, overlap, or leave a gap.
    """
    holders: dict[TensorPiece, list[int]] = defaultdict(list)
    for rank, pieces in enumerate(held):
        for piece in dict.fromkeys(pieces):
            if piece.num_bytes or math.prod(piece.shape) == 0:
                holders[piece].append(rank)
    _check(held, holders)
    total = sum(piece.num_bytes for piece in holders)
    limit = min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, total // (len(held) * _PIECES_PER_RANK)))
    cut = {part: tuple(ranks) for piece, ranks in holders.items() for part in _cut(piece, limit)}
    return _assigned(cut, len(held))


def _cut(piece: TensorPiece, limit: int) -> Iterable[TensorPiece]:
    for box in contiguous_parts(piece.box, max(1, limit // ITEM_BYTES[piece.dtype])):
        yield TensorPiece(piece.name, box, piece.dtype, piece.shape)


def _assigned(holders: Mapping[TensorPiece, tuple[int, ...]], world_size: int) -> list[list[TensorPiece]]:
    """Give each piece to the holder with the least to write: those with the fewest holders first (the others
    even it out), then the largest.
    """
    loads = Loads()
    plan: list[list[TensorPiece]] = [[] for _ in range(world_size)]
    for piece in sorted(holders, key=lambda piece: (len(holders[piece]), -piece.num_bytes, piece)):
        rank = loads.least(holders[piece])
        loads.add(rank, piece.num_bytes)
        plan[rank].append(piece)
    return plan


def _check(held: Sequence[Sequence[TensorPiece]], holders: Mapping[TensorPiece, Sequence[int]]) -> None:
    kinds: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            dtype, shape, first = kinds.setdefault(piece.name, (piece.dtype, piece.shape, rank))
            if (dtype, shape) != (piece.dtype, piece.shape):
                raise MismatchError(
                    f"{piece.name}: rank {first} has {dtype} {list(shape)}, "
                    f"rank {rank} has {piece.dtype} {list(piece.shape)}"
                )
    boxes: dict[str, list[Box]] = {name: [] for name in kinds}
    for piece in holders:
        boxes[piece.name].append(piece.box)
    for name, (_, shape, _) in kinds.items():
        _check_whole(name, shape, boxes[name])


def _check_whole(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    shared = overlapping(boxes)
    if shared is not None:
        raise MismatchError(f"{name}: the shards {shared[0].label()} and {shared[1].label()} overlap")
    held, expected = sum(box.num_elements for box in boxes), math.prod(shape)
    if held != expected:
        raise MismatchError(
            f"{name}: all shards together hold {held} of the {expected} elements of {list(shape)}"
        )
