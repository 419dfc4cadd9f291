"""Which version of the code a run was started from, as git sees it.

It changes nothing and needs no git to work.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class CodeRevision:
    """A commit, and whether tracked files differ from it."""

    commit: str
    dirty: bool


def code_revision(root: Path) -> CodeRevision | None:
    """Return the revision of the tree at `root`; None where it is not a git checkout of this code.

    A virtual environment inside somebody's repository is not a checkout of that repository: the package must
    be tracked.
    """
    if _git(root, "ls-files", "--error-unmatch", "orchestra/__init__.py") is None:
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    if not commit or changes is None:
        return None
    return CodeRevision(commit.strip(), bool(changes.strip()))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
