"""Who writes and who reads what: from the tensors' parts that all ranks declare to lists for each rank. Pure.

On a save every element is written once: a part that several ranks hold is written by one of them, and large
ones are cut, so that the replicas share the work evenly. On a restore every byte is read once, by one of the
ranks that want it, and sent to the others. All ranks compute the same lists from the same declarations, so
that these need not be sent.
"""

from __future__ import annotations

import heapq
import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from checkpointing.box import ITEM_BYTES, Box, contiguous_parts, overlapping
from checkpointing.checkpoint_errors import MismatchError
from checkpointing.manifest import Chunk, Tensor

Item = TypeVar("Item")


@dataclass(frozen=True, order=True)
class TensorPiece:
    """Part of tensor `name` (of `dtype` and global `shape`) that a rank holds, wants or writes."""

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
    """Return a rank's pieces as JSON for the other ranks."""
    return [[piece.name, piece.dtype, piece.shape, piece.box.offsets, piece.box.shape] for piece in pieces]


def declared(values: Sequence[Sequence[Any]]) -> list[TensorPiece]:
    """Return a rank's pieces from their `declaration`."""
    return [
        TensorPiece(name, Box(tuple(offsets), tuple(part)), dtype, tuple(shape))
        for name, dtype, shape, offsets, part in values
    ]


def grouped(items: Iterable[Item], num_bytes: Callable[[Item], int], max_bytes: int) -> Iterator[list[Item]]:
    """Yield the items in groups of at most `max_bytes`, in order; a larger one is a group of its own."""
    group: list[Item] = []
    size = 0
    for item in items:
        if group and size + num_bytes(item) > max_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += num_bytes(item)
    if group:
        yield group


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


# Who writes what.

# One chunk is read, checked and sent as a whole: large enough for a disk's bandwidth, small enough to hold a
# few.
_MAX_PIECE_BYTES = 32 << 20
# Below this a piece is not worth cutting for the sake of balance.
_MIN_PIECE_BYTES = 4 << 20
# Pieces per rank that keep the shares of replicas within a few percent of each other.
_PIECES_PER_RANK = 8


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
    cut = {part: tuple(ranks) for piece, ranks in holders.items() for part in _cut_piece(piece, limit)}
    return _assigned(cut, len(held))


def _cut_piece(piece: TensorPiece, limit: int) -> Iterable[TensorPiece]:
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


# Files as they will lie on storage: a safetensors header and the pieces after it, byte for byte.
#
# A file is staged in memory in exactly this form, so it is written without another copy. The header is padded
# with spaces (safetensors allows it) to a multiple of 4 KiB, so that the whole is aligned for direct writes.

# Object stores and some tools handle larger files badly; a rank writes as many as it needs.
_MAX_FILE_BYTES = 4 << 30
_HEADER_ALIGNMENT = 4096
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Image:
    """One file: its name, its header, and its pieces with the offset in the file at which each begins."""

    name: str
    header: bytes
    pieces: tuple[TensorPiece, ...]
    begins: tuple[int, ...]
    num_bytes: int


def images(pieces: Sequence[TensorPiece], rank: int) -> list[Image]:
    """Return the files that `rank` writes, wide dtypes first: each piece is then aligned to its own width."""
    ordered = sorted(pieces, key=lambda piece: (-ITEM_BYTES[piece.dtype], piece))
    groups = grouped(ordered, lambda piece: piece.num_bytes, _MAX_FILE_BYTES)
    return [
        image(f"{rank:05d}-{index:02d}.safetensors", group, _HEADER_ALIGNMENT)
        for index, group in enumerate(groups)
    ]


def image(
    name: str, pieces: Sequence[TensorPiece], alignment: int, metadata: Mapping[str, str] | None = None
) -> Image:
    """Return the file that holds these pieces, its header as long as a multiple of `alignment`."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + piece.num_bytes)
        entries[piece.key] = {"dtype": piece.dtype, "shape": piece.box.shape, "data_offsets": ends[-2:]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    begins = tuple(len(header) + end for end in ends[:-1])
    return Image(name, header, tuple(pieces), begins, len(header) + ends[-1])


# Who reads what.

# Neighbours in a file travel together up to this size: one read and one message instead of hundreds.
_RUN_BYTES = 1 << 20
# A chunk without checksum need not be read as a whole; larger ones are cut, to bound the buffers.
_MAX_UNVERIFIED_BYTES = 32 << 20
# Process groups that a restore makes at most, for the sets of ranks that move most bytes.
_MAX_GROUPS = 16


@dataclass(frozen=True)
class NamedChunk:
    """One chunk of tensor `name`."""

    name: str
    dtype: str
    chunk: Chunk


@dataclass(frozen=True)
class Transfer:
    """Chunks that follow each other in one file: `reader` reads them once, then all `members` have them.

    `members` are ascending: the reader and all ranks that want a part.
    """

    parts: tuple[NamedChunk, ...]
    reader: int
    members: tuple[int, ...]

    @property
    def file(self) -> str:
        return self.parts[0].chunk.file

    @property
    def begin(self) -> int:
        return self.parts[0].chunk.begin

    @property
    def num_bytes(self) -> int:
        return self.parts[-1].chunk.end - self.begin


def check_fit(tensors: Mapping[str, Tensor], wants: Iterable[TensorPiece]) -> None:
    """Raise MismatchError for the first wanted tensor that is not there, or is of another dtype or shape."""
    for want in wants:
        tensor = tensors.get(want.name)
        if tensor is None:
            raise MismatchError(f"{want.name}: wanted, but the checkpoint has no such tensor")
        if (tensor.dtype, tensor.shape) != (want.dtype, want.shape):
            raise MismatchError(
                f"{want.name}: the checkpoint has {tensor.dtype} {list(tensor.shape)}, "
                f"wanted is {want.dtype} {list(want.shape)}"
            )


def read_plan(
    tensors: Mapping[str, Tensor],
    wanted: Mapping[int, Iterable[TensorPiece]],
    *,
    reader: int | None = None,
) -> list[Transfer]:
    """Return the transfers that bring each rank what it wants, in the order that all ranks follow.

    Each chunk that is wanted is read once, by one of the ranks that want it, the bytes shared out evenly;
    with `reader`, by that rank. All readers are at work all the time: the order follows the bytes that each
    has read.
    """
    runs = list(_runs(_needed(tensors, wanted)))
    loads = Loads()
    read_by: dict[int, list[Transfer]] = {}
    # What only one rank wants is fixed and comes first; what many want evens it out, large before small.
    for parts, ranks in sorted(runs, key=_by_freedom_and_size):
        chosen = loads.least(ranks) if reader is None else reader
        transfer = Transfer(parts, chosen, ranks if chosen in ranks else tuple(sorted((*ranks, chosen))))
        loads.add(chosen, transfer.num_bytes)
        read_by.setdefault(chosen, []).append(transfer)
    return _side_by_side(read_by)


def busiest_sets(transfers: Iterable[Transfer], world_size: int) -> list[tuple[int, ...]]:
    """Return the sets of three and more, but not all, ranks that are worth a group; most bytes first."""
    sizes: dict[tuple[int, ...], int] = {}
    for transfer in transfers:
        if 2 < len(transfer.members) < world_size:
            sizes[transfer.members] = sizes.get(transfer.members, 0) + transfer.num_bytes
    return sorted(sizes, key=lambda members: (-sizes[members], members))[:_MAX_GROUPS]


def _needed(
    tensors: Mapping[str, Tensor], wanted: Mapping[int, Iterable[TensorPiece]]
) -> Iterator[tuple[NamedChunk, tuple[int, ...]]]:
    """Yield each chunk that is wanted with the ranks that want it, ascending."""
    holders: dict[str, dict[Box, dict[int, None]]] = {}
    for rank in sorted(wanted):
        for want in wanted[rank]:
            if want.box.num_elements:
                holders.setdefault(want.name, {}).setdefault(want.box, {})[rank] = None
    for name in sorted(holders):
        tensor = tensors[name]
        parts = sorted(
            (part for chunk in tensor.chunks for part in _parts_of(name, tensor.dtype, chunk)),
            key=lambda part: part.chunk.box,
        )
        ranks_of_box = [tuple(ranks) for ranks in holders[name].values()]
        ranks_of_boxes: dict[tuple[int, ...], tuple[int, ...]] = {}
        for part, boxes in zip(
            parts, _overlaps([part.chunk.box for part in parts], list(holders[name])), strict=True
        ):
            if not boxes:
                continue
            if boxes not in ranks_of_boxes:
                ranks_of_boxes[boxes] = tuple(sorted(set().union(*(ranks_of_box[box] for box in boxes))))
            yield part, ranks_of_boxes[boxes]


def _parts_of(name: str, dtype: str, chunk: Chunk) -> Iterator[NamedChunk]:
    if chunk.checksum:
        yield NamedChunk(name, dtype, chunk)
        return
    begin = chunk.begin
    for box in contiguous_parts(chunk.box, _MAX_UNVERIFIED_BYTES // ITEM_BYTES[dtype]):
        size = box.num_elements * ITEM_BYTES[dtype]
        yield NamedChunk(name, dtype, Chunk(box, chunk.file, begin, size, ""))
        begin += size


def _overlaps(chunks: Sequence[Box], boxes: Sequence[Box]) -> list[tuple[int, ...]]:
    """Return for each chunk (ascending) the indices of the boxes that share elements with it.

    Only neighbours along the first dim are compared: near-linear for shards of that dim.
    """
    boxes_of_chunk: list[list[int]] = [[] for _ in chunks]
    if not chunks or not chunks[0].shape:
        return [tuple(range(len(boxes)))] * len(chunks)
    starts = [chunk.offsets[0] for chunk in chunks]
    furthest_ends = list(accumulate((chunk.ends[0] for chunk in chunks), max))
    for index, box in enumerate(boxes):
        first = bisect_left(furthest_ends, box.offsets[0] + 1)
        for position in range(first, bisect_left(starts, box.ends[0])):
            if chunks[position].overlap(box) is not None:
                boxes_of_chunk[position].append(index)
    return [tuple(indices) for indices in boxes_of_chunk]


def _runs(
    needed: Iterable[tuple[NamedChunk, tuple[int, ...]]],
) -> Iterator[tuple[tuple[NamedChunk, ...], tuple[int, ...]]]:
    """Join small chunks that follow each other in a file and are wanted by the same ranks."""
    parts: list[NamedChunk] = []
    ranks: tuple[int, ...] = ()
    for part, its_ranks in sorted(needed, key=lambda entry: (entry[0].chunk.file, entry[0].chunk.begin)):
        if parts and (its_ranks != ranks or not _joins(parts[0].chunk, parts[-1].chunk, part)):
            yield tuple(parts), ranks
            parts = []
        parts.append(part)
        ranks = its_ranks
    if parts:
        yield tuple(parts), ranks


def _joins(first: Chunk, last: Chunk, part: NamedChunk) -> bool:
    chunk = part.chunk
    return (
        chunk.file == last.file
        and chunk.begin == last.end
        and chunk.end - first.begin <= _RUN_BYTES
        # In the buffer, too, every element has to lie at a multiple of its width.
        and (chunk.begin - first.begin) % ITEM_BYTES[part.dtype] == 0
    )


def _side_by_side(read_by: Mapping[int, Sequence[Transfer]]) -> list[Transfer]:
    """Merge the readers' lists, each in the order of its files, so that all get on equally fast."""
    order: list[tuple[int, int, Transfer]] = []
    for reader, transfers in read_by.items():
        before = 0
        for transfer in sorted(transfers, key=lambda transfer: (transfer.file, transfer.begin)):
            order.append((before, reader, transfer))
            before += transfer.num_bytes
    return [transfer for _, _, transfer in sorted(order, key=lambda entry: entry[:2])]


def _by_freedom_and_size(run: tuple[tuple[NamedChunk, ...], tuple[int, ...]]) -> tuple[bool, int, str, int]:
    parts, ranks = run
    num_bytes = sum(part.chunk.num_bytes for part in parts)
    return len(ranks) > 1, -num_bytes, parts[0].chunk.file, parts[0].chunk.begin
