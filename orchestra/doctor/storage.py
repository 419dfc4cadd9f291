"""Checks the folder of the runs: whether it can be written, its file system, its room and its clock."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from orchestra.doctor.check import Check, Finding, Mark, Subject
from orchestra.units import GIB, binary

_LITTLE_BYTES = 20 * GIB
_FEW_INODES = 100_000
_CLOCK_SLACK_S = 2.0
_SLOW_WRITE_S = 1.0
_MOUNTS = Path("/proc/self/mountinfo")


def nearest_folder(path: Path) -> Path:
    """Return the folder itself or, where it does not exist yet, the nearest above it that does."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _run_dir(subject: Subject) -> Iterator[Finding]:
    place = subject.run_dir.expanduser().absolute()
    folder = nearest_folder(place)
    kind = _kind(folder)
    new = "" if folder == place else f" (to be made in {folder})"
    named = f"{place}{new}, {kind}" if kind else f"{place}{new}"
    probe = folder / f".orchestra-doctor-{secrets.token_hex(4)}"
    begin = time.time()
    try:
        with probe.open("w") as file:
            file.write("probe")
            file.flush()
            os.fsync(file.fileno())
        seconds = time.time() - begin
        written = probe.stat().st_mtime
    except OSError as error:
        advice = "choose another run.dir, or make room for it there"
        yield Finding("run.dir", Mark.failed, f"{named}: cannot write: {error.strerror}", advice)
        return
    finally:
        probe.unlink(missing_ok=True)
    slow = seconds >= _SLOW_WRITE_S
    found = f"{named}: can be written" + (f", slowly: {seconds:.1f} s for 5 bytes" if slow else "")
    advice = "its server is busy or far away: another run.dir may serve better" if slow else ""
    yield Finding("run.dir", Mark.warning if slow else Mark.ok, found, advice)
    yield from _of_one_host(place, kind, subject)
    yield from _room(folder)
    yield _clock(begin, begin + seconds, written)


def _kind(folder: Path) -> str | None:
    from orchestra.submit.site import file_system_of

    return file_system_of(folder, _MOUNTS.read_text()) if _MOUNTS.exists() else None


def _of_one_host(place: Path, kind: str | None, subject: Subject) -> Iterator[Finding]:
    if subject.launcher == "slurm" and kind in ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"):
        advice = "use a folder on a file system that all nodes mount, such as your home"
        yield Finding(
            "run.dir", Mark.failed, f"{place} is in this machine's memory, the nodes have no part", advice
        )


def _room(folder: Path) -> Iterator[Finding]:
    status = os.statvfs(folder)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    # Some file systems make inodes as they need them and say 0.
    inodes = status.f_favail if status.f_files else None
    found = f"{binary(free)} of {binary(size)} free"
    found += "" if inodes is None else f", {inodes:,} inodes free"
    little = free < _LITTLE_BYTES or (inodes is not None and inodes < _FEW_INODES)
    advice = "checkpoints may not fit: free some, keep fewer (checkpoint.keep_last), or use another run.dir"
    yield Finding("room", Mark.warning if little else Mark.ok, found, advice if little else "")


def _clock(begin: float, end: float, written: float) -> Finding:
    """Compare this host's clock with the one that stamped a file in between; stamps may be whole seconds."""
    off = written - end if written > end else min(0.0, written + 1.0 - begin)
    if abs(off) > _CLOCK_SLACK_S:
        found = (
            f"the file system's clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} this host's"
        )
        return Finding(
            "clock", Mark.warning, found, "heartbeats and ages will be wrong: ask for NTP (chronyd)"
        )
    return Finding("clock", Mark.ok, f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, the file system's agrees")


CHECKS = (Check("run.dir", _run_dir),)
