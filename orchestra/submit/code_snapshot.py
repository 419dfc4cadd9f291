"""The copy of the code that a submitted run is trained with: nothing that is edited later reaches it.

It holds the four packages as they lie on disk, changes that were never committed too, and no more of what
lies beside them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from orchestra.errors import ConfigError
from orchestra.sizes.units import MIB
from orchestra.submit.launch import source_root

PACKAGES = ("conf", "orchestra", "launchers", "checkpointing")
# The packages themselves have less than 3 MiB; whoever keeps data among them would copy it for every run.
MAX_BYTES = 32 * MIB
_LEFT_OUT = ("__pycache__", ".*", "*.pyc", "*~")
_LARGEST = 3


def take_snapshot(target: Path, root: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
    """Copy the packages below `root` (default: those that are running) into the new folder `target`.

    Raises ConfigError when they hold more than `max_bytes`, naming the largest files.
    """
    root = root or source_root()
    sizes = {file: file.stat().st_size for package in PACKAGES for file in _files(root / package)}
    total = sum(sizes.values())
    if total > max_bytes:
        largest = sorted(sizes, key=lambda file: -sizes[file])[:_LARGEST]
        named = ", ".join(f"{file.relative_to(root)} ({sizes[file] / MIB:,.0f} MiB)" for file in largest)
        raise ConfigError(
            f"the code to be copied into the run has {total / MIB:,.0f} MiB, at most "
            f"{max_bytes / MIB:,.0f} MiB are allowed; the largest files are {named}: "
            f"move them out of {', '.join(PACKAGES)}"
        )
    for file in sizes:
        copy = target / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def is_snapshot(target: Path, root: Path | None = None) -> bool:
    """Tell whether a folder holds the same packages, byte for byte, as those below `root` (default: those
    that are running).
    """
    root = root or source_root()
    found, now = (
        {file.relative_to(top) for package in PACKAGES for file in _files(top / package)}
        for top in (target, root)
    )
    return found == now and all((target / file).read_bytes() == (root / file).read_bytes() for file in now)


def _files(folder: Path) -> Iterator[Path]:
    leave_out = shutil.ignore_patterns(*_LEFT_OUT)
    for parent, folders, names in os.walk(folder):
        ignored = leave_out(parent, [*folders, *names])
        folders[:] = sorted(set(folders) - ignored)
        yield from (
            Path(parent, name) for name in sorted(set(names) - ignored) if Path(parent, name).is_file()
        )
