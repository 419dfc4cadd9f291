"""Files that a mode of `orchestra plan` writes: named, and seen to be writable, before any work is done."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from pathlib import Path

from orchestra.errors import ConfigError


def named(text: str) -> Path:
    """Return the path that an option names, for argparse. An empty one is none: Path takes it for `.`."""
    if not text.strip():
        raise ArgumentTypeError("it is empty; give a path, or leave the option out")
    return Path(text)


def check_target(option: str, target: Path) -> None:
    """Raise ConfigError where `target`, which an option names, cannot become a file."""
    folder = target.parent
    if target.is_dir():
        problem = "it is a folder; give a file's name"
    elif not folder.exists():
        problem = f"there is no folder {folder}; make it, or give another file"
    elif not folder.is_dir():
        problem = f"{folder} is no folder; give another file"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"nothing can be written in {folder}; give another file"
    else:
        return
    raise ConfigError(f"{option} {target}: {problem}")
