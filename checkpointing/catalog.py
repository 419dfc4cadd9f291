"""Which checkpoints a place holds, and the acts that make one or take it away. No torch.

A checkpoint exists if and only if its manifest does. Nothing else is trusted: neither the names of folders
nor their order in time. A save under way writes to a draft; `commit` makes it a checkpoint as one act.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Container, Sequence
from dataclasses import dataclass

from checkpointing.checkpoint_errors import DamagedError, StorageError
from checkpointing.manifest import MANIFEST, Manifest, decode, encode
from checkpointing.storage import Storage

# Which checkpoints may go: a pure function of those that are there.


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint. `score` is what `keep_best` compares, lower is better; None: it has none.
    `is_intact` is false where it is known to be damaged.
    """

    step: int
    score: float | None = None
    is_intact: bool = True


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the newest `keep_last`, every one whose step is a multiple of `keep_every_steps`, and the
    `keep_best` with the lowest scores.
    """

    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0


def to_remove(checkpoints: Sequence[CommittedCheckpoint], policy: RetentionPolicy) -> list[int]:
    """Return the steps that no rule keeps, ascending. The newest intact one is always kept.

    Damaged ones count for no rule, so that they cannot push an intact one out; they go once `keep_last`
    intact ones are newer.
    """
    intact = [checkpoint for checkpoint in checkpoints if checkpoint.is_intact]
    steps = sorted(checkpoint.step for checkpoint in intact)
    keep = set(steps[-max(1, policy.keep_last) :])
    if policy.keep_every_steps:
        keep |= {step for step in steps if step % policy.keep_every_steps == 0}
    scored = sorted(
        (checkpoint.score, checkpoint.step) for checkpoint in intact if checkpoint.score is not None
    )
    keep |= {step for _, step in scored[: policy.keep_best]}
    if not keep:
        return []
    damaged = {checkpoint.step for checkpoint in checkpoints if not checkpoint.is_intact}
    return sorted({*steps} - keep | {step for step in damaged if step < min(keep)})


_STEP = re.compile(r"step-(\d{8,})")
# A file of a save on a storage without renames: of which generation, which save, and which rank.
_OURS = re.compile(r"g\d{3,}-\d{2,}-\d{5,}-\d{2,}\.safetensors")
_OWNER = ".owner"
# A checkpoint that was set aside, or on a storage without renames its manifest.
_SET_ASIDE = "set-aside"


@dataclass(frozen=True)
class Draft:
    """Where a save of `step` writes: every file goes to `folder`, its name beginning with `prefix`."""

    folder: str
    prefix: str
    step: int


def step_name(step: int) -> str:
    """Return `step-00000100`."""
    return f"step-{step:08d}"


def file_path(step: int, file: str) -> str:
    """Return the path of a file of a committed checkpoint."""
    return f"{step_name(step)}/{file}"


def committed_steps(storage: Storage) -> list[int]:
    """Return the steps that have a manifest, ascending. Nothing is said of their content."""
    steps = (step_of(name) for name in storage.names())
    return sorted(
        step for step in steps if step is not None and storage.size(file_path(step, MANIFEST)) is not None
    )


def step_of(name: str) -> int | None:
    """Return the step of a folder's name, None where it is not exactly that of a step."""
    match = _STEP.fullmatch(name)
    # `step-000000100` is nobody's.
    return int(match[1]) if match is not None and step_name(int(match[1])) == name else None


def read_manifest(storage: Storage, step: int) -> Manifest:
    """Return the manifest of a checkpoint. Raises DamagedError where it is not a whole one of that step."""
    manifest = decode(storage.get(file_path(step, MANIFEST)))
    if manifest.step != step:
        raise DamagedError(f"it is that of step {manifest.step}, found in {step_name(step)}", file=MANIFEST)
    return manifest


def check_sizes(storage: Storage, manifest: Manifest) -> None:
    """Raise DamagedError for a file that is missing, too short or too long."""
    sizes = storage.sizes(step_name(manifest.step))
    for name, expected in manifest.files.items():
        num_bytes = sizes.get(name)
        if num_bytes is None:
            raise DamagedError("it is missing", file=name)
        if num_bytes != expected.num_bytes:
            raise DamagedError(f"it has {num_bytes} bytes, expected {expected.num_bytes}", file=name)


def draft(storage: Storage, step: int, generation: int, index: int) -> Draft:
    """Return where save number `index` of a generation is to write. No two saves share a place."""
    mark = f"g{generation:03d}-{index:02d}"
    if storage.renames:
        return Draft(f".{step_name(step)}.{mark}.tmp", "", step)
    return Draft(step_name(step), f"{mark}-", step)


def commit(storage: Storage, draft: Draft, manifest: Manifest) -> None:
    """Make a draft, its files durable already, the checkpoint of its step, in place of an older one.

    Once the manifest is in place nothing fails any more: what cannot be cleaned up then is left over.
    """
    content = encode(manifest)
    path = f"{draft.folder}/{MANIFEST}"
    if not storage.renames:
        try:
            storage.put(path, content)
        except StorageError:
            # Where only the answer was lost, it is there.
            if storage.size(path) is None or storage.get(path) != content:
                raise
        with contextlib.suppress(StorageError):
            _remove_files(storage, draft.step, manifest.files)
            _remove_set_aside(storage, draft.step)
        return
    storage.put(path, content)
    target = step_name(draft.step)
    aside = _move_aside(storage, target)
    storage.rename(draft.folder, target)
    with contextlib.suppress(StorageError):
        if aside is not None:
            storage.remove(aside)
        _remove_set_aside(storage, draft.step)


def _move_aside(storage: Storage, target: str) -> str | None:
    """Make way for a checkpoint; return the older one's new name where it is to be removed afterwards.

    A folder without a manifest is nothing that was written here, or has lost what makes it a checkpoint: it
    is kept under another name.
    """
    if not storage.names(target):
        return None
    mark = secrets.token_hex(4)
    if storage.size(f"{target}/{MANIFEST}") is None:
        storage.rename(target, f"{target}.without-manifest-{mark}")
        return None
    aside = f".{target}.replaced-{mark}"
    storage.rename(target, aside)
    return aside


def discard(storage: Storage, draft: Draft) -> None:
    """Remove what a save wrote that was not committed."""
    if storage.renames:
        storage.remove(draft.folder)
        return
    path = f"{draft.folder}/{MANIFEST}"
    if storage.size(path) is not None and f'"{draft.prefix}' in storage.get(path).decode(errors="replace"):
        # It was committed after all, and only the answer was lost.
        return
    for name in storage.names(draft.folder):
        if name.startswith(draft.prefix):
            storage.remove(f"{draft.folder}/{name}")


def remove_checkpoint(storage: Storage, step: int) -> None:
    """Remove a checkpoint; half removed it is none. Where it is a link to a folder elsewhere, only the
    link goes.
    """
    if storage.renames:
        gone = f".{step_name(step)}.removed-{secrets.token_hex(4)}"
        storage.rename(step_name(step), gone)
        storage.remove(gone)
        return
    storage.remove(file_path(step, MANIFEST))
    _remove_files(storage, step)


def set_aside(storage: Storage, step: int) -> str:
    """Keep a checkpoint under a name that nobody takes for one; return that.

    It stays until its step, or a later one, is saved anew. A storage without renames keeps only its
    manifest: its files belong to no checkpoint from then on, and are removed as such.
    """
    mark = f"{_SET_ASIDE}-{secrets.token_hex(4)}"
    if storage.renames:
        name = f"{step_name(step)}.{mark}"
        storage.rename(step_name(step), name)
        return name
    path = file_path(step, f"{mark}.json")
    storage.put(path, storage.get(file_path(step, MANIFEST)))
    storage.remove(file_path(step, MANIFEST))
    return path


def _remove_set_aside(storage: Storage, step: int) -> None:
    """Remove what was set aside of a step that was saved anew, and of those before it: the interval may be
    another one since. On a storage without renames only manifests were kept, of which those of other steps
    stay.
    """
    if not storage.renames:
        for name in storage.names(step_name(step)):
            if name.startswith(f"{_SET_ASIDE}-"):
                storage.remove(file_path(step, name))
        return
    for name in storage.names():
        begin, mark, _ = name.partition(f".{_SET_ASIDE}-")
        earlier = step_of(begin) if mark else None
        if earlier is not None and earlier <= step:
            storage.remove(name)


def _remove_files(storage: Storage, step: int, kept: Container[str] = ()) -> list[str]:
    """Remove, on a storage without renames, what saves of this step wrote, but for the files that are kept;
    return the paths. Files that no save named so are left alone.
    """
    names = storage.names(step_name(step))
    removed = [file_path(step, name) for name in names if _OURS.fullmatch(name) and name not in kept]
    for path in removed:
        storage.remove(path)
    return removed


def claim(storage: Storage, owner: str) -> str:
    """Write down whose checkpoints lie here, unless that is written already; return who it is. *One process*.

    Of two that come at the same moment to a local place, one gets the other's name.
    """
    if storage.put_new(_OWNER, owner.encode()):
        return owner
    return storage.get(_OWNER).decode(errors="replace")


def owner(storage: Storage) -> str | None:
    """Return who has claimed the place, None where nobody has."""
    return None if storage.size(_OWNER) is None else storage.get(_OWNER).decode(errors="replace")


def prune(
    storage: Storage, policy: RetentionPolicy, known: dict[int, CommittedCheckpoint] | None = None
) -> list[int]:
    """Remove the checkpoints that the policy does not keep, and return their steps.

    `known` holds what is known of checkpoints already, so that many that are kept for good are not
    read again after every save; whoever writes one anew takes it out.
    """
    known = {} if known is None else known
    steps = committed_steps(storage)
    for step in steps:
        if step not in known:
            known[step] = _as_kept(storage, step)
    removed = to_remove([known[step] for step in steps], policy)
    for step in removed:
        remove_checkpoint(storage, step)
        del known[step]
    return removed


def _as_kept(storage: Storage, step: int) -> CommittedCheckpoint:
    """Look at a checkpoint as far as that is cheap: its manifest, and the sizes of its files."""
    try:
        manifest = read_manifest(storage, step)
        check_sizes(storage, manifest)
    except DamagedError:
        return CommittedCheckpoint(step, is_intact=False)
    score = manifest.state.get("score")
    return CommittedCheckpoint(step, float(score) if isinstance(score, int | float) else None)


# What interrupted saves and removals left, found by its name: nothing that others wrote is touched.


_DRAFT = re.compile(r"\.step-\d{8,}\.g\d{3,}-\d{2,}\.tmp")
_REMOVED = re.compile(r"\.step-\d{8,}\.removed-[0-9a-f]{8}")
_REPLACED = re.compile(r"\.(step-\d{8,})\.replaced-[0-9a-f]{8}")


def move_back(storage: Storage) -> list[str]:
    """Bring back the checkpoints that were moved aside when the power went, with nothing put in their place;
    return their names. *One process, before anything is looked for.*
    """
    back = []
    for name in storage.names():
        match = _REPLACED.fullmatch(name)
        if match is not None and not storage.names(match[1]):
            storage.rename(name, match[1])
            back.append(match[1])
    return back


def remove_leftovers(storage: Storage) -> list[str]:
    """Remove drafts and what is half removed, and return the paths. *One process, at the start.*"""
    move_back(storage)
    removed = []
    for name in storage.names():
        if any(pattern.fullmatch(name) for pattern in (_DRAFT, _REMOVED, _REPLACED)):
            storage.remove(name)
            removed.append(name)
        elif not storage.renames and (step := step_of(name)) is not None:
            removed += _remove_uncommitted(storage, step)
    return removed


def _remove_uncommitted(storage: Storage, step: int) -> list[str]:
    """Remove the files of saves that were not committed: all of ours where there is no manifest."""
    if storage.size(file_path(step, MANIFEST)) is None:
        return _remove_files(storage, step)
    try:
        return _remove_files(storage, step, read_manifest(storage, step).files)
    except DamagedError:
        # Whatever can be told from it later, it is evidence now.
        return []
