"""The event records of a run: who saw what, when, with which evidence. Standard library only.

Every process writes a file of its own under <run>/events/; readers merge them by time. Unknown event names
are kept, so that an older reader can show a newer run. What readers rely on is checked once, here: a record
that somebody edited or a disk damaged is passed over, and never ends the command that reads it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from orchestra.run.files import (
    FULL,
    LONGEST_NAME,
    JsonLinesWriter,
    Record,
    as_name,
    from_name,
    make_named,
    read_json_lines,
)
from orchestra.run.paths import RunDir

_WHOLE_NUMBERS = ("code", "step", "pid", "pid_started")
_TEXTS = ("host", "cause", "message", "traceback", "signal", "advice")
# What fits into 64 bits; Python reads longer ones from JSON as well.
_LARGEST = 1 << 63
# What the names of files begin with that `orchestra watch` writes.
WATCH_PREFIX = "watch."
# Files whose names are events for which a full disk had no room: what such names hold in any case, and what
# else as far as it fits.
_WRITTEN, _NO_ROOM = ".jsonl", ".no-room"
_OF_NAMES = ("event", "attempt", "time", "rank", "node", "code", "step", "undecided", "fallback")
_TEXTS_OF_NAMES = ("cause", "message")
_NEWEST_ONLY = ("checkpoint_committed",)
# The files of ranks and agents: attempt, kind and number.
_OF_ATTEMPT = re.compile(r"attempt-(\d+)\.(rank|node)-(\d+)\.")
# Events that rank 0 alone writes, and such that no rank does: the others' files are not read for them.
_OF_RANK_0 = {"restored", "roll_back", "checkpoint_started", "checkpoint_committed", "checkpoint_needs"}
_OF_NO_RANK = {"submitted", "attempt_started", "restarting", "waits_on"}
# From so many files on, so many threads read them.
_MANY_FILES, _READERS = 200, 16


class EventWriter:
    """Appends events of one process. `writer` names the file and must be unique among processes and
    attempts.
    """

    def __init__(self, run: RunDir, writer: str, attempt: int, **context: Any) -> None:
        self._path = run.event_file(writer)
        self._file = JsonLinesWriter(self._path)
        self._attempt = attempt
        # Files whose names are events of this process.
        self._names: dict[str, Path] = {}
        self._context = {"host": socket.gethostname(), **context}

    @property
    def is_before_start(self) -> bool:
        """Whether what it writes is of a start of a job that ended before its attempt began."""
        return bool(self._context.get("before_start"))

    def write(self, event: str, **evidence: Any) -> None:
        """Append `event` with its evidence (step, cause, seconds …), the time (Unix seconds) and the
        attempt.
        """
        self._file.write(self._record(event, evidence))

    def write_surely(self, event: str, **evidence: Any) -> None:
        """Append an event without which the run would be told wrong: of one that a full disk has no room for
        the name of an empty file tells the most needed. Raises OSError where it takes no name either.
        """
        record = self._record(event, evidence)
        try:
            self._file.write(record)
        except OSError as error:
            needed = {key: record[key] for key in _OF_NAMES if key in record}
            texts = {key: str(record[key]) for key in _TEXTS_OF_NAMES if key in record}
            name = as_name(needed, texts, LONGEST_NAME - len(_NO_ROOM))
            if error.errno not in FULL or name is None:
                raise
            self._make_named(event, self._path.with_name(f"{name}{_NO_ROOM}"))

    def _make_named(self, event: str, path: Path) -> None:
        """Make the file whose name is an event; of some kinds the newest one's alone is kept, since a folder
        takes no more names at some time.
        """
        before = self._names.pop(event, None)
        if before is None or not _is_renamed(before, path):
            make_named(path, self._path)
        if event in _NEWEST_ONLY:
            self._names[event] = path

    def _record(self, event: str, evidence: Record) -> Record:
        stamp = {"time": time.time(), "attempt": self._attempt, "event": event}
        return {**stamp, **self._context, **evidence}

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Close the file, for whoever writes into many runs."""
        self._file.close()


def _is_renamed(before: Path, path: Path) -> bool:
    try:
        before.rename(path)
    except OSError:
        return False
    return True


def read_events(
    run: RunDir, names: tuple[str, ...] = (), attempt: int | None = None, *, newest_ranks: bool = False
) -> list[Record]:
    """Return all events of a run, ordered by time; with `names` at least all those that are called so, with
    `attempt` at least all those of this one, with `newest_ranks` of the attempts before the newest two that
    had ranks perhaps only what agents, commands and rank 0 wrote.

    Each has a name, a finite `time` and an integer `attempt`; where it has a `rank`, `code`, `step` or `pid`
    these are integers, and `cause` and `message` are texts. Records without the former, or with a rank that
    is no integer, are passed over; other fields of a wrong type are left out.
    """
    entries = _entries(run)
    written = _that_tell(
        [name for name in entries if name.endswith(_WRITTEN)], set(names), attempt, newest_ranks
    )
    records = _all_records([run.events / name for name in written], _called(names) if names else None)
    records += [from_name(name.removesuffix(_NO_ROOM)) for name in entries if name.endswith(_NO_ROOM)]
    return sorted((_cleaned(record) for record in records if _is_event(record)), key=_time)


def _that_tell(files: Sequence[str], names: set[str], attempt: int | None, newest_ranks: bool) -> list[str]:
    """Return which of the writers' files may hold what is asked for: each attempt of a thousand ranks leaves
    a thousand, and on a network file system each takes some round trips.
    """
    matches = [_OF_ATTEMPT.match(name) for name in files]
    # By the ranks' own files: an attempt that never began leaves some of agents alone.
    last = max((int(match[1]) for match in matches if match and match[2] == "rank"), default=0)

    def tells(match: re.Match[str] | None) -> bool:
        if match is None:
            return True
        number, is_rank, index = int(match[1]), match[2] == "rank", int(match[3])
        if attempt is not None and number != attempt:
            return False
        if not is_rank:
            return not names or not names <= _OF_RANK_0
        if names and names <= (_OF_NO_RANK if index == 0 else _OF_NO_RANK | _OF_RANK_0):
            return False
        return index == 0 or not newest_ranks or number >= last - 1

    return [name for name, match in zip(files, matches, strict=True) if tells(match)]


def _all_records(files: Sequence[Path], wanted: re.Pattern[bytes] | None) -> list[Record]:
    """Read files in their order; several threads do where they are many, if there may be some."""

    def read(part: Sequence[Path]) -> list[Record]:
        return [record for file in part for record in _records(file, wanted)]

    if len(files) < _MANY_FILES:
        return read(files)
    size = -(-len(files) // _READERS)
    parts = [files[begin : begin + size] for begin in range(0, len(files), size)]
    # A user's threads may be limited, and a process that ends takes no more.
    with contextlib.suppress(RuntimeError):
        # Brings `logging` with it, which no command needs for a small run.
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_READERS) as pool:
            return [*itertools.chain.from_iterable(pool.map(read, parts))]
    return read(files)


def _records(file: Path, wanted: re.Pattern[bytes] | None) -> Iterator[Record]:
    try:
        yield from read_json_lines(file, wanted)
    except PermissionError:
        # Somebody who watches the run kept it to themselves; nothing that it trains by stands there.
        if not file.name.startswith(WATCH_PREFIX):
            raise


def event_files(run: RunDir) -> list[Path]:
    """Return all writers' files, in the order of their names."""
    return [run.events / name for name in _entries(run) if name.endswith(_WRITTEN)]


def _entries(run: RunDir) -> list[str]:
    try:
        with os.scandir(run.events) as entries:
            return sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


@functools.cache
def _called(names: tuple[str, ...]) -> re.Pattern[bytes]:
    """Match the lines of events with these names, and perhaps others: whoever reads them looks again."""
    return re.compile(rb'"event"\s*:\s*"(?:' + "|".join(names).encode() + rb')"')


def _is_event(record: Record) -> bool:
    # Without its rank, an event of a rank would pass for one of the whole run.
    return (
        isinstance(record.get("event"), str)
        and is_whole(record.get("attempt"))
        and is_number(record.get("time"))
        and ("rank" not in record or is_whole(record["rank"]))
    )


def _cleaned(record: Record) -> Record:
    wrong = {key for key in _WHOLE_NUMBERS if key in record and not is_whole(record[key])}
    wrong |= {key for key in _TEXTS if key in record and not isinstance(record[key], str)}
    return {key: value for key, value in record.items() if key not in wrong} if wrong else record


def _time(record: Record) -> float:
    return float(record["time"])


def is_whole(value: object) -> TypeGuard[int]:
    """Tell whether a value read from JSON is an integer of at most 64 bits; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value read from JSON is a finite number: Python's reader takes NaN and Infinity too."""
    return math.isfinite(value) if isinstance(value, float) else is_whole(value)


def rank_writer(attempt: int, rank: int) -> str:
    """Name of the event file of one worker."""
    return f"attempt-{attempt:03d}.rank-{rank:05d}"


def node_writer(attempt: int, node: int) -> str:
    """Name of the event file of one node agent."""
    return f"attempt-{attempt:03d}.node-{node:03d}"
