"""How the nodes of one start of a job agree on what they begin: node 0 decides and writes, the others read.

A file in <run>/control/ that belongs to this start of this job alone. It opens no connection.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.slurm.task import JobTask
from orchestra.errors import LaunchError, RivalError
from orchestra.rundir import RunDir
from orchestra.submit.claims import write_whole

# From the start of the first node's task to the last one's: images are pulled, Python is loaded by many.
MEETING_TIMEOUT_S = 600.0
_POLL_S = 0.5
_REFUSAL = "refusal"


@dataclass(frozen=True)
class Meeting:
    """One attempt's number and the place where its ranks meet."""

    attempt: int
    address: str
    port: int
    host: str
    time: float


def publish(run: RunDir, task: JobTask, meeting: Meeting) -> None:
    """Let the other nodes of this start know. *Node 0 only*. Raises OSError."""
    write_whole(run.meeting(task.job, task.restart), json.dumps(dataclasses.asdict(meeting)) + "\n")


def publish_refusal(run: RunDir, task: JobTask, text: str) -> None:
    """Let the other nodes of this start know that the job does not train. *Node 0 only*. Raises OSError."""
    write_whole(run.meeting(task.job, task.restart), json.dumps({_REFUSAL: text}) + "\n")


def await_meeting(
    run: RunDir, task: JobTask, is_stopped: Callable[[], bool], timeout_s: float = MEETING_TIMEOUT_S
) -> Meeting | None:
    """Return what node 0 decided, None when `is_stopped` said so before. *All nodes but 0*.

    Raises RivalError when node 0 found that another job trains the run, LaunchError when it says nothing for
    `timeout_s`.
    """
    place = run.meeting(task.job, task.restart)
    deadline = time.monotonic() + timeout_s
    while not is_stopped():
        if (found := _read(place)) is not None:
            return found
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node 0 of job {task.job} has not said within {timeout_s:g} s where to meet ({place}): its "
                f"log tells what became of it, or the nodes do not share {run.path}"
            )
        time.sleep(_POLL_S)
    return None


def is_there(file: Path) -> bool:
    """Tell whether a file exists by listing its folder. Raises OSError where that cannot be read.

    On NFS opening a folder asks the server, while the absence of a file may be remembered for half a minute.
    """
    with os.scandir(file.parent) as entries:
        return any(entry.name == file.name for entry in entries)


def _read(place: Path) -> Meeting | None:
    try:
        if not is_there(place):
            return None
        record: dict[str, Any] = json.loads(place.read_text())
        if isinstance(record.get(_REFUSAL), str):
            raise RivalError(record[_REFUSAL])
        return Meeting(**record)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
