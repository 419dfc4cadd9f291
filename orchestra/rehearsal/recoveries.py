"""How a run came back from each planned fault: who answered, how fast, and what was lost. Pure.

From the run's events and metrics rows alone. Hosts' clocks are compared where a fault and what follows it
were written on different hosts: the seconds are as good as the clocks agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from orchestra.events import is_number, is_whole
from orchestra.faults import PlannedFault
from orchestra.jsonl import Record
from orchestra.report.incidents import Chapter, chapters

# Each is the end of the stretch that it names; the first one begins with the fault.
STRETCHES = ("noticed", "decided", "begun", "restored", "new step")
MEANING = {
    "noticed": "somebody has written down that something is wrong",
    "decided": "nothing of the old attempt is left, and the policy has said what follows",
    "begun": "the next attempt begins: backoff and queue are over",
    "restored": "its ranks are started and have loaded their state",
    "new step": "what was lost is trained again, and a step that never was before",
}
# The first word that something is wrong.
_NOTICED = ("rank_failed", "failed", "hang_detected", "node_lost", "agent_lost")
_BY_SLURM = "Slurm started the job again"


@dataclass(frozen=True)
class Recovery:
    """What followed one planned fault; None where it is not known or never came."""

    fault: PlannedFault
    # Where it struck; None: it never did.
    host: str | None = None
    # What was decided, and by which rule of the policy.
    decision: str | None = None
    rule: str | None = None
    reason: str | None = None
    # From the fault to the next step that was never trained before, and of what that is made up.
    seconds: float | None = None
    stretches: dict[str, float] = field(default_factory=dict)
    # Steps that were trained again.
    lost_steps: int | None = None
    # What is wrong with it; None: it was answered and training went on.
    problem: str | None = None

    @property
    def is_passed(self) -> bool:
        return self.problem is None

    def to_json(self) -> Record:
        """Return it for `--json`."""
        told = {key: getattr(self, key) for key in ("host", "decision", "rule", "reason", "seconds")}
        more = {"stretches": self.stretches, "lost_steps": self.lost_steps, "problem": self.problem}
        fault = {"fault": self.fault.fault.name, "step": self.fault.at_step, "rank": self.fault.rank}
        return {**fault, "attempt": self.fault.attempt, **told, **more, "passed": self.is_passed}


def recoveries(
    faults: Iterable[PlannedFault], events: Sequence[Record], rows: Sequence[Record]
) -> list[Recovery]:
    """Return what followed each fault, in their order.

    `events` are in the order of time; `rows` all of metrics.jsonl, those that a rollback made void included.
    """
    told = {it.incident.attempt: it for it in chapters(events)}
    return [_recovery(fault, events, rows, told) for fault in faults]


def _recovery(
    fault: PlannedFault, events: Sequence[Record], rows: Sequence[Record], told: dict[int, Chapter]
) -> Recovery:
    struck = next((it for it in events if _is_of(it, fault)), None)
    if struck is None:
        return Recovery(fault, problem=_why_not(fault, events))
    host, since = str(struck.get("host")), float(struck["time"])
    decision, rule, reason = _answer(told.get(int(struck["attempt"])))
    known = Recovery(fault, host, decision, rule, reason)
    begun = [it for it in events if it["event"] == "attempt_started" and it["attempt"] > struck["attempt"]]
    if not begun:
        return replace(known, problem=f"no attempt followed{f': {reason}' if reason else ''}")
    # Ranks may train on for a moment after their agent was killed.
    first = min(float(it["time"]) for it in begun)
    reached = max((row["step"] for row in rows if _is_row(row) and row["time"] <= first), default=0)
    new = next((it for it in rows if _is_row(it) and it["time"] > first and it["step"] > reached), None)
    if new is None:
        return replace(known, problem=f"no step behind {reached} followed")
    start = max((it for it in begun if it["time"] < new["time"]), key=lambda it: int(it["attempt"]))
    own = [it for it in events if it["attempt"] == start["attempt"]]
    restored = [it for it in own if it["event"] == "restored" and is_whole(it.get("step"))]
    before = [it for it in events if it["time"] >= since and it["attempt"] < start["attempt"]]
    marks = {
        "noticed": _first(it for it in before if it["event"] in _NOTICED),
        "decided": _last(it for it in before if it["event"] == "restarting"),
        "begun": float(start["time"]),
        "restored": _first(restored or [it for it in own if it["event"] == "training_started"]),
        "new step": float(new["time"]),
    }
    # Where nothing tells what was restored it began with the first step.
    lost = max(0, reached - (restored[-1]["step"] if restored else 0))
    seconds = float(new["time"]) - since
    return replace(known, seconds=seconds, stretches=_stretches(since, marks), lost_steps=lost)


def _is_of(event: Record, fault: PlannedFault) -> bool:
    return (
        event["event"] == "fault_injected"
        and event["attempt"] == fault.attempt
        and event.get("fault") == fault.fault.name
        and event.get("step") == fault.at_step
    )


def _is_row(row: Record) -> bool:
    return is_whole(row.get("step")) and is_number(row.get("time"))


def _why_not(fault: PlannedFault, events: Sequence[Record]) -> str:
    """Say why a fault never struck."""
    starts = {it["attempt"]: it for it in events if it["event"] == "attempt_started"}
    if fault.attempt not in starts:
        return f"it never struck: there was no attempt {fault.attempt}"
    start = starts[fault.attempt]
    nodes, per_node = start.get("nodes"), start.get("ranks_per_node")
    ranks = nodes * per_node if is_whole(nodes) and is_whole(per_node) else None
    if ranks is not None and fault.rank is not None and fault.rank >= ranks:
        return f"it never struck: attempt {fault.attempt} had only {ranks} ranks"
    return f"it never struck: attempt {fault.attempt} ended before step {fault.at_step}"


def _answer(chapter: Chapter | None) -> tuple[str | None, str | None, str | None]:
    if chapter is None:
        return None, None, None
    if chapter.decision is None:
        return _BY_SLURM, None, None
    return chapter.decision, chapter.rule, chapter.reason


def _first(events: Iterable[Record]) -> float | None:
    return min((float(it["time"]) for it in events), default=None)


def _last(events: Iterable[Record]) -> float | None:
    return max((float(it["time"]) for it in events), default=None)


def _stretches(since: float, marks: dict[str, float | None]) -> dict[str, float]:
    """Return the seconds between each mark and the one before it; one that is missing takes none."""
    found, before = {}, since
    for name in STRETCHES:
        mark = marks[name]
        here = before if mark is None else max(before, mark)
        found[name] = here - before
        before = here
    return found
