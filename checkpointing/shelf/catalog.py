"""Which checkpoints a place holds, and the acts that make one or take it away. No torch.

A checkpoint exists if and only if its manifest does. Nothing else is trusted: neither the names of folders
nor their order in time. A save under way writes to a draft; `commit` makes it a checkpoint as one act.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from checkpointing.errors import DamagedError
from checkpointing.format.manifest import MANIFEST, Manifest, decode, encode
from checkpointing.shelf.retention import Kept, Policy, to_remove
from checkpointing.storage import Storage

_STEP = re.compile(r"step-(\d{8,})")
_DRAFT = re.compile(r"\.step-\d{8,}\..*\.tmp")
_REPLACED = re.compile(r"\.(step-\d{8,})\.replaced-[0-9a-f]+")


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
    steps = (_step_of(name) for name in storage.names())
    return sorted(
        step for step in steps if step is not None and storage.size(file_path(step, MANIFEST)) is not None
    )


def _step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    # `step-000000100` is nobody's.
    return step if step_name(step) == name else None


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
        found = sizes.get(name)
        if found is None:
            raise DamagedError("it is missing", file=name)
        if found != expected.num_bytes:
            raise DamagedError(f"it has {found} bytes, expected {expected.num_bytes}", file=name)


def draft(storage: Storage, step: int, generation: int, index: int) -> Draft:
    """Return where save number `index` of a generation is to write. No two saves share a place."""
    mark = f"g{generation:03d}-{index:02d}"
    if storage.renames:
        return Draft(f".{step_name(step)}.{mark}.tmp", "", step)
    return Draft(step_name(step), f"{mark}-", step)


def commit(storage: Storage, draft: Draft, manifest: Manifest) -> None:
    """Make a draft, its files durable already, the checkpoint of its step, in place of an older one."""
    content = encode(manifest)
    storage.put(f"{draft.folder}/{MANIFEST}", content)
    target = step_name(draft.step)
    if not storage.renames:
        _remove_stale_files(storage, draft.step, manifest)
        return
    aside = None
    if storage.names(target):
        aside = f".{target}.replaced-{secrets.token_hex(4)}"
        storage.rename(target, aside)
    storage.rename(draft.folder, target)
    if aside is not None:
        storage.remove(aside)


def discard(storage: Storage, draft: Draft) -> None:
    """Remove what a save wrote that was not committed."""
    if storage.renames:
        storage.remove(draft.folder)
        return
    for name in storage.names(draft.folder):
        if name.startswith(draft.prefix):
            storage.remove(f"{draft.folder}/{name}")


def remove_checkpoint(storage: Storage, step: int) -> None:
    """Remove a checkpoint, its manifest first: half removed it is none."""
    storage.remove(file_path(step, MANIFEST))
    storage.remove(step_name(step))


def prune(storage: Storage, policy: Policy, known: dict[int, Kept] | None = None) -> list[int]:
    """Remove the checkpoints that the policy does not keep, and return their steps.

    `known` holds what was found out about checkpoints before, so that many that are kept for good are not
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


def _as_kept(storage: Storage, step: int) -> Kept:
    """Look at a checkpoint as far as that is cheap: its manifest, and the sizes of its files."""
    try:
        manifest = read_manifest(storage, step)
        check_sizes(storage, manifest)
    except DamagedError:
        return Kept(step, is_intact=False)
    score = manifest.state.get("score")
    return Kept(step, float(score) if isinstance(score, int | float) else None)


def remove_leftovers(storage: Storage) -> list[str]:
    """Remove what interrupted saves and removals left, and return the paths. *One process, at the start.*

    A checkpoint that was moved aside when the power went, with nothing in its place, is moved back.
    """
    removed = []
    for name in storage.names():
        replaced = _REPLACED.fullmatch(name)
        if replaced is not None and storage.size(f"{replaced[1]}/{MANIFEST}") is None:
            storage.remove(replaced[1])
            storage.rename(name, replaced[1])
        elif replaced is not None or _DRAFT.fullmatch(name):
            storage.remove(name)
            removed.append(name)
        else:
            removed += _remove_strays(storage, name)
    return removed


def _remove_strays(storage: Storage, name: str) -> list[str]:
    """Remove a step's files that belong to no checkpoint: all of them where there is no manifest."""
    step = _step_of(name)
    if step is None:
        return []
    if storage.size(f"{name}/{MANIFEST}") is None:
        storage.remove(name)
        return [name]
    if storage.renames:
        return []
    try:
        return _remove_stale_files(storage, step, read_manifest(storage, step))
    except DamagedError:
        # Whatever can be told from it later, it is evidence now.
        return []


def _remove_stale_files(storage: Storage, step: int, manifest: Manifest) -> list[str]:
    keep = {MANIFEST, *manifest.files}
    stale = [file_path(step, name) for name in storage.names(step_name(step)) if name not in keep]
    for path in stale:
        storage.remove(path)
    return stale
