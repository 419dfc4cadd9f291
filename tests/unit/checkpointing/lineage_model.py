"""Attempts that stand still between any two acts on the storage, against the real catalog, retention and
lineage.

`python tests/unit/checkpointing/lineage_model.py --interleavings 100000` (`make lineage`). In each of them up
to five attempts of a run begin, save, prune, go back, lose checkpoints to damage, freeze before any act and
thaw before any later one, or never; a person prunes in between. What is true is told by what the states are
made of: each knows the whole history that it was trained by. Held to that, at every begin and every removal:

- an attempt begins with a state of the history of the newest attempt that had recorded its begin,
- and with the newest one that lay there all the time intact;
- where folders can be renamed, the newest intact state of that history is never removed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointing import catalog, manifest
from checkpointing.catalog import StoredCheckpoint
from checkpointing.checkpoint_errors import CheckpointError, SupersededError
from checkpointing.lineage import AttemptBegin, Base, Lineage
from checkpointing.manifest import File, Manifest
from checkpointing.restore import Places, ReadFailure, _offers
from checkpointing.saving import retention
from checkpointing.saving.retention import RetentionPolicy
from checkpointing.storage import Storage, open_storage
from checkpointing.storage.local import LocalStorage

EVERY = 10
_MOST_ATTEMPTS = 5
# Which attempt trained up to which step, from the first on.
History = tuple[tuple[int, int], ...]
# As many acts are given at once to the attempt that nobody disturbs.
_UNDISTURBED = 1_000_000
# How often it stands still just before an act that others see.
_PAUSES = 0.12
_ACTS = ("put", "put_new", "get", "read_into", "size", "sizes", "names", "rename", "sync", "remove", "create")


class ViolationError(AssertionError):
    """Something happened that never may."""


class _Gone(BaseException):
    """An attempt that nobody thaws any more."""


class Process:
    """A thread that does as many acts on the storage as it is given, and stands still then."""

    def __init__(self, run: Callable[[Process], None]) -> None:
        self.is_over = False
        self.error: BaseException | None = None
        self._left = 0
        self._is_ended = False
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=[run], daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[Process], None]) -> None:
        self._go.acquire()
        with contextlib.suppress(_Gone):
            try:
                if not self._is_ended:
                    run(self)
            except ViolationError as error:
                self.error = error
        self.is_over = True
        self._stands.release()

    def give(self, num_acts: int) -> None:
        """Let it do so many acts; returns when it has, or is over."""
        self._left = num_acts
        self._go.release()
        self._stands.acquire()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Let it never go on."""
        if not self.is_over:
            self._is_ended = True
            self.give(0)
        self._thread.join()

    def pause(self) -> None:
        """Do no further act until more are given, but for the last attempt."""
        if self._left < _UNDISTURBED:
            self._left = 0

    def act(self) -> None:
        """Stand still before an act where no more may be done."""
        while self._left == 0:
            self._stands.release()
            self._go.acquire()
            if self._is_ended:
                raise _Gone
        self._left -= 1


class SteppedStorage:
    """A storage whose every act is one of a process."""

    def __init__(self, storage: Storage, process: Process, attempt: ModelAttempt) -> None:
        self._storage, self._process, self._attempt = storage, process, attempt
        self.renames, self.place = storage.renames, storage.place

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._storage, name)
        if name not in _ACTS:
            return real

        def act(*arguments: Any) -> Any:
            is_seen = name in ("rename", "remove", "put") and not str(arguments[0]).endswith("tensors")
            if is_seen and self._attempt.world.chance.random() < _PAUSES:
                self._process.pause()
            self._process.act()
            if not is_seen:
                return real(*arguments)
            with self._attempt.held_to_the_truth(f"{name} {arguments[0]}"):
                return real(*arguments)

        return act


@dataclass
class World:
    """One run: its storage, its records, and what is true of it."""

    storage: Storage
    chance: random.Random
    policy: RetentionPolicy
    begins: dict[int, AttemptBegin] = field(default_factory=dict)
    back: dict[int, AttemptBegin] = field(default_factory=dict)
    started: int = -1
    # What the run has been trained by, as of its newest recorded begin or roll-back.
    truth: History = ()
    newest: int = -1
    copies: list[tuple[int, int, History]] = field(default_factory=list)
    # Step and attempt of what was damaged, in that order: nobody can foresee it.
    damaged: list[tuple[int, int | None]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def lineage(self) -> Lineage:
        """Return what is on record, as `orchestra.run.run_lineage` reads it."""
        back = [
            begin for attempt, begin in self.back.items() if all(known < attempt for known in self.begins)
        ]
        return Lineage.of([*self.begins.values(), *back])

    def is_true(self, history: History, step: int) -> bool:
        """Whether a state is one of the run's history, or the newest attempt's own."""
        if history and history[-1][0] == self.newest:
            return True
        return history == up_to(self.truth, step) and (not self.truth or step <= self.truth[-1][1])

    def intact(self, num_damaged: int | None = None) -> list[tuple[StoredCheckpoint, History]]:
        """Return what lies there, whole and true, at this moment; `num_damaged`: whole before further
        damages.
        """
        found = []
        later = [] if num_damaged is None else self.damaged[num_damaged:]
        for each in catalog.stored(self.storage):
            with contextlib.suppress(CheckpointError):
                written = catalog.read_manifest(self.storage, each)
                if (each.step, each.attempt) not in later:
                    catalog.check_sizes(self.storage, written, each.folder)
                history = history_of(written)
                if self.is_true(history, each.step):
                    found.append((each, history))
        return found

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def up_to(history: History, step: int) -> History:
    """Return a history as it was after an earlier step."""
    kept: list[tuple[int, int]] = []
    begin = 0
    for attempt, end in history:
        if begin < step:
            kept.append((attempt, min(end, step)))
        begin = end
    return tuple(kept)


def history_of(written: Manifest) -> History:
    return tuple((attempt, step) for attempt, step in written.state["history"])


class ModelAttempt:
    """One attempt: begins, saves some steps, and perhaps orders a roll-back."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.num_damaged = 0
        self.looks = world.chance.random() < 0.3

    def run(self, process: Process) -> None:
        world, chance = self.world, self.world.chance
        self.process = process
        self.storage: Any = SteppedStorage(world.storage, process, self)
        world.started = max(world.started, self.number)
        with contextlib.suppress(CheckpointError):
            step, history = self._begin()
            catalog.remove_leftovers(self.storage, self.number)
            for index in range(chance.randrange(1, 4)):
                step += EVERY
                history = (*(part for part in history if part[0] != self.number), (self.number, step))
                world.copies.append((step, self.number, history))
                if chance.random() < 0.85:
                    self._save(step, history, index)
            if chance.random() < 0.15 and world.started == self.number:
                self._go_back(step, history)

    def _lineage(self) -> Lineage:
        self.process.act()
        if self.world.started > self.number:
            raise SupersededError("another attempt has begun")
        return self.world.lineage()

    def _begin(self) -> tuple[int, History]:
        world = self.world
        catalog.move_back(self.storage, self._lineage())
        copy = self._copy() if world.chance.random() < 0.3 else None
        step, base, history = self._restored() if copy is None else copy
        later = [(each.step, each.attempt) for each in catalog.stored(self.storage) if each.step > step]
        self.process.act()
        # As one act: the event and its way to the disk.
        world.begins[self.number] = AttemptBegin(self.number, Base(step, base), frozenset(later))
        if self.number > world.newest:
            world.newest, world.truth = self.number, history
        else:
            world.count("begins recorded too late")
        self.process.act()
        with contextlib.suppress(CheckpointError):
            catalog.move_back(self.storage, self._lineage())
        return step, history

    def _copy(self) -> tuple[int, int | None, History] | None:
        """Begin with a copy in memory that is on the line, where there is one."""
        world = self.world
        lineage = self._lineage()
        found = [copy for copy in world.copies if lineage.is_on_line(copy[0], copy[1])]
        if not found:
            return None
        step, attempt, history = max(found)
        if not world.is_true(history, step):
            raise ViolationError(f"attempt {self.number} begins with a copy off the line: {step} {history}")
        world.count("begins from memory")
        return step, attempt, history

    def _restored(self) -> tuple[int, int | None, History]:
        """Restore the newest intact checkpoint by what `restore` offers, and hold that to the truth."""
        world, known = self.world, []

        def lineage() -> Lineage:
            found = self._lineage()
            known.append((world.newest, world.truth))
            return found

        there = {(each.step, each.attempt) for each, _ in world.intact()}
        offers = _offers(Places([self.storage], lineage), None)
        taken: Manifest | None = None
        failure: ReadFailure | None = None
        while taken is None:
            offer = offers.send(failure)
            if "refused" in offer:
                raise CheckpointError(offer["refused"])
            if "manifest" not in offer:
                break
            candidate = manifest.decode(offer["manifest"].encode())
            try:
                catalog.check_sizes(self.storage, candidate, offer["folder"])
                for name in candidate.files:
                    self.storage.get(f"{offer['folder']}/{name}")
            except CheckpointError as error:
                failure = ReadFailure.of(error)
            else:
                taken = candidate
        if known[-1] != (world.newest, world.truth):
            # The run went on elsewhere meanwhile: what was judged is no more.
            world.count("begins overtaken")
            raise SupersededError("overtaken")
        history = () if taken is None else history_of(taken)
        step = 0 if taken is None else taken.step
        if taken is not None and not world.is_true(history, step):
            raise ViolationError(f"attempt {self.number} restored {step} {history}; true is {world.truth}")
        ignored = {(each.step, each.attempt) for each, _ in world.intact() if each.step > step} & there
        if ignored:
            raise ViolationError(f"attempt {self.number} restored {step} and ignored {sorted(ignored)}")
        world.count("restores" if taken is not None else "begins at 0")
        return step, None if taken is None else taken.attempt, history

    def _save(self, step: int, history: History, index: int) -> None:
        world = self.world
        draft = catalog.draft(self.storage, step, self.number, index)
        content = json.dumps(history).encode()
        name = f"{draft.prefix}00000-00.safetensors"
        self.storage.put(f"{draft.folder}/{name}", content)
        base = world.begins[self.number].base
        written = Manifest(
            step,
            self.number,
            1.5,
            {},
            {},
            {name: File(len(content), "0" * 32)},
            {"history": history},
            attempt=self.number,
            base=base,
        )
        # The look before publishing is a courtesy: nothing rests on it.
        self.process.act()
        if self.looks and world.started > self.number:
            return
        try:
            catalog.commit(self.storage, draft, written)
        except CheckpointError:
            with contextlib.suppress(CheckpointError):
                catalog.discard(self.storage, draft)
            world.count("saves refused")
            return
        world.count("saves" if self.number == world.newest else "saves off the line")
        self.num_damaged = len(world.damaged)
        with contextlib.suppress(CheckpointError):
            gone = retention.prune(self.storage, world.policy, self._lineage)
            world.counts["removals"] = world.counts.get("removals", 0) + len(gone)

    def _go_back(self, step: int, history: History) -> None:
        world = self.world
        steps = catalog.committed_steps(self.storage, self._lineage())
        self.process.act()
        if world.started > self.number or world.newest != self.number:
            return
        to = world.chance.choice([0, *(each for each in steps if each < step)])
        world.back[self.number + 1] = AttemptBegin(self.number + 1, Base(to, self.number), has_begun=False)
        world.truth, world.newest = up_to(history, to), self.number + 1
        world.count("roll-backs")

    @contextlib.contextmanager
    def held_to_the_truth(self, what: str) -> Iterator[None]:
        """Look at what an act of this attempt takes away: the newest intact one of the line never."""
        world = self.world
        is_removal = world.storage.renames and ".leaving-" in what
        if not is_removal and self.number == world.started:
            yield
            return
        before = self._newest()
        yield
        after = self._newest()
        if before <= after:
            return
        if not world.storage.renames and what.startswith("remove"):
            # A removal that stood still: without a rename nobody can take it back.
            world.count("newest ones lost to a removal that stood still")
            return
        raise ViolationError(f"attempt {self.number}: {what} took the newest of the line away, step {before}")

    def _newest(self) -> int:
        return max((each.step for each, _ in self.world.intact(self.num_damaged)), default=0)


def interleaving(storage: Storage, seed: int) -> World:
    """Let one run's attempts happen, in an order that the seed decides. Raises ViolationError."""
    chance = random.Random(seed)
    world = World(storage, chance, RetentionPolicy(keep_last=chance.randrange(1, 4)))
    processes: list[Process] = []
    number = -1
    try:
        for _ in range(chance.randrange(4, 14)):
            frozen = [process for process in processes if not process.is_over]
            may_begin = number + 1 < _MOST_ATTEMPTS
            if may_begin and (not frozen or chance.random() < 0.45):
                # Some are claimed and never begin.
                number += 1 + (chance.random() < 0.1)
                processes.append(Process(ModelAttempt(world, number).run))
                frozen.append(processes[-1])
                process = processes[-1]
            elif frozen:
                process = chance.choice(frozen)
            else:
                break
            is_whole = chance.random() < 0.35
            process.give(100_000 if is_whole else chance.choice((1, 2, 3, 5, 8, 13, 21, 34, 55)))
            if chance.random() < 0.1:
                _damage(world)
            if chance.random() < 0.05:
                retention.remove_off_line(storage, world.lineage())
        # At last one that nobody disturbs.
        last = Process(ModelAttempt(world, number + 1).run)
        processes.append(last)
        last.give(2 * _UNDISTURBED)
        world.counts["freezes"] = sum(not process.is_over for process in processes)
    finally:
        for process in processes:
            process.end()
    return world


def _damage(world: World) -> None:
    """Lose a file of some checkpoint."""
    found = catalog.stored(world.storage)
    if found:
        hurt = world.chance.choice(found)
        world.damaged.append((hurt.step, hurt.attempt))
        for name in world.storage.names(hurt.folder):
            if name.endswith(".safetensors"):
                world.storage.remove(f"{hurt.folder}/{name}")
                return


@contextlib.contextmanager
def storages(kind: str) -> Iterator[Callable[[], Storage]]:
    """Give a function that returns an empty storage: of folders in memory that can be renamed, or of
    fsspec's.
    """
    if kind == "memory":
        from fsspec.implementations.memory import MemoryFileSystem

        def fresh() -> Storage:
            MemoryFileSystem.store.clear()
            MemoryFileSystem.pseudo_dirs[:] = [""]
            return open_storage(f"memory://{uuid.uuid4()}/checkpoints")

        yield fresh
        return
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="lineage-model-", dir=parent))
    try:

        def fresh_folder() -> Storage:
            shutil.rmtree(folder, ignore_errors=True)
            return LocalStorage(folder)

        yield fresh_folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check(kind: str, seeds: range) -> dict[str, int]:
    """Go through interleavings, and count what happened in them. Raises ViolationError with the seed."""
    counts: dict[str, int] = {}
    with storages(kind) as fresh:
        for seed in seeds:
            try:
                world = interleaving(fresh(), seed)
            except ViolationError as error:
                raise ViolationError(f"{kind}, seed {seed}: {error}") from error
            for what, number in world.counts.items():
                counts[what] = counts.get(what, 0) + number
    return counts


def main() -> int:
    """Check as many interleavings as are asked for, half of them on either kind of storage."""
    parser = argparse.ArgumentParser(description="interleavings of attempts that freeze and thaw")
    parser.add_argument("--interleavings", type=int, default=100_000, help="(%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--kind", choices=("local", "memory"), help="of storage (both)")
    arguments = parser.parse_args()
    kinds = [arguments.kind] if arguments.kind else ["local", "memory"]
    each = arguments.interleavings // len(kinds)
    for kind in kinds:
        began = time.monotonic()
        counts = check(kind, range(arguments.first_seed, arguments.first_seed + each))
        told = ", ".join(f"{number:,} {what}" for what, number in sorted(counts.items()))
        sys.stdout.write(f"{kind}: {each:,} interleavings in {time.monotonic() - began:.0f} s: {told}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
