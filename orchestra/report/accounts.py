"""Reads what `orchestra.recovery.accounting` books of a run, and who is slow in it now. Read-only.

It reads all of metrics.jsonl: for a run that somebody asks about, not for a table of a thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestra.recovery.accounting import Accounts, account
from orchestra.recovery.history import newest_attempt
from orchestra.run.events import is_number, is_whole
from orchestra.run.files import Record, read_json_lines
from orchestra.run.metrics_file import wall_begin
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase, read_record


def read_accounts(run: RunDir, events: Sequence[Record], state: RunPhase, now: float) -> Accounts:
    """Book the wall time of a run in `state` up to `now`, or up to its end."""
    began = wall_begin(events, read_record(run))
    rows = read_json_lines(run.metrics)
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
