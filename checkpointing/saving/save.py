"""Saving: copy, return, and let threads write, vote and commit while training goes on.

Each rank writes its own files and tells the coordinator what it wrote; the coordinator compares all of it
with the plan and writes the manifest, which is the commit. Ranks talk through `Peers`, never through a
collective of the training. Whatever fails, every rank learns of it, what was written is removed, and the next
save is new.
"""

from __future__ import annotations

import errno
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from checkpointing import catalog
from checkpointing.catalog import Draft
from checkpointing.checkpoint_errors import (
    CheckpointError,
    FalseWordError,
    MismatchError,
    MissingRanksError,
    SaveFailedError,
    StorageError,
)
from checkpointing.integrity import checksums
from checkpointing.integrity.shard_digest import part_digest
from checkpointing.lineage import Base, Lineage
from checkpointing.manifest import Chunk, File, Manifest, Tensor
from checkpointing.options import Event, Needs, Options, Phase
from checkpointing.outages import in_time
from checkpointing.peers import Peers
from checkpointing.plans import Image, TensorPiece, declaration, declared, images, write_plan
from checkpointing.saving import retention
from checkpointing.saving.staging import Staging, staging_bytes
from checkpointing.shards import Shard
from checkpointing.storage import Storage

# Bytes handed to the storage at once: a multiple of every alignment, enough for a disk's bandwidth, and so
# much that the interpreter's lock, which the training's thread holds now and then, is asked for seldom.
_BLOCK_BYTES = 64 << 20
# Of memory that had to grow: one part in so many more than it needs.
_SPARE_SHARE = 64
# The other ranks wait this much longer than the coordinator waits for them.
_SLACK_S = 30.0
# How long `wait` gives the other ranks to learn of a verdict that is known here.
_SETTLING_S = 5.0
# How long it waits until older checkpoints are removed.
_PRUNING_S = 30.0


@dataclass
class _Save:
    """One save under way on this rank. `verdict` is what the coordinator said, once it did."""

    topic: str
    step: int
    state: Mapping[str, Any]
    storage: Storage
    draft: Draft
    began: float
    # Who writes what.
    plan: Sequence[Sequence[TensorPiece]]
    blocked_s: float = 0.0
    error: str | None = None
    verdict: dict[str, Any] = field(default_factory=dict)
    staging: Staging | None = None
    thread: threading.Thread | None = None
    # Set once the verdict is known; the thread may go on, to wait for the other ranks' threads.
    is_concluded: threading.Event = field(default_factory=threading.Event)


class Saver:
    """Saves this rank's part of a state, one save at a time."""

    def __init__(
        self,
        storage: Storage,
        peers: Peers,
        options: Options,
        on_event: Event,
        at_phase: Phase,
        lineage: Callable[[], Lineage] = Lineage,
        fallback: Storage | None = None,
    ) -> None:
        self._storage = storage
        self._fallback = fallback
        # Only then it is asked after each save: its storage may stand still.
        self._is_fallback_used = False
        self._peers = peers
        self._options = options
        self._on_event = on_event
        self._at_phase = at_phase
        self._lineage = lineage
        # What the states that are saved went on from; manifests say it.
        self.base = Base(0)
        # Several may talk through the same peers, each of its own saves.
        self._topic = peers.unused("saver")
        self._num_saves = 0
        self._num_skipped = 0
        self._plan: list[list[TensorPiece]] = []
        self._images: list[Image] = []
        self._is_plan_old = False
        self._staging: Staging | None = None
        self._current: _Save | None = None
        self._known: dict[int, retention.CommittedCheckpoint] = {}

    def prepare(self, shards: Sequence[Shard]) -> Needs:
        """Agree on who writes what, and return what a save takes; nothing is taken yet. *Collective*.

        Removes what interrupted saves left. The same shards (names, shapes, offsets) must be passed to each
        `save`, but after `plan_anew`. Raises MismatchError where the ranks' shards do not make up each tensor
        once.
        """
        if self._peers.is_coordinator:
            for storage in self._places:
                # What cannot be removed now is removed later.
                act = partial(catalog.remove_leftovers, storage, self._options.generation)
                is_second = storage is self._fallback
                self._quietly(partial(in_time, act, storage.place) if is_second else act)
        self._agree(shards)
        needed = sum(piece.num_bytes for pieces in self._plan for piece in pieces)
        # Each rank asks: where that fails it does so on all of them, and nobody waits for a word.
        free, topic = self._storage.free_bytes(), self._peers.unused("room")
        if self._peers.is_coordinator:
            is_enough = free is None or needed <= free
            self._peers.answer(topic, 0 if is_enough else self._removable_bytes())
        return Needs(needed, staging_bytes(self._images), free, self._peers.await_answer(topic))

    def _removable_bytes(self) -> int:
        """Return what the older checkpoints take that a save without room removes first."""
        try:
            fallback = self._look_into_fallback() if self._is_fallback_used else None
            return retention.removable_bytes(self._storage, self._policy, self._lineage(), fallback)
        except StorageError:
            # It would not remove any now either.
            return 0

    def _agree(self, shards: Sequence[Shard]) -> None:
        held = declaration(shard.piece for shard in shards)
        values = self._peers.exchange(self._peers.unused("prepare"), held)
        self._plan = write_plan([declared(value) for value in values])
        self._images = images(self._plan[self._peers.rank], self._peers.rank)

    def plan_anew(self) -> None:
        """Let the saves from the next one on have other shards than those before. *Each rank*.

        The next one then agrees again on who writes what, and takes more memory where that it has is too
        small: it may hold the training much longer than others.
        """
        self._is_plan_old = True

    @property
    def is_plan_old(self) -> bool:
        """Whether the next save has to agree again."""
        return self._is_plan_old

    def reserve(self, shards: Sequence[Shard]) -> None:
        """Take the staging memory, so that a save only copies; else the first one does. *Any rank*."""
        if not self._plan:
            self.prepare(shards)
        self._take_staging(shards)

    def _take_staging(self, shards: Sequence[Shard], spare_bytes: int = 0) -> None:
        pinned = any(shard.tensor.is_cuda for shard in shards)
        folder = self._options.staging_dir
        self._staging = Staging(self._images, pinned=pinned, folder=folder, spare_bytes=spare_bytes)

    def _adapt_staging(self, shards: Sequence[Shard]) -> None:
        """Have memory for the files as they are planned now; the save before is over."""
        if self._staging is None:
            self._take_staging(shards)
        elif self._staging.images is not self._images:
            size, memory = staging_bytes(self._images), self._staging.memory
            pinned = any(shard.tensor.is_cuda for shard in shards)
            if size <= memory.numel():
                self._staging = Staging(self._images, pinned=pinned, memory=memory)
                return
            # All that holds the old memory, before other is taken.
            del memory
            self._staging = None
            if self._current is not None:
                self._current.staging = None
            # Headers grow with the pieces: the next change is then likely to fit.
            self._take_staging(shards, size // _SPARE_SHARE)

    @property
    def _places(self) -> list[Storage]:
        return [self._storage] if self._fallback is None else [self._storage, self._fallback]

    @property
    def _used_places(self) -> list[Storage]:
        """Where checkpoints lie, as far as is known."""
        return self._places if self._is_fallback_used else [self._storage]

    def _look_into_fallback(self) -> Storage | None:
        """Find out whether the fallback holds any; return it where it does, and answers. *Coordinator.*"""
        if self._fallback is None:
            return None
        try:
            found = in_time(partial(catalog.stored, self._fallback), self._fallback.place)
        except StorageError:
            return None
        self._is_fallback_used = bool(found)
        return self._fallback if found else None

    def save(
        self,
        step: int,
        shards: Sequence[Shard],
        state: Mapping[str, Any],
        *,
        in_fallback: bool = False,
        limit_s: float | None = None,
    ) -> bool:
        """Copy the shards and return; threads write and commit. *Collective*.

        `in_fallback`: in the second place, which must have been given, whatever the save before does. Else it
        returns False where that is still under way and `when_busy` is skip, or has not ended in `limit_s`.
        Never raises for a failing storage: the event `checkpoint_failed` tells, on every rank, and the next
        save tries again. So it is with a state that cannot be written as it is.
        """
        began = time.monotonic()
        if self._is_plan_old:
            self._agree(shards)
            self._is_plan_old = False
        if not self._plan:
            self.prepare(shards)
        index, self._num_saves = self._num_saves, self._num_saves + 1
        error: str | None = None
        try:
            if not (in_fallback or self._is_our_turn(index, step, limit_s)):
                return False
        except FalseWordError as false:
            # The other ranks may have begun: they learn at once that this one cannot.
            error = str(false)
        content: dict[str, Any] = {}
        try:
            content = _content(state)
        except MismatchError as wrong:
            # Only one rank has the state: it tells the others with its vote.
            error = str(wrong)
        storage = self._places[int(in_fallback)]
        draft = catalog.draft(storage, step, self._options.generation, index)
        save = _Save(f"{self._topic}/{index}", step, content, storage, draft, began, self._plan, error=error)
        if error is None:
            # Else the memory may still belong to the save before.
            self._stage(save, shards, is_stuck=in_fallback and self._is_stuck(step))
        save.blocked_s = time.monotonic() - began
        save.thread = threading.Thread(target=self._finish, args=[save], name=f"save-{step}", daemon=True)
        self._current = save
        if self._peers.is_coordinator:
            self._on_event("checkpoint_started", {"step": step, "blocked_s": save.blocked_s})
        save.thread.start()
        return True

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for the save in flight. *Collective*. Raises SaveFailedError when it was not committed, or not
        within `limit_s`.
        """
        save = self._current
        if save is None:
            return
        longest_s = self._options.limit_s + 2 * _SLACK_S
        if not save.is_concluded.wait(longest_s if limit_s is None else min(limit_s, longest_s)):
            raise SaveFailedError(save.step, {self._peers.rank: "its storage has not answered for too long"})
        # Until the other ranks have learnt the verdict too: a save that follows at once is then not skipped.
        # And until older ones are removed, where nobody is in a hurry and the storage lets us.
        has_time = limit_s is None and not save.verdict.get("reasons")
        assert save.thread is not None
        save.thread.join(_PRUNING_S if has_time else _SETTLING_S)
        if save.verdict.get("reasons"):
            raise SaveFailedError(
                save.step, {int(rank): why for rank, why in save.verdict["reasons"].items()}
            )

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still at work on a save."""
        thread = None if self._current is None else self._current.thread
        return thread is not None and thread.is_alive()

    def distrust(self, steps: Iterable[int]) -> None:
        """Count these checkpoints for damaged from now on, whatever their files' sizes say."""
        self._known.update({step: retention.CommittedCheckpoint(step, is_intact=False) for step in steps})

    def _is_stuck(self, step: int) -> bool:
        """Whether this rank still writes another state. The same one may be copied over itself."""
        return self._current is not None and self._current.step != step and self.is_busy

    def _is_our_turn(self, index: int, step: int, limit_s: float | None) -> bool:
        """Decide for all ranks alike whether the save before is over. The coordinator's word counts."""
        topic = f"{self._topic}/{index}/turn"
        if self._peers.is_coordinator:
            thread = self._current.thread if self._current else None
            if thread is not None and self._options.when_busy == "wait":
                longest_s = self._options.limit_s + _SLACK_S
                thread.join(longest_s if limit_s is None else min(limit_s, longest_s))
            is_busy = self.is_busy
            self._peers.answer(topic, not is_busy)
            if is_busy:
                self._tell_skipped(step)
        return bool(self._peers.await_answer(topic, self._options.limit_s + 2 * _SLACK_S))

    def _tell_skipped(self, step: int) -> None:
        """Tell of a skipped save, of many the first, second, fourth, eighth …: a disk that is too slow for
        good must not fill the records.
        """
        self._num_skipped += 1
        if self._num_skipped & (self._num_skipped - 1) == 0:
            assert self._current is not None
            why = f"the save of step {self._current.step} is still being written"
            self._on_event("checkpoint_skipped", {"step": step, "count": self._num_skipped, "why": why})

    def _stage(self, save: _Save, shards: Sequence[Shard], *, is_stuck: bool) -> None:
        """Copy the shards, where the save before `is_stuck` into other memory than it reads."""
        try:
            if is_stuck:
                self._take_staging(shards)
            else:
                self._adapt_staging(shards)
            assert self._staging is not None
            save.staging = self._staging
            save.staging.copy_in(shards)
            self._at_phase("staging", save.step)
        except Exception as error:  # noqa: BLE001
            # The other ranks count on this one's word: it goes on, to say that it failed.
            save.error = f"staging failed: {error}"

    # From here on in the background.

    def _finish(self, save: _Save) -> None:
        """Write, vote, and learn the verdict; nothing that goes wrong here may stop the training."""
        is_told = False
        try:
            self._vote(save)
            is_told = True
        except MissingRanksError as error:
            save.verdict = {"reasons": {str(rank): str(error) for rank in error.ranks}}
        except Exception as error:  # noqa: BLE001  told by the event below
            save.verdict = {"reasons": {str(self._peers.rank): str(error) or type(error).__name__}}
        reasons = save.verdict.get("reasons")
        if reasons:
            if is_told and str(self._peers.rank) in reasons:
                # This rank was late, and the coordinator has cleaned up. Untold, it may just be committing.
                self._quietly(lambda: catalog.discard(save.storage, save.draft))
            self._on_event("checkpoint_failed", {"step": save.step, "reasons": reasons})
        save.is_concluded.set()
        if self._peers.is_coordinator and not reasons and save.storage is self._storage:
            # The place need not answer any more, and nothing here changes what was committed. After a save in
            # the fallback it is left alone: it failed a moment ago.
            self._quietly(lambda: self._prune_older(save))
        try:
            self._peers.tell(f"{save.topic}/over", True)
            if self._peers.is_coordinator:
                self._await_all(save)
        except CheckpointError:
            # The store went with rank 0: the run is ending.
            return

    def _vote(self, save: _Save) -> None:
        outcome: dict[str, Any]
        try:
            outcome = {"error": save.error} if save.error else {"files": self._write(save)}
        except Exception as error:  # noqa: BLE001  whatever failed here, all ranks are to learn of it
            outcome = {"error": str(error) or type(error).__name__, "is_full": _is_full(error)}
        self._at_phase("before_vote", save.step)
        self._peers.tell(save.topic, outcome)
        if self._peers.is_coordinator:
            save.verdict = self._conclude(save)
            # A rank that is stuck in its storage reads it when that answers, many skipped saves later.
            self._peers.answer(save.topic, save.verdict, until_forgotten=True)
            if not save.verdict["reasons"]:
                self._announce(save)
        else:
            save.verdict = self._peers.await_answer(save.topic, self._options.limit_s + _SLACK_S)

    def _await_all(self, save: _Save) -> None:
        """Stay busy until every rank's thread is through: its memory must not be staged over before."""
        while True:
            try:
                self._peers.hear_all(f"{save.topic}/over", self._options.limit_s)
                self._peers.forget(save.topic)
                return
            except MissingRanksError:
                continue

    def _write(self, save: _Save) -> list[dict[str, Any]]:
        """Write this rank's files; return what the coordinator needs to know of each."""
        staging = save.staging
        assert staging is not None
        with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
            sums = [
                pool.submit(_sums, image, staging.content(index))
                for index, image in enumerate(staging.images)
            ]
            for index, image in enumerate(staging.images):
                self._write_file(save, image, staging.content(index))
            return [future.result() for future in sums]

    def _write_file(self, save: _Save, image: Image, content: memoryview) -> None:
        file = save.storage.create(f"{save.draft.folder}/{save.draft.prefix}{image.name}", len(content))
        try:
            for begin in range(0, len(content), _BLOCK_BYTES):
                if begin <= len(content) // 2 < begin + _BLOCK_BYTES:
                    self._at_phase("mid_file", save.step)
                file.write(content[begin : begin + _BLOCK_BYTES])
            file.commit()
        except BaseException:
            file.discard()
            raise

    # The coordinator's part.

    def _conclude(self, save: _Save) -> dict[str, Any]:
        """Hear all ranks and commit, or clean up; return the verdict for all."""
        reasons: dict[str, str]
        is_full = False
        try:
            outcomes = self._peers.hear_all(save.topic, self._options.limit_s)
            reasons = {
                str(rank): outcome["error"] for rank, outcome in enumerate(outcomes) if "error" in outcome
            }
            is_full = any(outcome.get("is_full") for outcome in outcomes)
            if not reasons:
                if any(outcome["files"] for outcome in outcomes):
                    save.storage.sync(save.draft.folder)
                manifest = self._manifest(save, outcomes)
                if save.storage is self._storage:
                    # Whoever is called may ask a place that does not answer, the reason for this save.
                    self._at_phase("before_manifest", save.step)
                catalog.commit(save.storage, save.draft, manifest)
                return {"reasons": {}, "bytes": manifest.num_bytes}
        except MissingRanksError as error:
            reasons = {str(rank): str(error) for rank in error.ranks}
        except Exception as error:  # noqa: BLE001  as above
            reasons = {"0": str(error) or type(error).__name__}
            is_full = _is_full(error)
        self._quietly(lambda: catalog.discard(save.storage, save.draft))
        if is_full:
            self._quietly(lambda: self._prune(save, upcoming=save.step))
        return {"reasons": reasons}

    def _manifest(self, save: _Save, outcomes: Sequence[Mapping[str, Any]]) -> Manifest:
        """Compare what the ranks wrote with the plan, and with the sizes on storage; return the manifest."""
        files: dict[str, File] = {}
        chunks: dict[TensorPiece, Chunk] = {}
        digests: dict[str, list[int]] = {}
        sizes = save.storage.sizes(save.draft.folder)
        for rank, outcome in enumerate(outcomes):
            for image, sums in zip(images(save.plan[rank], rank), outcome["files"], strict=True):
                name = save.draft.prefix + image.name
                if sizes.get(name) != image.num_bytes:
                    what = f"{sizes.get(name)} bytes on storage, {image.num_bytes} were written"
                    raise CheckpointError(f"{name} has {what}")
                files[name] = File(image.num_bytes, sums["checksum"])
                rows = zip(image.pieces, image.begins, sums["chunks"], strict=True)
                for piece, begin, (checksum, part) in rows:
                    chunks[piece] = Chunk(piece.box, name, begin, piece.num_bytes, checksum)
                    digests.setdefault(piece.name, []).append(int(part, 16))
        tensors: dict[str, Tensor] = {}
        for name, group in itertools.groupby(sorted(chunks), key=lambda piece: piece.name):
            pieces = list(group)
            digest = checksums.written(checksums.combined(digests[name]))
            parts = tuple(chunks[piece] for piece in pieces)
            tensors[name] = Tensor(pieces[0].dtype, pieces[0].shape, digest, parts)
        options = self._options
        return Manifest(
            step=save.step,
            generation=options.generation,
            created=time.time(),
            layout=options.layout,
            tensors=tensors,
            files=files,
            state=save.state,
            attempt=options.generation,
            base=self.base,
        )

    def _announce(self, save: _Save) -> None:
        evidence = {
            "step": save.step,
            "generation": self._options.generation,
            "bytes": save.verdict["bytes"],
            "seconds": time.monotonic() - save.began,
            "blocked_s": save.blocked_s,
        }
        if save.storage is self._fallback:
            self._is_fallback_used = True
            evidence["fallback"] = save.storage.place
        self._on_event("checkpoint_committed", evidence)

    def _prune_older(self, save: _Save) -> None:
        self._at_phase("before_prune", save.step)
        self._prune(save)

    @property
    def _policy(self) -> retention.RetentionPolicy:
        options = self._options
        return retention.RetentionPolicy(
            options.keep_last,
            options.keep_every_steps,
            options.keep_best,
            options.score_of,
            options.replaces,
        )

    def _prune(self, save: _Save, upcoming: int | None = None) -> None:
        self._known.pop(save.step, None)
        fallback = self._look_into_fallback() if self._is_fallback_used else None
        removed = retention.prune(
            self._storage,
            self._policy,
            self._lineage,
            self._known,
            upcoming,
            fallback,
            saved=save.step if upcoming is None else None,
        )
        if upcoming is not None and removed:
            self._on_event("checkpoint_room_made", {"step": upcoming, "removed": removed})

    def _quietly(self, act: Callable[[], object]) -> None:
        """Clean up as far as the storage lets us: what is left is found by `remove_leftovers`."""
        try:
            act()
        except (CheckpointError, OSError) as error:
            self._on_event("checkpoint_cleanup_failed", {"message": str(error)})


def _content(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state, which may change before it is written. Raises MismatchError."""
    try:
        if (key := other_key(state)) is not None:
            raise MismatchError(f"the state has the key {key!r}; JSON's keys are text")
        content: dict[str, Any] = json.loads(json.dumps(dict(state), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise MismatchError(f"the state is not JSON: {error}") from error
    return content


def other_key(values: object) -> object | None:
    """Return a key that is no text, which JSON would make one; None where there is none."""
    if isinstance(values, Mapping):
        other = next((key for key in values if not isinstance(key, str)), None)
        return other if other is not None else other_key(list(values.values()))
    if isinstance(values, list | tuple):
        return next((key for key in map(other_key, values) if key is not None), None)
    return None


def _is_full(error: BaseException | None) -> bool:
    """Whether it was for want of room that something failed."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _sums(image: Image, content: memoryview) -> dict[str, Any]:
    """Return the checksum of a file, and of each of its chunks with its part of the tensor's digest."""
    whole = checksums.FileChecksum()
    whole.update(image.header)
    chunks = []
    for piece, begin in zip(image.pieces, image.begins, strict=True):
        part = content[begin : begin + piece.num_bytes]
        whole.update(part)
        bits = part_digest(part, piece.dtype, piece.box)
        chunks.append((checksums.of_chunk(part), checksums.written(bits)))
    return {"checksum": whole.hexdigest(), "chunks": chunks}
