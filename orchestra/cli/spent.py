"""Where a run's time went, and who is slow in it, as `status` and `why` show it. Pure text and JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from orchestra.cli import figures
from orchestra.jsonl import Record
from orchestra.recovery.accounting import Accounts
from orchestra.report.accounts import SlowRank, read_accounts, slow_ranks
from orchestra.rundir import RunDir

_WIDTH = 80
_LABEL = 8
# The words for the accounts, in the order they are shown.
_WORDS = {
    "productive_s": "productive",
    "lost_s": "lost work",
    "checkpoint_s": "saving",
    "restart_s": "starts",
    "restore_s": "restores",
    "queue_s": "queue",
    "idle_s": "idle",
}
# Slow ranks that are named.
_NAMED = 4


def spent_lines(run: RunDir, events: Sequence[Record], state: str, now: float) -> list[str]:
    """Return where the time of a run in `state` went and which ranks are slow, in at most 80 columns."""
    return [*_accounts_lines(read_accounts(run, events, state, now)), *_slow_lines(slow_ranks(events))]


def spent_record(run: RunDir, events: Sequence[Record], state: str, now: float) -> Record:
    """Return the same for `--json`: `accounts` in seconds, `goodput`, `stragglers`."""
    accounts = read_accounts(run, events, state, now)
    slow = [dataclasses.asdict(each) for each in slow_ranks(events)]
    return {"goodput": accounts.goodput, "accounts": accounts.to_json(), "stragglers": slow}


def _accounts_lines(accounts: Accounts) -> list[str]:
    if accounts.wall_s <= 0:
        return []
    # What rounds to nothing says nothing.
    parts = [
        f"{word} {_exact(getattr(accounts, key))}"
        for key, word in _WORDS.items()
        if getattr(accounts, key) >= 0.05
    ]
    text = f"{_exact(accounts.wall_s)}, goodput {figures.percent(accounts.goodput)}: {', '.join(parts)}"
    return _labelled("time", text)


def _exact(seconds: float) -> str:
    """Return a duration; below a minute with one decimal, since restarts are counted in seconds."""
    return f"{seconds:.1f}s" if seconds < 59.95 else figures.duration(seconds)


def _slow_lines(slow: Sequence[SlowRank]) -> list[str]:
    named = [f"rank {each.rank} on {each.host}, {each.ratio:.1f} × the others" for each in slow[:_NAMED]]
    more = [f"and {len(slow) - _NAMED} more"] if len(slow) > _NAMED else []
    return _labelled("slow", "; ".join([*named, *more])) if slow else []


def _labelled(label: str, text: str) -> list[str]:
    indent = " " * _LABEL
    return textwrap.wrap(text, _WIDTH, initial_indent=label.ljust(_LABEL), subsequent_indent=indent)
