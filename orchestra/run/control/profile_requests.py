"""Requests to trace a running run, as files in <run>/control/: which attempt, how many steps, which ranks.

`orchestra profile` writes one; rank 0 looks for them beside requests to stop, and all ranks agree on the
steps. A request names one attempt, so that an old one traces no later attempt. Standard library only.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from orchestra.run.control.request_files import read_request_files, write_request_file
from orchestra.run.control.stop_requests import user_name
from orchestra.run.events import is_number, is_whole
from orchestra.run.paths import RunDir

# So many ranks can be named in one request, and so many steps be traced: a trace takes megabytes a step.
MOST_RANKS, MOST_STEPS = 8, 100
_TOKEN_BITS = 32
_TOKEN = re.compile(rf"[0-9a-f]{{{_TOKEN_BITS // 4}}}")


@dataclass(frozen=True)
class ProfileRequest:
    """One request: steps to trace from the next agreed one on, on these ranks (empty: on all)."""

    attempt: int
    steps: int
    ranks: tuple[int, ...]
    token: str
    time: float
    user: str
    host: str


def token_of(number: int) -> str:
    """Return the token that a number of 32 bits is: ranks tell each other numbers."""
    return f"{number:0{_TOKEN_BITS // 4}x}"


def write_request(run: RunDir, attempt: int, steps: int, ranks: tuple[int, ...]) -> ProfileRequest:
    """Ask that `attempt` of a run traces some steps. *Any process that shares the run directory.*

    Raises OSError where it cannot be written.
    """
    token = token_of(secrets.randbits(_TOKEN_BITS))
    request = ProfileRequest(attempt, steps, ranks, token, time.time(), user_name(), socket.gethostname())
    write_request_file(run.profile_request(attempt, token), request)
    return request


def read_requests(run: RunDir, attempt: int) -> list[ProfileRequest]:
    """Return the requests to trace `attempt`, oldest first; what is no request is passed over. Raises OSError
    where the folder is there and cannot be read.
    """
    return read_request_files(run.profile_request(attempt, "*"), attempt, _from_record)


def _from_record(record: dict[str, Any]) -> ProfileRequest | None:
    ranks, steps = record.get("ranks"), record.get("steps")
    texts = [record.get(key) for key in ("token", "user", "host")]
    is_request = (
        is_whole(record.get("attempt"))
        and is_whole(steps)
        and 1 <= steps <= MOST_STEPS
        and isinstance(ranks, list)
        and len(ranks) <= MOST_RANKS
        and all(is_whole(rank) and 0 <= rank < 1 << 31 for rank in ranks)
        and is_number(record.get("time"))
        and all(isinstance(text, str) for text in texts)
        and _TOKEN.fullmatch(record["token"])
    )
    if not is_request:
        return None
    fields = {field.name: record[field.name] for field in dataclasses.fields(ProfileRequest)}
    return ProfileRequest(**{**fields, "ranks": tuple(record["ranks"])})
