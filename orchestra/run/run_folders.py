"""Which folders hold runs, remembered in the user's cache, so that a name means its run from anywhere.

One small file for each folder, named by a digest of its path and written as one act: any number of processes
may do so at once, and none reads what another one is writing. What is lost comes back when a command meets
the folder again; only what is there is believed. Called by the commands.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from orchestra.run.files import write_atomically

# A folder that is gone for longer than this is forgotten: before, its file system may be away.
_FORGOTTEN_AFTER_S = 30 * 86400.0


def index_folder() -> Path:
    """Return where it is remembered: $ORCHESTRA_CACHE_DIR, else $XDG_CACHE_HOME/orchestra or ~/.cache."""
    own = os.environ.get("ORCHESTRA_CACHE_DIR")
    cache = Path(own or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "orchestra")
    return cache.expanduser() / "run-folders"


def remember(folder: Path) -> None:
    """Note that runs lie in `folder`. Never fails: a name can still be found where it lies."""
    path = str(folder.absolute())
    entry = index_folder() / hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:32]
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if entry.exists():
            return
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(entry, path, is_synced=False)
        _forget_what_is_gone(entry.parent)


def remembered() -> list[Path]:
    """Return the folders that are remembered and there, by their paths."""
    folders = []
    with contextlib.suppress(OSError, RuntimeError):
        for entry in index_folder().iterdir():
            # An entry may be forgotten, or drafted, meanwhile.
            with contextlib.suppress(OSError, ValueError):
                path = Path(entry.read_text())
                if not entry.name.startswith(".") and path.is_absolute() and path.is_dir():
                    folders.append(path)
    return sorted(folders)


def _forget_what_is_gone(index: Path) -> None:
    for entry in index.iterdir():
        with contextlib.suppress(OSError, ValueError):
            is_old = time.time() - entry.stat().st_mtime > _FORGOTTEN_AFTER_S
            if is_old and not Path(entry.read_text()).is_dir():
                entry.unlink()
