"""The one oracle of the fault matrix and the soak: a run that was hurt ends as if nothing had happened.

Losses and the digest of the last state are those of an uninterrupted run on the same layout, each sample was
trained once, a checkpoint that verifies is there, an older attempt published nothing behind a newer one's
start, the accounts sum to the wall time, and no process and no job is left. It hurts nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from matrix_field import Field, Subject, TooLateError, until

from orchestra.events import read_events
from orchestra.jsonl import Record, read_json_lines
from orchestra.metrics_file import read_metrics
from orchestra.recovery.accounting import Accounts, account
from orchestra.rundir import RunDir

_GONE_WITHIN_S = 60.0
# Step, loss and gradient norm.
Row = tuple[int, float, float]
# Of the wall time.
_ACCOUNTS_MAY_DIFFER = 0.01


@dataclass
class References:
    """Uninterrupted runs on the login node, one for each number of ranks; trained when they are first asked
    for.
    """

    on: Field
    overrides: tuple[str, ...]
    label: str
    timeout_s: float = 600
    _trained: dict[int, RunDir] = field(default_factory=dict)

    def of(self, ranks: int) -> RunDir:
        if ranks not in self._trained:
            name = f"whole-{self.label}-{ranks}-{time.time_ns() // 1_000_000}"
            self._trained[ranks] = self.on.train_here(
                name, *self.overrides, f"cluster.gpus_per_node={ranks}", timeout_s=self.timeout_s
            )
        return self._trained[ranks]


def losses(run: RunDir) -> list[Row]:
    """Return step, loss and gradient norm of each step; of a step trained again what counts."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(run)]


def digest(on: Field, run: RunDir) -> str:
    """Return the digest of the state in the last checkpoint."""
    listed = json.loads(on.orchestra("checkpoint", "ls", str(run.path), "--json").stdout)
    return str(max(listed, key=lambda it: it["step"])["state_digest"])


def _unlike(own: list[Row], whole: list[Row]) -> list[tuple[Row | None, Row]]:
    """Return the rows of the whole run that the other lacks or tells otherwise.

    An attempt logs its first step whatever train.log_every says, so that the other may have more of them.
    """
    by_step = {row[0]: row for row in own}
    return [(by_step.get(row[0]), row) for row in whole if by_step.get(row[0]) != row]


def samples(run: RunDir) -> dict[int, list[int]]:
    """Return the samples of each step; of a step that was trained again those of the newest attempt."""
    newest: dict[int, int] = {}
    rows: list[Record] = [row for file in run.samples.iterdir() for row in read_json_lines(file)]
    for row in rows:
        newest[row["step"]] = max(newest.get(row["step"], 0), row["attempt"])
    found: dict[int, list[int]] = {step: [] for step in newest}
    for row in rows:
        if row["attempt"] == newest[row["step"]]:
            found[row["step"]] += [sample for part in row["sample_ids"] for sample in part]
    return {step: sorted(ids) for step, ids in found.items()}


def accounts(run: RunDir) -> tuple[Accounts, float]:
    """Return a finished run's accounts, and the seconds from its first start to its last end."""
    events, rows = read_events(run), read_json_lines(run.metrics)
    begins = [it["time"] for it in events if it["event"] in ("submitted", "attempt_started")]
    ends = [it["time"] for it in events if it["event"] in ("finished", "node_ended")]
    return account(events, rows), max(ends) - min(begins)


def published_late(run: RunDir) -> list[Record]:
    """Return the checkpoints that an attempt committed after a newer one had restored another state."""
    events = read_events(run)
    began = {it["attempt"]: it["time"] for it in events if it["event"] == "restored"}
    return [
        it
        for it in events
        if it["event"] == "checkpoint_committed"
        and any(number > it["attempt"] and time < it["time"] for number, time in began.items())
    ]


def faults_of(run: RunDir, whole: RunDir, on: Field, *, same_layout: bool = True) -> list[str]:
    """Return in what a finished run differs from one that nothing happened to; empty: in nothing.

    With another layout the sums are added up in another order: losses and state are not compared then.
    """
    found = []
    if not any("node" in it and it.get("code") == 0 for it in read_events(run) if it["event"] == "finished"):
        found.append(f"it is not finished: {_last_words(run)}")
        return found
    if same_layout and (unlike := _unlike(losses(run), losses(whole))):
        found.append(f"its losses differ: {unlike[:3]}")
    if same_layout and digest(on, run) != digest(on, whole):
        found.append("its last state differs")
    if samples(run) != samples(whole):
        found.append("its samples differ")
    verified = on.orchestra("checkpoint", "verify", str(run.path), check=False)
    if verified.returncode:
        found.append(f"a checkpoint does not verify: {verified.stdout}{verified.stderr}")
    if late := published_late(run):
        found.append(f"an older attempt published: {late}")
    booked, wall_s = accounts(run)
    if abs(booked.wall_s - wall_s) > _ACCOUNTS_MAY_DIFFER * wall_s:
        found.append(f"{booked.wall_s:.2f} s are booked of {wall_s:.2f} s")
    return found


def left_behind(on: Field, run: Subject) -> list[str]:
    """Return what is left of a run that has ended, after it had time to go: processes and jobs."""
    found = []
    try:
        until(lambda: not _processes(on, run.run), "no process", _GONE_WITHIN_S)
    except TooLateError:
        found.append(f"processes are left: {_processes(on, run.run)}")
    try:
        until(run.is_over, "no job", _GONE_WITHIN_S)
    except TooLateError:
        found.append("a job is left")
    return found


def _processes(on: Field, run: RunDir) -> Mapping[str, dict[int, str]]:
    path = str(run.path)
    busy = {
        host: {pid: line for pid, line in own.items() if path in line} for host, own in on.at_work().items()
    }
    return {host: own for host, own in busy.items() if own}


def _last_words(run: RunDir) -> str:
    last = [it for it in read_events(run) if it["event"] in ("failed", "restarting", "requeued")]
    return json.dumps(last[-1]) if last else "nothing was said"
