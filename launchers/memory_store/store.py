"""The copies in one node's memory: what its ranks have written, and what a neighbour node sent to be kept.

<place>/orchestra-<uid>/<run>.<host>/       in memory (tmpfs), of this user alone (0700)
├── lock          held by the agent as long as it lives: a folder whose lock is free belongs to nobody
├── bell          a pipe into which a rank writes a byte after each new copy
├── own/          rank-00003.slot-0.bin and .copy, written by this node's ranks, or fetched for them
└── kept/         the same of the neighbour's ranks

A copy is there if and only if its `.copy` is, whose first line says of whom and of which step it is. Only its
size is checked here: a rank compares checksums before it uses one. A record whose first line says nothing of
that kind is none, and is told of (`CopyStore.unreadable`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import select
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers import LauncherError

# Tells the ranks the folder.
FOLDER_VARIABLE = "ORCHESTRA_COPIES"
OWN, KEPT = "own", "kept"
_PLACE = Path("/dev/shm")
# Two complete copies of each rank are kept, and a third place is there to receive the next.
_NUM_KEPT, _NUM_SLOTS = 2, 3
# How long a folder without an agent is left alone: a killed agent's successor goes on with it.
_ORPHAN_S = 120.0


@dataclass(frozen=True, order=True)
class Copy:
    """A complete copy of a rank's state after a step. `layout`: the degrees of the mesh, by axis."""

    attempt: int
    step: int
    rank: int
    num_bytes: int
    layout: Mapping[str, Any] = field(compare=False, hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return what the other nodes need to know of it."""
        return {"step": self.step, "attempt": self.attempt, "rank": self.rank, "layout": dict(self.layout)}

    def to_record(self) -> dict[str, Any]:
        """Return what the first line of its record says, which `copy_of` reads."""
        return {**self.to_json(), "bytes": self.num_bytes}


@dataclass(frozen=True)
class CopyPlace:
    """Where a copy lies: its record, and its bytes beside it."""

    copy: Copy
    record: Path
    # Which writing of the record it is: another one has another number.
    version: tuple[int, int]

    @property
    def content(self) -> Path:
        return self.record.with_suffix(".bin")

    def is_unchanged(self) -> bool:
        """Whether the copy is still there: then all that was read of it meanwhile was of this copy."""
        with contextlib.suppress(OSError):
            return _version(self.record) == self.version
        return False


class CopyStore:
    """One node's folder of one run. Made by `open_copy_store`; safe to use from several threads."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock
        self._bell = os.open(folder / "bell", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._memory: dict[Path, mmap.mmap] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks' environment has to say."""
        return {FOLDER_VARIABLE: str(self.folder)}

    def held(self) -> list[Copy]:
        """Return the complete copies that lie here, each once, of this node's ranks and the neighbour's."""
        return sorted({place.copy for place in self.places()})

    def places(self, *kinds: str) -> Iterator[CopyPlace]:
        """Yield where complete copies lie, of both kinds or of one."""
        for kind in kinds or (OWN, KEPT):
            for record in sorted((self.folder / kind).glob("rank-*.slot-*.copy")):
                if (place := _place(record)) is not None:
                    yield place

    def unreadable(self) -> list[str]:
        """Return the records that are there and do not say of what: their copies are none."""
        return [
            f"{kind}/{record.name}"
            for kind in (OWN, KEPT)
            for record in sorted((self.folder / kind).glob("rank-*.slot-*.copy"))
            if not _is_readable(record)
        ]

    def find(self, rank: int, step: int, attempt: int) -> CopyPlace | None:
        """Return where a copy lies; None where it does not."""
        for place in self.places():
            if (place.copy.rank, place.copy.step, place.copy.attempt) == (rank, step, attempt):
                return place
        return None

    def adopt(self, rank: int, step: int, attempt: int) -> bool:
        """Bring a copy to where this node's own ranks look for theirs; return whether it is there."""
        place = self.find(rank, step, attempt)
        if place is None or place.record.parent.name == OWN:
            return place is not None
        target = min(self._slots(OWN, rank), key=_age)
        target.unlink(missing_ok=True)
        self._memory.pop(place.content, None)
        place.content.rename(target.with_suffix(".bin"))
        place.record.rename(target)
        return True

    def receive(self, kind: str, copy: Copy) -> Incoming:
        """Make room for a copy that comes. Raises OSError where there is none."""
        slots = self._slots(kind, copy.rank)
        record = min(slots, key=_age)
        record.unlink(missing_ok=True)
        content = record.with_suffix(".bin")
        memory = self._memory.get(content)
        if memory is None or len(memory) != copy.num_bytes:
            memory = _taken(content, copy.num_bytes)
            # The ranks may resize their own files, and memory that is cut off ends who writes to it.
            if kind == KEPT:
                self._memory[content] = memory
        older = sorted((slot for slot in slots if slot != record and _age(slot) > _NO_COPY), key=_age)
        return Incoming(record, memory, older[: max(0, len(older) - _NUM_KEPT + 1)])

    def _slots(self, kind: str, rank: int) -> list[Path]:
        names = (f"rank-{rank:05d}.slot-{number}.copy" for number in range(_NUM_SLOTS))
        return [self.folder / kind / name for name in names]

    def keep_only(self, own: range, kept: range) -> None:
        """Remove all other ranks' files: an attempt on other nodes has begun and needs none of them."""
        for kind, ranks in ((OWN, own), (KEPT, kept)):
            for file in (self.folder / kind).iterdir():
                number = file.name.removeprefix("rank-").split(".")[0]
                if number.isdecimal() and int(number) not in ranks:
                    self._memory.pop(file, None)
                    # Whoever still sends it says at its end that it is gone.
                    file.unlink(missing_ok=True)

    def await_new_copy(self, limit_s: float) -> None:
        """Wait until a rank has made a copy, at most so long."""
        with contextlib.suppress(OSError, ValueError):
            select.select([self._bell], [], [], limit_s)
            os.read(self._bell, 1 << 16)

    def wake(self) -> None:
        """End another thread's wait for a new copy."""
        with contextlib.suppress(OSError):
            os.write(self._bell, b".")

    def close(self) -> None:
        """Empty and remove the folder: the run ends here, and its memory is given back."""
        self._memory.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        for descriptor in (self._bell, self._lock):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@dataclass(frozen=True)
class Incoming:
    """A copy on its way here: memory to put it into, and the records that go when it has come."""

    record: Path
    memory: mmap.mmap
    older: list[Path]

    def commit(self, record: bytes) -> None:
        """Say that it is there. Raises OSError."""
        draft = self.record.with_suffix(".draft")
        draft.write_bytes(record)
        draft.replace(self.record)
        for older in self.older:
            older.unlink(missing_ok=True)


def open_copy_store(run: str, host: str, place: Path = _PLACE) -> CopyStore:
    """Open this node's folder for a run, with what an earlier agent left, and remove those of dead runs.

    `run` and `host` name the folder. Raises LauncherError where it cannot be made or somebody else has it.
    """
    of_user = place / f"orchestra-{os.getuid()}"
    folder = Path(f"{folders_of(run, place)}{_plain(host)}")
    try:
        _own_folder(of_user)
        _own_folder(folder)
        lock = _locked(folder)
        if lock is None:
            raise LauncherError(f"another agent on {host} keeps copies of {run}: {folder} is locked")
        for name in (OWN, KEPT):
            _own_folder(folder / name)
        if not (folder / "bell").exists():
            os.mkfifo(folder / "bell", 0o600)
        store = CopyStore(folder, lock)
    except OSError as error:
        raise LauncherError(f"no folder for copies in memory: {error}") from error
    remove_dead(of_user)
    return store


def folders_of(run: str, place: Path = _PLACE) -> Path:
    """Return how the paths of a run's folders on this node begin; the host's name follows."""
    return place / f"orchestra-{os.getuid()}" / f"{_plain(run)}."


def remove_dead(of_user: Path) -> None:
    """Remove folders that no agent has held for a while: nobody will go on with them."""
    for folder in of_user.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - _last_used(folder) < _ORPHAN_S or (lock := _locked(folder)) is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _last_used(folder: Path) -> float:
    """Return when something was put into a folder last, in Unix seconds. Raises OSError where it is gone."""
    times = [folder.stat().st_mtime]
    for kind in (OWN, KEPT):
        with contextlib.suppress(FileNotFoundError):
            times.append((folder / kind).stat().st_mtime)
    return max(times)


def _locked(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock until this process ends; None where another has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The folder is in this node's own memory, where locks work and end with their process.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _own_folder(folder: Path) -> None:
    """Make a folder of this user alone. Raises LauncherError where there is one of somebody else's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid():
        raise LauncherError(f"{folder} belongs to user {status.st_uid}: no copies are put there")
    folder.chmod(0o700)


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)


def _taken(content: Path, num_bytes: int) -> mmap.mmap:
    """Return a file's memory of so many bytes, all of it taken: a full tmpfs is missed now."""
    descriptor = os.open(content, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, num_bytes)
        os.posix_fallocate(descriptor, 0, max(1, num_bytes))
        return mmap.mmap(descriptor, max(1, num_bytes), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


_NO_COPY = (-1, -1)


def _age(record: Path) -> tuple[int, int]:
    place = _place(record)
    return _NO_COPY if place is None else (place.copy.attempt, place.copy.step)


def _place(record: Path) -> CopyPlace | None:
    """Return the copy that a record tells of; None where it tells of none, or its bytes are not all there."""
    try:
        version = _version(record)
        with record.open("rb") as file:
            copy = copy_of(file.readline())
        size = record.with_suffix(".bin").stat().st_size
    except (OSError, ValueError):
        return None
    return CopyPlace(copy, record, version) if size >= copy.num_bytes else None


def _is_readable(record: Path) -> bool:
    """Whether a record says of what it is; one that is gone meanwhile need not."""
    try:
        with record.open("rb") as file:
            copy_of(file.readline())
    except ValueError:
        return False
    except OSError:
        pass
    return True


def copy_of(line: bytes) -> Copy:
    """Return the copy that the first line of a record tells of. Raises ValueError where it tells of none."""
    record = json.loads(line)
    keys = ("attempt", "step", "rank", "bytes") if isinstance(record, dict) else ()
    numbers = [number for key in keys if isinstance(number := record.get(key), int)]
    if len(numbers) < 4 or min(numbers) < 0:
        raise ValueError("no record of a copy")
    layout = record.get("layout")
    attempt, step, rank, num_bytes = numbers
    return Copy(attempt, step, rank, num_bytes, layout if isinstance(layout, dict) else {})


def _version(record: Path) -> tuple[int, int]:
    status = record.stat()
    return status.st_ino, status.st_mtime_ns
