"""Tells a run or a sweep that was removed or renamed from one whose file system is away. It only reads.

Asked again and again by whoever goes on for as long as a run is there: rank 0 of an attempt, `orchestra logs
-f`, `orchestra watch`. Standard library only.
"""

from __future__ import annotations

from pathlib import Path

from orchestra.run.paths import RunDir, SweepDir


class RemovalCheck:
    """Remembers when the records of a run or a sweep were there last, and on which file system."""

    def __init__(self, directory: RunDir | SweepDir) -> None:
        self._directory = directory
        # On the caller's clock; None: they were never there.
        self._there_at: float | None = None
        self._device: int | None = None

    def away_s(self, now: float) -> float | None:
        """Look now, at any clock's `now` in seconds; return how long ago the records were there last. None
        where they are there, or never were, or where their file system is not mounted: it comes back.

        Raises OSError where that cannot be seen.
        """
        path = self._directory.path
        if self._directory.has_records():
            self._there_at, self._device = now, _device_of(path)
            return None
        if self._there_at is None or _device_of(path) != self._device:
            return None
        return now - self._there_at


def _device_of(folder: Path) -> int:
    """Return the number of the file system that a folder is on, or would be. Raises OSError."""
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_dev
