"""Lets one user pass through folders that are closed to others, for as long as tests run as that user.

A checkout or a Python below root's home cannot be reached by an ordinary user, and Slurm jobs of ordinary
users are what the tests are about. An entry in the folder's access control list opens it for this one user
and for no other; a list that is there already is added to, and put back as it was.
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

HEADER = struct.Struct("<I")
ENTRY = struct.Struct("<HHI")
"""What the kernel keeps for one entry of a list: its kind, its permissions, whose it is."""

Entries = dict[tuple[int, int], int]
"""Permissions by (kind, id), in any order; the kernel wants them sorted."""


@contextmanager
def let_through(uid: int, paths: Sequence[Path]) -> Iterator[None]:
    """Open every closed folder above these paths for a user, and put back at the end what was there."""
    folders = {folder for path in paths for folder in (path, *path.parents) if folder.is_dir()}
    closed = [folder for folder in sorted(folders) if not folder.stat().st_mode & stat.S_IXOTH]
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in closed}
    lists = {folder: os.getxattr(folder, ATTRIBUTE) for folder in closed if ATTRIBUTE in os.listxattr(folder)}
    try:
        for folder, mode in modes.items():
            entries = unpacked(lists[folder]) if folder in lists else entries_of(mode)
            os.setxattr(folder, ATTRIBUTE, packed(with_passage(entries, uid)))
        yield
    finally:
        for folder, mode in modes.items():
            if folder in lists:
                os.setxattr(folder, ATTRIBUTE, lists[folder])
            else:
                if ATTRIBUTE in os.listxattr(folder):
                    os.removexattr(folder, ATTRIBUTE)
                folder.chmod(mode)


def entries_of(mode: int) -> Entries:
    """Return the list that says what a mode says."""
    return {(OWNER, NOBODY): mode >> 6 & 7, (GROUP, NOBODY): mode >> 3 & 7, (OTHERS, NOBODY): mode & 7}


def with_passage(entries: Entries, uid: int) -> Entries:
    """Return a list that also lets one user pass, and gives nobody else anything new."""
    mask = entries.get((MASK, NOBODY))
    if mask is None:
        mask = entries[GROUP, NOBODY]
    elif not mask & EXECUTE:
        # The mask has held back what named users and groups are granted: grant them no more than it let pass.
        owners_and_others = (OWNER, MASK, OTHERS)
        entries = {key: held if key[0] in owners_and_others else held & mask for key, held in entries.items()}
    mine = entries.get((NAMED_USER, uid), 0) | EXECUTE
    return {**entries, (NAMED_USER, uid): mine, (MASK, NOBODY): mask | EXECUTE}


def packed(entries: Entries) -> bytes:
    """Return a list as the kernel keeps it."""
    rows = sorted(entries.items())
    return HEADER.pack(VERSION) + b"".join(ENTRY.pack(kind, held, whose) for (kind, whose), held in rows)


def unpacked(attribute: bytes) -> Entries:
    """Return the entries of a list as the kernel keeps it."""
    return {(kind, whose): held for kind, held, whose in ENTRY.iter_unpack(attribute[HEADER.size :])}
