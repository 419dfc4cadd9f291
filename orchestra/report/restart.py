"""The time between an attempt that failed and the next one: what its leader decided, and when that is due.

From the events of one attempt, and from whether the process that leads it lives. It asks no scheduler and
does not decide what follows a failure.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from launchers import processes
from orchestra.events import is_number, is_whole
from orchestra.jsonl import Record

RESTARTING = "restarting"
# Decisions that another attempt of the same crew follows, and the one that another job does; after the others
# its leader ends.
_GO_ON = ("restart", "replace", "shrink", "requeue")
# A verdict carries this while its leader has yet to say what follows.
_UNDECIDED = "undecided"
# Where nobody can tell whether the leader lives, it may begin the next attempt so long after it is due.
_LATE_S = 120.0


@dataclass(frozen=True)
class Restart:
    """Another attempt is to begin once a failed one's leader has waited for a while."""

    # The policy's action, or "undecided" for the moment before it says.
    decision: str
    reason: str
    # Unix seconds: when it was decided, and when the next attempt is to begin.
    decided: float
    due: float
    # What the attempt failed of.
    after: str | None
    # The Slurm job that the attempt belongs to; None in the foreground.
    job: str | None


def restart_to_come(own: Sequence[Record]) -> Restart | None:
    """Return what its leader decided after an attempt's last verdict, if that is that another one begins, or
    that it has yet to decide.

    `own` are the events of the newest attempt, by time. Whether the leader still lives is another question:
    `is_awaited`.
    """
    event = _last_word(own)
    if event is None:
        return None
    if event["event"] == RESTARTING:
        return _restart(event, _start(own)) if event.get("decision") in _GO_ON else None
    return _restart(event, _start(own)) if event.get(_UNDECIDED) is True else None


def _last_word(own: Sequence[Record]) -> Record | None:
    """Return the last thing that was said about the whole attempt's end; None while nothing was."""
    words = ("finished", "failed", "requeued", RESTARTING)
    return next((it for it in reversed(own) if it["event"] in words and "rank" not in it), None)


def is_awaited(restart: Restart, own: Sequence[Record], now: float, last_growth: float) -> bool:
    """Tell whether the leader that decided on `restart` lives, and so begins another attempt.

    On its own host its process tells; elsewhere it counts as alive until it is late by two minutes, counted
    from the last word of the run, at `last_growth` by the file server's clock.
    """
    start = _start(own)
    decided = _last_word(own) or {}
    if start is not None and is_of_this_host(start) and _is_same_leader(start, decided):
        lives = leader_lives(start)
        # Of several nodes the next one's agent leads where this one's is gone.
        if lives or start.get("nodes", 1) == 1:
            return lives
    wait_s = restart.due - restart.decided
    return now - max(restart.decided, last_growth) < wait_s + _LATE_S


def is_of_this_host(record: Record) -> bool:
    """Tell whether what wrote a record ran, or runs, on this host."""
    return record.get("host") == socket.gethostname()


def leader_lives(start: Record) -> bool:
    """Tell whether the process that `start` names (`pid`, `pid_started`) still runs on this host."""
    pid, started = start.get("pid"), start.get("pid_started")
    if not is_whole(pid):
        return False
    process = processes.find(pid)
    return process is not None and (started is None or process.started == started)


def _start(own: Sequence[Record]) -> Record | None:
    return next((event for event in reversed(own) if event["event"] == "attempt_started"), None)


def _restart(event: Record, start: Record | None) -> Restart:
    is_decided = event["event"] == RESTARTING
    wait_s, reason = event.get("wait_s"), event.get("reason") if is_decided else event.get("cause")
    after = event.get("after") if is_decided else event.get("cause")
    decided = float(event["time"])
    job = None if start is None else start.get("job")
    return Restart(
        decision=str(event["decision"]) if is_decided else _UNDECIDED,
        reason=reason if isinstance(reason, str) else "",
        decided=decided,
        due=decided + (max(0.0, float(wait_s)) if is_number(wait_s) else 0.0),
        after=after if isinstance(after, str) else None,
        job=job if isinstance(job, str) else None,
    )


def _is_same_leader(start: Record, decided: Record) -> bool:
    """Of a crew of several nodes another one may have led at the end; of its process nothing is known."""
    return all(
        key not in start or key not in decided or start[key] == decided[key] for key in ("host", "node")
    )
