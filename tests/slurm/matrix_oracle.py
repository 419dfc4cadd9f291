"""The one oracle of all that injects faults: such a run ends as if nothing had happened.

Losses and the digest of the last state are those of an uninterrupted run on the same layout, each sample was
trained once, a checkpoint that verifies is there, an older attempt published nothing after a newer one's
start, the accounts sum to the wall time, and no process and no job is left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from sites import Site, SubmittedRun, TooLateError, wait_until

from orchestra.recovery.accounting import Accounts, account
from orchestra.run.events import read_events
from orchestra.run.files import Record, read_json_lines
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from orchestra.run.run_lineage import read_lineage

_GONE_WITHIN_S = 60.0
# Step, loss and gradient norm.
Row = tuple[int, float, float]
# Of the wall time.
_ACCOUNTS_MAY_DIFFER = 0.01


@dataclass
class References:
    """Uninterrupted runs on the login node, one for each number of ranks, trained when first asked for."""

    site: Site
    overrides: tuple[str, ...]
    label: str
    timeout_s: float = 600
    _trained: dict[int, RunDir] = field(default_factory=dict)

    def of(self, ranks: int) -> RunDir:
        if ranks not in self._trained:
            name = f"whole-{self.label}-{ranks}-{time.time_ns() // 1_000_000}"
            self._trained[ranks] = self.site.train_here(
                name, *self.overrides, f"cluster.gpus_per_node={ranks}", timeout_s=self.timeout_s
            )
        return self._trained[ranks]

    @property
    def trained(self) -> list[int]:
        """The numbers of ranks that were asked for so far."""
        return sorted(self._trained)


def losses(run: RunDir) -> list[Row]:
    """Return step, loss and gradient norm of each step; of a step trained again what counts."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(run)]


def _digest(site: Site, run: RunDir) -> str:
    """Return the digest of the state in the last checkpoint."""
    listed = json.loads(site.orchestra("checkpoint", "ls", str(run.path), "--json").stdout)
    counting = [checkpoint for checkpoint in listed if checkpoint["on_line"]]
    return str(max(counting, key=lambda checkpoint: checkpoint["step"])["state_digest"])


def _unlike(own: list[Row], whole: list[Row]) -> list[tuple[Row | None, Row]]:
    """Return the rows of the whole run that the other lacks or tells otherwise.

    An attempt logs its first step whatever train.log_every says, so that the other may have more of them.
    """
    by_step = {row[0]: row for row in own}
    return [(by_step.get(row[0]), row) for row in whole if by_step.get(row[0]) != row]


def samples(run: RunDir) -> dict[int, list[int]]:
    """Return the samples of each step; of a step that was trained again those of the newest attempt.

    Read here and not by the product, which is what is judged.
    """
    newest: dict[int, int] = {}
    rows: list[Record] = [row for file in run.samples.iterdir() for row in read_json_lines(file)]
    for row in rows:
        newest[row["step"]] = max(newest.get(row["step"], 0), row["attempt"])
    ids: dict[int, list[int]] = {step: [] for step in newest}
    for row in rows:
        if row["attempt"] == newest[row["step"]]:
            ids[row["step"]] += [sample for part in row["sample_ids"] for sample in part]
    return {step: sorted(of_step) for step, of_step in ids.items()}


def accounts(run: RunDir) -> tuple[Accounts, float]:
    """Return a finished run's accounts, and the seconds from its first start to its last end."""
    events, rows = read_events(run), read_json_lines(run.metrics)
    begins = [event["time"] for event in events if event["event"] in ("submitted", "attempt_started")]
    newest = max(event["attempt"] for event in events if event["event"] == "attempt_started")
    # A node that was frozen may end its part of an older attempt long after the run.
    last = [event for event in events if event.get("attempt") == newest]
    ends = [event["time"] for event in last if event["event"] in ("finished", "node_ended")]
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


def published_late(run: RunDir) -> list[LateCheckpoint]:
    """Return the checkpoints that an attempt committed after a newer one had restored another state.

    A checkpoint that the newer attempt itself restored was there before: only the event of it came later.
    """
    events, late = read_events(run), []
    restores = [event for event in events if event["event"] == "restored"]
    for event in (event for event in events if event["event"] == "checkpoint_committed"):
        after = [restored for restored in restores if restored["attempt"] > event["attempt"]]
        newer = next((restored for restored in after if restored["time"] < event["time"]), None)
        if newer is None or (newer["step"], newer["generation"]) == (event["step"], event["attempt"]):
            continue
        late.append(
            LateCheckpoint(
                event["attempt"],
                event["step"],
                event["host"],
                begun=event["time"] - event["seconds"],
                committed=event["time"],
                newer_attempt=newer["attempt"],
                restored_step=newer["step"],
                restored=newer["time"],
            )
        )
    return late


def _clock(unix_s: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(unix_s))}.{int(unix_s % 1 * 1000):03d}"


def differences(run: RunDir, whole: RunDir, site: Site, *, same_layout: bool = True) -> list[str]:
    """Return in what a finished run differs from one that nothing happened to; empty: in nothing.

    With another layout the sums are added up in another order: losses and state are not compared then.
    """
    events = read_events(run)
    if not any(
        event["event"] == "finished" and "node" in event and event.get("code") == 0 for event in events
    ):
        last = [event for event in events if event["event"] in ("failed", "restarting", "requeued")]
        return [f"it is not finished: {json.dumps(last[-1]) if last else 'nothing was written'}"]
    found = []
    if same_layout and (unlike := _unlike(losses(run), losses(whole))):
        found.append(f"its losses differ: {unlike[:3]}")
    if same_layout and _digest(site, run) != _digest(site, whole):
        found.append("its last state differs")
    if samples(run) != samples(whole):
        found.append("its samples differ")
    verified = site.orchestra("checkpoint", "verify", str(run.path), check=False)
    if verified.returncode:
        found.append(f"a checkpoint does not verify: {verified.stdout}{verified.stderr}")
    lineage = read_lineage(run)
    if late := [each for each in published_late(run) if lineage.is_on_line(each.step, each.attempt)]:
        found.append(f"an older attempt published what counts: {'; '.join(map(str, late))}")
    booked, wall_s = accounts(run)
    if abs(booked.wall_s - wall_s) > _ACCOUNTS_MAY_DIFFER * wall_s:
        found.append(f"{booked.wall_s:.2f} s are booked of {wall_s:.2f} s")
    return found


def void_saves(run: RunDir) -> list[str]:
    """Return what an older attempt committed off the run's line: it stood still before, and nobody reads
    it.
    """
    lineage = read_lineage(run)
    departures = (lineage.departure(saved.step, saved.attempt) for saved in published_late(run))
    return [f"step {each.step} off the line: {each.words}" for each in departures if each is not None]


def left_over(run: SubmittedRun) -> list[str]:
    """Return what is left of a run that has ended, after it had time to go: processes and jobs."""
    found = []
    try:
        wait_until(lambda: not _processes(run), "no process", _GONE_WITHIN_S)
    except TooLateError:
        found.append(f"processes are left: {_processes(run)}")
    try:
        wait_until(run.is_over, "no job", _GONE_WITHIN_S)
    except TooLateError:
        found.append("a job is left")
    return found


def _processes(run: SubmittedRun) -> Mapping[str, dict[int, str]]:
    """Return the processes of a run, on each node that has any."""
    return {node: left for node in run.site.layout.nodes if (left := run.processes(node))}


def assert_as_if_nothing_had_happened(run: SubmittedRun, whole: RunDir) -> None:
    """Wait for a run's end, and hold it to all of the oracle."""
    run.wait(lambda: run.is_finished() or run.is_over(), "it ends")
    assert differences(run.dir, whole, run.site) == [], run.logs()
    assert left_over(run) == []
