"""How much longer matrix products take than others with as many FLOPs: tiles that stick out, waves that are
not full, what a tile takes before its first and after its last block, and rows that are not aligned.

A product [m, k] x [k, n] is cut into tiles of its result, and each of the device's processors works on one of
them at a time (NVIDIA, "Matrix Multiplication Background", sections 2.3 and 3). The last tile of a row takes
as long as the others, and so does a last wave with few tiles: with tiles of 128 x 256, 4,096 tokens and a
width of 1,600 keep 132 processors busy for two waves of which a quarter is idle. The library is taken to
choose the best of its tiles, and to share the sum of one tile among several processors where that is faster.

`orchestra.plan.compute` multiplies the times of orchestra's own products with this. Other trainers' constants
are fitted to whole steps, without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

from orchestra.plan.case import PlanCase

# Rows and columns of a tile, and the share of the full rate it reaches. The sizes are those the guide lists;
# the large ones read least for each product, and small ones are for what large ones do not fill. The shares
# are assumed.
_TILES = (
    (128, 256, 1.0),
    (256, 128, 1.0),
    (128, 128, 0.92),
    (128, 64, 0.75),
    (64, 128, 0.75),
    (64, 64, 0.55),
)
# Processors that share one tile's sum; each part is at least so long.
_PARTS, _SHORTEST_PART = (1, 2, 3, 4, 6, 8), 512
# A tile takes so much longer, in numbers of the dim along which it sums in 16 bits, to load its first blocks
# and write its result. With it the products alone of three models on one H200 (738, 714 and 651 TFLOP/s)
# all run at 768 to 780 TFLOP/s where tiles and waves are full; what is in fp8 passes more numbers meanwhile.
_ENDS = 192
# Of that rate usual products reach what a device's row says (`devices`): 749 on that H200.
_USUAL = 749 / 780

# Products that read rows which do not begin at multiples of 16 bytes load number by number; that they take
# twice as long is assumed. Padding 50,257 words to 50,304 made all of nanoGPT some 25 % faster (Karpathy,
# 2023), of whose FLOPs at 124M the output matrix has a third: twice is no exaggeration.
ALIGNED_BYTES, _UNALIGNED = 16, 2.0


def slowdown(
    case: PlanCase,
    matrices: Iterable[tuple[float, float]],
    *,
    num_tokens: float | None = None,
    rate: float = 1.0,
) -> float:
    """Return the time of the three products (forward, and both of the backward pass) of some matrices
    [inputs, outputs], over that of usual ones with as many FLOPs.

    `num_tokens`: of one product, by default the micro-batch's. `rate`: of these products over that of
    products in 16 bits. 1.0 for devices whose number of processors is not known, and for CPUs.
    """
    if case.device.num_processors is None:
        return 1.0
    tokens = max(1, round(case.tokens.count if num_tokens is None else num_tokens))
    time = work = 0.0
    for inputs, outputs in matrices:
        n, m = max(1, round(inputs)), max(1, round(outputs))
        work += 3 * tokens * n * m
        for shape in ((tokens, m, n), (tokens, n, m), (n, m, tokens)):
            time += _time(*shape, case.device.num_processors, _ENDS * rate)
    return _USUAL * time / work


def unaligned_slowdown(num_words: float, width_bytes: int) -> float:
    """Return the same for the output matrix, whose backward products both read gradients of the logits, for
    rows of so many words that no trainer has padded.
    """
    if round(num_words) * width_bytes % ALIGNED_BYTES == 0:
        return 1.0
    return (1 + 2 * _UNALIGNED) / 3


@cache
def _time(rows: int, columns: int, length: int, num_processors: int, ends: float) -> float:
    """Return what a product takes, in multiplications of all processors together at the full rate."""
    return min(
        _waves(rows, columns, part_of, num_processors, tile)
        * tile[0]
        * tile[1]
        * (length / part_of + ends * (1 if part_of == 1 else 2))
        * num_processors
        / tile[2]
        for tile in _TILES
        for part_of in _PARTS
        if part_of == 1 or length / part_of >= _SHORTEST_PART
    )


def _waves(rows: int, columns: int, part_of: int, num_processors: int, tile: tuple[int, int, float]) -> int:
    num_tiles = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
    return math.ceil(num_tiles * part_of / num_processors)
