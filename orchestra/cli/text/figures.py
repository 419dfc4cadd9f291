"""Numbers as people read them: three digits, a unit, aligned. Pure text; it reads no run."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Columns of a plain terminal.
WIDTH = 80
_UNKNOWN = "-"
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def quantity(value: float | None) -> str:
    """Return 3 significant digits with a decimal prefix: 41234 → "41.2k"."""
    if value is None:
        return _UNKNOWN
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.95 and more would print as 1000.
        if abs(value) >= limit * 0.99995:
            return f"{value / limit:.{_decimals(value / limit)}f}{suffix}"
    return f"{value:.{_decimals(value)}f}" if isinstance(value, float) else str(value)


def _decimals(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2


def loss(value: float | None) -> str:
    """Return a loss with four decimals."""
    return _UNKNOWN if value is None else f"{value:.4f}"


def named_losses(losses: Mapping[str, float]) -> str:
    """Return "wiki 2.7183, code 1.6180"; nothing for none."""
    return ", ".join(f"{name} {loss(value)}" for name, value in losses.items())


def percent(share: float | None) -> str:
    """Return a share as a percentage with one decimal: 0.3121 → "31.2%"."""
    return "n/a" if share is None else f"{100 * share:.1f}%"


def duration(seconds: float | None) -> str:
    """Return "0:42", "1:02:03" or "3d 04:05"."""
    if seconds is None or not math.isfinite(seconds):
        return _UNKNOWN
    whole = round(seconds)
    days, rest = divmod(whole, _DAY_S)
    hours, rest = divmod(rest, _HOUR_S)
    minutes, left = divmod(rest, _MINUTE_S)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def age(seconds: float | None) -> str:
    """Return one number and a unit: "42s", "7m", "3h", "12d"."""
    if seconds is None:
        return _UNKNOWN
    for limit, unit in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "m")):
        if seconds >= 2 * limit:
            return f"{int(seconds // limit)}{unit}"
    return f"{max(0, int(seconds))}s"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Align columns: the first to the left, the others to the right. Nothing is cut off.

    A row of two cells under more columns is a name and a text that goes over all the others.
    """
    names = max(len(row[0]) for row in (header, *rows))
    full = [row for row in (header, *rows) if len(row) == len(header)]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)][1:]
    lines = []
    for name, *cells in (header, *rows):
        if len(cells) == len(widths):
            cells = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([name.ljust(names), *cells]).rstrip())
    return "\n".join(lines)


def without(row: tuple[str, ...], header: tuple[str, ...], dropped: Collection[str]) -> tuple[str, ...]:
    """Return a row without the columns whose titles are dropped; rows of two cells stay as they are."""
    if len(row) != len(header):
        return row
    return tuple(cell for cell, title in zip(row, header, strict=True) if title not in dropped)


def fitting_table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int | None, drop: Sequence[str]
) -> str:
    """Return the table without as many of the columns in `drop`, in that order, as do not fit into `width`.

    None: whoever reads it is no terminal, and gets all.
    """
    for num_dropped in range(len(drop) + 1):
        titles = drop[:num_dropped]
        shown = table(without(header, header, titles), [without(row, header, titles) for row in rows])
        full = [line for line, row in zip(shown.splitlines(), (header, *rows), strict=True) if len(row) > 2]
        if width is None or max(map(len, full)) <= width:
            break
    return shown


def wrapped(
    text: str, head: str = "", indent: str = "", *, width: int = WIDTH, keeps_words: bool = False
) -> list[str]:
    """Return lines of at most `width` columns, the first one after `head`, the others after `indent`.

    `keeps_words`: longer words, such as paths and commands to be copied, stay whole.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=not keeps_words,
        break_on_hyphens=False,
    )


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, all of its cells aligned to the left. Nothing is cut off."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def number_of(number: int, noun: str) -> str:
    """Return "1 node" or "4 nodes"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def counts(numbers: Mapping[Any, int]) -> str:
    """Return "8 finished, 2 running"."""
    return ", ".join(f"{number} {word}" for word, number in numbers.items())


# A series of numbers drawn with characters: one line of blocks, or a chart of braille dots. Pure text.


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
