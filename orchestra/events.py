"""The event records of a run: who saw what, when, with which evidence. Standard library only.

Every process writes a file of its own under <run>/events/; readers merge them by time. Unknown event names
are kept, so that an older reader can show a newer run.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from orchestra.jsonl import JsonLinesWriter, Record, read_json_lines
from orchestra.rundir import RunDir


class EventWriter:
    """Appends events of one process. `writer` names the file and must be unique among processes and
    attempts.
    """

    def __init__(self, run: RunDir, writer: str, attempt: int, **context: Any) -> None:
        self._file = JsonLinesWriter(run.event_file(writer))
        self._attempt = attempt
        self._context = {"host": socket.gethostname(), **context}

    def write(self, event: str, **evidence: Any) -> None:
        """Append `event` with its evidence (step, cause, seconds …), the time (Unix seconds) and the
        attempt.
        """
        stamp = {"time": time.time(), "attempt": self._attempt, "event": event}
        self._file.write({**stamp, **self._context, **evidence})


def read_events(run: RunDir) -> list[Record]:
    """Return all events of a run, ordered by time."""
    files = sorted(run.events.glob("*.jsonl"))
    return sorted((record for file in files for record in read_json_lines(file)), key=_time)


def _time(record: Record) -> float:
    return float(record.get("time") or 0.0)


def rank_writer(attempt: int, rank: int) -> str:
    """Name of the event file of one worker."""
    return f"attempt-{attempt:03d}.rank-{rank:05d}"


def node_writer(attempt: int, node: int) -> str:
    """Name of the event file of one node agent."""
    return f"attempt-{attempt:03d}.node-{node:03d}"
