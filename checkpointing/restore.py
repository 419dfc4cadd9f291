"""Restoring: the newest checkpoint that proves intact, onto whatever layout the ranks have now.

The coordinator alone lists checkpoints and reads manifests; chunks are read by the ranks that a plan names,
each checked while it passes. What one rank finds damaged, all ranks learn, and all walk back to the next
older one. Where the storage only does not answer, all wait and ask for the same one again.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from checkpointing import catalog
from checkpointing import manifest as manifests
from checkpointing.catalog import OffLine, StoredCheckpoint
from checkpointing.checkpoint_errors import (
    DamagedError,
    MismatchError,
    NewerVersionError,
    NoCheckpointError,
    StorageError,
    SupersededError,
    UnreachableError,
)
from checkpointing.integrity import checksums
from checkpointing.lineage import Lineage
from checkpointing.manifest import Manifest
from checkpointing.options import Phase, no_fault
from checkpointing.outages import OutagePatience, in_time, is_passing, is_refused, may_be_damage
from checkpointing.peers import Peers
from checkpointing.plans import Transfer, check_fit, declaration, declared, read_plan
from checkpointing.shards import Shard
from checkpointing.storage import Storage
from checkpointing.transfer import Mover, Placement, Routes

MODES = ("broadcast", "rank0", "direct")
WantedShards = Callable[[Manifest], Sequence[Shard]]
_Split = tuple[list[StoredCheckpoint], list[OffLine]]


@dataclass(frozen=True)
class RestoredCheckpoint:
    """What was restored: the checkpoint's manifest (its state is in `manifest.state`), the bytes that this
    rank read from storage, the seconds since the ranks met, why newer checkpoints were skipped, why later
    ones are off the line, and the fallback's place where it lies there.
    """

    manifest: Manifest
    bytes_read: int
    seconds: float
    skipped: Sequence[tuple[int, str]]
    off_line: Sequence[tuple[int, str]] = ()
    fallback: str | None = None
    read_twice: Sequence[str] = ()

    def __repr__(self) -> str:
        """Return the outcome without the manifest, which is as long as the model has tensors."""
        return (
            f"RestoredCheckpoint(step={self.step}, bytes_read={self.bytes_read}, seconds={self.seconds:.3f}, "
            f"skipped={self.skipped!r}, off_line={self.off_line!r}, fallback={self.fallback!r}, "
            f"read_twice={self.read_twice!r})"
        )

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> Mapping[str, Any]:
        return self.manifest.state


@dataclass(frozen=True)
class Places:
    """Where a run's checkpoints lie, and how long a storage that does not answer is waited for.

    `storages`: the place, and the fallback where there is one. `expected`: of a place's number the newest
    step on the line that is known to have been committed there. The coordinator alone uses all but the
    storages.
    """

    storages: Sequence[Storage]
    lineage: Callable[[], Lineage] = Lineage
    patience: OutagePatience = field(default_factory=OutagePatience)
    expected: Mapping[int, int] = field(default_factory=dict)

    @property
    def words(self) -> str:
        return " and ".join(storage.place for storage in self.storages)


def restore(
    places: Places,
    peers: Peers,
    group: dist.ProcessGroup | None,
    wanted: WantedShards,
    *,
    how: str = "broadcast",
    step: int | None = None,
    at_phase: Phase = no_fault,
    goes_on: Callable[[], None] = lambda: None,
) -> RestoredCheckpoint | None:
    """Fill the wanted shards from the newest intact checkpoint on the line, or from that of `step`.
    *Collective*.

    Returns None where the places hold no committed checkpoint of the line and no step is asked for. A storage
    that does not answer is waited for, and `goes_on` called before each try. Raises, on every rank,
    MissingRanksError (a rank did not come), NoCheckpointError (none is intact, or not the one of `step`),
    MismatchError (the checkpoint does not fit what is wanted), UnreachableError (a storage did not answer
    within the patience), StorageError (the place cannot be listed, or the checkpoint may not be
    read). After an error the shards hold anything.
    """
    topic = peers.unused("restore")
    peers.exchange(f"{topic}/here", None)
    began = time.monotonic()
    offers = _offers(places, step)
    skipped: list[tuple[int, str]] = []
    failure: ReadFailure | None = None
    while True:
        offer = _offered(peers, peers.unused(topic), offers, failure, skipped, places)
        if offer is None:
            return None
        goes_on()
        failure = None
        if "manifest" not in offer:
            continue
        manifest, folder = manifests.decode(offer["manifest"].encode()), offer["folder"]
        storage = places.storages[offer["place"]]
        task = _RestoreTask(storage, folder, manifest, peers, group, how, peers.unused(topic), at_phase)
        num_bytes, failure, read_twice = _filled(task, functools.partial(wanted, manifest))
        if failure is None:
            off_line = [(each, words) for each, words in offer["off_line"] if each > manifest.step]
            fallback = storage.place if offer["place"] else None
            seconds = time.monotonic() - began
            return RestoredCheckpoint(manifest, num_bytes, seconds, skipped, off_line, fallback, read_twice)


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
    num_bytes, failure, _ = _filled(task, lambda: shards)
    if failure is not None:
        raise failure.damage
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


@dataclass(frozen=True)
class ReadFailure:
    """Why a checkpoint could not be read. `is_outage`: the storage did not answer, which says nothing of what
    it holds; `may_be_damage`: unless other checkpoints there can be read; `is_refused`: we may not read it.
    """

    what: str
    file: str | None = None
    tensor: str | None = None
    is_outage: bool = False
    may_be_damage: bool = False
    is_refused: bool = False

    @staticmethod
    def of(error: Exception, file: str | None = None, tensor: str | None = None) -> ReadFailure:
        """Return the failure that an exception tells."""
        what = str(error) or type(error).__name__
        return ReadFailure(what, file, tensor, is_passing(error), may_be_damage(error), is_refused(error))

    @property
    def damage(self) -> DamagedError:
        return DamagedError(self.what, file=self.file, tensor=self.tensor)


Offers = Generator[dict[str, Any], ReadFailure | None, None]


def _offers(places: Places, step: int | None) -> Offers:
    """Yield, as JSON, the checkpoints of the line whose manifest and files' sizes are right, the newest
    first, each with those that were skipped before it; where there is none (any more) why; and `waits` before
    a storage is asked again. What is sent back is why the one that was offered could not be read.
    *Coordinator.*
    """
    patience = places.patience
    found = yield from _found(places)
    if isinstance(found, dict):
        yield found
        return
    on, off = found
    steps = [checkpoint.step for checkpoint in on]
    if not steps or step not in (None, *steps):
        yield {"empty": True} if step is None else {"absent": step, "there": steps}
        return
    skipped: list[tuple[int, str]] = []
    off_line = [(each.checkpoint.step, each.words) for each in off]
    outage: ReadFailure | None = None
    for candidate in reversed(on) if step is None else [on[steps.index(step)]]:
        place: StoredCheckpoint | None = candidate
        damaged: list[StoredCheckpoint] = []
        is_offered = False
        while place is not None:
            storage = places.storages[place.place]
            offer = {"skipped": skipped, "off_line": off_line, "folder": place.folder, "place": place.place}
            read = _whole_manifest(storage, place)
            if isinstance(read, ReadFailure):
                failure: ReadFailure | None = read
            else:
                if place.unread is not None:
                    # It can be read now: who wrote it says whether it counts.
                    yield from _offers(places, step)
                    return
                if not is_offered and outage is None:
                    # Reading takes its time; only what fails then again and again is one outage.
                    patience.end_outage()
                is_offered = True
                failure = yield {**offer, "manifest": manifests.encode(read).decode()}
                skipped = []
            assert failure is not None
            if failure.is_outage or _is_gone(storage):
                if patience.lasts(failure.what):
                    yield {"waits": True}
                    patience.pause()
                    continue
                outage = failure
                if not failure.may_be_damage:
                    break
            elif failure.is_refused:
                yield {"refused": str(failure.damage)}
                return
            skipped.append((candidate.step, str(failure.damage)))
            # Asked again: it is damaged, unless it only made way to another name while it was read, or lies
            # in the other place too.
            damaged.append(place)
            place = _elsewhere(places, damaged)
        if outage is not None and not outage.may_be_damage:
            break
    yield {"skipped": skipped} if outage is None else _unreachable(places, outage.what)


def _found(places: Places) -> Generator[dict[str, Any], Any, dict[str, Any] | _Split]:
    """Return what lies on the line and what does not, once all places could be listed, or why that cannot be
    told; a fallback that does not answer is passed by where nothing newer is known to lie there.
    """
    patience = places.patience
    while True:
        found: list[StoredCheckpoint] = []
        failures: dict[int, Exception] = {}
        on: list[StoredCheckpoint] = []
        off: list[OffLine] = []
        for number, storage in enumerate(places.storages):
            try:
                list_it = functools.partial(catalog.stored, storage)
                listed = in_time(list_it, storage.place) if number else list_it()
                found += [replace(each, place=number) for each in listed]
            except StorageError as error:
                failures[number] = error
        try:
            on, off = catalog.split(found, places.lineage())
        except (StorageError, SupersededError) as error:
            failures[0] = error
        newest = max((each.step for each in on), default=0)
        readable = max((each.step for each in on if each.unread is None), default=0)
        # A folder that is not mounted now looks like an empty one.
        gone = {
            number: f"{places.storages[number].place}: nothing is there, though step {step} was committed"
            for number, step in places.expected.items()
            if step > newest and number not in failures and all(each.place != number for each in found)
        }
        passing = [
            str(error)
            for number, error in failures.items()
            if is_passing(error) and (number == 0 or places.expected.get(number, 0) > newest)
        ]
        unread = [each.unread for each in found if each.unread is not None and each.step > readable]
        reasons = [*passing, *gone.values(), *unread]
        if not reasons or not patience.lasts(reasons[0]):
            break
        yield {"waits": True}
        patience.pause()
    if (failure := failures.get(0)) is not None:
        return _unreachable(places, str(failure)) if is_passing(failure) else {"refused": str(failure)}
    if gone and found:
        return _unreachable(places, next(iter(gone.values())))
    for number, failure in failures.items():
        if places.expected.get(number, 0) > newest:
            return _unreachable(places, str(failure))
        patience.tell("fallback_unreachable", {"why": str(failure)})
    return on, off


def _whole_manifest(storage: Storage, checkpoint: StoredCheckpoint) -> Manifest | ReadFailure:
    """Return the manifest of a checkpoint whose files have their sizes, or what is wrong with one. Raises
    NewerVersionError.
    """
    try:
        manifest = catalog.read_manifest(storage, checkpoint)
        catalog.check_sizes(storage, manifest, checkpoint.folder)
    except NewerVersionError as error:
        # No older one is taken in its place: it may be intact.
        raise NewerVersionError(error.what, file=checkpoint.manifest) from error
    except (DamagedError, StorageError) as error:
        return ReadFailure.of(error)
    return manifest


def _is_gone(storage: Storage) -> bool:
    """Whether nothing is in a place any more, as where its file system is not mounted."""
    try:
        return not storage.names()
    except StorageError as error:
        return is_passing(error)


def _unreachable(places: Places, why: str) -> dict[str, Any]:
    return {"unreachable": f"the storage did not answer for {places.patience.waited_s:.0f} s: {why}"}


def _elsewhere(places: Places, damaged: Sequence[StoredCheckpoint]) -> StoredCheckpoint | None:
    """Return where a checkpoint lies besides, None where it does nowhere; `damaged`: where it was tried."""
    for number, storage in enumerate(places.storages):
        try:
            found = in_time(functools.partial(catalog.stored, storage), storage.place)
        except StorageError:
            continue
        for each in (replace(each, place=number) for each in found):
            if each.origin == damaged[0].origin and each not in damaged:
                return each
    return None


def _offered(
    peers: Peers,
    topic: str,
    offers: Offers,
    failure: ReadFailure | None,
    skipped: list[tuple[int, str]],
    places: Places,
) -> dict[str, Any] | None:
    """Return the checkpoint that the coordinator offers next, or its word that it waits; None where there are
    none on the line. `failure`: of the one that was offered before.
    """
    if peers.is_coordinator:
        try:
            peers.answer(topic, offers.send(failure))
        except NewerVersionError as error:
            peers.answer(topic, {"newer": str(error)})
    offer: dict[str, Any] = peers.await_answer(topic, 2 * peers.limit_s)
    skipped.extend((step, reason) for step, reason in offer.get("skipped", ()))
    if "manifest" in offer or "waits" in offer:
        return offer
    if "empty" in offer:
        return None
    if "unreachable" in offer:
        raise UnreachableError(offer["unreachable"])
    if "refused" in offer:
        raise StorageError(offer["refused"])
    if "newer" in offer:
        raise NoCheckpointError(f"{places.words}: {offer['newer']}; an older step has to be asked for")
    if "absent" in offer:
        there = ", ".join(map(str, offer["there"])) or "none"
        raise NoCheckpointError(
            f"{places.words}: no checkpoint of step {offer['absent']}; there are: {there}"
        )
    raise NoCheckpointError(f"{places.words}: no committed checkpoint is intact", skipped)


def _filled(
    task: _RestoreTask, ask: Callable[[], Sequence[Shard]]
) -> tuple[int, ReadFailure | None, list[str]]:
    """Fill what this rank asks for; return the bytes that it read, what any rank could not read, and in words
    what ranks read twice.
    """
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
    failed = None if reader.verdict is None else asdict(reader.verdict)
    outcomes = task.peers.exchange(f"{task.topic}/read", {"failed": failed, "twice": reader.read_twice})
    routes.close()
    failures = [ReadFailure(**outcome["failed"]) for outcome in outcomes if outcome["failed"] is not None]
    # What one rank found damaged is not waited for because another one was not answered.
    failure = min(failures, key=lambda each: (each.is_outage, each.is_refused), default=None)
    twice = [f"rank {rank}: {words}" for rank, each in enumerate(outcomes) for words in each["twice"]]
    return reader.num_bytes, failure, twice


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
    """Reads and checks chunks; what does not have its checksum once more, as a network may have changed it on
    its way. It remembers the first damage instead of raising: the other ranks count on this one to send
    something, and learn afterwards that it is worth nothing.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = folder
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.verdict: ReadFailure | None = None
        # What was right the second time.
        self.read_twice: list[str] = []

    def read(self, transfer: Transfer, memory: memoryview) -> None:
        """Fill the memory; called by several threads. Nothing more is read after a damage."""
        if self.verdict is not None:
            return
        try:
            failure = self._read_once(transfer, memory)
            if failure is not None:
                first, failure = failure, self._read_once(transfer, memory)
                if failure is None:
                    with self._lock:
                        self.read_twice.append(str(first.damage))
                else:
                    self._note(failure)
        except Exception as error:  # noqa: BLE001  whatever failed here, all ranks are to learn of it
            failure = ReadFailure.of(error, transfer.file, transfer.parts[0].name)
            # This node may be the only one that has not mounted the place.
            self._note(replace(failure, is_outage=failure.is_outage or _is_gone(self._storage)))

    def _read_once(self, transfer: Transfer, memory: memoryview) -> ReadFailure | None:
        """Fill the memory; return which of its chunks does not have its checksum first."""
        path = f"{self._folder}/{transfer.file}" if self._folder else transfer.file
        self._storage.read_into(path, transfer.begin, memory)
        with self._lock:
            self.num_bytes += transfer.num_bytes
        for part in transfer.parts:
            begin = part.chunk.begin - transfer.begin
            checksum = checksums.of_chunk(memory[begin : begin + part.chunk.num_bytes])
            if part.chunk.checksum and checksum != part.chunk.checksum:
                where, expected = part.chunk.box.label(), part.chunk.checksum
                what = f"the chunk {where} has the checksum {checksum}, expected {expected}"
                return ReadFailure(what, transfer.file, part.name)
        return None

    def _note(self, failure: ReadFailure) -> None:
        with self._lock:
            if self.verdict is None:
                self.verdict = failure
