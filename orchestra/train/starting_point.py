"""Where an attempt begins: with nothing, with given weights, with copies in memory or with a checkpoint.

What the run was rolled back behind is void: it is set aside before anything is restored, so that nothing that
comes later finds it. It saves nothing and knows no step but the first.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.checkpoint_errors import CheckpointError, NoCheckpointError
from checkpointing.checkpointer import Checkpointer
from checkpointing.manifest import Manifest
from checkpointing.peers import Peers
from checkpointing.restore import RestoredCheckpoint, fetch
from checkpointing.shards import Shard, torch_dtype
from conf.schema import Config, RollBackConfig
from orchestra.errors import DataError, TrainingError, UnusableCheckpointError
from orchestra.huggingface.folder import from_json, open_folder, to_json
from orchestra.huggingface.start import problems_of_folder
from orchestra.parallel.mesh import Mesh, RankEnvironment
from orchestra.run import rollback
from orchestra.run.events import EventWriter, is_whole, read_events
from orchestra.run.paths import RunDir
from orchestra.run.record import wandb_id
from orchestra.run.rollback import BadSteps, RollBack, Stretch, kept, left_out_by, merged
from orchestra.train import memory_copies
from orchestra.train.memory_copies import MemoryCopies
from orchestra.train.state import (
    Position,
    TensorState,
    changes,
    digest,
    facts,
    position_from_json,
)

# Starts a run's parameters from a folder of Hugging Face weights (`model.init_from`) instead of a seed.
#
# Each byte is read once and broadcast, by the same code that restores checkpoints. Whether a run starts anew
# it does not know: that is for its caller to decide.


# Weights of another type than the masters' pass through memory of their own: of this many bytes at a time.
_BYTES_AT_ONCE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Start:
    """Where the weights came from, the bytes that all ranks together read, and the seconds it took."""

    place: str
    bytes_read: int
    seconds: float


def load_start(
    config: Config, masters: Sequence[Shard], peers: Peers, group: dist.ProcessGroup | None
) -> Start:
    """Fill the masters (`model.<parameter>`) from the folder `model.init_from`. *Collective*.

    Any floating-point type is taken; fp32 masters hold every number of the narrower ones. The 16-bit copies
    are the caller's to make. Raises on every rank: TrainingError where the folder is not that of this model
    or holds numbers that are not finite; DamagedError where it cannot be read.
    """
    began = time.monotonic()
    assert config.model.init_from is not None
    topic = peers.unused("init_from")
    if peers.is_coordinator:
        peers.answer(topic, _found(config))
    found = peers.await_answer(topic, 2 * peers.limit_s)
    if "error" in found:
        raise TrainingError(found["error"])
    storage, folder, manifest = from_json(found)
    how = config.checkpoint.restore.name
    bytes_read = 0
    for names in _batches(manifest):
        here = [shard for shard in masters if shard.name in names]
        wanted = [_as_stored(shard, manifest) for shard in here]
        bytes_read += fetch(storage, folder, manifest, wanted, peers, group, how=how, topic=topic)
        for shard, filled in zip(here, wanted, strict=True):
            if filled is not shard:
                shard.tensor.copy_(filled.tensor)
    _refuse_nonfinite(masters, peers, topic, config.model.init_from)
    bytes_of_all = sum(peers.exchange(f"{topic}/bytes", bytes_read))
    return Start(config.model.init_from, bytes_of_all, time.monotonic() - began)


def _found(config: Config) -> dict[str, Any]:
    """Read the headers for all ranks; what is wrong with them goes to all as well."""
    assert config.model.init_from is not None
    try:
        folder = open_folder(config.model.init_from)
    except DataError as error:
        return {"error": f"model.init_from: {error}"}
    problem = next(problems_of_folder(config.model, folder), None)
    return to_json(folder) if problem is None else {"error": problem}


def _batches(manifest: Manifest) -> Iterator[set[str]]:
    """Yield the tensors' names in groups, the same ones on all ranks, whatever each rank holds of them."""
    names: set[str] = set()
    num_bytes = 0
    for name, tensor in manifest.tensors.items():
        if names and num_bytes + tensor.num_bytes > _BYTES_AT_ONCE:
            yield names
            names, num_bytes = set(), 0
        names.add(name)
        num_bytes += tensor.num_bytes
    yield names


def _as_stored(shard: Shard, manifest: Manifest) -> Shard:
    """Return the shard, or one like it in the type that the folder has."""
    dtype = manifest.tensors[shard.name].dtype
    if dtype == shard.dtype:
        return shard
    return dataclasses.replace(shard, tensor=torch.empty_like(shard.tensor, dtype=torch_dtype(dtype)))


def _refuse_nonfinite(masters: Sequence[Shard], peers: Peers, topic: str, place: str) -> None:
    """There are no checksums in such a folder; at least nothing that cannot be trained is taken."""
    bad = next((shard.name for shard in masters if not bool(torch.isfinite(shard.tensor).all())), None)
    reported = peers.exchange(f"{topic}/finite", bad)
    name = next((each for each in reported if each is not None), None)
    if name is not None:
        raise TrainingError(
            f"model.init_from={place}: {name} holds numbers that are not finite: the file is damaged, or the "
            "model was; copy it again"
        )


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

    def _roll_backs(self) -> tuple[rollback.Stretch, ...]:
        """Set aside what roll-backs have made void; return the data that they leave out."""
        told = answered(self._peers, "roll backs", self._set_aside)
        return rollback.from_lists(told)

    def _set_aside(self) -> list[list[int]]:
        """Do so on rank 0."""
        found = _roll_backs_of(self._setting.run)
        if found:
            void = self._checkpointer.set_aside(
                min(it.to for it in found),
                lambda it: self._is_own(it) and rollback.is_void(found, it.step, it.generation),
            )
            for step, name in void:
                self._tell("checkpoint_set_aside", {"step": step, "name": name, "cause": "a roll-back"})
        return rollback.to_lists(left_out_by(found))

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
        begin = position_from_json(restored.state)
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
        begin = position_from_json(found.document)
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
        self._state.copy_masters_to_parameters()
        if self._peers.is_coordinator:
            self._tell("weights_loaded", asdict(start))

    def _step_that_was_committed(self) -> int | None:
        events = read_events(self._setting.run)
        void = rollback.roll_backs(events)
        steps = [
            it["step"]
            for it in events
            if it["event"] == "checkpoint_committed"
            and "step" in it
            and not rollback.is_void(void, it["step"], it["attempt"])
        ]
        return max(steps, default=None)

    def _announce(self, restored: RestoredCheckpoint, not_from_memory: str | None) -> None:
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
    return rollback.roll_backs(read_events(run, (rollback.EVENT,)))


def _newest_recorded(run: RunDir) -> int:
    """Return the step that the run's events expect to be restored: committed last, or gone back to since."""
    last = 0
    for event in read_events(run):
        is_of_storage = event.get("source") != memory_copies.SOURCE
        if event["event"] in ("checkpoint_committed", "restored") and is_of_storage:
            last = event.get("step", last)
        elif event["event"] == rollback.EVENT:
            last = min(last, event.get("to", last))
    return last


def _saved_facts(manifest: Manifest) -> Mapping[str, Any]:
    saved = manifest.state.get("config")
    return saved if isinstance(saved, Mapping) else {}


# Where a run goes on that is rolled back, and which data it leaves out: decided once, by rank 0, and written
# down before the attempt ends.
#
# PaLM's practice (arXiv:2204.02311, section 5.1): restart from a checkpoint roughly 100 steps before the
# spike started, and skip the batches that were seen before and during it, 200 to 500. What becomes of it then
# is the next attempt's: `orchestra.run.rollback` says what is void, `beginning` restores. Whether the run may
# go on at all is the policy's.


@dataclass(frozen=True)
class Seen:
    """What the training has seen: where its data stands behind the last bad step, the sequences of a global
    batch, and what is left out already.
    """

    position: int
    global_batch_size: int
    left_out: tuple[Stretch, ...]


def target(committed: Sequence[int], first_bad: int, steps_before: int) -> int:
    """Return the step to go back to: of the committed ones (ascending) the newest that is `steps_before` the
    first bad one, else the oldest before that, else 0, the beginning.
    """
    before = [step for step in committed if step < first_bad]
    old_enough = [step for step in before if step <= first_bad - steps_before]
    return old_enough[-1] if old_enough else min(before, default=0)


def order(
    checkpointer: Checkpointer,
    bad: BadSteps,
    seen: Seen,
    config: RollBackConfig,
    attempt: int,
    events: EventWriter,
) -> RollBack:
    """Decide on a roll-back and put it on the disk. *Rank 0 only*, no save under way.

    Raises StorageError where the checkpoints cannot be listed, and OSError where nothing can be written.
    """
    to, position = _target(checkpointer, bad, config)
    stretch = _stretch(to, position, bad, seen, config) if bad.leaves_out else None
    size = seen.global_batch_size
    found = RollBack(
        attempt=attempt,
        step=bad.last,
        to=to,
        cause=bad.cause,
        left_out=() if stretch is None else (stretch,),
        data_steps=None if stretch is None else (stretch.begin // size + 1, -(-stretch.end // size)),
    )
    events.write(
        rollback.EVENT,
        step=found.step,
        first_bad=bad.first,
        to=to,
        cause=found.cause,
        left_out=rollback.to_lists(found.left_out),
        data_steps=None if found.data_steps is None else list(found.data_steps),
        message=bad.words,
    )
    events.sync()
    return found


def _target(checkpointer: Checkpointer, bad: BadSteps, config: RollBackConfig) -> tuple[int, int]:
    """Return the step to go back to, and where the data stood behind it."""
    committed = checkpointer.committed_steps()
    while committed:
        # A device may have been broken since before all that is kept: then from the oldest.
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
        # The restore will pass it over too.
        committed.remove(step)
    return 0, 0


def _stretch(to: int, position: int, bad: BadSteps, seen: Seen, config: RollBackConfig) -> Stretch:
    """Return what is left out from the data behind step `to` on: so many steps, and all bad ones."""
    num_steps = max(config.skip_steps, bad.last - to)
    parts = kept(position, num_steps * seen.global_batch_size, merged(seen.left_out))
    begin, count = parts[-1]
    return Stretch(parts[0][0], max(begin + count, seen.position))
