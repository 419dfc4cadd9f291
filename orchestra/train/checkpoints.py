"""When a run saves: the rules of `checkpoint.*` on top of the library. What it continues from is `beginning`.

The library knows tensors and JSON; here they become a run's state, which `state` and `position` describe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpointing.checkpointer import Checkpointer
from checkpointing.errors import SaveFailedError
from checkpointing.options import Options, no_fault
from conf.schema import WhenBusy
from orchestra.errors import RollBackError, TrainingError
from orchestra.roll_backs import BadSteps, Stretch
from orchestra.train import position, preflight, rolling_back
from orchestra.train.beginning import Beginning, Setting, answered
from orchestra.train.copy_slots import FOLDER_VARIABLE
from orchestra.train.faults import Faults
from orchestra.train.fence import fenced
from orchestra.train.memory_copies import CopySetting, MemoryCopies
from orchestra.train.position import Position
from orchestra.train.record import wandb_id
from orchestra.train.rolling_back import Seen
from orchestra.train.save_rhythm import SaveRhythm
from orchestra.train.state import TensorState, facts

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
            return rolling_back.order(
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
        return {**position.to_json(full), **identity}

    # Making ready.

    def _prepare(self) -> None:
        setting = self._setting
        shards = self._state.snapshot()
        needs = self._checkpointer.prepare(shards)
        preflight.check_storage(needs, setting.place)
        # All ranks look before any takes.
        available = preflight.available_host_bytes()
        self._peers.exchange("host memory", available)
        preflight.check_host_memory(needs.staging_bytes, setting.ranks.local_world_size, available)
        self._checkpointer.reserve(shards)
        if not self._peers.is_coordinator:
            return
        evidence = {**asdict(needs), "place": setting.place, "host_available_bytes": available}
        self._tell("checkpoint_needs", evidence)
        kept = setting.config.checkpoint.keep_last + 1
        to_come = max(1, kept - len(self._checkpointer.committed_steps()))
        missing = preflight.missing_storage_bytes(needs, to_come)
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
