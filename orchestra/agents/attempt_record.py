"""What the agents write about one attempt: that it starts, which ranks died without a verdict, how it ended.

Each node's agent writes a file of events of its own, as each rank does; ranks write their own verdicts. Only
the leader's agent writes how the whole attempt started and ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema import Config
from launchers import processes
from launchers.torchrun import Ending, LaunchSpec
from orchestra.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    LaunchError,
    StopRequested,
)
from orchestra.recovery.history import Attempt, attempt_of
from orchestra.recovery.incidents import NO_VERDICT, UNHEARD, Verdict, judge, node_verdict, signal_name
from orchestra.report.unwatched import beginner
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, is_number, node_writer, read_events
from orchestra.run.files import read_last_lines
from orchestra.run.metrics_file import sound_row
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import batch_shape, has_open_micro_batch, layout
from orchestra.submit.claims import upcoming_attempt

# As much of the metrics as holds an attempt's last row, also where one that was replaced logged after it.
_NUM_ROWS = 16
_ROW_BYTES = 1 << 14

# What most often sends these signals to a worker.
_HINTS = {
    "SIGKILL": "from outside: often the kernel when memory runs out (dmesg tells), or a user's kill -9",
    "SIGSEGV": "a crash in native code; the rank's log may hold its last words",
    "SIGABRT": "an assertion in native code; the rank's log may hold its last words",
    "SIGBUS": "a memory-mapped file was cut short or a device went away; /dev/shm may be full",
}


@dataclass(frozen=True)
class AttemptRecord:
    """The record that one node's agent keeps of an attempt, in an event file of its own."""

    run: RunDir
    number: int
    node: int
    events: EventWriter

    def seen(self) -> Attempt:
        """Return what everybody has written about this attempt so far."""
        return attempt_of(read_events(self.run, attempt=self.number), self.number)

    def conclude(
        self,
        ending: Ending,
        interruption: str | None,
        amended: Callable[[Verdict], Verdict] = lambda verdict: verdict,
        *,
        decides: Callable[[Verdict], bool] = lambda _: False,
        steps: int,
        ended_after: int | None = None,
    ) -> Verdict:
        """Judge how the whole attempt ended, write that down and return it. *The leader only*.

        `interruption` says why the ranks were ended at once, None where they ended by themselves, be it
        because they were asked to. What `amended` makes of the verdict is what counts; `decides` tells
        whether the caller is about to decide what follows it, and readers are to wait for that.
        `ended_after`: the step after which all ranks were heard to come to their end, where they were, of the
        run's `steps`.
        """
        verdict = judge(self.seen(), exit_code=ending.exit_code, interruption=interruption)
        if verdict.cause == NO_VERDICT and ending.exit_code == EXIT_DONE and ended_after is not None:
            # Their words lie on no disk, which was full. Before the last step they end well for a stop alone.
            verdict = Verdict(EXIT_DONE, "finished", step=ended_after)
            if ended_after < steps:
                verdict = Verdict(EXIT_STOPPED, StopRequested.__name__, UNHEARD, step=ended_after)
        if verdict.cause == NO_VERDICT and ending.exit_code == EXIT_STOPPED:
            # The agent's own, which started no ranks: torchrun never ends with it.
            verdict = Verdict(EXIT_STOPPED, StopRequested.__name__, self._asked_before_ranks())
        if not self.run.events.is_dir() and verdict.code != EXIT_INTERRUPTED:
            gone = f"{self.run.path} was removed or renamed while it trained, and its records with it"
            if self.run.checkpoints.is_dir():
                gone += f"; what it saved since then lies in {self.run.checkpoints}"
            verdict = Verdict(EXIT_FAILED, stop_requests.REMOVED, gone)
        verdict = amended(verdict)
        with contextlib.suppress(OSError):
            self._write_verdict(verdict, ending, is_decided_next=decides(verdict))
        # As everybody reads it from now on.
        return node_verdict(self.seen()) or verdict

    def _asked_before_ranks(self) -> str:
        asked: list[object] = []
        with contextlib.suppress(OSError):
            asked += stop_requests.read_requests(self.run, self.number)[:1]
        return f"{asked[0] if asked else 'asked to stop'}, before its ranks were started"

    def _write_verdict(self, verdict: Verdict, ending: Ending, *, is_decided_next: bool) -> None:
        survivors = {"survivors": list(ending.survivors)} if ending.survivors else {}
        following = {"undecided": True} if is_decided_next else {}
        self.events.write_surely(
            "finished" if verdict.code == EXIT_DONE else "failed",
            node=self.node,
            code=verdict.code,
            cause=verdict.cause,
            message=verdict.message,
            step=verdict.step,
            reached=self._last_logged_step(),
            **survivors,
            **following,
        )

    def _last_logged_step(self) -> int | None:
        """Return the newest step that this attempt logged; None where it logged none."""
        began = min((float(start["time"]) for start in self.seen().starts), default=math.inf)
        rows = (sound_row(row) for row in read_last_lines(self.run.metrics, _NUM_ROWS, _ROW_BYTES))
        steps = [
            int(row["step"])
            for row in rows
            if row is not None and row.get("attempt", self.number) == self.number and _time_of(row) >= began
        ]
        return steps[-1] if steps else None

    def write_failed(self, error: Exception) -> None:
        """Write that the attempt failed before torchrun could say anything; a full disk is passed over."""
        cause = type(error).__name__
        with contextlib.suppress(OSError):
            facts = {"cause": cause, "message": str(error), "undecided": True}
            self.events.write_surely("failed", node=self.node, code=EXIT_FAILED, **facts)

    def write_killed_ranks(self, ending: Ending, *, was_stopped: bool) -> None:
        """Write a `rank_failed` for each rank of this node that died without a verdict of its own."""
        with_verdict = self.seen().ended_ranks
        for failure in ending.failures:
            if failure.cleaned_up or failure.rank in with_verdict or was_stopped:
                continue
            self.events.write("rank_failed", rank=failure.rank, pid=failure.pid, **_cause(failure.exit_code))


def _time_of(row: dict[str, Any]) -> float:
    return float(row["time"]) if is_number(row.get("time")) else -math.inf


def _cause(exit_code: int) -> dict[str, object]:
    if exit_code >= 0:
        return {"code": EXIT_FAILED, "cause": f"exit code {exit_code}", "message": "it wrote no verdict"}
    name = signal_name(-exit_code)
    message = _HINTS.get(name, "")
    return {"code": EXIT_FAILED, "cause": f"killed by {name}", "message": message, "signal": name}


def write_started(record: AttemptRecord, config: Config, spec: LaunchSpec, **context: Any) -> None:
    """Write that an attempt starts, led by this process. *The leader only*.

    `config` says the nodes that take part; `context` goes into the event, such as the scheduler's job. Raises
    LaunchError when the run directory cannot be written.
    """
    leader = processes.find(os.getpid())
    try:
        record.events.write(
            "attempt_started",
            node=record.node,
            pid=os.getpid(),
            pid_started=None if leader is None else leader.started,
            nodes=spec.num_nodes,
            ranks_per_node=spec.ranks_per_node,
            **_layout(config, spec.world_size),
            **beginner(os.environ),
            **context,
        )
    except OSError as error:
        raise LaunchError(f"{record.run.events}: cannot be written: {error.strerror}") from error


def write_start_failed(
    run: RunDir, crew: str, job: str | None, code: int, cause: str, unfit: Sequence[str] = ()
) -> None:
    """Write down that a start of a job ended before its attempt began: nothing else would tell why.

    `crew` names the start; without a `job` the command itself says it. `unfit`: hosts that are to blame.
    Raises OSError.
    """
    if job is None:
        return
    # The attempt never was, and its number is free.
    events = EventWriter(run, f"crew.{crew}", upcoming_attempt(run) - 1, before_start=True)
    try:
        facts = {"unfit": list(unfit)} if unfit else {}
        events.write("start_failed", job=job, code=code, cause=cause, **facts)
    finally:
        events.close()


class AttemptRecords:
    """The records that one node's agent keeps: one writer for each file, and only the newest one is open."""

    def __init__(self) -> None:
        self._records: dict[int, AttemptRecord] = {}

    def of(self, run: RunDir, attempt: int, node: int) -> AttemptRecord:
        """Return the record of a node of an attempt. Raises LaunchError when nothing can be written there."""
        if attempt not in self._records:
            for number in [number for number in self._records if number < attempt]:
                self._records.pop(number).events.close()
            try:
                events = EventWriter(run, node_writer(attempt, node), attempt)
            except OSError as error:
                raise LaunchError(f"{run.events}: cannot be written: {error.strerror}") from error
            self._records[attempt] = AttemptRecord(run, attempt, node, events)
        return self._records[attempt]


def _layout(config: Config, world_size: int) -> dict[str, object]:
    mesh = layout(config.parallelism, world_size)
    if has_open_micro_batch(config.train):  # the ranks record what they find
        return {"layout": dataclasses.asdict(mesh), "micro_batch_size": "auto", "accumulation": None}
    batch = batch_shape(config.train, mesh.dp)
    return {
        "layout": dataclasses.asdict(mesh),
        "micro_batch_size": batch.micro_batch_size,
        "accumulation": batch.accumulation,
    }
