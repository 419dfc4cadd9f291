"""How files of a run are written and read: small ones as one act, growing ones line by line. Standard library
only.

JSON-lines files have one writer each, are safe to read while they grow and safe after a crash. A process that
dies in the middle of a write leaves a torn last line. Readers pass over it; whoever reopens the file for
writing cuts it first, so that a torn line never ends up in the middle.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import itertools
import json
import math
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

Record = dict[str, Any]

_TAIL_BYTES = 1 << 16
# Of a growing file, read and parsed at once.
_PIECE_BYTES = 1 << 20
# Why a disk has no room, and the longest name of a file.
FULL = (errno.ENOSPC, errno.EDQUOT)
LONGEST_NAME = 255
# Records that wait for room on a disk: at some hundred bytes each a few megabytes.
MOST_KEPT = 10_000


def to_log(words: str) -> None:
    """Write words on standard error, mostly a log on the disk of the run, which may be full: that changes
    neither what follows nor the exit code, as words would that wait in a buffer for the last flush.
    """
    with contextlib.suppress(OSError):
        os.write(2, words.encode(errors="replace"))


def as_name(needed: Record, texts: dict[str, str], most: int) -> str | None:
    """Return a file's name of at most so many characters that holds a record, `texts` shortened to what fits;
    None where what is needed does not fit. An empty file of that name is what a full disk still takes.
    """

    def named(record: Record) -> str:
        text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
        return base64.urlsafe_b64encode(text.encode(errors="replace")).decode()

    kept = dict(needed)
    if len(named(kept)) > most:
        return None
    for key, text in texts.items():
        fits = next(
            (n for n in range(min(len(text), most), 0, -1) if len(named({**kept, key: text[:n]})) <= most), 0
        )
        kept |= {key: text[:fits]} if fits else {}
    return named(kept)


def other_place(error: OSError) -> str:
    """Return what to do where a run's directory cannot be made; a disk may lack files as well as bytes."""
    tools = "`df` tells of bytes, `df -i` of files, `quota` of what is yours"
    room = f"make room there ({tools}), or " if error.errno in FULL else ""
    return f"{room}choose another run.dir"


def make_named(path: Path, other: Path) -> None:
    """Make a file of which the name alone counts. Where the disk takes no new file either, as when all of a
    quota of files is used, it is one more name of `other`, a file in the same folder. Raises OSError.
    """
    try:
        path.touch()
    except OSError as error:
        if error.errno not in FULL:
            raise
        try:
            os.link(other, path)
        except OSError:
            raise error from None


def from_name(name: str) -> Record:
    """Return the record that such a name holds; an empty one where it holds none."""
    try:
        record = json.loads(base64.urlsafe_b64decode(name))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def finite_or_null(value: Any) -> Any:
    """Replace non-finite floats, which JSON cannot hold, by null, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return value


def write_atomically(path: Path, text: str, *, is_synced: bool = True) -> None:
    """Write a file as one act: a reader sees the old text, the whole new one or none. Raises OSError.

    Several processes may write the same file, and the last one wins. `is_synced`: its bytes are on the disk
    before its name, so that it is whole after a power failure too.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            # Whoever reads it knows no draft.
            error.filename = str(path)
        raise


def make_once(path: Path, text: str) -> bool:
    """Make a file with all that is in it, once: return False where it stands already. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def names_in(folder: Path) -> list[str]:
    """List a folder. On NFS opening it asks the server, while the absence of a file by its name may be
    remembered for half a minute. Raises OSError where it is there and cannot be read.
    """
    try:
        return [entry.name for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []


def read_json(path: Path) -> Record | None:
    """Return the object that a JSON file holds; None where it is missing, cannot be read or holds none."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


class JsonLinesWriter:
    """Appends records to one file, from any thread. Each record is a single write, so that readers see whole
    lines or nothing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        # What the disk did not take, oldest first.
        self._kept: deque[Record] = deque(maxlen=MOST_KEPT)
        # Two threads at once would be fine, were it not for the part of a record that is taken back.
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        """Append one record. Floats keep full precision (`repr`); non-finite ones become null."""
        line = json.dumps(finite_or_null(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            try:
                written = os.write(self._fd, line)
            except OSError as error:
                # A descriptor has no name.
                error.filename = str(self._path)
                raise
            if written < len(line):
                # The disk is full: take the part back, or the next record would end up inside it.
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def write_or_keep(self, record: Record) -> None:
        """Append one record after those that are kept, and keep it where the disk takes none: whoever writes
        goes on. *One thread only*. Of more than MOST_KEPT the oldest are lost; the first one that is kept is
        told of on standard error.
        """
        was_kept = bool(self._kept)
        self._kept.append(record)
        problem = self.write_kept()
        if problem is not None and not was_kept:
            to_log(f"{self._path} cannot be written: {problem}; its records are kept until it can be\n")

    def write_kept(self) -> str | None:
        """Append what is kept; return why the disk does not take it, None where nothing is left."""
        try:
            while self._kept:
                self.write(self._kept[0])
                self._kept.popleft()
        except OSError as error:
            return error.strerror or str(error)
        return None

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def cut_torn_line(path: Path) -> int:
    """Cut an unfinished last line off a file; return the number of bytes cut. A missing file is left
    missing.
    """
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            end = _end_of_last_line(file, size)
            if end < size:
                file.truncate(end)
            return size - end
    except FileNotFoundError:
        return 0


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    position = size
    while position > 0:
        start = max(0, position - _TAIL_BYTES)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


def read_json_lines(path: Path, wanted: re.Pattern[bytes] | None = None) -> Iterator[Record]:
    """Yield the whole records of a file in order; a torn last line or a missing file yields nothing more.

    `wanted` picks lines by their bytes, so that no others need to be parsed.
    """
    for records in JsonLinesReader(path, wanted).pieces():
        yield from records


def read_last_lines(path: Path, num_lines: int, num_bytes: int) -> list[Record]:
    """Return the last whole records of a file, of at most so many lines and bytes; none of a missing file."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - num_bytes)
            file.seek(start)
            block = file.read(num_bytes)
    except FileNotFoundError:
        return []
    # The last piece is no whole line, and neither is the first one when it was cut into.
    lines = block.split(b"\n")[1 if start else 0 : -1]
    return [record for line in lines[-num_lines:] if (record := _parsed(line)) is not None]


class JsonLinesReader:
    """Follows a growing file by polling (network file systems have no change notices)."""

    def __init__(self, path: Path, wanted: re.Pattern[bytes] | None = None) -> None:
        self._path = path
        self._wanted = wanted
        self._offset = 0

    def read_new(self) -> list[Record]:
        """Return the records completed since the last call; lines that are not JSON objects are
        passed over.
        """
        offset = self._offset
        try:
            return list(itertools.chain.from_iterable(self.pieces()))
        except OSError:
            # None of them was returned.
            self._offset = offset
            raise

    def pieces(self) -> Iterator[list[Record]]:
        """Yield the same in parts, of which only one at a time is in memory."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                rest = b""
                while piece := file.read(_PIECE_BYTES):
                    whole, newline, rest = (rest + piece).rpartition(b"\n")
                    self._offset += len(whole) + len(newline)
                    lines = whole.splitlines()
                    if self._wanted is not None:
                        lines = list(filter(self._wanted.search, lines))
                    yield _all_parsed(lines)
        except FileNotFoundError:
            return

    @property
    def offset(self) -> int:
        """How far it has read, in bytes."""
        return self._offset


def _all_parsed(lines: list[bytes]) -> list[Record]:
    """Parse lines at once: they share the strings of their keys then, which take most of the memory."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        found = []
    if len(found) != len(lines):
        found = [_parsed(line) for line in lines]
    return [record for record in found if isinstance(record, dict)]


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
