"""When a run saves: the rules of `checkpoint.*` on top of the library. What it continues from is `beginning`.

The library knows tensors and JSON; here they become a run's state, which `state` and `position` describe.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpointing.checkpoint_errors import SaveFailedError
from checkpointing.checkpointer import Checkpointer
from checkpointing.options import Options, no_fault
from conf.schema import WhenBusy
from orchestra.errors import EXIT_FAILED, RollBackError, TrainingError
from orchestra.run import stop_requests
from orchestra.run.events import EventWriter, is_number, read_events
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from orchestra.run.record import run_record, wandb_id
from orchestra.run.rollback import BadSteps, Stretch
from orchestra.sizes import save_interval
from orchestra.sizes.flops import num_parameters
from orchestra.sizes.save_interval import Interval
from orchestra.train import starting_point
from orchestra.train.copy_files import FOLDER_VARIABLE
from orchestra.train.memory import host_memory
from orchestra.train.memory_copies import CopySetting, MemoryCopies
from orchestra.train.starting_point import Beginning, Seen, Setting, Tell, answered
from orchestra.train.state import Position, TensorState, facts, position_to_json
from orchestra.train.watch.inject_faults import Faults

# Keeps a rank of an attempt that another one has replaced from publishing anything.
#
# An attempt's number is claimed once in a run's life: a higher claim means that somebody else trains the run,
# and this process was stopped, cut off or forgotten, and woke up. What it still holds in its hands is void.


# Before a checkpoint is made valid, and before older ones are removed.
_PHASES = ("before_manifest", "before_prune")


def fenced(
    run: RunDir, attempt: int, events: EventWriter, at_phase: Callable[[str, int], None]
) -> Callable[[str, int], None]:
    """Return `at_phase`, and behind it a look for a newer attempt where this one is about to publish.

    Called from any thread. Where there is a newer attempt this process ends at once: its peers are as void.
    """

    def look(phase: str, step: int) -> None:
        at_phase(phase, step)
        if phase not in _PHASES:
            return
        # A file system that cannot be asked now cannot take the manifest either.
        newest = stop_requests.claimed_attempt(run)
        if newest is not None and newest > attempt and _has_begun(run, attempt):
            with contextlib.suppress(OSError):
                events.write("fenced", step=step, phase=phase, newest=newest, cause="a newer attempt began")
            sys.stderr.write(f"attempt {newest} has begun: this process of attempt {attempt} ends\n")
            sys.stderr.flush()
            os._exit(EXIT_FAILED)

    return look


def _has_begun(run: RunDir, attempt: int) -> bool:
    """Tell whether an attempt after this one was started: a claim alone may be a dead leader's."""
    started = read_events(run, ("attempt_started",))
    return any(it["event"] == "attempt_started" and it["attempt"] > attempt for it in started)


# At which steps an attempt saves: every so many, and for `checkpoint.every_steps=auto` how many that is.
#
# `auto` is decided once per attempt by rank 0, and written down: by what steps and saves of earlier attempts
# took, else by the plan in the run's record, else by the first steps of this attempt. It saves nothing
# itself.


# Steps of a run's first attempt that are timed where nothing else tells a step's time; the very first is not.
_TIMED_STEPS = 20
# The newest so many rows and saves are believed.
_RECENT = 20
# The fp32 master of a parameter and Adam's two moments.
_SAVED_BYTES = 12


class SaveRhythm:
    """Tells one rank when to save. All ranks ask it about the same steps in the same order."""

    def __init__(self, setting: Setting, tell: Tell) -> None:
        self._setting = setting
        self._tell = tell
        chosen = setting.config.checkpoint.every_steps
        self._is_open = chosen == save_interval.AUTO
        self._every_steps = chosen if isinstance(chosen, int) else None
        self._begin = 0
        self._first_over: float | None = None

    def begin(self, step: int) -> None:
        """Settle, where earlier attempts or the plan tell it, how often this one saves. *Collective*."""
        self._begin = step
        if self._is_open:
            self._settle("save interval", self._known)

    def is_due(self, step: int) -> bool:
        """Whether the state behind `step` is to be saved by the rhythm. Of an attempt that has to time its
        first steps it is *collective* behind the last of those.
        """
        if self._is_open:
            self._time(step)
        return self._every_steps is not None and step % self._every_steps == 0

    def _time(self, step: int) -> None:
        num_steps = step - self._begin
        if num_steps == 1:
            self._first_over = time.perf_counter()
        if num_steps == 1 + _TIMED_STEPS:
            self._settle("save interval timed", self._timed)

    def _settle(self, topic: str, question: Callable[[], Interval | None]) -> None:
        def told() -> dict[str, Any] | None:
            found = question()
            return None if found is None else found.to_json()

        evidence: Mapping[str, Any] | None = answered(self._setting.peers, topic, told)
        if evidence is None:
            return
        self._every_steps, self._is_open = int(evidence["every_steps"]), False
        if self._setting.peers.is_coordinator:
            self._tell("save_interval", evidence)

    # What rank 0 knows.

    def _known(self) -> Interval | None:
        setting = self._setting
        recent = read_metrics(setting.run)[-_RECENT:]
        times = [float(row["step_time_s"]) for row in recent if is_number(row.get("step_time_s"))]
        if times:
            return self._interval(statistics.median(times))
        planned = run_record(setting.run).get("save_interval")
        step_time_s = planned.get("step_time_s") if isinstance(planned, dict) else None
        if not is_number(step_time_s) or step_time_s <= 0:
            return None
        return self._interval(float(step_time_s), source="predicted")

    def _timed(self) -> Interval | None:
        assert self._first_over is not None
        return self._interval((time.perf_counter() - self._first_over) / _TIMED_STEPS)

    def _interval(self, step_time_s: float, source: str = "measured") -> Interval:
        config, world_size = self._setting.config, self._setting.mesh.world_size
        share = num_parameters(config.model) * _SAVED_BYTES / world_size
        stalls, writes = self._measured_saves()
        stall_s = statistics.median(stalls) if stalls else save_interval.assumed_stall_s(share)
        write_s = statistics.median(writes) if writes else save_interval.assumed_write_s(share)
        mttf = save_interval.mttf_s(world_size, config.cluster.mtbf_device_hours)
        found = save_interval.chosen(max(step_time_s, 1e-6), stall_s, mttf, write_s=write_s, source=source)
        return replace(found, every_steps=min(found.every_steps, config.train.steps))

    def _measured_saves(self) -> tuple[list[float], list[float]]:
        """Return what the newest saves took: the training's wait, and the writing behind it, in seconds."""
        stalls: list[float] = []
        writes: list[float] = []
        started: dict[Any, float] = {}
        for event in read_events(self._setting.run, ("checkpoint_started", "checkpoint_committed")):
            step = event.get("step")
            if event["event"] == "checkpoint_started" and is_number(event.get("blocked_s")):
                stalls.append(float(event["blocked_s"]))
                started[step] = event["time"]
            elif step in started:
                writes.append(max(0.0, event["time"] - started[step]))
        return stalls[-_RECENT:], writes[-_RECENT:]


# How often the checkpoint of the last step is tried: nothing comes after it that could make up for it.
_LAST_TRIES = 2


class Checkpoints:
    """One rank's saves, on storage and in memory, and its restore. All methods but `is_due`, `is_copy_due`,
    `let_change` and `close` are *collective*, in the same order.
    """

    def __init__(self, setting: Setting, state: TensorState, faults: Faults) -> None:
        self._setting = setting
        self._state = state
        self._peers = setting.peers
        self._last_step = setting.config.train.steps
        self._saves = setting.config.checkpoint.every_steps is not None
        self._rhythm = SaveRhythm(setting, self._tell)
        self._facts = facts(setting.config)
        self._id = wandb_id(setting.run)
        self._checkpointer = Checkpointer(
            setting.place,
            setting.peers,
            options(setting),
            group=dist.group.WORLD if setting.mesh.world_size > 1 else None,
            on_event=self._tell,
            at_phase=fenced(setting.run, setting.attempt, setting.events, faults.strike),
        )
        self._copies = self._made_copies()
        self._left_out: tuple[Stretch, ...] = ()

    def begin(self) -> Position:
        """Return where to continue from, the state filled, and make ready to save.

        The first attempt of a run begins at 0, any other one with the copies in memory that it was told of or
        with the newest intact checkpoint. Raises UnusableCheckpointError where the place holds another run's,
        where the run's own are gone, or where they are of another model, or where none is intact;
        TrainingError where a save will not fit.
        """
        beginning = Beginning(self._setting, self._state, self._checkpointer, self._copies, self._tell)
        begin = beginning.find()
        self._left_out = begin.left_out
        self._rhythm.begin(begin.step)
        if self._saves:
            self._prepare()
        if self._copies is not None:
            self._copies.prepare(begin.step)
        return begin

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Whether the state behind `step` is to be saved; `is_last`: this attempt ends there."""
        is_due = self._rhythm.is_due(step)
        return self._saves and (is_due or is_last or step == self._last_step)

    def waits_for_storage(self, step: int, *, is_last: bool = False) -> bool:
        """Whether the save behind `step` may hold the training until what it writes is committed."""
        chosen = self._setting.config.checkpoint
        is_waited_for = not chosen.async_save or chosen.when_busy is WhenBusy.wait
        return is_waited_for or is_last or step == self._last_step

    def save(self, behind: Position, *, is_last: bool = False) -> None:
        """Save the state as it is now. Training goes on whatever becomes of it: the events tell.

        Only with `checkpoint.async_save=false`, at the last step and where it `is_last` of the attempt it
        waits until it is committed. Raises TrainingError where such a last one cannot be written.
        """
        if is_last or behind.step == self._last_step:
            self._save_last(behind)
            return
        self._checkpointer.save(behind.step, self._state.snapshot(), self._document(behind))
        if not self._setting.config.checkpoint.async_save:
            self._failure()

    def roll_back(self, bad: BadSteps, reached: int, global_batch_size: int) -> RollBackError:
        """Decide where the run goes back to from some bad steps, and put it on the disk; return the error
        that ends this attempt.

        `reached`: where the data stands behind the last bad step. Waits for the save under way.
        """
        setting, seen = self._setting, Seen(reached, global_batch_size, self._left_out)
        # What it writes is of a step before: it may be the one to go back to.
        self._failure()

        def order() -> str:
            # Whoever has been replaced has no say in where the run goes on.
            fenced(setting.run, setting.attempt, setting.events, no_fault)("before_manifest", bad.last)
            config = setting.config.recovery.roll_back
            return starting_point.order(
                self._checkpointer, bad, seen, config, setting.attempt, setting.events
            ).words

        words = answered(self._peers, "roll back", order)
        self._peers.tell("rolled back", None)
        if self._peers.is_coordinator:
            # Its store ends with it: the other ranks are to have read the answer.
            self._peers.hear_all("rolled back")
        return RollBackError(f"{bad.words}: {words}")

    # Copies in memory.

    def is_copy_due(self, step: int) -> bool:
        """Whether the state behind `step` is to be copied in memory."""
        return self._copies is not None and self._copies.is_due(step)

    def copy(self, behind: Position) -> None:
        """Begin to copy the state as it is now into the node's memory. A failure costs the copy alone."""
        assert self._copies is not None
        self._copies.take(behind.step, self._document(behind))

    def let_change(self) -> None:
        """Wait until the state may change: before each update."""
        if self._copies is not None:
            self._copies.let_change()

    def close(self) -> None:
        """End what is under way in memory; what was copied stays for the agent to keep or remove."""
        if self._copies is not None:
            self._copies.close()

    def _made_copies(self) -> MemoryCopies | None:
        setting, every_steps = self._setting, self._setting.config.recovery.memory_copy_every_steps
        if every_steps is None:
            return None
        folder = os.environ.get(FOLDER_VARIABLE)
        of_run = CopySetting(
            folder=None if folder is None else Path(folder),
            every_steps=every_steps,
            last_step=self._last_step,
            attempt=setting.attempt,
            run=f"{setting.run.name}/{self._id}",
            facts=self._facts,
            mesh=setting.mesh,
            peers=self._peers,
            local_world_size=setting.ranks.local_world_size,
            tell=self._tell,
        )
        return MemoryCopies(of_run, self._state)

    # Saving.

    def _save_last(self, behind: Position) -> None:
        self._failure()  # of the save before: the last one must be neither skipped nor too late
        for number in range(_LAST_TRIES):
            is_begun = self._checkpointer.save(behind.step, self._state.snapshot(), self._document(behind))
            found = self._failure() if is_begun else "the save before it has not ended"
            # All ranks must agree on whether to try again.
            reasons = self._peers.exchange(f"last/{number}", found)
            reason = next((it for it in reasons if it is not None), None)
            if reason is None:
                return
        raise TrainingError(
            f"step {behind.step} was trained, but its checkpoint could not be written, tried {_LAST_TRIES} "
            f"times: {reason}; repair {self._setting.place}, then `orchestra resume "
            f"{self._setting.run.name}` trains again what comes after the newest checkpoint"
        )

    def _failure(self) -> str | None:
        """Wait for the save in flight; return why it was not committed, None where it was."""
        try:
            self._checkpointer.wait()
        except SaveFailedError as error:
            return str(error)
        return None

    def _document(self, behind: Position) -> dict[str, Any]:
        """Return the state that is no tensor. Rank 0's is what is written; the others have no totals."""
        if behind.totals is None:
            return {}
        full = replace(behind, num_updates=self._state.num_updates, left_out=self._left_out)
        identity = {"wandb_id": self._id, "config": self._facts}
        return {**position_to_json(full), **identity}

    # Making ready.

    def _prepare(self) -> None:
        setting = self._setting
        shards = self._state.snapshot()
        needs = self._checkpointer.prepare(shards)
        host_memory.check_storage(needs, setting.place)
        # All ranks look before any takes.
        available = host_memory.available_host_bytes()
        self._peers.exchange("host memory", available)
        host_memory.check_host_memory(needs.staging_bytes, setting.ranks.local_world_size, available)
        self._checkpointer.reserve(shards)
        if not self._peers.is_coordinator:
            return
        evidence = {**asdict(needs), "place": setting.place, "host_available_bytes": available}
        self._tell("checkpoint_needs", evidence)
        kept = setting.config.checkpoint.keep_last + 1
        to_come = max(1, kept - len(self._checkpointer.committed_steps()))
        missing = host_memory.missing_storage_bytes(needs, to_come)
        if missing:
            cause = f"{to_come} more checkpoints are to lie there before the first one is removed"
            self._tell("checkpoint_space_low", {**evidence, "missing_bytes": missing, "cause": cause})

    def _tell(self, event: str, evidence: Mapping[str, Any]) -> None:
        """Write an event, from any thread; a full disk may take the record, never the checkpoint."""
        try:
            self._setting.events.write(event, **evidence)
        except OSError as error:
            sys.stderr.write(f"event {event} {dict(evidence)} could not be written: {error}\n")


def options(setting: Setting) -> Options:
    """Return the library's options for a run."""
    chosen = setting.config.checkpoint
    return Options(
        generation=setting.attempt,
        layout=asdict(setting.mesh.layout),
        keep_last=chosen.keep_last,
        keep_every_steps=chosen.keep_every_steps,
        keep_best=chosen.keep_best,
        when_busy=chosen.when_busy.name,
        restore=chosen.restore.name,
        limit_s=chosen.timeout_s,
    )
