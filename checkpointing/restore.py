"""Restoring: the newest checkpoint that proves intact, onto whatever layout the ranks have now.

The coordinator alone lists checkpoints and reads manifests; chunks are read by the ranks that a plan names,
each checked while it passes. What one rank finds damaged, all ranks learn, and all walk back to the next
older one.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from checkpointing import catalog, checksums
from checkpointing import manifest as manifests
from checkpointing.catalog import StoredCheckpoint
from checkpointing.checkpoint_errors import (
    DamagedError,
    MismatchError,
    NoCheckpointError,
    StorageError,
    SupersededError,
)
from checkpointing.lineage import Lineage
from checkpointing.manifest import Manifest
from checkpointing.options import Phase, no_fault
from checkpointing.peers import Peers
from checkpointing.plans import NamedChunk, Transfer, check_fit, declaration, declared, read_plan
from checkpointing.shards import Shard
from checkpointing.storage import Storage
from checkpointing.transfer import Mover, Placement, Routes

MODES = ("broadcast", "rank0", "direct")
WantedShards = Callable[[Manifest], Sequence[Shard]]


@dataclass(frozen=True)
class RestoredCheckpoint:
    """What was restored: the checkpoint's manifest (its state is in `manifest.state`), the bytes that this
    rank read from storage, the seconds since the ranks met, why newer checkpoints were skipped, and why later
    ones are off the line.
    """

    manifest: Manifest
    bytes_read: int
    seconds: float
    skipped: Sequence[tuple[int, str]]
    off_line: Sequence[tuple[int, str]] = ()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> Mapping[str, Any]:
        return self.manifest.state


def restore(
    storage: Storage,
    peers: Peers,
    group: dist.ProcessGroup | None,
    wanted: WantedShards,
    *,
    how: str = "broadcast",
    step: int | None = None,
    lineage: Callable[[], Lineage] = Lineage,
    at_phase: Phase = no_fault,
) -> RestoredCheckpoint | None:
    """Fill the wanted shards from the newest intact checkpoint on the line, or from that of `step`.
    *Collective*.

    Returns None where the place holds no committed checkpoint of the line and no step is asked for. `lineage`
    is asked on the coordinator alone. Raises, on
    every rank, MissingRanksError (a rank did not come), NoCheckpointError (none is intact, or not the one of
    `step`), MismatchError (the checkpoint does not fit what is wanted), StorageError (the place cannot be
    listed). After an error the shards hold anything.
    """
    topic = peers.unused("restore")
    peers.exchange(f"{topic}/here", None)
    began = time.monotonic()
    offers = _offers(storage, step, lineage)
    skipped: list[tuple[int, str]] = []
    while True:
        offer = _offered(peers, peers.unused(topic), offers, skipped, storage.place)
        if offer is None:
            return None
        manifest, folder = manifests.decode(offer["manifest"].encode()), offer["folder"]
        task = _RestoreTask(storage, folder, manifest, peers, group, how, peers.unused(topic), at_phase)
        num_bytes, damage = _filled(task, functools.partial(wanted, manifest))
        if damage is None:
            off_line = [(each, words) for each, words in offer["off_line"] if each > manifest.step]
            return RestoredCheckpoint(manifest, num_bytes, time.monotonic() - began, skipped, off_line)
        skipped.append((manifest.step, str(damage)))


def fetch(
    storage: Storage,
    folder: str,
    manifest: Manifest,
    shards: Sequence[Shard],
    peers: Peers,
    group: dist.ProcessGroup | None,
    *,
    how: str = "broadcast",
    topic: str,
) -> int:
    """Fill the shards from the files in `folder` that `manifest` lists. *Collective*.

    Returns the bytes that this rank read. Chunks with an empty checksum are taken as they are. Raises, on
    every rank, DamagedError or MismatchError.
    """
    task = _RestoreTask(storage, folder, manifest, peers, group, how, peers.unused(topic))
    num_bytes, damage = _filled(task, lambda: shards)
    if damage is not None:
        raise damage
    return num_bytes


@dataclass(frozen=True)
class _RestoreTask:
    """One checkpoint that is tried: what it is and who talks about it how."""

    storage: Storage
    folder: str
    manifest: Manifest
    peers: Peers
    group: dist.ProcessGroup | None
    how: str
    topic: str
    at_phase: Phase = no_fault


def _offers(storage: Storage, step: int | None, lineage: Callable[[], Lineage]) -> Iterator[dict[str, Any]]:
    """Yield, as JSON, the checkpoints of the line whose manifest and files' sizes are right, the newest
    first, each with those that were skipped before it; and where there is none (any more) why. *Coordinator.*
    """
    try:
        on, off = catalog.split(catalog.stored(storage), lineage())
    except (StorageError, SupersededError) as error:
        yield {"unreachable": str(error)}
        return
    steps = [checkpoint.step for checkpoint in on]
    if step is not None and step not in steps:
        yield {"absent": step, "there": steps}
        return
    if not steps:
        yield {"empty": True}
        return
    skipped: list[tuple[int, str]] = []
    off_line = [(each.checkpoint.step, each.words) for each in off]
    for candidate in reversed(on) if step is None else [on[steps.index(step)]]:
        place: StoredCheckpoint | None = candidate
        while place is not None:
            try:
                manifest = catalog.read_manifest(storage, place)
                catalog.check_sizes(storage, manifest, place.folder)
            except (DamagedError, StorageError) as error:
                skipped.append((candidate.step, str(error)))
            else:
                content = manifests.encode(manifest).decode()
                offer = {"skipped": skipped, "off_line": off_line, "folder": place.folder}
                yield {**offer, "manifest": content}
                skipped = []
            # Asked again: it is damaged, unless it only made way to another name while it was read.
            place = _moved(storage, place)
    yield {"skipped": skipped}


def _moved(storage: Storage, checkpoint: StoredCheckpoint) -> StoredCheckpoint | None:
    """Return where a checkpoint lies now, None where that is where it lay, or nowhere."""
    try:
        found = catalog.stored(storage)
    except StorageError:
        return None
    origin = (checkpoint.step, checkpoint.generation, checkpoint.attempt)
    same = [each for each in found if (each.step, each.generation, each.attempt) == origin]
    return None if checkpoint in same else next(iter(same), None)


def _offered(
    peers: Peers,
    topic: str,
    offers: Iterator[dict[str, Any]],
    skipped: list[tuple[int, str]],
    place: str,
) -> dict[str, Any] | None:
    """Return the checkpoint that the coordinator offers next; None where there are none on the line."""
    if peers.is_coordinator:
        peers.answer(topic, next(offers))
    offer: dict[str, Any] = peers.await_answer(topic, 2 * peers.limit_s)
    skipped.extend((step, reason) for step, reason in offer.get("skipped", ()))
    if "manifest" in offer:
        return offer
    if "empty" in offer:
        return None
    if "unreachable" in offer:
        raise StorageError(offer["unreachable"])
    if "absent" in offer:
        there = ", ".join(map(str, offer["there"])) or "none"
        raise NoCheckpointError(f"{place}: no checkpoint of step {offer['absent']}; there are: {there}")
    raise NoCheckpointError(f"{place}: no committed checkpoint is intact", skipped)


def _filled(task: _RestoreTask, ask: Callable[[], Sequence[Shard]]) -> tuple[int, DamagedError | None]:
    """Fill what this rank asks for; return the bytes that it read, and what any rank found damaged."""
    shards, words = _agreed(task, ask)
    rank = task.peers.rank
    transfers = _planned(task, words)
    mine = sum(transfer.reader == rank for transfer in transfers)
    reader = _CheckedReader(task.storage, task.folder)

    def after_read(num_read: int) -> None:
        if num_read == (mine + 1) // 2:
            task.at_phase("restore", task.manifest.step)

    after_read(0)
    # On the GPUs as soon as one rank has shards there.
    is_cuda = any(word["is_cuda"] for word in words)
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    routes = Routes(transfers, None if task.how == "direct" else task.group)
    mover = Mover(transfers, Placement(shards), routes, rank, device, task.peers.limit_s)
    mover.move(reader.read, after_read)
    verdicts = task.peers.exchange(f"{task.topic}/read", reader.verdict)
    routes.close()
    damage = next((verdict for verdict in verdicts if verdict is not None), None)
    return reader.num_bytes, None if damage is None else DamagedError(**damage)


def _agreed(
    task: _RestoreTask, ask: Callable[[], Sequence[Shard]]
) -> tuple[Sequence[Shard], list[dict[str, Any]]]:
    """Return this rank's shards and what every rank wants, by rank. What does not fit one fits none."""
    shards: Sequence[Shard] = ()
    failure: Exception | None = None
    try:
        shards = ask()
        wants = [shard.piece for shard in shards]
        check_fit(task.manifest.tensors, wants)
        word = {"wants": declaration(wants), "is_cuda": any(shard.tensor.is_cuda for shard in shards)}
    except Exception as error:  # noqa: BLE001  raised below, when the other ranks know
        failure = error
        word = {"error": str(error) or type(error).__name__}
    words = task.peers.exchange(f"{task.topic}/wanted", word)
    if failure is not None:
        raise failure
    for rank, other in enumerate(words):
        if "error" in other:
            raise MismatchError(f"rank {rank}: {other['error']}")
    return shards, words


def _planned(task: _RestoreTask, words: Sequence[Mapping[str, Any]]) -> list[Transfer]:
    tensors, rank = task.manifest.tensors, task.peers.rank
    if task.how == "direct":
        return read_plan(tensors, {rank: declared(words[rank]["wants"])})
    if task.how not in MODES:
        raise MismatchError(f"restore={task.how}: unknown; use {', '.join(MODES)}")
    if task.group is None and task.peers.world_size > 1:
        raise MismatchError(
            f"restore={task.how} needs a process group for the bytes; use direct, or pass a group"
        )
    wanted = {other: declared(word["wants"]) for other, word in enumerate(words)}
    return read_plan(tensors, wanted, reader=0 if task.how == "rank0" else None)


class _CheckedReader:
    """Reads and checks chunks. It remembers the first damage instead of raising: the other ranks count on
    this one to send something, and learn afterwards that it is worth nothing.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = folder
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.verdict: dict[str, str | None] | None = None

    def read(self, transfer: Transfer, memory: memoryview) -> None:
        """Fill the memory; called by several threads. Nothing more is read after a damage."""
        if self.verdict is not None:
            return
        path = f"{self._folder}/{transfer.file}" if self._folder else transfer.file
        try:
            self._storage.read_into(path, transfer.begin, memory)
            with self._lock:
                self.num_bytes += transfer.num_bytes
            for part in transfer.parts:
                self._check(transfer, part, memory)
        except Exception as error:  # noqa: BLE001  whatever failed here, all ranks are to learn of it
            self._note(str(error) or type(error).__name__, transfer.file, transfer.parts[0].name)

    def _check(self, transfer: Transfer, part: NamedChunk, memory: memoryview) -> None:
        begin = part.chunk.begin - transfer.begin
        checksum = checksums.of_chunk(memory[begin : begin + part.chunk.num_bytes])
        if part.chunk.checksum and checksum != part.chunk.checksum:
            where, expected = part.chunk.box.label(), part.chunk.checksum
            what = f"the chunk {where} has the checksum {checksum}, expected {expected}"
            self._note(what, transfer.file, part.name)

    def _note(self, what: str, file: str, tensor: str) -> None:
        with self._lock:
            if self.verdict is None:
                self.verdict = {"what": what, "file": file, "tensor": tensor}
