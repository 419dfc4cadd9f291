"""Which checkpoints a place holds, and the acts that make one or take it away. No torch.

A checkpoint exists if and only if its manifest does. Nothing else is trusted: neither the names of folders
nor their order in time. A save under way writes to a draft; `commit` makes it a checkpoint as one act.

Any process may stand still between two acts and go on much later, when other attempts train the run. So no
act here destroys what such an attempt published. A name that may be taken is taken by a rename that fails
where something lies there, what has to make way goes to a name that is listed too, and what is removed goes
through a name of its own that the next attempt can take back. On a storage without renames each save has a
manifest of its own; `manifest.json` is a copy of one for other readers. Which of all those count, `split`
says by the lineage.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from checkpointing.checkpoint_errors import DamagedError, StorageError, SupersededError
from checkpointing.lineage import UNDIVIDED, Departure, Lineage
from checkpointing.manifest import HEAD_BYTES, MANIFEST, Manifest, ManifestHead, decode, encode, head
from checkpointing.outages import is_passing
from checkpointing.storage import Storage

_STEP = re.compile(r"step-(\d{8,})")
# A checkpoint that made way for another one of its step, and one that is about to be removed.
_MADE_WAY = re.compile(r"(step-\d{8,})\.kept-[0-9a-f]{8}")
_LEAVING = re.compile(r"\.(step-\d{8,})\.(?:leaving|replaced)-[0-9a-f]{8}")
# On a storage without renames: the prefix of a save's files (generation and number), a rank's file, and the
# manifest of a save.
_PREFIX = re.compile(r"(g(\d{3,})-\d{2,}-)")
_OURS = re.compile(r"(g(\d{3,})-\d{2,}-)\d{5,}-\d{2,}\.safetensors")
_OWN_MANIFEST = re.compile(r"(g(\d{3,})-\d{2,}-)manifest\.json")
_OWNER = ".owner"
# Others may take a name again and again, but hardly so often.
_NUM_TRIES = 8


@dataclass(frozen=True)
class Draft:
    """Where a save of `step` writes: every file goes to `folder`, its name beginning with `prefix`."""

    folder: str
    prefix: str
    step: int

    @property
    def manifest(self) -> str:
        """The path of its manifest: that of no other save."""
        return f"{self.folder}/{self.prefix}{MANIFEST}"


@dataclass(frozen=True)
class StoredCheckpoint:
    """One that has a manifest, whatever it is worth: who wrote it (None: it does not say), and where its
    files and its manifest lie. `place` is 1 in a run's second place, its fallback.

    `unread`: why the storage does not give the manifest out now, so that nobody knows who wrote it.
    """

    step: int
    generation: int
    attempt: int | None
    folder: str
    manifest: str
    place: int = 0
    unread: str | None = None

    @property
    def origin(self) -> tuple[int, int, int | None]:
        """What is the same of one that lies in two places."""
        return self.step, self.generation, self.attempt

    @property
    def age(self) -> tuple[int, int, bool, bool, int]:
        """What orders those of one step, the older first; of two alike the one with the step's name
        counts, and that of the first place.
        """
        is_named = self.folder == step_name(self.step)
        return self.step, self.generation, self.attempt is not None, is_named, -self.place


def step_name(step: int) -> str:
    """Return `step-00000100`."""
    return f"step-{step:08d}"


def file_path(step: int, file: str) -> str:
    """Return the path of a file of the checkpoint that has its step's name."""
    return f"{step_name(step)}/{file}"


def step_of(name: str) -> int | None:
    """Return the step of a folder's name, None where it is not exactly that of a step."""
    match = _STEP.fullmatch(name)
    # `step-000000100` is nobody's.
    return int(match[1]) if match is not None and step_name(int(match[1])) == name else None


def named(step: int) -> StoredCheckpoint:
    """Return the checkpoint that has its step's name, whoever wrote it."""
    return StoredCheckpoint(step, 0, None, step_name(step), file_path(step, MANIFEST))


def strays(storage: Storage, checkpoint: StoredCheckpoint, manifest: Manifest) -> list[str]:
    """Return the files in a checkpoint's folder that belong to no checkpoint."""
    names = storage.names(checkpoint.folder)
    saves = {match[1] for name in names if (match := _OWN_MANIFEST.fullmatch(name)) is not None}
    of_saves = {name for name in names if (match := _PREFIX.match(name)) is not None and match[1] in saves}
    return sorted({*names} - {MANIFEST, *manifest.files} - of_saves)


def stored_in(storages: Sequence[Storage]) -> list[StoredCheckpoint]:
    """Return what `stored` does, of all places of a run; `storages[checkpoint.place]` holds it."""
    found = [
        replace(checkpoint, place=place)
        for place, storage in enumerate(storages)
        for checkpoint in stored(storage)
    ]
    return sorted(found, key=lambda entry: entry.age)


def stored(storage: Storage) -> list[StoredCheckpoint]:
    """Return all that has a manifest, ascending by step. Nothing is said of their content."""
    names: list[str] = []
    found: list[StoredCheckpoint] = []
    for _ in range(_NUM_TRIES):
        before, names = names, storage.names()
        if names == before:
            break
        found, is_whole = _listed(storage, names)
        if is_whole:
            break
        # One took another name while this was looked at, or was never whole: then the names are the same
        # again.
    return sorted(found, key=lambda entry: entry.age)


def _listed(storage: Storage, names: Iterable[str]) -> tuple[list[StoredCheckpoint], bool]:
    """Return what has a manifest under some names, and whether each of them that may have one has."""
    found, is_whole = [], True
    for name in names:
        match = _MADE_WAY.fullmatch(name) or _LEAVING.fullmatch(name)
        step = step_of(name if match is None else match[1])
        if step is None:
            continue
        for file in _manifests(storage, name):
            entry = _entry(storage, step, name, file)
            found += [] if entry is None else [entry]
            is_whole = is_whole and entry is not None
    return found, is_whole


def _manifests(storage: Storage, folder: str) -> list[str]:
    """Return the names of the manifests in a folder that count."""
    if storage.renames:
        return [MANIFEST]
    return _manifests_among(storage.names(folder))


def _manifests_among(names: Sequence[str]) -> list[str]:
    own = [name for name in names if _OWN_MANIFEST.fullmatch(name)]
    return sorted(own, key=_numbers) or [name for name in names if name == MANIFEST]


def _numbers(name: str) -> list[int]:
    """Return generation and number of a save's own manifest: 100 comes after 99."""
    return [int(number) for number in re.findall(r"\d+", name)]


def _entry(storage: Storage, step: int, folder: str, file: str) -> StoredCheckpoint | None:
    path = f"{folder}/{file}"
    match = _OWN_MANIFEST.fullmatch(file)
    if match is not None:
        # A save that has a manifest of its own numbers the attempt.
        return StoredCheckpoint(step, int(match[2]), int(match[2]), folder, path)
    size = storage.size(path)
    if size is None:
        return None
    try:
        found = _head(storage, path, size)
    except StorageError as error:
        return StoredCheckpoint(step, 0, None, folder, path, unread=str(error) if is_passing(error) else None)
    if found is None or found.step != step:
        # Damaged: nobody restores it, and who wrote it cannot be told.
        return StoredCheckpoint(step, 0, None, folder, path)
    return StoredCheckpoint(step, found.generation, found.attempt, folder, path)


def _head(storage: Storage, path: str, size: int) -> ManifestHead | None:
    begin = bytearray(min(size, HEAD_BYTES))
    storage.read_into(path, 0, memoryview(begin))
    if (found := head(bytes(begin))) is not None:
        return found
    # Written by somebody else, with other spaces or another order.
    try:
        manifest = decode(storage.get(path))
    except DamagedError:
        return None
    return ManifestHead(manifest.step, manifest.generation, manifest.attempt)


@dataclass(frozen=True)
class OffLine:
    """A stored checkpoint that is none of the run's history; `departure` is None where a newer attempt saved
    its step anew, and no record says where that one began.
    """

    checkpoint: StoredCheckpoint
    departure: Departure | None

    @property
    def is_late(self) -> bool:
        """Whether it was published after the attempt that made it void had begun."""
        return self.departure is not None and self.departure.is_late

    @property
    def words(self) -> str:
        """The reason, for people."""
        if self.departure is not None:
            return self.departure.words
        return f"written by attempt {self.checkpoint.generation}; a newer one saved its step anew"


def split(
    found: Iterable[StoredCheckpoint], lineage: Lineage
) -> tuple[list[StoredCheckpoint], list[OffLine]]:
    """Return the checkpoints on the line, ascending, one of a step at most, and all others but the same ones
    in the second place. Pure.

    Whoever saves a step began before it: of two attempts that saved one, only the newer may be on the line.
    """
    on: dict[int, StoredCheckpoint] = {}
    off = []
    for checkpoint in sorted(found, key=lambda each: each.age):
        departure = lineage.departure(checkpoint.step, checkpoint.attempt)
        if departure is not None:
            off.append(OffLine(checkpoint, departure))
            continue
        before = on.get(checkpoint.step)
        if before is not None and (before.origin != checkpoint.origin or before.place == checkpoint.place):
            off.append(OffLine(before, None))
        on[checkpoint.step] = checkpoint
    return [on[step] for step in sorted(on)], sorted(off, key=lambda each: each.checkpoint.age)


def on_line(storage: Storage, lineage: Lineage) -> list[StoredCheckpoint]:
    """Return the checkpoints on the line, ascending by step."""
    return split(stored(storage), lineage)[0]


def committed_steps(storage: Storage, lineage: Lineage = UNDIVIDED) -> list[int]:
    """Return the steps that have a manifest on the line, ascending. Nothing is said of their content."""
    return [checkpoint.step for checkpoint in on_line(storage, lineage)]


def read_manifest(storage: Storage, checkpoint: StoredCheckpoint | int) -> Manifest:
    """Return the manifest of a checkpoint; of a step that of the one that has its name.

    Raises DamagedError where it is not a whole one of that step and attempt.
    """
    checkpoint = named(checkpoint) if isinstance(checkpoint, int) else checkpoint
    try:
        manifest = decode(storage.get(checkpoint.manifest))
    except DamagedError:
        # A network may have changed it on its way.
        manifest = decode(storage.get(checkpoint.manifest))
    if manifest.step != checkpoint.step:
        raise DamagedError(f"it is that of step {manifest.step}, found in {checkpoint.folder}", file=MANIFEST)
    if checkpoint.attempt is not None and manifest.attempt not in (None, checkpoint.attempt):
        raise DamagedError(
            f"it is that of attempt {manifest.attempt}, found where attempt {checkpoint.attempt} wrote",
            file=MANIFEST,
        )
    return manifest


def check_sizes(storage: Storage, manifest: Manifest, folder: str | None = None) -> None:
    """Raise DamagedError for a file that is missing, too short or too long. `folder`: None for its step's."""
    sizes = storage.sizes(step_name(manifest.step) if folder is None else folder)
    for name, expected in manifest.files.items():
        num_bytes = sizes.get(name)
        if num_bytes is None:
            raise DamagedError("it is missing", file=name)
        if num_bytes != expected.num_bytes:
            raise DamagedError(f"it has {num_bytes} bytes, expected {expected.num_bytes}", file=name)


# Making a draft a checkpoint.


def draft(storage: Storage, step: int, generation: int, index: int) -> Draft:
    """Return where save number `index` of a generation is to write. No two saves share a place."""
    mark = f"g{generation:03d}-{index:02d}"
    if storage.renames:
        return Draft(f".{step_name(step)}.{mark}.tmp", "", step)
    return Draft(step_name(step), f"{mark}-", step)


def commit(storage: Storage, draft: Draft, manifest: Manifest) -> None:
    """Make a draft, its files durable already, the checkpoint of its step.

    An older attempt's of that step makes way and stays; one of the same attempt is replaced. Raises
    SupersededError where a newer attempt has saved the step: then this one is void, and stays a draft. Once
    the manifest is in place nothing fails any more: what cannot be cleaned up then is left over.
    """
    content = encode(manifest)
    if storage.renames:
        _put(storage, draft.manifest, content)
        _take_name(storage, draft, manifest.generation)
        return
    with contextlib.suppress(StorageError):
        _refuse_older(storage, draft, manifest.generation)
        _keep_lone_manifest(storage, draft.folder)
    _put(storage, draft.manifest, content)
    with contextlib.suppress(StorageError):
        # The copy that other readers look for. Where it is an older save's still, that one stays.
        _put(storage, f"{draft.folder}/{MANIFEST}", content)
        # Manifests first: whatever ends this, no manifest is left whose files are gone.
        for name in sorted(storage.names(draft.folder), key=lambda name: not name.endswith(MANIFEST)):
            match = _PREFIX.match(name)
            if match is not None and int(match[2]) == manifest.generation and match[1] != draft.prefix:
                storage.remove(f"{draft.folder}/{name}")


def _put(storage: Storage, path: str, content: bytes) -> None:
    try:
        storage.put(path, content)
    except StorageError:
        # Where only the answer was lost, it is there.
        if storage.size(path) != len(content) or storage.get(path) != content:
            raise


def _take_name(storage: Storage, draft: Draft, generation: int) -> None:
    """Rename a draft to its step's name, which fails as long as something lies there."""
    target, replaced = step_name(draft.step), []
    for _ in range(_NUM_TRIES):
        try:
            storage.rename(draft.folder, target)
            break
        except StorageError:
            if not storage.names(target):
                raise
        there = _entry(storage, draft.step, target, MANIFEST)
        if there is not None and there.generation > generation:
            raise SupersededError(_superseded(draft.step, there.generation))
        way = _way_out(target, there, generation)
        # Another process may have put another one there since: it stays listed under the new name.
        with contextlib.suppress(StorageError):
            storage.rename(target, way)
            replaced.append(way)
    else:
        raise StorageError(f"{storage.place}/{target}: others take this name again and again")
    with contextlib.suppress(StorageError):
        for way in replaced:
            there = _entry(storage, draft.step, way, MANIFEST)
            if _LEAVING.fullmatch(way) and there is not None and there.generation == generation:
                storage.remove(way)


def _way_out(target: str, there: StoredCheckpoint | None, generation: int) -> str:
    """Return the name to which what lies under a step's name makes way.

    A folder without a manifest is nothing that was written here, or has lost what makes it a checkpoint.
    """
    mark = secrets.token_hex(4)
    if there is None:
        return f"{target}.without-manifest-{mark}"
    return f".{target}.replaced-{mark}" if there.generation == generation else f"{target}.kept-{mark}"


def _superseded(step: int, generation: int) -> str:
    return f"attempt {generation} has saved step {step} already: the run goes on from other states"


def _refuse_older(storage: Storage, draft: Draft, generation: int) -> None:
    numbers = [_OWN_MANIFEST.fullmatch(name) for name in storage.names(draft.folder)]
    newest = max((int(match[2]) for match in numbers if match is not None), default=0)
    if newest > generation:
        raise SupersededError(_superseded(draft.step, newest))


def _keep_lone_manifest(storage: Storage, folder: str) -> None:
    """Give a manifest that has the common name alone, as older saves have, one of its own."""
    if _manifests(storage, folder) != [MANIFEST]:
        return
    content = storage.get(f"{folder}/{MANIFEST}")
    with contextlib.suppress(DamagedError):
        manifest = decode(content)
        match = _PREFIX.match(next(iter(manifest.files), ""))
        prefix = f"g{manifest.generation:03d}-00-" if match is None else match[1]
        storage.put(f"{folder}/{prefix}{MANIFEST}", content)


def discard(storage: Storage, draft: Draft) -> None:
    """Remove what a save wrote that was not committed."""
    if storage.renames:
        storage.remove(draft.folder)
        return
    path = f"{draft.folder}/{MANIFEST}"
    if storage.size(draft.manifest) is not None and _are_equal(storage, path, draft.manifest):
        # It was committed after all, and only the answer was lost.
        return
    # The manifest first: without it the files belong to no checkpoint.
    for name in sorted(storage.names(draft.folder), key=lambda name: not name.endswith(MANIFEST)):
        if name.startswith(draft.prefix):
            storage.remove(f"{draft.folder}/{name}")


def _are_equal(storage: Storage, one: str, other: str) -> bool:
    size = storage.size(one)
    return size is not None and size == storage.size(other) and storage.get(one) == storage.get(other)


# Taking checkpoints away.


def remove_checkpoint(
    storage: Storage, checkpoint: StoredCheckpoint, is_still_due: Callable[[], bool] = lambda: True
) -> bool:
    """Remove a checkpoint; half removed it is none. Where it is a link to a folder elsewhere, only the link
    goes.

    `is_still_due` is asked once the name is free and nothing is lost yet: where it is false, or where another
    checkpoint had taken the name, it is put back. Returns whether it was removed.
    """
    if storage.renames:
        return _remove_folder(storage, checkpoint, is_still_due)
    if not is_still_due():
        return False
    _remove_save(storage, checkpoint)
    return True


def _remove_folder(storage: Storage, checkpoint: StoredCheckpoint, is_still_due: Callable[[], bool]) -> bool:
    name, mark = step_name(checkpoint.step), secrets.token_hex(4)
    leaving, gone = f".{name}.leaving-{mark}", f".{name}.removed-{mark}"
    storage.rename(checkpoint.folder, leaving)
    there = _entry(storage, checkpoint.step, leaving, MANIFEST)
    is_same = there is not None and (there.generation, there.attempt) == (
        checkpoint.generation,
        checkpoint.attempt,
    )
    if not is_same or not is_still_due():
        _give_name(storage, leaving, name)
        return False
    # From here on it is none. It fails where another attempt has taken it back meanwhile.
    storage.rename(leaving, gone)
    storage.remove(gone)
    return True


def _give_name(storage: Storage, folder: str, name: str) -> str:
    """Rename a folder to its step's name, or where that is taken to one that is listed too; return it."""
    try:
        storage.rename(folder, name)
    except StorageError:
        if not storage.names(name):
            raise
        name = f"{name}.kept-{secrets.token_hex(4)}"
        storage.rename(folder, name)
    return name


def _remove_save(storage: Storage, checkpoint: StoredCheckpoint) -> None:
    """Remove one save's manifest and files on a storage without renames, and the copy of its manifest."""
    folder, common = checkpoint.folder, f"{checkpoint.folder}/{MANIFEST}"
    try:
        files = set(decode(storage.get(checkpoint.manifest)).files)
    except DamagedError:
        files = set()
    if _are_equal(storage, common, checkpoint.manifest):
        storage.remove(common)
    storage.remove(checkpoint.manifest)
    own = _PREFIX.match(checkpoint.manifest.rpartition("/")[2])
    for name in storage.names(folder):
        is_own = _OURS.fullmatch(name) and own is not None and name.startswith(own[1])
        if name in files or is_own or (not files and own is None and _OURS.fullmatch(name)):
            storage.remove(f"{folder}/{name}")
    # Another attempt's manifest may be there, whose copy was overwritten by this one's.
    left = [name for name in _manifests(storage, folder) if name != MANIFEST]
    if left and storage.size(common) is None:
        storage.put(common, storage.get(f"{folder}/{max(left, key=_numbers)}"))


def claim(storage: Storage, owner: str) -> str:
    """Write down whose checkpoints lie here, unless that is written already; return who it is. *One process*.

    Of two that come at the same moment to a local place, one gets the other's name.
    """
    # Asked first: a disk that is full or read-only now can still be read.
    if storage.size(_OWNER) is None and storage.put_new(_OWNER, owner.encode()):
        return owner
    return storage.get(_OWNER).decode(errors="replace")


def owner(storage: Storage) -> str | None:
    """Return who has claimed the place, None where nobody has."""
    return None if storage.size(_OWNER) is None else storage.get(_OWNER).decode(errors="replace")


# What interrupted saves and removals left, found by its name: nothing that others wrote is touched.


_DRAFT = re.compile(r"\.step-\d{8,}\.g(\d{3,})-\d{2,}\.tmp")
_REMOVED = re.compile(r"\.step-\d{8,}\.removed-[0-9a-f]{8}")


def move_back(storage: Storage, lineage: Lineage = UNDIVIDED) -> list[str]:
    """Give each checkpoint on the line the name of its step, where another one has it or where it was about
    to be removed; return the names. *One process, before anything is looked for.*
    """
    if not storage.renames:
        return []
    found = stored(storage)
    on, _ = split(found, lineage)
    back = []
    for checkpoint in found:
        name, folder = step_name(checkpoint.step), checkpoint.folder
        is_hidden = _LEAVING.fullmatch(folder) is not None
        if folder == name or not (is_hidden or checkpoint in on):
            continue
        if checkpoint in on and storage.names(name):
            storage.rename(name, f"{name}.kept-{secrets.token_hex(4)}")
        back.append(_give_name(storage, folder, name))
    return back


def remove_leftovers(storage: Storage, generation: int | None = None) -> list[str]:
    """Remove drafts and what is half removed, and return the paths. *One process, at the start.*

    `generation` is the caller's: what newer ones write is theirs. None: of all.
    """
    move_back(storage)
    removed = []
    for name in storage.names():
        match = _DRAFT.fullmatch(name)
        is_void = match is not None and (generation is None or int(match[1]) <= generation)
        if is_void or _REMOVED.fullmatch(name):
            storage.remove(name)
            removed.append(name)
        elif not storage.renames and step_of(name) is not None:
            removed += _remove_uncommitted(storage, name, generation)
    return removed


def _remove_uncommitted(storage: Storage, folder: str, generation: int | None) -> list[str]:
    """Remove the files of saves that were not committed, on a storage without renames."""
    names = storage.names(folder)
    # Of one and the same listing: what lacks a manifest in it goes.
    manifests = _manifests_among(names)
    if manifests and MANIFEST not in names:
        # The save was killed before it made the copy, which other readers look for.
        storage.put(f"{folder}/{MANIFEST}", storage.get(f"{folder}/{manifests[-1]}"))
    kept = {match[1] for name in manifests if (match := _OWN_MANIFEST.fullmatch(name)) is not None}
    listed: set[str] = set()
    if manifests == [MANIFEST]:
        try:
            listed = set(decode(storage.get(f"{folder}/{MANIFEST}")).files)
        except DamagedError:
            # Whatever can be told from it later, it is evidence now.
            return []
    removed = []
    for name in names:
        match = _OURS.fullmatch(name)
        if match is None or match[1] in kept or name in listed:
            continue
        if generation is None or int(match[2]) <= generation:
            removed.append(f"{folder}/{name}")
            storage.remove(removed[-1])
    return removed
