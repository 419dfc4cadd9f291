"""A folder on another file system than its parent, taken away and brought back as what is mounted is."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


class OtherFileSystem:
    """What lies in `mount_point` is in the machine's memory; away, the folder is there and empty."""

    def __init__(self, mount_point: Path, mounted: Path) -> None:
        assert mounted.stat().st_dev != mount_point.parent.stat().st_dev
        self._mount_point, self._mounted = mount_point, mounted
        mount_point.symlink_to(mounted)

    def take_away(self) -> None:
        self._mount_point.unlink()
        self._mount_point.mkdir()

    def bring_back(self) -> None:
        shutil.rmtree(self._mount_point)
        self._mount_point.symlink_to(self._mounted)


@contextlib.contextmanager
def other_file_system(mount_point: Path) -> Iterator[OtherFileSystem]:
    """Mount one at `mount_point`, which must not exist."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as mounted:
        yield OtherFileSystem(mount_point, Path(mounted))
