"""Requests to stop a run, as files in <run>/control/: who asks, why, and which attempt is meant.

Whoever wants a run to stop writes one: a node agent that got a signal, `orchestra cancel` on any host. Rank 0
and the agent look for them. A request names one attempt and is never taken back, so that an old one stops no
later attempt. Standard library only.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from orchestra.run.control.request_files import EMPTY, read_request_files, write_request_file
from orchestra.run.events import is_number, is_whole
from orchestra.run.files import FULL, LONGEST_NAME, as_name, make_named, names_in
from orchestra.run.paths import RunDir

# Reasons other than a signal's ("signal SIGTERM").
CANCEL = "cancel"
TIME_LIMIT = "time_limit"
PREEMPTED = "preempted"
# Its records are gone, and nobody could stop it; also the verdict of such an attempt.
REMOVED = "run directory removed"
# The run goes on at once, on more or fewer nodes.
RESIZE = "resize"
# The signal that a job's script asks Slurm for before the time limit.
_WARNING = "SIGUSR2"

_TOKEN_BYTES = 4
# RunDir.claim
_CLAIM_NAME = re.compile(r"attempt-(\d+)\.claim$")
# RunDir.stop_request
_REQUEST_NAME = re.compile(r"attempt-(\d+)\.stop-.*\.json")


@dataclass(frozen=True)
class StopRequest:
    """One request: the attempt it is meant for, why, by whom, when (Unix seconds)."""

    attempt: int
    reason: str
    time: float
    user: str
    host: str
    pid: int
    # End the processes now; otherwise the ranks save first.
    at_once: bool = False

    def __str__(self) -> str:
        return f"{self.reason}, asked for by {self.user} on {self.host}"


def signal_reason(name: str) -> str:
    """Return the reason of a request that a signal such as "SIGTERM" led to."""
    return TIME_LIMIT if name == _WARNING else f"signal {name}"


def write_request(run: RunDir, attempt: int, reason: str, *, at_once: bool = False) -> StopRequest:
    """Ask that `attempt` of a run stops, as one act: a reader sees the whole request or none.

    *Any process of any host that shares the run directory*, as often as it likes. Raises OSError where it
    cannot be written, above all when the run directory is gone.
    """
    request = new_request(attempt, reason, at_once=at_once)
    try:
        write_request_file(run.stop_request(attempt, secrets.token_hex(_TOKEN_BYTES)), request)
    except OSError as error:
        needed, prefix = dataclasses.asdict(request), len(run.stop_request(attempt, EMPTY).name)
        texts = {key: needed.pop(key) for key in ("user", "host")}
        name = as_name(needed, texts, LONGEST_NAME - prefix)
        if error.errno not in FULL or name is None:
            raise
        make_named(run.stop_request(attempt, f"{name}{EMPTY}"), run.claim(attempt))
    return request


def new_request(attempt: int, reason: str, *, at_once: bool = False) -> StopRequest:
    """Return a request of this process, now, which nobody has been told of."""
    return StopRequest(attempt, reason, time.time(), user_name(), socket.gethostname(), os.getpid(), at_once)


def read_requests(run: RunDir, attempt: int) -> list[StopRequest]:
    """Return the requests to stop `attempt`, oldest first; what is no request is passed over. Raises OSError
    where the folder is there and cannot be read.
    """
    return read_request_files(run.stop_request(attempt, "*"), attempt, from_record)


def requested_attempt(run: RunDir) -> int | None:
    """Return the highest attempt that was ever asked to stop; None where none was. Raises OSError."""
    return _highest_attempt(run, _REQUEST_NAME)


def claimed_attempt(run: RunDir) -> int | None:
    """Return the highest attempt that somebody claimed; None where none was. Raises OSError."""
    return _highest_attempt(run, _CLAIM_NAME)


def _highest_attempt(run: RunDir, name: re.Pattern[str]) -> int | None:
    matches = (name.match(entry) for entry in names_in(run.control))
    return max((int(match[1]) for match in matches if match is not None), default=None)


def read_request(run: RunDir, attempt: int) -> StopRequest | None:
    """Return the oldest request to stop `attempt`, None without one; see `read_requests`."""
    return next(iter(read_requests(run, attempt)), None)


def from_record(record: dict[str, Any]) -> StopRequest | None:
    """Return the request that a JSON object holds; None where it holds none."""
    texts = ("reason", "user", "host")
    is_request = (
        is_whole(record.get("attempt"))
        and is_whole(record.get("pid"))
        and is_number(record.get("time"))
        and all(isinstance(record.get(key), str) for key in texts)
    )
    if not is_request:
        return None
    names = [field.name for field in dataclasses.fields(StopRequest) if field.name in record]
    return StopRequest(**{**{name: record[name] for name in names}, "at_once": record.get("at_once") is True})


def user_name(number: str | None = None) -> str:
    """Return the name of a user by number (None: of this process), or the number where it has none, as in a
    container.

    What the system calls it, as Slurm does: LOGNAME and USER may name somebody else (`su -m`).
    """
    number = str(os.getuid()) if number is None else number
    try:
        return pwd.getpwuid(int(number)).pw_name
    except (KeyError, ValueError, OverflowError):
        return number
