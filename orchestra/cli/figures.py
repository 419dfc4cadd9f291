"""Numbers as people read them: three digits, a unit, aligned. Pure text; it reads no run."""

from __future__ import annotations

import math

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


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Align columns: the first to the left, the others to the right. Nothing is cut off."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        first = row[0].ljust(widths[0])
        others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)
