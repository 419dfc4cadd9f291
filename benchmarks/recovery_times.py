"""Where the seconds of a recovery went, from a run's files: from the fault to a step never trained before.

All hosts of a development cluster share one clock, so that times of different writers can be compared. It
hurts nothing and starts nothing.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestra.run.events import read_events
from orchestra.run.files import Record, read_json_lines
from orchestra.run.paths import RunDir

# Each mark is the end of the stretch that it names; the first one begins at the fault.
MARKS = (
    "noticed",
    "ended",
    "decided",
    "ordered",
    "ranks started",
    "connected",
    "restored",
    "first step",
    "new step",
)
MEANING = {
    "noticed": "somebody knows of the fault: the attempt is marked broken, or its first failure is recorded",
    "ended": "no process of the old attempt is left, and its verdict is written",
    "decided": "the policy has said what follows",
    "ordered": "the next attempt begins: spares are chosen, backoff and queue are over",
    "ranks started": "the last rank's process has opened its log",
    "connected": "the ranks know each other and have built the model; the restore begins",
    "restored": "the state of the newest checkpoint is loaded",
    "first step": "the first step is trained again",
    "new step": "a step that was never trained before is trained",
}
_FAILURES = ("rank_failed", "failed", "hang_detected", "node_lost", "agent_lost")
_LOOK_S = 0.03


@dataclass(frozen=True)
class Recovery:
    """One recovery: seconds from the fault to each mark that is known, and what the machine did beside it."""

    fault: str
    load: float
    at: dict[str, float]
    lost_steps: int

    @property
    def total_s(self) -> float:
        return self.at["new step"]

    def stretches(self) -> dict[str, float]:
        """Return the seconds between each mark and the one before it; a mark that is missing takes none."""
        found, before = {}, 0.0
        for mark in MARKS:
            here = max(before, self.at.get(mark, before))
            found[mark] = here - before
            before = here
        return found


class Births(threading.Thread):
    """Notes when the logs of ranks and the crew's files came to be: a file's own times move on."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._over = threading.Event()
        self.seen: dict[Path, float] = {}

    def run_once(self) -> None:
        now = time.time()
        for folder, pattern in ((self._run.logs, "attempt-*/rank-*.log"), (self._run.control, "*/orders/*")):
            for file in folder.glob(pattern):
                self.seen.setdefault(file, now)

    def run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.run_once()

    def close(self) -> None:
        self._over.set()
        self.join()

    def of_ranks(self, attempt: int) -> list[float]:
        folder = self._run.attempt_logs(attempt)
        return [seen for file, seen in self.seen.items() if file.parent == folder]

    def of_broken_orders(self) -> list[float]:
        return [seen for file, seen in self.seen.items() if file.suffix == ".broken"]


def new_step(run: RunDir, since: float) -> Record | None:
    """Return the first row after `since` of a step that no row up to the next attempt's start told of."""
    starts = [it["time"] for it in read_events(run) if it["event"] == "attempt_started"]
    begun = min((it for it in starts if it > since), default=None)
    if begun is None:
        return None
    rows = list(read_json_lines(run.metrics))
    highest = max((row["step"] for row in rows if row["time"] <= begun), default=0)
    return next((row for row in rows if row["time"] > begun and row["step"] > highest), None)


def recovery(run: RunDir, fault: str, since: float, births: Births, load: float) -> Recovery:
    """Return how the run came back from a fault at `since`; `new_step` must have found one."""
    row = new_step(run, since)
    assert row is not None
    events = [it for it in read_events(run) if it["time"] > since]
    # The last attempt that began before the new step: a failed start in between belongs to the recovery.
    (attempt,) = [max(it["attempt"] for it in _named(events, "attempt_started") if it["time"] < row["time"])]
    old = [it for it in events if it["attempt"] < attempt]
    begun = next(it for it in _named(events, "attempt_started") if it["attempt"] == attempt)
    restored = next((it for it in _named(events, "restored") if it["attempt"] == attempt), None)
    rows = [it for it in read_json_lines(run.metrics) if it["time"] > begun["time"]]
    noticed = [it["time"] for it in old if it["event"] in _FAILURES]
    noticed += [it for it in births.of_broken_orders() if since < it < begun["time"]]
    marks: dict[str, float | None] = {
        "noticed": min(noticed, default=None),
        "ended": _last(it for it in old if it["event"] in ("failed", "finished") and "node" in it),
        "decided": _last(it for it in old if it["event"] == "restarting"),
        "ordered": begun["time"],
        "ranks started": max(births.of_ranks(attempt), default=None),
        "connected": restored["time"] - restored["seconds"] if restored else None,
        "restored": restored["time"] if restored else None,
        "first step": rows[0]["time"] if rows else None,
        "new step": row["time"],
    }
    at = {name: time - since for name, time in marks.items() if time is not None}
    return Recovery(fault, load, at, int(row["step"] - rows[0]["step"]))


def _named(events: Iterable[Record], name: str) -> list[Record]:
    return [it for it in events if it["event"] == name]


def _last(events: Iterable[Record]) -> float | None:
    return max((it["time"] for it in events), default=None)


def table(recoveries: Sequence[Recovery]) -> str:
    """Return one line for each fault, in Markdown: the median recovery with its stretches, least to most."""
    lines = ["| fault | total s | " + " | ".join(MARKS) + " |", "|---" * (2 + len(MARKS)) + "|"]
    for fault in dict.fromkeys(it.fault for it in recoveries):
        same = sorted((it for it in recoveries if it.fault == fault), key=lambda it: it.total_s)
        totals = [it.total_s for it in same]
        middle = same[(len(same) - 1) // 2].stretches()
        shown = f"{statistics.median(totals):.1f}"
        if len(same) > 1:
            shown += f" ({totals[0]:.1f} to {totals[-1]:.1f}, n={len(same)})"
        lines.append(f"| {fault} | {shown} | " + " | ".join(f"{middle[mark]:.1f}" for mark in MARKS) + " |")
    return "\n".join(lines)
