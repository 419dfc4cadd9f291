"""What ended an attempt, from its events alone. It starts, ends and writes nothing.

Every rank writes its own verdict; a rank that was killed could not, so the node agent writes `rank_failed`
for it. The first failure counts, since the others mostly follow from it: a peer's collective breaks when a
rank is gone. For the same reason a rank killed by a signal comes before all that had the time to write.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED
from orchestra.jsonl import Record
from orchestra.recovery.causes import follows_from_another
from orchestra.recovery.culprit import culprit

_STATES = {EXIT_DONE: "finished", EXIT_INTERRUPTED: "interrupted", EXIT_STOPPED: "stopped"}
# Ends that no rank is to blame for.
_IN_GOOD_ORDER = (EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED)
_VERDICTS = ("finished", "failed", "rank_failed")


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended, and who was first."""

    # What `orchestra run` exits with: the codes of orchestra.errors.
    code: int
    cause: str
    message: str = ""
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    traceback: str | None = None
    # Whether the message says all that a user needs, and the traceback nothing more.
    explained: bool = False

    @property
    def state(self) -> str:
        """One word: finished, interrupted, stopped (to be continued) or failed."""
        return _STATES.get(self.code, "failed")


def of_attempt(events: Iterable[Record], attempt: int) -> list[Record]:
    """Return the events of one attempt, in their order."""
    return [event for event in events if event.get("attempt") == attempt]


def last_attempt(events: Iterable[Record]) -> int | None:
    """Return the number of the newest attempt that was started."""
    started = [int(event["attempt"]) for event in events if event.get("event") == "attempt_started"]
    return max(started, default=None)


def node_verdict(events: Iterable[Record]) -> Verdict | None:
    """Return what the node agent wrote as the end of an attempt, from its events; None without one."""
    ends = [event for event in events if event.get("event") in ("finished", "failed") and "rank" not in event]
    if not ends:
        return None
    return _with_first_failure(int(ends[-1].get("code", EXIT_FAILED)), ends[-1], events)


def _with_first_failure(code: int, end: Record, events: Iterable[Record]) -> Verdict:
    failure = None if code in _IN_GOOD_ORDER else _seen_from_outside(events) or first_failure(events)
    source = failure or end
    return Verdict(
        code=code,
        cause=str(source.get("cause") or end.get("event", "failed")),
        message=str(source.get("message") or ""),
        rank=source.get("rank"),
        host=source.get("host"),
        step=source.get("step"),
        traceback=source.get("traceback"),
        explained=source.get("explained") is True,
    )


def first_failure(events: Iterable[Record]) -> Record | None:
    """Return the failure of a rank that came first among the events of one attempt."""
    failures = [
        event for event in events if event.get("event") in ("failed", "rank_failed") and "rank" in event
    ]
    return min(failures, key=_order_of_blame, default=None)


def _seen_from_outside(events: Iterable[Record]) -> Record | None:
    """Return what the agents saw that no rank could say: a node that is gone, a rank that hangs.

    What ranks say then follows from it: their peers are gone.
    """
    events = list(events)
    lost = [event for event in events if event.get("event") in ("node_lost", "agent_lost")]
    if lost:
        hosts = ", ".join(dict.fromkeys(str(event.get("host")) for event in lost))
        cause = str(lost[0]["event"]).replace("_", " ")
        return {"cause": cause, "message": f"{hosts}: {lost[0].get('cause')}", "host": lost[0].get("host")}
    hung = [event for event in events if event.get("event") == "hang_detected"]
    found = culprit(events) if hung else None
    if found is None:
        return None
    step = hung[0].get("step")
    return {"cause": "hang", "message": found.why, "rank": found.rank, "host": found.host, "step": step}


def _order_of_blame(event: Record) -> tuple[bool, bool, float]:
    return "signal" not in event, follows_from_another(event), event.get("time") or 0.0


def _only_stopped(events: Iterable[Record]) -> bool:
    failed = [event for event in _of_ranks(events) if event["event"] != "finished"]
    return all(event.get("code") == EXIT_STOPPED for event in failed)


def ranks_with_verdict(events: Iterable[Record]) -> frozenset[int]:
    """Return the ranks whose end is known."""
    return frozenset(int(event["rank"]) for event in _of_ranks(events))


def finished_ranks(events: Iterable[Record]) -> frozenset[int]:
    """Return the ranks that came to the end of the training."""
    return frozenset(int(event["rank"]) for event in _of_ranks(events) if event["event"] == "finished")


def _of_ranks(events: Iterable[Record]) -> list[Record]:
    return [event for event in events if event.get("event") in _VERDICTS and "rank" in event]


def judge(events: Sequence[Record], *, exit_code: int, interruption: str | None) -> Verdict:
    """Judge an attempt that is over from its events, torchrun's exit code and why it was ended at once, if it
    was.

    One rank that stopped on request is enough for that verdict, unless another one failed: ranks write it
    when all of them have saved.
    """
    finished = [event for event in _of_ranks(events) if event["event"] == "finished"]
    if exit_code == EXIT_DONE and finished:
        return Verdict(EXIT_DONE, "finished", step=finished[0].get("step"))
    failure = first_failure(events)
    outside = _seen_from_outside(events)
    if failure is not None and outside is None and _only_stopped(events):
        cause, message = str(failure.get("cause")), str(failure.get("message") or "")
        return Verdict(EXIT_STOPPED, cause, message, step=failure.get("step"))
    if interruption is not None:
        return Verdict(EXIT_INTERRUPTED, "interrupted", interruption)
    if outside is not None or failure is not None:
        code = EXIT_FAILED if failure is None or outside is not None else int(failure.get("code", 1))
        return _with_first_failure(code or EXIT_FAILED, failure or {}, events)
    return Verdict(
        EXIT_FAILED, "no verdict", f"{_ended(exit_code)}, and no rank said why; see the node's log"
    )


def _ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"torchrun was ended by {signal_name(-exit_code)}"
    return f"torchrun ended with code {exit_code}"


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; numbers without a name stay numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
