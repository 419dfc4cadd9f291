"""The running interpreter's own library as text: real prose and code on every machine, nothing to download.

All *.py files of the standard library in the order of their names, as bytes, each followed by SEPARATOR.
Tests, site-packages and IDLE are left out. The text depends on the version of Python, so a run resumed
under another one would see other samples.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from orchestra.errors import DataError

# The id after the 256 byte values; follows each document.
SEPARATOR = 256
VOCAB_SIZE = 257

_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files() -> list[Path]:
    """Return the library's source files, sorted by their path below the library."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, children, names in os.walk(root):
        children[:] = [child for child in children if child not in _LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def stdlib_tokens() -> npt.NDArray[np.uint16]:
    """Return the text as tokens (uint16): bytes, with SEPARATOR after each file. About 12 million.

    Raises DataError where the library cannot be read.
    """
    parts = []
    separator = np.array([SEPARATOR], dtype=np.uint16)
    try:
        for path in stdlib_files():
            parts += [np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.uint16), separator]
    except OSError as error:
        raise DataError(f"data.source=stdlib: cannot read {error.filename} ({error.strerror})") from error
    if not parts:
        folder = sysconfig.get_path("stdlib")
        raise DataError(f"data.source=stdlib: this Python has no *.py files in {folder}; use data=tokens")
    return np.concatenate(parts)
