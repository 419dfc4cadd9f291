"""A series of numbers drawn with characters: one line of blocks, or a chart of braille dots. Pure text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
# Dots of one braille cell by (row, column), Unicode block 2800: four rows of two.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800


def resampled(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values: the means of equal parts."""
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` (finite) as one line of at most `width` blocks, the smallest lowest."""
    points = resampled(values, width)
    if not points:
        return ""
    low, high = min(points), max(points)
    return "".join(_BLOCKS[_level(point, low, high, len(_BLOCKS))] for point in points)


def _level(value: float, low: float, high: float, count: int) -> int:
    """Return which of `count` equal steps from `low` to `high` is nearest to `value`."""
    return round((value - low) / (high - low) * (count - 1)) if high > low else 0


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draw `values` (finite, at least 2) over `width` × `height` characters, labels included."""
    labels = (f"{max(values):.2f}", f"{min(values):.2f}")
    margin = max(len(label) for label in labels)
    cells = _plot(values, width - margin - 2, height)
    rows = ["".join(chr(_BRAILLE + dots) if dots else " " for dots in row).rstrip() for row in cells]
    sides = [labels[0], *[""] * (height - 2), labels[1]]
    return [f"{side:>{margin}} ┤{row}" for side, row in zip(sides, rows, strict=True)]


def _plot(values: Sequence[float], width: int, height: int) -> list[list[int]]:
    """Return the dots of each cell; consecutive points are joined by vertical strokes."""
    columns, lines = 2 * width, 4 * height
    points = resampled(values, columns)
    low, high = min(values), max(values)
    cells = [[0] * width for _ in range(height)]
    before = None
    for column in range(columns):
        point = points[column * len(points) // columns]
        line = lines - 1 - _level(point, low, high, lines)
        start = line if before is None or before == line else before + (1 if line > before else -1)
        for dot in range(min(start, line), max(start, line) + 1):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
        before = line
    return cells
