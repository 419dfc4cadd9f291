"""When a run saves and what it continues from: the rules of `checkpoint.*` on top of the library.

The library knows tensors and JSON; here they become a run's state, which `state` and `position` describe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpointing.checkpointer import Checkpointer
from checkpointing.errors import CheckpointError, NoCheckpointError, SaveFailedError
from checkpointing.format.manifest import Manifest
from checkpointing.options import Options
from checkpointing.peers import Peers
from checkpointing.restoring.restore import Restored
from checkpointing.shards import Shard
from conf.schema import Config, WhenBusy
from orchestra.errors import TrainingError, UnusableCheckpointError
from orchestra.events import EventWriter, read_events
from orchestra.parallel.mesh import Mesh, RankEnvironment
from orchestra.rundir import RunDir
from orchestra.train import memory_copies, position, preflight
from orchestra.train.copy_slots import FOLDER_VARIABLE
from orchestra.train.faults import Faults
from orchestra.train.fence import fenced
from orchestra.train.init_from import load_start
from orchestra.train.memory_copies import CopySetting, MemoryCopies
from orchestra.train.position import Position
from orchestra.train.record import wandb_id
from orchestra.train.state import TensorState, changes, digest, facts

# How often the checkpoint of the last step is tried: nothing comes after it that could make up for it.
_LAST_TRIES = 2


@dataclass(frozen=True)
class Setting:
    """Whose checkpoints they are, and who this rank is among its peers."""

    config: Config
    run: RunDir
    attempt: int
    ranks: RankEnvironment
    mesh: Mesh
    peers: Peers
    events: EventWriter
    # The step whose copies in memory are to be taken; None: the newest checkpoint is.
    from_memory: int | None = None

    @property
    def place(self) -> str:
        """The folder or URL of the run's checkpoints."""
        return self.config.checkpoint.dir or str(self.run.checkpoints)


class Checkpoints:
    """One rank's saves, on storage and in memory, and its restore. All methods but `is_due`, `is_copy_due`,
    `let_change` and `close` are *collective*, in the same order.
    """

    def __init__(self, setting: Setting, state: TensorState, faults: Faults) -> None:
        self._setting = setting
        self._state = state
        self._peers = setting.peers
        self._last_step = setting.config.train.steps
        self._every_steps = setting.config.checkpoint.every_steps
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

    def begin(self) -> Position:
        """Return where to continue from, the state filled, and make ready to save.

        The first attempt of a run begins at 0, any other one with the copies in memory that it was told of or
        with the newest intact checkpoint. Raises UnusableCheckpointError where the place holds another run's,
        where the run's own are gone, or where they are of another model, or where none is intact;
        TrainingError where a save will not fit.
        """
        begin = self._restored() if self._setting.attempt > 0 else self._fresh()
        if begin.step == 0 and self._setting.config.model.init_from is not None:
            self._take_weights()
        if self._every_steps is not None:
            self._prepare()
        if self._copies is not None:
            self._copies.prepare(begin.step)
        return begin

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Whether the state behind `step` is to be saved; `is_last`: this attempt ends there."""
        if self._every_steps is None:
            return False
        return is_last or step % self._every_steps == 0 or step == self._last_step

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
        full = replace(behind, num_updates=self._state.num_updates)
        identity = {"wandb_id": self._id, "config": self._facts}
        return {**position.to_json(full), **identity}

    # Beginning.

    def _claim(self) -> None:
        """Make a place outside the run's directory this run's own: two runs in one would remove each other's
        checkpoints.
        """
        setting = self._setting
        if setting.config.checkpoint.dir is None or self._every_steps is None:
            return
        mine = self._id or setting.run.name
        owner = self._answered("owner", lambda: self._checkpointer.claim(mine))
        if owner != mine:
            raise UnusableCheckpointError(
                f"{setting.place} belongs to another run (its wandb id is {owner}, this run's is {mine}); "
                "give this run a folder of its own (checkpoint.dir)"
            )

    def _fresh(self) -> Position:
        if self._every_steps is None:
            return Position()
        found = self._answered("committed", self._checkpointer.committed_steps)
        if found:
            raise UnusableCheckpointError(
                f"{self._setting.place} holds checkpoints already (newest: step {found[-1]}), and this run "
                "has only begun: they are another run's; continue that one with `orchestra resume RUN`, or "
                "give this run a folder of its own (checkpoint.dir)"
            )
        self._claim()
        return Position()

    def _restored(self) -> Position:
        self._claim()
        found = self._from_memory()
        if isinstance(found, Position):
            return found
        try:
            restored = self._checkpointer.restore(self._wanted)
        except NoCheckpointError as error:
            # Whoever starts again finds the same.
            raise UnusableCheckpointError(str(error)) from error
        if restored is None:
            return self._from_the_beginning(found)
        begin = position.from_json(restored.state)
        self._state.take_back(restored.manifest, begin.num_updates)
        self._announce(restored, found)
        return begin

    def _from_memory(self) -> Position | str | None:
        """Return where the copies in memory stand, the state filled; why it cannot be; None unless asked."""
        step = self._setting.from_memory
        if step is None:
            return None
        if self._copies is None:
            return "recovery.memory_copy_every_steps is null"
        found = self._copies.restore(step)
        if isinstance(found, str):
            return found
        begin = position.from_json(found.document)
        self._state.take_back_all(begin.num_updates)
        if self._peers.is_coordinator:
            self._tell("restored", memory_copies.evidence(found, self._setting.mesh.layout))
        return begin

    def _wanted(self, manifest: Manifest) -> list[Shard]:
        theirs = manifest.state.get("wandb_id")
        if None not in (theirs, self._id) and theirs != self._id:
            raise UnusableCheckpointError(
                f"{self._setting.place} holds checkpoints of another run (its wandb id is {theirs}, this "
                f"run's is {self._id}); give this run a folder of its own (checkpoint.dir)"
            )
        changes(_saved_facts(manifest), self._facts)
        return self._state.wanted(manifest)

    def _from_the_beginning(self, not_from_memory: str | None) -> Position:
        lost = self._answered("lost", self._step_that_was_committed)
        if lost is not None:
            raise UnusableCheckpointError(
                f"the run's events record a checkpoint of step {lost}, but {self._setting.place} holds none; "
                "bring the folder back, or begin a new run"
            )
        if self._peers.is_coordinator:
            nothing = {"step": 0, "seconds": 0.0, "bytes_read": 0, "skipped": []}
            told = {"source": "beginning", "not_from_memory": not_from_memory}
            self._tell("restored", {**nothing, **told, "reason": "no checkpoint was committed yet"})
        return Position()

    def _take_weights(self) -> None:
        """Begin with given weights in the place of those from the seed."""
        setting = self._setting
        group = dist.group.WORLD if setting.mesh.world_size > 1 else None
        start = load_start(setting.config, self._state.masters, self._peers, group)
        self._state.masters_were_filled()
        if self._peers.is_coordinator:
            self._tell("weights_loaded", asdict(start))

    def _step_that_was_committed(self) -> int | None:
        events = read_events(self._setting.run)
        steps = [it["step"] for it in events if it["event"] == "checkpoint_committed" and "step" in it]
        return max(steps, default=None)

    def _answered(self, topic: str, question: Any) -> Any:
        """Return rank 0's answer to a question, so that all ranks go the same way."""
        if self._peers.is_coordinator:
            try:
                self._peers.answer(topic, {"is": question()})
            except CheckpointError as error:
                self._peers.answer(topic, {"failed": str(error)})
        answer = self._peers.await_answer(topic)
        if "failed" in answer:
            raise TrainingError(answer["failed"])
        return answer["is"]

    def _announce(self, restored: Restored, not_from_memory: str | None) -> None:
        bytes_read = sum(self._peers.exchange("bytes read", restored.bytes_read))
        if not self._peers.is_coordinator:
            return
        skipped = [{"step": step, "reason": reason} for step, reason in restored.skipped]
        gone = _newest_recorded(self._setting.run)
        if gone > max([restored.step, *(step for step, _ in restored.skipped)]):
            reason = "its manifest is not there any more, though it was committed"
            skipped.insert(0, {"step": gone, "reason": reason})
        evidence = {
            "source": "checkpoint",
            "not_from_memory": not_from_memory,
            "step": restored.step,
            "seconds": restored.seconds,
            "bytes_read": bytes_read,
            "skipped": skipped,
            "layout_saved": dict(restored.manifest.layout),
            "layout": asdict(self._setting.mesh.layout),
            "generation": restored.manifest.generation,
            "digest": digest(restored.manifest),
            "changes": changes(_saved_facts(restored.manifest), self._facts),
        }
        self._tell("restored", evidence)

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


def _newest_recorded(run: RunDir) -> int:
    """Return the step that the run's events expect to be restored: committed last, or gone back to since."""
    last = 0
    for event in read_events(run):
        is_of_storage = event.get("source") != memory_copies.SOURCE
        if event["event"] in ("checkpoint_committed", "restored") and is_of_storage:
            last = event.get("step", last)
    return last


def _saved_facts(manifest: Manifest) -> Mapping[str, Any]:
    saved = manifest.state.get("config")
    return saved if isinstance(saved, Mapping) else {}
