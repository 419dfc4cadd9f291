"""What interrupted saves and removals left, found by its name: nothing that others wrote is touched."""

from __future__ import annotations

import re

from checkpointing.errors import DamagedError
from checkpointing.format.manifest import MANIFEST
from checkpointing.shelf.catalog import is_ours, read_manifest, remove_stale_files, step_name, step_of
from checkpointing.storage import Storage

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
        elif not storage.renames and step_of(name) is not None:
            removed += _remove_unreferenced(storage, name)
    return removed


def _remove_unreferenced(storage: Storage, name: str) -> list[str]:
    """Remove the files of saves that were not committed: all of ours where there is no manifest."""
    step = step_of(name)
    assert step is not None
    if storage.size(f"{name}/{MANIFEST}") is None:
        stale = [f"{step_name(step)}/{each}" for each in storage.names(name) if is_ours(each)]
        for path in stale:
            storage.remove(path)
        return stale
    try:
        return remove_stale_files(storage, step, read_manifest(storage, step))
    except DamagedError:
        # Whatever can be told from it later, it is evidence now.
        return []
