"""A checkpoint that is set aside is none any more, and goes when its step is saved anew."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from sample_checkpoint import write

from checkpointing import catalog
from checkpointing.catalog import RetentionPolicy, remove_leftovers
from checkpointing.checkpointer import Checkpointer
from checkpointing.manifest import MANIFEST
from checkpointing.options import Options
from checkpointing.peers import Peers
from checkpointing.storage import Storage, open_storage


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    local = str(tmp_path / "checkpoints")
    return open_storage(local if request.param == "local" else f"memory://{uuid.uuid4()}/checkpoints")


def test_only_what_is_void_and_behind_the_step_is_set_aside(storage: Storage) -> None:
    for step, generation in ((5, 0), (10, 0), (15, 0), (20, 1)):
        write(storage, step, generation=generation)
    checkpointer = Checkpointer(storage.place, Peers.alone(), Options())
    done = checkpointer.set_aside(5, lambda it: it.generation == 0)
    assert [step for step, _ in done] == [10, 15]
    assert checkpointer.committed_steps() == [5, 20]
    assert checkpointer.set_aside(5, lambda it: it.generation == 0) == []


def test_its_manifest_stays_and_no_tidying_takes_it(storage: Storage) -> None:
    for step in (5, 10):
        write(storage, step)
    before = storage.get(catalog.file_path(10, MANIFEST))
    name = catalog.set_aside(storage, 10)
    remove_leftovers(storage)
    catalog.prune(storage, RetentionPolicy(keep_last=1))
    assert catalog.committed_steps(storage) == [5]
    assert storage.get(f"{name}/{MANIFEST}" if storage.renames else name) == before
    if storage.renames:
        assert len(storage.names(name)) > 1


def test_the_step_saved_anew_takes_its_place(storage: Storage) -> None:
    write(storage, 10)
    names = [catalog.set_aside(storage, 10)]
    write(storage, 10, generation=1)
    names.append(catalog.set_aside(storage, 10))
    manifest = write(storage, 10, generation=2)
    assert catalog.read_manifest(storage, 10) == manifest
    catalog.check_sizes(storage, manifest)
    for name in names:
        assert storage.size(f"{name}/{MANIFEST}" if storage.renames else name) is None
    assert len(storage.names("")) == 1


def test_a_save_behind_it_ends_what_was_set_aside_too(storage: Storage) -> None:
    """The interval of saves may have changed: the very step may never come again."""
    write(storage, 10)
    name = catalog.set_aside(storage, 10)
    write(storage, 12, generation=1)
    if storage.renames:
        assert storage.names(name) == []


def test_later_steps_keep_what_was_set_aside_of_them(storage: Storage) -> None:
    for step in (1, 10):
        write(storage, step)
    name = catalog.set_aside(storage, 10)
    write(storage, 1, generation=1)
    assert storage.size(f"{name}/{MANIFEST}" if storage.renames else name) is not None


def test_a_manifest_that_cannot_be_read_is_left_where_it_is(storage: Storage) -> None:
    for step in (5, 10):
        write(storage, step)
    storage.put(catalog.file_path(10, MANIFEST), b"{")
    checkpointer = Checkpointer(storage.place, Peers.alone(), Options())
    assert checkpointer.set_aside(0, lambda it: it.step > 5) == []
    assert checkpointer.committed_steps() == [5, 10]
