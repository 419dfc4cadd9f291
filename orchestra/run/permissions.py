"""Who may write the files of a run: its user alone, and the members of run.group where one is given.

A job executes the code and the batch script in the run's directory, and does what stands in its `control/`:
whoever can write there acts as the run's user. So the umask of the shell is closed to others before a command
or an agent makes anything. Standard library only.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextlib.contextmanager
def closed_to_others() -> Iterator[None]:
    """Let nobody else write what this process and its children make, whatever the umask was."""
    before = os.umask(_OTHERS_WRITE)
    os.umask(before | _OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(before)


def open_to_group(group: str | None) -> None:
    """Let the members of a run's group, where it has one, write what this process makes from now on; nobody
    else.
    """
    mask = os.umask(_OTHERS_WRITE) | _OTHERS_WRITE
    os.umask(mask if group is None else mask & ~stat.S_IRWXG)


@contextlib.contextmanager
def open_as_folder(folder: Path) -> Iterator[None]:
    """Let what is made in a folder of a run be its group's, where the folder was given to one."""
    before = os.umask(_OTHERS_WRITE)
    os.umask(before)
    with contextlib.suppress(OSError):
        mode = folder.stat().st_mode
        if mode & stat.S_ISGID and mode & stat.S_IWGRP:
            os.umask((before | _OTHERS_WRITE) & ~stat.S_IRWXG)
    try:
        yield
    finally:
        os.umask(before)


def who_may_write(folder: Path) -> str:
    """Say who may write into a folder of a run, as the end of an error."""
    try:
        owner = folder.owner()
    except (OSError, KeyError):
        owner = "whoever started it"
    return f"{owner} alone can, and members of its run.group if it has one"


def give_to_group(folder: Path, group: str | None) -> None:
    """Give a new folder with all in it to a run's group, where it has one, to be written by its members; what
    is made in it later belongs to the group too. Raises OSError.
    """
    if group is None:
        return
    number = grp.getgrnam(group).gr_gid
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        os.chown(path, -1, number, follow_symlinks=False)
        if path.is_dir():
            path.chmod(mode | stat.S_ISGID | stat.S_IRWXG)
        elif not path.is_symlink():
            path.chmod(mode | stat.S_IRGRP | stat.S_IWGRP)


def make_for_group(folder: Path, group: str) -> None:
    """Make a folder for a run's group, with those above it that are missing; one that is there is given to it
    where it is this user's own and empty. Raises OSError.
    """
    given = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if not given and folder.stat().st_uid == os.geteuid() and not any(folder.iterdir()):
        given = [folder]
    for path in given:
        give_to_group(path, group)


def close_to_others(paths: Iterable[Path], group: str | None) -> None:
    """Take from others what an older run's files let them write; what is not this user's stays as it is."""
    taken = stat.S_IWOTH if group is not None else _OTHERS_WRITE
    for path in paths:
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & taken:
                path.chmod(mode & ~taken)


def group_problem(group: str) -> str | None:
    """Return why a run cannot be given to a group; None where it can."""
    try:
        found = grp.getgrnam(group)
    except KeyError:
        return f"run.group={group}: this machine has no such group; name one of yours (`id -Gn`)"
    if os.geteuid() != 0 and found.gr_gid not in (os.getegid(), *os.getgroups()):
        return f"run.group={group}: you are no member of it; name one of yours (`id -Gn`)"
    return None


def loose_folders(folder: Path, group: str | None = None) -> Iterator[str]:
    """Yield a sentence for `folder`, which holds runs, and for each one above it that others than this user
    and the members of `group` can write: they could put something else in a run's place.
    """
    place = folder.expanduser().absolute()
    for path in (place, *place.parents):
        try:
            status = path.stat()
        except OSError:
            continue
        # In a sticky folder, such as /tmp, everybody can rename their own alone.
        if status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & stat.S_IWOTH:
            who, change = "everybody", "o-w"
        elif status.st_mode & stat.S_IWGRP and not _is_private(status) and _name(status.st_gid) != group:
            who, change = f"group {_name(status.st_gid)}", "g-w"
        else:
            continue
        yield (
            f"{path} can be written by {who}, who could put other code in a run's place, which then runs as "
            f"you; `chmod {change} {path}`, or choose another run.dir"
        )


def _is_private(status: os.stat_result) -> bool:
    """Whether a file's group is that of its owner alone, as most Linux systems make one for each user."""
    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    is_own = owner.pw_gid == group.gr_gid and owner.pw_name == group.gr_name
    return is_own and set(group.gr_mem) <= {owner.pw_name}


def _name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
