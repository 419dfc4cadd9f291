"""Who reads what on a restore: from a manifest's chunks and every rank's wanted boxes to one ordered list.
Pure.

All ranks compute the same list from the same input, so that it need not be sent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from checkpointing.box import ITEM_BYTES, Box, contiguous_parts
from checkpointing.checkpoint_errors import MismatchError
from checkpointing.manifest import Chunk, Tensor
from checkpointing.write_plan import Loads

# Neighbours in a file travel together up to this size: one read and one message instead of hundreds.
_RUN_BYTES = 1 << 20
# A chunk without checksum need not be read as a whole; larger ones are cut, to bound the buffers.
_MAX_UNVERIFIED_BYTES = 32 << 20
# Process groups that a restore makes at most, for the sets of ranks that move most bytes.
_MAX_GROUPS = 16


@dataclass(frozen=True)
class Want:
    """The part `box` of tensor `name`, of `dtype` and global `shape`, that a rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


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
        last = self.parts[-1].chunk
        return last.begin + last.num_bytes - self.begin


def declaration(wants: Iterable[Want]) -> list[list[Any]]:
    """Return what a rank wants, as JSON for the other ranks."""
    return [[want.name, want.box.offsets, want.box.shape] for want in wants]


def declared(values: Iterable[Sequence[Any]]) -> list[tuple[str, Box]]:
    """Return what a rank wants from its `declaration`."""
    return [(name, Box(tuple(offsets), tuple(shape))) for name, offsets, shape in values]


def check_fit(tensors: Mapping[str, Tensor], wants: Iterable[Want]) -> None:
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
    wanted: Mapping[int, Iterable[tuple[str, Box]]],
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
    tensors: Mapping[str, Tensor], wanted: Mapping[int, Iterable[tuple[str, Box]]]
) -> Iterator[tuple[NamedChunk, tuple[int, ...]]]:
    """Yield each chunk that is wanted with the ranks that want it, ascending."""
    holders: dict[str, dict[Box, dict[int, None]]] = {}
    for rank in sorted(wanted):
        for name, box in wanted[rank]:
            if box.num_elements:
                holders.setdefault(name, {}).setdefault(box, {})[rank] = None
    for name in sorted(holders):
        tensor = tensors[name]
        parts = sorted(
            (part for chunk in tensor.chunks for part in _cut(name, tensor.dtype, chunk)), key=_by_box
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


def _cut(name: str, dtype: str, chunk: Chunk) -> Iterator[NamedChunk]:
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
        and chunk.begin == last.begin + last.num_bytes
        and chunk.begin + chunk.num_bytes - first.begin <= _RUN_BYTES
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


def _by_box(part: NamedChunk) -> Box:
    return part.chunk.box
