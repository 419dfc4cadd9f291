"""Units, sizes and lists as people read them, and durations as Slurm writes them. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

MIB = 1 << 20
GIB = 1 << 30
_BINARY_UNITS = ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB"))
TERA = 1e12

_MINUTES = re.compile(r"(\d+)(?::(\d+))?")
_CLOCK = re.compile(r"(\d+):(\d+):(\d+)")
_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
# Longest units first: 5ms is no 5 m.
_UNIT_S = {
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "min": Fraction(60),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_PART = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_UNIT_S)})")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")


def binary(num_bytes: int) -> str:
    """Return a number of bytes with three digits, in the largest unit of which it is at least one."""
    for unit, name in _BINARY_UNITS:
        if num_bytes >= unit:
            value = num_bytes / unit
            # Between 1000 and 1024 three digits would be written as 1e+03.
            return f"{value:.0f} {name}" if value >= 999.5 else f"{value:.3g} {name}"
    return f"{num_bytes} byte{'' if num_bytes == 1 else 's'}"


def first_few(items: Sequence[object], most: int = 3) -> str:
    """Return "a, b, c and 4 more"."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def slurm_time_s(text: str) -> int | None:
    """Return the seconds of a Slurm time limit; None for `UNLIMITED`. Raises ValueError for any other form.

    Slurm's forms (sbatch, --time): M, M:SS, H:MM:SS, D-HH, D-HH:MM and D-HH:MM:SS.
    """
    text = text.strip()
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    if match := _DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    elif match := _CLOCK.fullmatch(text):
        days, (hours, minutes, seconds) = 0, (int(part) for part in match.groups())
    elif match := _MINUTES.fullmatch(text):
        days, hours, (minutes, seconds) = 0, 0, (int(part or 0) for part in match.groups())
    else:
        raise ValueError(f"{text!r} is not a time limit; use minutes, H:MM:SS or D-HH:MM:SS")
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def duration_s(text: str) -> Fraction | None:
    """Return the seconds of a duration as people write it (90s, 1h30m, 2.5d, 20us); None for other text."""
    if not _DURATION.fullmatch(text):
        return None
    return sum((Fraction(number) * _UNIT_S[unit] for number, unit in _PART.findall(text)), Fraction())


def as_slurm_time(text: str) -> str:
    """Return a duration as people write it in Slurm's form, 4h as 4:00:00; any other text as it is."""
    seconds = duration_s(text.strip())
    if seconds is None:
        return text
    minutes, rest = divmod(-(-seconds // 1), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
