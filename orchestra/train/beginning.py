"""Where an attempt begins: with nothing, with given weights, with copies in memory or with a checkpoint.

What the run was rolled back behind is void: it is set aside before anything is restored, so that nothing that
comes later finds it. It saves nothing and knows no step but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from checkpointing.checkpointer import Checkpointer
from checkpointing.errors import CheckpointError, NoCheckpointError
from checkpointing.format.manifest import Manifest
from checkpointing.peers import Peers
from checkpointing.restoring.restore import Restored
from checkpointing.shards import Shard
from conf.schema import Config
from orchestra import roll_backs
from orchestra.errors import TrainingError, UnusableCheckpointError
from orchestra.events import EventWriter, read_events
from orchestra.parallel.mesh import Mesh, RankEnvironment
from orchestra.roll_backs import RollBack, left_out_by, merged
from orchestra.rundir import RunDir
from orchestra.train import memory_copies, position
from orchestra.train.init_from import load_start
from orchestra.train.memory_copies import MemoryCopies
from orchestra.train.position import Position
from orchestra.train.record import wandb_id
from orchestra.train.state import TensorState, changes, digest, facts

Tell = Callable[[str, Mapping[str, Any]], None]


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


def answered(peers: Peers, topic: str, question: Callable[[], Any]) -> Any:
    """Return rank 0's answer to a question (JSON), so that all ranks go the same way. *Collective*.

    Raises TrainingError where the storage did not answer rank 0.
    """
    if peers.is_coordinator:
        try:
            peers.answer(topic, {"is": question()})
        except CheckpointError as error:
            peers.answer(topic, {"failed": str(error)})
    answer = peers.await_answer(topic)
    if "failed" in answer:
        raise TrainingError(answer["failed"])
    return answer["is"]


class Beginning:
    """Fills one rank's state at the beginning of an attempt."""

    def __init__(
        self,
        setting: Setting,
        state: TensorState,
        checkpointer: Checkpointer,
        copies: MemoryCopies | None,
        tell: Tell,
    ) -> None:
        self._setting = setting
        self._state = state
        self._checkpointer = checkpointer
        self._copies = copies
        self._tell = tell
        self._peers = setting.peers
        self._facts = facts(setting.config)
        self._id = wandb_id(setting.run)

    def find(self) -> Position:
        """Return where to continue from, the state filled. *Collective*.

        The first attempt of a run begins at 0, any other one with the copies in memory that it was told of or
        with the newest intact checkpoint. Raises UnusableCheckpointError where the place holds another run's,
        where the run's own are gone, or where they are of another model, or where none is intact.
        """
        begin = self._restored() if self._setting.attempt > 0 else self._fresh()
        if begin.step == 0 and self._setting.config.model.init_from is not None:
            self._take_weights()
        return begin

    def _claim(self) -> None:
        """Make a place outside the run's directory this run's own: two runs in one would remove each other's
        checkpoints.
        """
        setting = self._setting
        if setting.config.checkpoint.dir is None or setting.config.checkpoint.every_steps is None:
            return
        mine = self._id or setting.run.name
        owner = answered(self._peers, "owner", lambda: self._checkpointer.claim(mine))
        if owner != mine:
            raise UnusableCheckpointError(
                f"{setting.place} belongs to another run (its wandb id is {owner}, this run's is {mine}); "
                "give this run a folder of its own (checkpoint.dir)"
            )

    def _fresh(self) -> Position:
        if self._setting.config.checkpoint.every_steps is None:
            return Position()
        found = answered(self._peers, "committed", self._checkpointer.committed_steps)
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
        rolled = self._roll_backs()
        begin = self._found()
        return replace(begin, left_out=merged((*begin.left_out, *rolled)))

    def _roll_backs(self) -> tuple[roll_backs.Stretch, ...]:
        """Set aside what roll-backs have made void; return the data that they leave out."""
        told = answered(self._peers, "roll backs", self._set_aside)
        return roll_backs.from_lists(told)

    def _set_aside(self) -> list[list[int]]:
        """Do so on rank 0."""
        found = _roll_backs_of(self._setting.run)
        if found:
            void = self._checkpointer.set_aside(
                min(it.to for it in found),
                lambda it: self._is_own(it) and roll_backs.is_void(found, it.step, it.generation),
            )
            for step, name in void:
                self._tell("checkpoint_set_aside", {"step": step, "name": name, "cause": "a roll-back"})
        return roll_backs.to_lists(left_out_by(found))

    def _found(self) -> Position:
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

    def _is_own(self, manifest: Manifest) -> bool:
        """Whether nothing says that a checkpoint is another run's."""
        theirs = manifest.state.get("wandb_id")
        return None in (theirs, self._id) or theirs == self._id

    def _wanted(self, manifest: Manifest) -> list[Shard]:
        if not self._is_own(manifest):
            theirs = manifest.state.get("wandb_id")
            raise UnusableCheckpointError(
                f"{self._setting.place} holds checkpoints of another run (its wandb id is {theirs}, this "
                f"run's is {self._id}); give this run a folder of its own (checkpoint.dir)"
            )
        changes(_saved_facts(manifest), self._facts)
        return self._state.wanted(manifest)

    def _from_the_beginning(self, not_from_memory: str | None) -> Position:
        lost = answered(self._peers, "lost", self._step_that_was_committed)
        if lost is not None:
            raise UnusableCheckpointError(
                f"the run's events record a checkpoint of step {lost}, but {self._setting.place} holds none; "
                "bring the folder back, or begin a new run"
            )
        if self._peers.is_coordinator:
            nothing = {"step": 0, "seconds": 0.0, "bytes_read": 0, "skipped": []}
            told = {"source": "beginning", "not_from_memory": not_from_memory}
            is_back = bool(_roll_backs_of(self._setting.run))
            reason = "it was rolled back" if is_back else "no checkpoint was committed yet"
            self._tell("restored", {**nothing, **told, "reason": reason})
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
        void = roll_backs.roll_backs(events)
        steps = [
            it["step"]
            for it in events
            if it["event"] == "checkpoint_committed"
            and "step" in it
            and not roll_backs.is_void(void, it["step"], it["attempt"])
        ]
        return max(steps, default=None)

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


def _roll_backs_of(run: RunDir) -> list[RollBack]:
    return roll_backs.roll_backs(read_events(run, (roll_backs.EVENT,)))


def _newest_recorded(run: RunDir) -> int:
    """Return the step that the run's events expect to be restored: committed last, or gone back to since."""
    last = 0
    for event in read_events(run):
        is_of_storage = event.get("source") != memory_copies.SOURCE
        if event["event"] in ("checkpoint_committed", "restored") and is_of_storage:
            last = event.get("step", last)
        elif event["event"] == roll_backs.EVENT:
            last = min(last, event.get("to", last))
    return last


def _saved_facts(manifest: Manifest) -> Mapping[str, Any]:
    saved = manifest.state.get("config")
    return saved if isinstance(saved, Mapping) else {}
