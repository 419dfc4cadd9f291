"""Lets one user pass through folders that are closed to others, for as long as tests run as that user.

A checkout or a Python below root's home cannot be reached by an ordinary user, and Slurm jobs of ordinary
users are what the tests are about. An entry in the folder's access control list opens it for this one user
and for no other.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ATTRIBUTE = "system.posix_acl_access"
VERSION = 2
OWNER, NAMED_USER, GROUP, MASK, OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
NOBODY = 0xFFFFFFFF
EXECUTE = 1


@contextmanager
def let_through(uid: int, paths: Sequence[Path]) -> Iterator[None]:
    """Open every closed folder above these paths for a user, and close them again at the end."""
    folders = {folder for path in paths for folder in (path, *path.parents) if folder.is_dir()}
    closed = [folder for folder in sorted(folders) if not folder.stat().st_mode & stat.S_IXOTH]
    with_lists = [folder for folder in closed if ATTRIBUTE in os.listxattr(folder)]
    if with_lists:
        names = ", ".join(map(str, with_lists))
        raise RuntimeError(f"{names}: an access control list closes it to ordinary users; move what is in it")
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in closed}
    try:
        for folder, mode in modes.items():
            os.setxattr(folder, ATTRIBUTE, access_list(mode, uid))
        yield
    finally:
        for folder, mode in modes.items():
            if ATTRIBUTE in os.listxattr(folder):
                os.removexattr(folder, ATTRIBUTE)
            folder.chmod(mode)


def access_list(mode: int, uid: int) -> bytes:
    """Return the list that says what a mode says, and also lets one user pass."""
    group = mode >> 3 & 7
    entries = (
        (OWNER, mode >> 6 & 7, NOBODY),
        (NAMED_USER, EXECUTE, uid),
        (GROUP, group, NOBODY),
        (MASK, group | EXECUTE, NOBODY),
        (OTHERS, mode & 7, NOBODY),
    )
    return struct.pack("<I", VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
