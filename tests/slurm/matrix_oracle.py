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

from matrix_field import Field, Freeze, Subject, TooLateError, until

from orchestra.recovery.accounting import Accounts, account
from orchestra.run.events import read_events
from orchestra.run.files import Record, read_json_lines
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

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


@dataclass(frozen=True)
class LateCheckpoint:
    """A checkpoint that an attempt committed after a newer one had restored another state (Unix seconds)."""

    attempt: int
    step: int
    host: str
    begun: float
    committed: float
    newer_attempt: int
    restored_step: int
    restored: float

    def __str__(self) -> str:
        after_s = self.committed - self.restored
        return (
            f"attempt {self.attempt} on {self.host} began to save step {self.step} at {_clock(self.begun)} "
            f"and committed it at {_clock(self.committed)}, {after_s:.2f} s after attempt "
            f"{self.newer_attempt} had restored step {self.restored_step} at {_clock(self.restored)}"
        )

    def was_cut_in_two_by(self, freeze: Freeze | None) -> bool:
        """Tell whether its process stood still between its last look for a newer attempt and the commit.

        That no look can prevent. A look that is made after the freeze, or not at all, is another matter.
        """
        return (
            freeze is not None
            and (self.host, self.step in freeze.publishing) == (freeze.host, True)
            and self.begun < freeze.since < self.restored < freeze.until < self.committed
        )


def published_late(run: RunDir) -> list[LateCheckpoint]:
    """Return the checkpoints that an attempt committed after a newer one had restored another state.

    A checkpoint that the newer attempt itself restored was there before: only the event of it came later.
    """
    events = read_events(run)
    found = []
    for event in (it for it in events if it["event"] == "checkpoint_committed"):
        saved = (event["step"], event["attempt"])
        newer = [
            it
            for it in events
            if it["event"] == "restored" and it["attempt"] > event["attempt"] and it["time"] < event["time"]
        ]
        if newer and (newer[0]["step"], newer[0]["generation"]) != saved:
            found.append(
                LateCheckpoint(
                    event["attempt"],
                    event["step"],
                    event["host"],
                    begun=event["time"] - event["seconds"],
                    committed=event["time"],
                    newer_attempt=newer[0]["attempt"],
                    restored_step=newer[0]["step"],
                    restored=newer[0]["time"],
                )
            )
    return found


def _clock(unix_s: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(unix_s))}.{int(unix_s % 1 * 1000):03d}"


def faults_of(
    run: RunDir, whole: RunDir, on: Field, *, same_layout: bool = True, freeze: Freeze | None = None
) -> list[str]:
    """Return in what a finished run differs from one that nothing happened to; empty: in nothing.

    With another layout the sums are added up in another order: losses and state are not compared then. What a
    process published late because of a `freeze` is not counted: `cut_in_two` tells of it.
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
    if late := [it for it in published_late(run) if not it.was_cut_in_two_by(freeze)]:
        found.append(f"an older attempt published: {'; '.join(map(str, late))}")
    booked, wall_s = accounts(run)
    if abs(booked.wall_s - wall_s) > _ACCOUNTS_MAY_DIFFER * wall_s:
        found.append(f"{booked.wall_s:.2f} s are booked of {wall_s:.2f} s")
    return found


def cut_in_two(run: RunDir, freeze: Freeze | None) -> list[str]:
    """Return what a process published late because it stood still between its look and its commit.

    Known, and not mended yet: whoever restores must tell which attempt a checkpoint is of. The run must end
    as if it had not happened all the same, which `faults_of` compares.
    """
    if freeze is None:
        return []
    times = f"it was frozen from {_clock(freeze.since)} to {_clock(freeze.until)}, its manifest written"
    late = [it for it in published_late(run) if it.was_cut_in_two_by(freeze)]
    return [f"known race: {it}; {times}" for it in late]


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
