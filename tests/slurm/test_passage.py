"""What tests/slurm/passage.py opens is open for one user, and is closed again as it was."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from passage import ATTRIBUTE, GROUP, MASK, NAMED_USER, NOBODY, entries_of, let_through, packed, unpacked

USER, OTHER = 65533, 65532
"""Numbers without a name are users too."""


def passes(uid: int, folder: Path) -> bool:
    test = ["test", "-e", folder / "file"]
    return subprocess.run(test, user=uid, group=uid, extra_groups=[], check=False).returncode == 0


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    (folder / "file").touch()
    for parent in tmp_path.parents[:2]:
        parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    tmp_path.chmod(0o755)
    return folder


def test_one_user_passes_and_the_folder_is_closed_again(closed: Path) -> None:
    with let_through(USER, [closed]):
        assert passes(USER, closed)
        assert not passes(OTHER, closed)
    assert not passes(USER, closed)
    assert ATTRIBUTE not in os.listxattr(closed)
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


def test_list_that_is_there_already_is_added_to_and_put_back(closed: Path) -> None:
    held_back = {(NAMED_USER, OTHER): 7, (MASK, NOBODY): 4}
    before = packed({**entries_of(0o700), **held_back})
    os.setxattr(closed, ATTRIBUTE, before)
    with let_through(USER, [closed]):
        assert passes(USER, closed)
        assert not passes(OTHER, closed), "the mask let this user read names only"
        assert unpacked(os.getxattr(closed, ATTRIBUTE))[GROUP, NOBODY] == 0
    assert os.getxattr(closed, ATTRIBUTE) == before


def test_what_a_killed_session_left_is_no_obstacle(closed: Path) -> None:
    left = let_through(USER, [closed])
    left.__enter__()
    with let_through(USER, [closed]):
        assert passes(USER, closed)
    left.__exit__(None, None, None)
    assert ATTRIBUTE not in os.listxattr(closed)
