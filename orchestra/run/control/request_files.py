"""Requests as files in <run>/control/: each is one act, names one attempt, and is never taken back, so that
an old one does nothing to a later attempt. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from orchestra.run.files import Record, from_name, names_in, read_json, write_atomically
from orchestra.run.permissions import open_as_folder


class Request(Protocol):
    """The attempt that is meant, and when it was asked for (Unix seconds)."""

    @property
    def attempt(self) -> int: ...

    @property
    def time(self) -> float: ...


# Of files that are empty: a full disk had no room for their words, and their names hold them.
EMPTY = ".no-room"

Asked = TypeVar("Asked", bound=Request)


def write_request_file(file: Path, request: Any) -> None:
    """Write a request, a dataclass: a reader sees the whole one or none. Raises OSError where it cannot be
    written, above all when the run directory is gone.
    """
    file.parent.mkdir(exist_ok=True)
    # The run's own agents may be another member's of its group.
    with open_as_folder(file.parent):
        write_atomically(file, json.dumps(dataclasses.asdict(request)) + "\n", is_synced=False)


def read_request_files(
    pattern: Path, attempt: int, from_record: Callable[[Record], Asked | None]
) -> list[Asked]:
    """Return what `attempt` is asked for in files of this pattern, which has one star, oldest first; what is
    no request is passed over. Raises OSError where the folder is there and cannot be read.
    """
    begin, end = pattern.name.split("*")
    names = [name for name in names_in(pattern.parent) if name.startswith(begin) and name.endswith(end)]
    records = []
    for name in names:
        starred = name.removeprefix(begin).removesuffix(end)
        is_empty = starred.endswith(EMPTY)
        records.append(
            {"user": "?", "host": "?", **from_name(starred.removesuffix(EMPTY))}
            if is_empty
            else read_json(pattern.parent / name) or {}
        )
    requests = [from_record(record) for record in records]
    meant = [request for request in requests if request is not None and request.attempt == attempt]
    return sorted(meant, key=lambda request: request.time)
