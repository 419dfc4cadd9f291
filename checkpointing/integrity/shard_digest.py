"""The digest of a part of a tensor: its elements' bits times weights of their places (`checksums`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from checkpointing.box import ITEM_BYTES, Box
from checkpointing.integrity.checksums import Buffer

_NUM_LANES = 2
# Elements that are worked on at a time, so that they and their weights stay in the cache.
_ELEMENTS_AT_ONCE = 1 << 17
# An index's weight is that of its upper part times that of its lowest 12 bits: two small tables.
_LOW_BITS = 12


def part_digest(content: Buffer, dtype: str, box: Box) -> int:
    """Return the digest of the part of a tensor that `box` says and `content` holds (row-major bytes).

    The digest of a whole tensor is `combined` over the digests of parts that make it up.
    """
    words = np.frombuffer(content, dtype=f"<u{min(ITEM_BYTES[dtype], 4)}")
    offsets, shape = box.offsets or (0,), box.shape or (1,)
    if ITEM_BYTES[dtype] == 8:
        offsets, shape = (*offsets[:-1], offsets[-1] * 2), (*shape[:-1], shape[-1] * 2)
    if not words.size:
        return 0
    rows = words.reshape(-1, shape[-1])
    leading = [_leading_weights(offsets[:-1], shape[:-1], lane) for lane in range(_NUM_LANES)]
    totals = [0] * _NUM_LANES
    for columns in _spans(shape[-1], _ELEMENTS_AT_ONCE):
        width = columns.stop - columns.start
        last = [
            _weights(offsets[-1] + columns.start, width, len(shape) - 1, lane) for lane in range(_NUM_LANES)
        ]
        for some in _spans(len(rows), max(1, _ELEMENTS_AT_ONCE // width)):
            block = _folded(rows[some, columns])
            for lane in range(_NUM_LANES):
                sums = np.einsum("rc,c->r", block, last[lane])
                totals[lane] += int(np.einsum("r,r->", sums, leading[lane][some]))
    return (totals[0] & 0xFFFFFFFF) << 32 | totals[1] & 0xFFFFFFFF


def _spans(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _folded(elements: npt.NDArray[np.generic]) -> npt.NDArray[np.uint32]:
    words = elements.astype(np.uint32, copy=False)
    return words ^ (words >> np.uint32(15))


def _leading_weights(offsets: Sequence[int], shape: Sequence[int], lane: int) -> npt.NDArray[np.uint32]:
    weights = np.ones(1, dtype=np.uint32)
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        weights = np.multiply.outer(weights, _weights(offset, size, dim, lane)).reshape(-1)
    return weights


def _weights(offset: int, size: int, dim: int, lane: int) -> npt.NDArray[np.uint32]:
    """Return the odd weights of the indices from `offset` on."""
    stream = 2 * (dim * _NUM_LANES + lane)
    first, end = offset >> _LOW_BITS, (offset + size - 1 >> _LOW_BITS) + 1
    table = np.multiply.outer(_odd_numbers(first, end, stream), _low_weights(stream + 1)).reshape(-1)
    begin = offset - (first << _LOW_BITS)
    return table[begin : begin + size]


@functools.cache
def _low_weights(stream: int) -> npt.NDArray[np.uint32]:
    return _odd_numbers(0, 1 << _LOW_BITS, stream)


def _odd_numbers(begin: int, end: int, stream: int) -> npt.NDArray[np.uint32]:
    """Return pseudo-random numbers begin … end − 1 of a stream: SplitMix64's mixing, upper half, made odd."""
    seed = np.uint64((stream + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    mixed = np.arange(begin, end, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95) + seed
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
