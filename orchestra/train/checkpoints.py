"""When a run saves, on storage and in memory: the rules of `checkpoint.*` on top of the library.

The library saves named tensors and JSON; here they are a run's state, which `state` describes. What an
attempt continues from is in `starting_point`. Called by the trainer, on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from checkpointing.checkpoint_errors import FalseWordError, SaveFailedError
from checkpointing.checkpointer import Checkpointer
from checkpointing.options import Options, no_fault
from conf.schema import Config, RollBackConfig, WhenBusy
from orchestra.errors import EXIT_FAILED, RollBackError, UnsavedError
from orchestra.run.events import EventWriter, is_number, read_events
from orchestra.run.metrics_file import recent_rows
from orchestra.run.paths import RunDir
from orchestra.run.rollback import BadSteps, Stretch
from orchestra.run.run_lineage import newer_attempt, read_lineage
from orchestra.sizes import save_interval
from orchestra.sizes.save_interval import Interval
from orchestra.sizes.topology import BatchRamp, batch_ramp
from orchestra.sizes.training_shape import checkpoint_bytes
from orchestra.train.memory import host_memory
from orchestra.train.memory_copies import MemoryCopies
from orchestra.train.starting_point import DataProgress, StartingPoint, order_roll_back
from orchestra.train.state import CheckpointContext, Position, TensorState, position_to_json

# Before a checkpoint is made valid, and before older ones are removed.
_FENCED_PHASES = ("before_manifest", "before_prune")
# Steps that are timed for `checkpoint.every_steps=auto`; the very first of an attempt or a batch is not.
_TIMED_STEPS = 20
# How many of the newest saves of earlier attempts are used.
_RECENT = 20
# How often the last checkpoint of an attempt is tried at least: no later one can make up for it.
_LAST_TRIES = 2
# Before the second try there is no pause, before the third one this, and then up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
# What is left of the time to stop when the last save is given up: for the records, and the ranks' end.
_STOP_SLACK_S = 15.0
# What is kept of it for a save in the fallback: this, or so many times the longest save, at most half of it.
_FALLBACK_S, _FALLBACK_FACTOR = 30.0, 2.0
# So long a save under way is waited for before the fallback is used, where the time to stop lets it, and for
# so much of that at least.
_SHORTEST_WAIT_S, _LEAST_SHARE = 10.0, 0.1


def fenced(
    run: RunDir, attempt: int, events: EventWriter, at_phase: Callable[[str, int], None]
) -> Callable[[str, int], None]:
    """Return a function that looks for a newer attempt where this one is about to publish, and ends this
    process at once where there is one; then it calls `at_phase`. Called from any thread.

    An attempt's number is claimed once in a run's life. A higher claim means that another attempt trains the
    run, and that this process was stopped or cut off and went on later: what it holds is void, and so is what
    its peers hold. A courtesy, which spares the others its work: it may stand still between this look and
    what follows, and whoever reads goes by the lineage.
    """

    def look(phase: str, step: int) -> None:
        if phase in _FENCED_PHASES:
            end_if_replaced(phase, step)
        # A rehearsed failure strikes between the look and what follows: there it hurts most.
        at_phase(phase, step)

    def end_if_replaced(phase: str, step: int) -> None:
        # A file system that cannot be asked now cannot take the manifest either.
        newest = newer_attempt(run, attempt)
        if newest is None:
            return
        with contextlib.suppress(OSError):
            events.write("fenced", step=step, phase=phase, newest=newest, cause="a newer attempt began")
        sys.stderr.write(f"attempt {newest} has begun: this process of attempt {attempt} ends\n")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    return look


class SaveRhythm:
    """Decides on one rank at which steps an attempt saves. All ranks ask about the same steps in the same
    order.

    With `checkpoint.every_steps=auto` rank 0 decides how many steps lie between two saves, and records it: by
    the times of steps and saves of earlier attempts, else by the first steps of this one; and again by the
    first steps of each larger batch of a ramp, which take longer.
    """

    def __init__(
        self,
        context: CheckpointContext,
        num_bytes: int,
        mtbf_device_hours: float | None,
        batches: BatchRamp,
    ) -> None:
        self._context = context
        self._checkpoint_bytes = num_bytes
        self._mtbf_device_hours = mtbf_device_hours
        self._batches = batches
        # Steps that are saved by the clock are agreed on where the ranks agree on when to stop.
        chosen = context.settings.every_steps if context.settings.every_s is None else None
        self._is_auto = self._is_open = chosen == save_interval.AUTO
        self._every_steps = chosen if isinstance(chosen, int) else None
        # The step before the first one that is timed, and the batch of those that follow it.
        self._begin = 0
        self._batch_size = batches.at(1).global_batch_size
        # When each of the steps that are timed was over, and the one before them, and whether it is saved.
        self._ends: list[tuple[float, bool]] = []

    def begin(self, step: int) -> None:
        """Decide by earlier attempts, where there are any, how often this one saves. *Collective*."""
        self._begin, self._batch_size = step, self._batches.at(step + 1).global_batch_size
        if self._is_open:
            self._decide("save interval", self._by_earlier_attempts)

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved by the rhythm. Where steps have to be timed it is
        *collective* after the last of those.
        """
        if self._is_auto:
            self._follow_batch(step)
        if self._is_open:
            self._time(step)
        return self._is_multiple(step)

    def _follow_batch(self, step: int) -> None:
        """Keep the interval in seconds where a larger batch begins, until its own steps are timed."""
        before, size = self._batch_size, self._batches.at(step).global_batch_size
        if size == before:
            return
        if self._every_steps is not None:
            self._every_steps = max(1, round(self._every_steps * before / size))
        self._begin, self._batch_size, self._is_open = step - 1, size, True

    def _time(self, step: int) -> None:
        num_steps = step - self._begin
        if num_steps == 1:
            self._ends = []
        self._ends.append((time.perf_counter(), self._is_multiple(step)))
        if num_steps == 1 + _TIMED_STEPS:
            steps = [(then - end, saves) for (end, saves), (then, _) in itertools.pairwise(self._ends)]
            # Saves between the steps of a later batch are none of their time, and evaluations are rare.
            times = [seconds for seconds, saves in steps if not saves] or [seconds for seconds, _ in steps]
            step_time_s = statistics.median(times)
            self._decide(f"save interval timed/{step}", lambda: self._interval(step_time_s))

    def _is_multiple(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    def _decide(self, topic: str, interval: Callable[[], Interval | None]) -> None:
        """Take over rank 0's interval, if it has one."""

        def evidence_of_rank_0() -> dict[str, Any] | None:
            decided = interval()
            return None if decided is None else decided.to_json()

        evidence: Mapping[str, Any] | None = self._context.answered(topic, evidence_of_rank_0)
        if evidence is None:
            return
        self._every_steps, self._is_open = int(evidence["every_steps"]), False
        if self._context.peers.is_coordinator:
            self._context.record("save_interval", evidence)

    def _by_earlier_attempts(self) -> Interval | None:
        run = self._context.run
        # The time of a step grows with its batch.
        times = [
            float(row["step_time_s"]) * self._batch_size / self._batches.at(row["step"]).global_batch_size
            for row in recent_rows(run, read_lineage(run))
            if is_number(row.get("step_time_s"))
        ]
        return self._interval(statistics.median(times)) if times else None

    def _interval(self, step_time_s: float) -> Interval:
        world_size = self._context.mesh.world_size
        share = self._checkpoint_bytes / world_size
        stalls, writes = self._measured_saves()
        stall_s = statistics.median(stalls) if stalls else save_interval.assumed_stall_s(share)
        write_s = statistics.median(writes) if writes else save_interval.assumed_write_s(share)
        mttf = save_interval.mttf_s(world_size, self._mtbf_device_hours)
        interval = save_interval.chosen(max(step_time_s, 1e-6), stall_s, mttf, write_s=write_s)
        return replace(interval, every_steps=min(interval.every_steps, self._context.last_step))

    def _measured_saves(self) -> tuple[list[float], list[float]]:
        """Return the seconds that the newest saves took: the training's wait, and the writing after it."""
        stalls: list[float] = []
        writes: list[float] = []
        started: dict[Any, float] = {}
        for event in read_events(self._context.run, ("checkpoint_started", "checkpoint_committed")):
            step = event.get("step")
            if event["event"] == "checkpoint_started" and is_number(event.get("blocked_s")):
                stalls.append(float(event["blocked_s"]))
                started[step] = event["time"]
            elif step in started:
                writes.append(max(0.0, event["time"] - started[step]))
        return stalls[-_RECENT:], writes[-_RECENT:]


@dataclass
class SaveHealth:
    """How many saves in a row were not committed, None as long as none of this attempt failed; and the
    seconds that the longest of the others took (*rank 0*).
    """

    failed_in_a_row: int | None = None
    longest_s: float = 0.0

    def note(self, event: str, evidence: Mapping[str, Any]) -> None:
        """Count a save by the event that tells how it ended. Called from any thread."""
        self.longest_s = max(self.longest_s, evidence.get("seconds", 0.0))
        if event == "checkpoint_failed":
            self.failed_in_a_row = (self.failed_in_a_row or 0) + 1
        elif event == "checkpoint_committed" and self.failed_in_a_row is not None:
            self.failed_in_a_row = 0


@dataclass
class Checkpoints:
    """One rank's saves, on storage and in memory, and its restore. All methods but `is_due`,
    `is_copy_due` and `close` are *collective*, in the same order.
    """

    context: CheckpointContext
    roll_back_config: RollBackConfig
    state: TensorState
    checkpointer: Checkpointer
    start: StartingPoint
    rhythm: SaveRhythm
    copies: MemoryCopies | None
    health: SaveHealth
    # What no step trains on.
    left_out: tuple[Stretch, ...] = ()
    # Whether the step asked about last is saved by the rhythm or the clock, and not for the attempt's end
    # alone: at those experts may move, so that with a fixed `checkpoint.every_steps` a run that was stopped
    # has moved no others than one that was not. A clock, or every_steps=auto, saves others in each attempt.
    is_regular: bool = False

    def begin(self, goes_on: Callable[[], None] = lambda: None) -> Position:
        """Return where to continue from, the state filled, and make ready to save. `goes_on` is called before
        each try to restore. Raises what `StartingPoint.find` raises, and TrainingError where a save will not
        fit.
        """
        begin = self.start.find(goes_on)
        self.left_out = begin.left_out
        self.rhythm.begin(begin.step)
        if self.context.saves:
            self._prepare()
        if self.copies is not None:
            self.copies.prepare(begin.step)
        return begin

    def is_due(self, step: int, *, is_last: bool = False, by_clock: bool = False) -> bool:
        """Whether the state after `step` is to be saved. `is_last`: this attempt ends there; `by_clock`: all
        ranks have agreed to save it by rank 0's clock.
        """
        self.is_regular = self.rhythm.is_due(step) or by_clock
        return self.context.saves and (self.is_regular or self._is_end(step, is_last))

    def _is_end(self, step: int, is_last: bool) -> bool:
        return is_last or step == self.context.last_step

    def waits_for_storage(self, step: int, *, is_last: bool = False) -> bool:
        """Whether the save after `step` may hold the training until it is committed."""
        settings = self.context.settings
        is_waited_for = not settings.async_save or settings.when_busy is WhenBusy.wait
        return is_waited_for or self._is_end(step, is_last)

    def save(
        self,
        position: Position,
        *,
        is_last: bool = False,
        left_s: Callable[[], float] = lambda: math.inf,
        goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Save the state as it is now. A save that fails is recorded and does not end the training.

        Only with `checkpoint.async_save=false`, at the last step and where it `is_last` of the attempt it
        waits until it is committed. A last one is tried again for `checkpoint.last_save_patience_s`, and for
        no longer than rank 0's `left_s()` seconds from then; in the end once in the run's fallback. `goes_on`
        is called before each try, and before what may take longer than any save so far. Raises UnsavedError
        where it can be written nowhere.

        Experts that are to move do once the state is copied, where the attempt goes on.
        """
        if self.is_regular and self.state.experts is not None:
            topic = self.context.peers.unused("experts' plan")
            self.state.experts.plan(partial(self.context.answered, topic))
        if self._is_end(position.step, is_last):
            self._save_last(position, left_s, goes_on)
            return
        if self.checkpointer.is_plan_old:
            goes_on()
        self.checkpointer.save(position.step, self.state.snapshot(), self._document(position))
        if not self.context.settings.async_save:
            self._failure()
        if self.state.experts is not None and self.state.experts.is_planned:
            goes_on()
            self._move_experts(position.step)

    def _move_experts(self, step: int) -> None:
        """Bring experts where the save says that they are."""
        if self.copies is not None:
            self.copies.await_read()
        moved = self.state.move_experts()
        self.checkpointer.plan_anew()
        peers = self.context.peers
        num_bytes = sum(peers.exchange(peers.unused("experts moved"), moved.bytes))
        if peers.is_coordinator:
            self.context.record("experts_moved", {"step": step, **asdict(moved), "bytes": num_bytes})

    def roll_back(self, bad: BadSteps, reached: int, batches: BatchRamp) -> RollBackError:
        """Decide where the run goes back to from some bad steps, and record it on the disk; return the error
        that ends this attempt.

        `reached`: the number of samples consumed up to the last bad step. Waits for the save under way.
        """
        context, data = self.context, DataProgress(reached, batches, self.left_out)
        # What it writes is of a step before: it may be the one to go back to.
        self._failure()

        def order() -> str:
            # An attempt that was replaced may not decide where the run goes on.
            fenced(context.run, context.attempt, context.events, no_fault)("before_manifest", bad.last)
            return order_roll_back(context, self.checkpointer, self.roll_back_config, bad, data).words

        words = context.answered("roll back", order)
        self.context.peers.tell("rolled back", None)
        if self.context.peers.is_coordinator:
            # The store ends with rank 0: the other ranks have to have read the answer.
            self.context.peers.hear_all("rolled back")
        return RollBackError(f"{bad.words}: {words}")

    def is_copy_due(self, step: int) -> bool:
        """Whether the state after `step` is to be copied in memory."""
        return self.copies is not None and self.copies.is_due(step)

    def copy(self, position: Position) -> None:
        """Begin to copy the state as it is now into the node's memory. A failure costs the copy alone."""
        assert self.copies is not None
        self.copies.take(position.step, self._document(position))

    def close(self) -> None:
        """End what is copied in memory; the files stay for the agent to keep or remove."""
        if self.copies is not None:
            self.copies.close()

    def _save_last(
        self, position: Position, left_s: Callable[[], float], goes_on: Callable[[], None]
    ) -> None:
        began, pause_s = time.monotonic(), 0.0
        until = began + self.context.settings.last_save_patience_s

        def wait_s() -> float | None:
            return self._longest_wait_s(left_s())

        # Of the save before: the last one must be neither skipped nor too late.
        self._failure(self.context.answered("last/wait", wait_s))
        for number in itertools.count(1):
            goes_on()
            limit_s = self.context.answered(f"last/{number}/wait", wait_s)
            reason = self._tried_last(position, number, limit_s)
            if reason is None:
                return
            room_s = min(until - time.monotonic(), self._room_s(left_s()))
            is_over = number >= _LAST_TRIES and pause_s > room_s
            # By rank 0's clock.
            if self.context.answered(f"last/{number}/is over", partial(bool, is_over)):
                break
            if number == _LAST_TRIES and self.context.peers.is_coordinator:
                patience_s = min(self.context.settings.last_save_patience_s, self._room_s(left_s()))
                evidence = {"step": position.step, "patience_s": max(0.0, patience_s), "why": reason}
                self.context.record("last_save_waits", evidence)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        waited_s = time.monotonic() - began
        places = self.context.place
        if (fallback := self.context.fallback) is not None:
            goes_on()
            failure = self._tried_last(position, number + 1, None, in_fallback=True)
            if failure is None:
                return
            reason, places = f"{reason}; nor in checkpoint.fallback_dir: {failure}", f"{places} or {fallback}"
        raise UnsavedError(
            f"step {position.step} was trained, but its checkpoint could not be written, tried {number} "
            f"times in {waited_s:.0f} s (checkpoint.last_save_patience_s): {reason}; repair "
            f"{places}, then `orchestra resume {self.context.run.name}` trains again what comes "
            "after the newest checkpoint"
        )

    def _room_s(self, left_s: float) -> float:
        """Return how much of the seconds that are left may go by before the last save is given up, or goes to
        the fallback.
        """
        room_s = left_s - _STOP_SLACK_S
        if self.context.fallback is not None and room_s < math.inf:
            kept_s = max(_FALLBACK_S, _FALLBACK_FACTOR * self.health.longest_s)
            room_s -= min(room_s / 2, kept_s)
        return room_s

    def _longest_wait_s(self, left_s: float) -> float | None:
        """Return for how long a storage that stands still is waited for; None: until it fails."""
        room_s = self._room_s(left_s)
        if self.context.fallback is None or room_s == math.inf:
            return None
        wait_s = max(_SHORTEST_WAIT_S, _FALLBACK_FACTOR * self.health.longest_s, room_s)
        # One in the fallback must fit into what is left; a place that answers is given a chance all the same.
        return min(wait_s, max(left_s - _STOP_SLACK_S - self.health.longest_s, left_s * _LEAST_SHARE, 0.0))

    def _tried_last(
        self, position: Position, number: int, limit_s: float | None, *, in_fallback: bool = False
    ) -> str | None:
        """Try to save the last state; return why that failed on any rank, None where it did not."""
        shards, document = self.state.snapshot(), self._document(position)
        is_begun = self.checkpointer.save(
            position.step, shards, document, in_fallback=in_fallback, limit_s=limit_s
        )
        failure = self._failure(limit_s) if is_begun else "the save before it has not ended"
        # All ranks must agree on whether to try again.
        try:
            reasons = self.context.peers.exchange(f"last/{number}", failure)
        except FalseWordError as error:
            reasons = [str(error)]
        return next((str(each) for each in reasons if each is not None), None)

    def _failure(self, limit_s: float | None = None) -> str | None:
        """Wait for the save in flight; return why it was not committed, None where it was."""
        try:
            self.checkpointer.wait(limit_s)
        except SaveFailedError as error:
            return str(error)
        return None

    def _document(self, position: Position) -> dict[str, Any]:
        """Return the state that is no tensor. Rank 0's is written; the other ranks have no totals."""
        if position.totals is None:
            return {}
        full = replace(
            position,
            num_updates=self.state.num_updates,
            left_out=self.left_out,
            optimizer_values=tuple(self.state.optimizer_values),
            experts={} if self.state.experts is None else self.state.experts.state(),
        )
        context = self.context
        identity = {"wandb_id": context.wandb_id, "config": context.facts, "score_of": context.score_of}
        return {**position_to_json(full), **identity}

    def _prepare(self) -> None:
        """Check that saves will fit, and allocate what they are staged in."""
        context = self.context
        shards = self.state.snapshot()
        needs = self.checkpointer.prepare(shards)
        host_memory.check_storage(needs, context.place)
        # All ranks look before any takes.
        available = host_memory.available_host_bytes()
        self.context.peers.exchange("host memory", available)
        if context.staging_dir is None:
            host_memory.check_host_memory(needs.staging_bytes, context.local_world_size, available)
        self.checkpointer.reserve(shards)
        if not self.context.peers.is_coordinator:
            return
        evidence = {**asdict(needs), "place": context.place, "host_available_bytes": available}
        context.record("checkpoint_needs", evidence)
        if context.fallback is not None:
            # Beside the training: a storage that stands still must not hold up its begin.
            look = partial(self._look_at_fallback, needs.checkpoint_bytes)
            threading.Thread(target=look, name="fallback", daemon=True).start()
        kept = self.context.settings.keep_last + 1
        to_come = max(1, kept - len(self.checkpointer.committed_steps()))
        missing = host_memory.missing_storage_bytes(needs, to_come)
        if missing:
            cause = f"{to_come} more checkpoints are to lie there before the first one is removed"
            context.record("checkpoint_space_low", {**evidence, "missing_bytes": missing, "cause": cause})

    def _look_at_fallback(self, num_bytes: int) -> None:
        """Tell where the last save could not be written to the fallback, as it looks now."""
        problem = self.checkpointer.fallback_problem(num_bytes)
        if problem is not None:
            self.context.record("fallback_unusable", {"place": self.context.fallback, "why": problem})


def build_checkpoints(
    config: Config,
    context: CheckpointContext,
    state: TensorState,
    copies: MemoryCopies | None,
    at_phase: Callable[[str, int], None],
) -> Checkpoints:
    """Return one rank's saves and its restore. `copies` is None where the state is not copied in memory;
    `at_phase` is called with the name of each phase of a save and its step, from any thread.
    """
    settings = context.settings
    options = Options(
        generation=context.attempt,
        layout=asdict(context.mesh.layout),
        keep_last=settings.keep_last,
        keep_every_steps=settings.keep_every_steps,
        keep_best=settings.keep_best,
        score_of=context.score_of,
        when_busy=settings.when_busy.name,
        restore=settings.restore.name,
        limit_s=settings.timeout_s,
        staging_dir=context.staging_dir,
        restore_patience_s=settings.restore_patience_s,
    )
    health = SaveHealth()

    def on_event(event: str, evidence: Mapping[str, Any]) -> None:
        health.note(event, evidence)
        context.record(event, evidence)

    checkpointer = Checkpointer(
        context.place,
        context.peers,
        options,
        group=context.group,
        on_event=on_event,
        at_phase=fenced(context.run, context.attempt, context.events, at_phase),
        lineage=context.lineage,
        fallback=context.fallback,
    )
    start = StartingPoint(context, config.model, state, checkpointer, copies)
    rhythm = SaveRhythm(
        context,
        checkpoint_bytes(config),
        config.cluster.mtbf_device_hours,
        batch_ramp(config.train, context.mesh.layout.dp),
    )
    return Checkpoints(context, config.recovery.roll_back, state, checkpointer, start, rhythm, copies, health)
