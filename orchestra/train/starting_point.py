"""Where an attempt begins: at step 0, there perhaps with given weights (`model.init_from`), with copies in
memory, or with a checkpoint; and where a run goes back to that is rolled back. Called by `checkpoints`.

Only what lies on the run's line is begun with (`orchestra.run.run_lineage`). Where an attempt begins is on
the disk before it trains: from then on no earlier one can publish a later step that counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.checkpoint_errors import CheckpointError, NoCheckpointError, StorageError, UnreachableError
from checkpointing.checkpointer import Checkpointer
from checkpointing.lineage import Base
from checkpointing.manifest import Manifest
from checkpointing.peers import Peers
from checkpointing.plans import grouped
from checkpointing.restore import RestoredCheckpoint, fetch
from checkpointing.saving.retention import is_same_score
from checkpointing.shards import Shard, torch_dtype
from conf.schema import ModelConfig, RollBackConfig
from orchestra.errors import DataError, TrainingError, UnusableCheckpointError
from orchestra.huggingface.folder import from_json, open_folder, problems_of_folder, to_json
from orchestra.run import rollback, run_lineage
from orchestra.run.events import is_whole, read_events
from orchestra.run.files import Record
from orchestra.run.rollback import BadSteps, RollBack, Stretch, kept, merged
from orchestra.run.run_lineage import newest_checkpoint, obeyed_roll_backs
from orchestra.sizes.topology import BatchRamp
from orchestra.train.memory_copies import MemoryCopies
from orchestra.train.state import (
    CheckpointContext,
    Position,
    TensorState,
    changes,
    digest,
    position_from_json,
)

_BEGINNING = Base(0)
# Weights of another type than the masters' are read into a buffer: at most so many bytes at a time.
_BYTES_AT_ONCE = 1 << 30


def load_weights(
    model: ModelConfig, how: str, masters: Sequence[Shard], peers: Peers, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Fill the masters (`model.<parameter>`) from the Hugging Face folder `model.init_from`; return what is
    to be recorded of it. *Collective*.

    Each byte is read once; `how` is `checkpoint.restore`. Any floating-point type is taken; fp32 masters hold
    every number of the narrower ones. The caller makes the 16-bit parameters. Raises on every rank:
    TrainingError where the folder is not that of this model or holds numbers that are not finite;
    DamagedError where it cannot be read.
    """
    began = time.monotonic()
    assert model.init_from is not None
    topic = peers.unused("init_from")
    if peers.is_coordinator:
        peers.answer(topic, _folder_of_weights(model, model.init_from))
    answer = peers.await_answer(topic, 2 * peers.limit_s)
    if "error" in answer:
        raise TrainingError(answer["error"])
    storage, folder, manifest = from_json(answer)
    bytes_read = 0
    # The same groups on all ranks, whatever each rank holds of them.
    sizes = {name: tensor.num_bytes for name, tensor in manifest.tensors.items()}
    for group_names in grouped(sizes, sizes.__getitem__, _BYTES_AT_ONCE):
        names = set(group_names)
        here = [shard for shard in masters if shard.name in names]
        wanted = [_as_stored(shard, manifest) for shard in here]
        bytes_read += fetch(storage, folder, manifest, wanted, peers, group, how=how, topic=topic)
        for shard, filled in zip(here, wanted, strict=True):
            if filled is not shard:
                shard.tensor.copy_(filled.tensor)
    _refuse_nonfinite(masters, peers, topic, model.init_from)
    bytes_of_all = sum(peers.exchange(f"{topic}/bytes", bytes_read))
    return {"place": model.init_from, "bytes_read": bytes_of_all, "seconds": time.monotonic() - began}


def _folder_of_weights(model: ModelConfig, place: str) -> dict[str, Any]:
    """Return the headers of the folder's files as JSON, or what is wrong with them. *Rank 0 only*."""
    try:
        folder = open_folder(place)
    except DataError as error:
        return {"error": f"model.init_from: {error}"}
    problem = next(problems_of_folder(model, folder), None)
    return to_json(folder) if problem is None else {"error": problem}


def _as_stored(shard: Shard, manifest: Manifest) -> Shard:
    """Return the shard, or one like it in the type that the folder has."""
    dtype = manifest.tensors[shard.name].dtype
    if dtype == shard.dtype:
        return shard
    return dataclasses.replace(shard, tensor=torch.empty_like(shard.tensor, dtype=torch_dtype(dtype)))


def _refuse_nonfinite(masters: Sequence[Shard], peers: Peers, topic: str, place: str) -> None:
    """Raise TrainingError where a weight is not finite: these folders have no checksums. *Collective*."""
    bad = next((shard.name for shard in masters if not bool(torch.isfinite(shard.tensor).all())), None)
    reported = peers.exchange(f"{topic}/finite", bad)
    name = next((each for each in reported if each is not None), None)
    if name is not None:
        raise TrainingError(
            f"model.init_from={place}: {name} holds numbers that are not finite: the file is damaged, or the "
            "model was; copy it again"
        )


@dataclass(frozen=True)
class StartingPoint:
    """Fills one rank's state at the beginning of an attempt."""

    context: CheckpointContext
    model: ModelConfig
    state: TensorState
    checkpointer: Checkpointer
    copies: MemoryCopies | None

    def find(self, goes_on: Callable[[], None] = lambda: None) -> Position:
        """Return where to continue from, the state filled. *Collective*. A storage that does not answer is
        waited for; `goes_on` is called before each try.

        The first attempt of a run begins at 0, any other one with the copies in memory that the agent named
        or with the newest intact checkpoint. Raises UnusableCheckpointError where the place holds another
        run's, where the run's own are gone, or where they are of another model, or where none is intact; and
        StorageOutageError where a storage does not answer for `checkpoint.restore_patience_s`.
        """
        begin = self._restored(goes_on) if self.context.attempt > 0 else self._fresh(goes_on)
        if begin.step == 0 and self.model.init_from is not None:
            # In the place of the weights from the seed.
            how, peers = self.context.settings.restore.name, self.context.peers
            evidence = load_weights(self.model, how, self.state.wanted_masters(), peers, self.context.group)
            self.state.copy_masters_to_parameters()
            if peers.is_coordinator:
                self.context.record("weights_loaded", evidence)
        return begin

    def _claim(self, goes_on: Callable[[], None], *, only_look: bool = False) -> None:
        """Make a place outside the run's directory this run's own: two would remove each other's files.

        `only_look`: refuse another's place and write nothing.
        """
        context = self.context
        if context.settings.dir is None or not self.context.saves:
            return
        mine = context.wandb_id or context.run.name

        def owner_of_place() -> str:
            if not only_look:
                return self.checkpointer.claim(mine)
            found = self.checkpointer.owner()
            if found is None and not self.checkpointer.is_anything_there() and self._has_committed_here():
                # Whatever retention removed, who owns a place stays written there: it is not mounted.
                away = "nothing is there, though checkpoints were committed"
                raise StorageError(f"{context.place}: {away}") from OSError(errno.ESTALE, away)
            return found or mine

        owner = context.answered_in_time(context.peers.unused("owner"), owner_of_place, goes_on)
        if owner != mine:
            raise UnusableCheckpointError(
                f"{context.place} belongs to another run (its wandb id is {owner}, this run's is {mine}); "
                "give this run a folder of its own (checkpoint.dir)"
            )

    def _has_committed_here(self) -> bool:
        """Whether the run's records tell of a checkpoint in this very place. *Rank 0 only*."""
        needs = read_events(self.context.run, ("checkpoint_needs",))
        attempts = {each["attempt"] for each in needs if each.get("place") == self.context.place}
        return any("fallback" not in each and each["attempt"] in attempts for each in self._commits())

    def _fresh(self, goes_on: Callable[[], None]) -> Position:
        if not self.context.saves:
            return Position()
        committed = self.context.answered_in_time("committed", self.checkpointer.committed_steps, goes_on)
        if committed:
            raise UnusableCheckpointError(
                f"{self.context.place} holds checkpoints already (newest: step {committed[-1]}), and this "
                "run has only begun: they are another run's; continue that one with `orchestra resume RUN`, "
                "or give this run a folder of its own (checkpoint.dir)"
            )
        self._claim(goes_on)
        return Position()

    def _restored(self, goes_on: Callable[[], None]) -> Position:
        # A folder that is not mounted now is not this run's to write to.
        self._claim(goes_on, only_look=True)
        left_out = rollback.from_lists(self.context.answered_in_time("roll backs", self._left_out, goes_on))
        begin = self._restored_position(goes_on)
        self._claim(goes_on)
        return replace(begin, left_out=merged((*begin.left_out, *left_out)))

    def _left_out(self) -> list[list[int]]:
        """Return the data that roll-backs leave out. *Rank 0 only*."""
        found = self._roll_backs()
        return rollback.to_lists(merged(stretch for turn in found for stretch in turn.left_out))

    def _roll_backs(self) -> list[RollBack]:
        return obeyed_roll_backs(read_events(self.context.run, run_lineage.EVENTS))

    def _restored_position(self, goes_on: Callable[[], None]) -> Position:
        from_memory = self._from_memory()
        if isinstance(from_memory, Position):
            return from_memory
        try:
            expected = self._expected() if self.context.peers.is_coordinator else None
            restored = self.checkpointer.restore(self._wanted, expected=expected, goes_on=goes_on)
        except UnreachableError as error:
            raise self.context.outage(str(error)) from error
        except NoCheckpointError as error:
            # A restart would find the same.
            raise UnusableCheckpointError(str(error)) from error
        if restored is None:
            return self._from_the_beginning(from_memory)
        begin = position_from_json(restored.state)
        self.state.take_back(restored.manifest, begin)
        self._announce(restored, from_memory)
        return begin

    def _from_memory(self) -> Position | str | None:
        """Return where the copies in memory stand, the state filled; why it cannot be; None unless asked."""
        step = self.context.from_memory
        if step is None:
            return None
        if self.copies is None:
            return "recovery.memory_copy_every_steps is null"
        restored = self.copies.restore(step)
        if isinstance(restored, str):
            return restored
        begin = position_from_json(restored.document)
        self.state.take_back(None, begin)
        if self.context.peers.is_coordinator:
            layout = asdict(self.context.mesh.layout)
            self._record(
                run_lineage.MEMORY,
                begin.step,
                restored.seconds,
                restored.num_bytes,
                layout_saved=layout,
                layout=layout,
                base=Base(begin.step, restored.attempt),
                generation=restored.attempt,
                changes={},
            )
        return begin

    def _is_own(self, manifest: Manifest) -> bool:
        """Whether a checkpoint may be this run's: its wandb id is this run's, or one of them has none."""
        theirs, ours = manifest.state.get("wandb_id"), self.context.wandb_id
        return None in (theirs, ours) or theirs == ours

    def _wanted(self, manifest: Manifest) -> list[Shard]:
        if not self._is_own(manifest):
            theirs = manifest.state.get("wandb_id")
            raise UnusableCheckpointError(
                f"{self.context.place} holds checkpoints of another run (its wandb id is {theirs}, this "
                f"run's is {self.context.wandb_id}); give this run a folder of its own (checkpoint.dir)"
            )
        changes(_saved_facts(manifest), self.context.facts)
        return self.state.wanted(manifest)

    def _from_the_beginning(self, not_from_memory: str | None) -> Position:
        lost = self.context.answered("lost", self._step_that_was_committed)
        if lost is not None:
            raise UnusableCheckpointError(
                f"the run's events record a checkpoint of step {lost}, but {self.context.place} holds none; "
                "bring the folder back, or begin a new run"
            )
        if self.context.peers.is_coordinator:
            is_back = bool(self._roll_backs())
            reason = "it was rolled back" if is_back else "no checkpoint was committed yet"
            self._record("beginning", 0, 0.0, 0, not_from_memory=not_from_memory, reason=reason)
        return Position()

    def _expected(self) -> dict[int, int]:
        """Return the place (1: the fallback) where the newest step on the line was committed, and that step,
        as far as the run directory can be read now; nothing where that place is not used any more.
        *Rank 0 only*.
        """
        with contextlib.suppress(CheckpointError, OSError):
            # Of two of one step the later one.
            newest = max(reversed(self._commits()), key=lambda event: event["step"], default=None)
            if newest is not None and newest.get("fallback") in (None, self.context.fallback):
                return {int("fallback" in newest): newest["step"]}
        return {}

    def _commits(self) -> list[Record]:
        found = self.context.lineage()
        return [
            event
            for event in read_events(self.context.run, ("checkpoint_committed",))
            if event["event"] == "checkpoint_committed"
            and "step" in event
            and found.is_on_line(event["step"], event["attempt"])
        ]

    def _step_that_was_committed(self) -> int | None:
        return max((event["step"] for event in self._commits()), default=None)

    def _announce(self, restored: RestoredCheckpoint, not_from_memory: str | None) -> None:
        bytes_read = sum(self.context.peers.exchange("bytes read", restored.bytes_read))
        if not self.context.peers.is_coordinator:
            return
        passed_over = (*restored.off_line[::-1], *restored.skipped)
        skipped = [{"step": step, "reason": reason} for step, reason in passed_over]
        expected = newest_checkpoint(read_events(self.context.run)) or 0
        if expected > max([restored.step, *(step for step, _ in restored.skipped)]):
            reason = "its manifest is not there any more, though it was committed"
            skipped.insert(0, {"step": expected, "reason": reason})
        self._record(
            "checkpoint",
            restored.step,
            restored.seconds,
            bytes_read,
            skipped=skipped,
            not_from_memory=not_from_memory,
            layout_saved=dict(restored.manifest.layout),
            layout=asdict(self.context.mesh.layout),
            base=Base(restored.step, restored.manifest.attempt),
            generation=restored.manifest.generation,
            digest=digest(restored.manifest),
            **({} if restored.fallback is None else {"fallback": restored.fallback}),
            **({"read_twice": list(restored.read_twice)} if restored.read_twice else {}),
            changes=changes(_saved_facts(restored.manifest), self.context.facts),
        )
        self._announce_other_scores(restored)

    def _announce_other_scores(self, restored: RestoredCheckpoint) -> None:
        """Tell where checkpoint.keep_best begins anew: what is saved from here on has other scores."""
        saved, now = restored.state.get("score_of"), self.context.score_of
        if self.context.settings.keep_best and not is_same_score(saved, now):
            evidence = {"step": restored.step, "saved": saved, "now": now}
            self.context.record("best_begins_anew", evidence)

    def _record(
        self,
        source: str,
        step: int,
        seconds: float,
        bytes_read: int,
        base: Base = _BEGINNING,
        **others: Any,
    ) -> None:
        """Record on the disk what the attempt begins with, which makes void what earlier ones publish of
        later steps. *Rank 0 only*. Raises TrainingError where it cannot be written.
        """
        evidence: dict[str, Any] = {"source": source, "step": step, "seconds": seconds}
        context = self.context
        # Where the storage does not say so, nothing counts as late.
        with contextlib.suppress(CheckpointError):
            evidence[run_lineage.LATER] = self.checkpointer.stored_after(step)
        try:
            context.events.write(
                run_lineage.BEGIN, **{"skipped": [], **evidence, "bytes_read": bytes_read, **others}
            )
            context.events.sync()
        except OSError as error:
            raise TrainingError(
                f"{context.run.events}: where attempt {context.attempt} begins cannot be recorded: "
                f"{error.strerror}; make room there and resume the run"
            ) from error
        context.lineage.forget()
        self.checkpointer.begin_from(base)


def _saved_facts(manifest: Manifest) -> Mapping[str, Any]:
    saved = manifest.state.get("config")
    return saved if isinstance(saved, Mapping) else {}


@dataclass(frozen=True)
class DataProgress:
    """How far the training has read its data: the samples consumed up to the last bad step, the sequences of
    each step's global batch, and what is left out already.
    """

    position: int
    batches: BatchRamp
    left_out: tuple[Stretch, ...]


def target(committed: Sequence[int], first_bad: int, steps_before: int) -> int:
    """Return the step to go back to: of the committed ones (ascending) the newest that is `steps_before` the
    first bad one, else the oldest before that, else 0, the beginning.
    """
    before = [step for step in committed if step < first_bad]
    old_enough = [step for step in before if step <= first_bad - steps_before]
    return old_enough[-1] if old_enough else min(before, default=0)


def order_roll_back(
    context: CheckpointContext,
    checkpointer: Checkpointer,
    config: RollBackConfig,
    bad: BadSteps,
    data: DataProgress,
) -> RollBack:
    """Decide which step the run goes back to and which data it leaves out, and write it to the disk, which
    the next attempt reads. *Rank 0 only*, no save under way.

    As PaLM did (arXiv:2204.02311, section 5.1): restart from a checkpoint roughly 100 steps before the spike
    started, and skip the batches that were seen before and during it, 200 to 500. Whether the run may go on
    at all is decided by the recovery policy.

    Raises StorageError where the checkpoints cannot be listed, and OSError where nothing can be written.
    """
    to, position = _target(checkpointer, bad, config)
    stretch = None
    through = data.batches.sequences_through
    if bad.leaves_out:
        # The data of so many steps from there on, and of all bad ones.
        last = to + max(config.skip_steps, bad.last - to)
        parts = kept(position, through(last) - through(to), merged(data.left_out))
        begin, count = parts[-1]
        stretch = Stretch(parts[0][0], max(begin + count, data.position))
    steps_of = data.batches.steps_through
    ordered = RollBack(
        attempt=context.attempt,
        step=bad.last,
        to=to,
        cause=bad.cause,
        left_out=() if stretch is None else (stretch,),
        data_steps=None if stretch is None else (steps_of(stretch.begin + 1), steps_of(stretch.end)),
    )
    context.events.write(
        rollback.EVENT,
        step=ordered.step,
        first_bad=bad.first,
        to=to,
        cause=ordered.cause,
        left_out=rollback.to_lists(ordered.left_out),
        data_steps=None if ordered.data_steps is None else list(ordered.data_steps),
        message=bad.words,
    )
    context.events.sync()
    return ordered


def _target(checkpointer: Checkpointer, bad: BadSteps, config: RollBackConfig) -> tuple[int, int]:
    """Return the step to go back to, and the samples consumed up to it."""
    committed = checkpointer.committed_steps()
    while committed:
        # A device may have been broken before the oldest checkpoint was saved: then from that one.
        first = bad.first if bad.leaves_out else max(bad.first, committed[0] + 1)
        step = target(committed, first, config.steps_before if bad.leaves_out else 1)
        if step == 0:
            break
        try:
            samples = checkpointer.manifest(step).state.get("samples")
        except CheckpointError:
            samples = None
        if is_whole(samples):
            return step, samples
        # The restore will skip it too.
        committed.remove(step)
    return 0, 0
