"""What happened to a run, attempt by attempt, where its time went, and who is slow in it now. Read-only.

Called by `orchestra why`, `orchestra status RUN` and rehearsals. The accounts take all of metrics.jsonl: they
are for a run that somebody asks about, not for a table of a thousand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestra.recovery import history
from orchestra.recovery.accounting import Accounts, account
from orchestra.recovery.history import Attempt, newest_attempt
from orchestra.recovery.incidents import Incident, incidents
from orchestra.run.events import is_number, is_whole
from orchestra.run.files import Record, read_json
from orchestra.run.metrics_file import wall_begin
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase, read_record

GAVE_UP = "give_up"


@dataclass(frozen=True)
class RankProcess:
    """A rank's process, on the host that it runs on."""

    rank: int
    host: str
    pid: int


def rank_processes(run: RunDir, attempt: int) -> list[RankProcess]:
    """Return the processes of an attempt's ranks, by rank, as their nodes wrote them down last."""
    found = []
    for path in run.heartbeats.glob("node-*.json"):
        summary = read_json(path) or {}
        pids = summary.get("processes")
        if summary.get("attempt") == attempt and isinstance(pids, dict):
            host = str(summary.get("host"))
            found += [RankProcess(int(rank), host, pid) for rank, pid in pids.items() if is_whole(pid)]
    return sorted(found, key=lambda each: each.rank)


@dataclass(frozen=True)
class EndedAttempt:
    """One attempt: what ended it, and what was decided; None where no decision was written down."""

    incident: Incident
    decision: str | None = None
    rule: str | None = None
    reason: str | None = None
    wait_s: float = 0.0
    exclude: tuple[str, ...] = ()
    # What the run ended with, where it was given up.
    code: int | None = None
    # Of each node that a spare replaced: the lost host and the spare's.
    replaced: tuple[tuple[str, str], ...] = ()

    def record(self) -> Record:
        """Return it for `--json`."""
        record = dataclasses.asdict(self)
        record["incident"]["kind"] = self.incident.kind.value
        return record


def ended_attempts(events: Sequence[Record]) -> list[EndedAttempt]:
    """Return the attempts that are over, oldest first. `events` are in the order of time."""
    attempts = history.read(events)
    by_number = {attempt.number: attempt for attempt in attempts}
    ended = incidents(attempts)
    return [_ended_attempt(incident, by_number[incident.attempt]) for incident in ended]


def _ended_attempt(incident: Incident, attempt: Attempt) -> EndedAttempt:
    decided = attempt.decisions
    replaced = tuple(
        (str(event.get("host")), str(event["by_host"]))
        for event in attempt.named("node_replaced")
        if "by_host" in event
    )
    if not decided:
        return EndedAttempt(incident, replaced=replaced)
    # A requeue is told twice: why it was decided, and by which job it goes on.
    last = decided[-1]
    first = next((event for event in decided if "rule" in event), last)
    decision = "requeue" if last["event"] == "requeued" else _text(last, "decision")
    wait_s = first.get("wait_s")
    return EndedAttempt(
        incident,
        decision=decision,
        rule=_text(first, "rule"),
        reason=_text(first, "reason"),
        wait_s=float(wait_s) if is_number(wait_s) else 0.0,
        exclude=incident.excluded,
        code=first["code"] if decision == GAVE_UP and "code" in first else None,
        replaced=replaced,
    )


def _text(event: Record, key: str) -> str | None:
    value = event.get(key)
    return value if isinstance(value, str) and value else None


def read_accounts(
    run: RunDir, events: Sequence[Record], rows: Iterable[Record], state: RunPhase, now: float
) -> Accounts:
    """Book the wall time of a run in `state` up to `now`, or up to its end; `rows` are all it has."""
    began = wall_begin(events, read_record(run))
    return account(events, rows, began=began, now=None if state.is_over else now)


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes slower than the others by `ratio`, after `step`."""

    rank: int
    host: str
    ratio: float
    step: int | None


def slow_ranks(events: Iterable[Record]) -> list[SlowRank]:
    """Return the ranks that were found slow in the newest attempt and have not recovered, slowest first."""
    attempt = newest_attempt(list(events))
    found: dict[int, SlowRank] = {}
    for event in () if attempt is None else attempt.events:
        rank, ratio = event.get("rank"), event.get("ratio")
        if not is_whole(rank):
            continue
        if event["event"] == "straggler_found" and is_number(ratio):
            host = event.get("host")
            found[rank] = SlowRank(rank, host if isinstance(host, str) else "?", ratio, event.get("step"))
        elif event["event"] == "straggler_gone":
            found.pop(rank, None)
    return sorted(found.values(), key=lambda slow: -slow.ratio)
