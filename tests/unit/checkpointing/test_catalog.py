"""Which checkpoints are there: those with a manifest, on a local folder and on an object store alike."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_checkpoint import arrays, memory, write, write_draft

from checkpointing import catalog
from checkpointing.catalog import CommittedCheckpoint, RetentionPolicy, remove_leftovers, to_remove
from checkpointing.checkpoint_errors import DamagedError, StorageError
from checkpointing.checkpointer import Checkpointer
from checkpointing.manifest import MANIFEST
from checkpointing.options import Options
from checkpointing.peers import Peers
from checkpointing.storage import Storage
from checkpointing.storage.local import LocalStorage
from checkpointing.storage.remote import RemoteStorage
from checkpointing.verify import verify


def files_of(storage: Storage) -> set[str]:
    """Return the paths of all files, in the place and in its folders."""
    paths = set()
    for name in storage.names():
        is_file = "." in name and not name.startswith(".")
        paths |= {name} if is_file else {f"{name}/{file}" for file in storage.names(name)}
    return paths


def test_a_committed_checkpoint_is_found_and_read(storage: Storage) -> None:
    for step in (200, 5, 123_456_789):
        write(storage, step, state={"samples": step})
    assert catalog.committed_steps(storage) == [5, 200, 123_456_789]
    manifest = catalog.read_manifest(storage, 200)
    assert manifest.state == {"samples": 200}
    catalog.check_sizes(storage, manifest)


def test_only_exact_names_count(storage: Storage) -> None:
    write(storage, 7)
    for name in (
        *("step-7", "step-000000007", "step-0000000x", "xstep-00000007", "step-00000007x", "Step-00000007"),
        *(".step-00000007.g000-00.tmp", ".step-00000007.replaced-00ff", "latest", "step--0000007"),
    ):
        storage.put(f"{name}/{MANIFEST}", storage.get(catalog.file_path(7, MANIFEST)))
        assert catalog.committed_steps(storage) == [7], name


def test_a_folder_without_a_manifest_is_no_checkpoint(storage: Storage) -> None:
    write_draft(storage, catalog.draft(storage, 7, 0, 0))
    storage.put("step-00000008/00000-00.safetensors", b"data")
    assert catalog.committed_steps(storage) == []


def test_a_manifest_of_another_step_is_damage(storage: Storage) -> None:
    write(storage, 7)
    storage.put(catalog.file_path(8, MANIFEST), storage.get(catalog.file_path(7, MANIFEST)))
    with pytest.raises(DamagedError, match="that of step 7, found in step-00000008"):
        catalog.read_manifest(storage, 8)


def test_two_saves_never_share_a_place(storage: Storage) -> None:
    drafts = [catalog.draft(storage, *numbers) for numbers in itertools.product((1, 2), (0, 1), (0, 1))]
    assert len({(draft.folder, draft.prefix) for draft in drafts}) == 8


def test_a_discarded_draft_leaves_nothing_and_spares_the_checkpoint_of_its_step(storage: Storage) -> None:
    write(storage, 7)
    before = files_of(storage)
    draft = catalog.draft(storage, 7, 1, 0)
    write_draft(storage, draft)
    assert files_of(storage) > before
    catalog.discard(storage, draft)
    assert files_of(storage) == before
    catalog.discard(storage, draft)


def test_a_new_save_of_a_step_replaces_the_older_one_whole(storage: Storage) -> None:
    write(storage, 7, world_size=4)
    newer = write(storage, 7, arrays(seed=1), world_size=2, generation=1)
    assert catalog.read_manifest(storage, 7) == newer
    assert files_of(storage) == {catalog.file_path(7, name) for name in (MANIFEST, *newer.files)}
    assert verify(storage, 7).is_intact


def test_leftovers_go_and_checkpoints_stay(storage: Storage) -> None:
    kept = write(storage, 7)
    for step, generation in ((7, 1), (8, 0)):
        write_draft(storage, catalog.draft(storage, step, generation, 3))
    assert len(remove_leftovers(storage)) >= 2
    assert files_of(storage) == {catalog.file_path(7, name) for name in (MANIFEST, *kept.files)}
    assert remove_leftovers(storage) == []


def test_what_is_not_ours_is_left_alone(storage: Storage) -> None:
    # Nor is anything made in a place that is not there yet.
    assert (catalog.committed_steps(storage), remove_leftovers(storage), storage.names()) == ([], [], [])
    storage.put("notes.txt", b"mine")
    storage.put("other/data.bin", b"mine")
    assert remove_leftovers(storage) == []
    assert files_of(storage) == {"notes.txt", "other/data.bin"}


def test_another_tools_step_folder_is_never_removed(storage: Storage) -> None:
    foreign = "step-00000007/lit_model.pth"
    storage.put(foreign, b"weeks of work")
    assert remove_leftovers(storage) == []
    assert storage.get(foreign) == b"weeks of work"
    write(storage, 7)
    catalog.prune(storage, RetentionPolicy(keep_last=1))
    assert verify(storage, 7).is_intact
    kept = [name for name in storage.names() if storage.size(f"{name}/lit_model.pth") is not None]
    assert len(kept) == 1


def test_a_checkpoint_behind_a_link_loses_only_the_link(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "place")
    for step in (1, 2):
        write(storage, step)
    (tmp_path / "place" / "step-00000001").rename(tmp_path / "archived")
    (tmp_path / "place" / "step-00000001").symlink_to(tmp_path / "archived")
    assert catalog.prune(storage, RetentionPolicy(keep_last=1)) == [1]
    assert (tmp_path / "archived" / MANIFEST).is_file()
    assert storage.names() == ["step-00000002"]


def test_nothing_after_the_manifest_can_fail_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = memory()
    write(storage, 7)

    def fail(*_: object) -> None:
        raise StorageError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStorage, "names", fail)
        write(storage, 7, arrays(seed=1), generation=1)
    assert catalog.read_manifest(storage, 7).generation == 1
    assert verify(storage, 7).is_intact


def test_a_commit_whose_answer_was_lost_is_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = memory()
    put = RemoteStorage.put

    def lose_the_answer(self: RemoteStorage, path: str, content: bytes) -> None:
        put(self, path, content)
        if path.endswith(MANIFEST):
            raise StorageError("time-out")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStorage, "put", lose_the_answer)
        write(storage, 7)
    catalog.discard(storage, catalog.draft(storage, 7, 0, 0))
    assert verify(storage, 7).is_intact


def test_a_place_has_one_owner(storage: Storage) -> None:
    assert catalog.owner(storage) is None
    assert [catalog.claim(storage, name) for name in ("first", "second", "first")] == ["first"] * 3
    assert catalog.owner(storage) == "first"
    assert catalog.committed_steps(storage) == []


def test_the_files_of_a_damaged_checkpoint_stay_as_evidence(storage: Storage) -> None:
    write(storage, 7)
    storage.put(catalog.file_path(7, MANIFEST), b"{}")
    before = files_of(storage)
    remove_leftovers(storage)
    assert files_of(storage) == before


class PowerLostError(Exception):
    """The power went."""


@contextlib.contextmanager
def power_for(num_acts: int, storage: Storage) -> Iterator[None]:
    """Let this many acts on a storage be done and no more."""
    done = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(PowerLostError):
        for name in ("put", "rename", "remove"):

            def counted(
                self: Storage, *arguments: object, act: object = getattr(type(storage), name)
            ) -> None:
                nonlocal done
                if done == num_acts:
                    raise PowerLostError
                done += 1
                act(self, *arguments)  # type: ignore[operator]

            patch.setattr(type(storage), name, counted)
        yield


def test_a_half_removed_checkpoint_is_none(storage: Storage) -> None:
    write(storage, 7)
    with power_for(1, storage):
        catalog.remove_checkpoint(storage, 7)
    assert storage.names() != []
    assert catalog.committed_steps(storage) == []
    remove_leftovers(storage)
    assert files_of(storage) == set()


@pytest.mark.parametrize("num_acts", range(6))
def test_power_lost_at_any_act_of_a_commit_leaves_the_old_or_the_new_one(
    storage: Storage, num_acts: int
) -> None:
    old = write(storage, 7)
    draft = catalog.draft(storage, 7, 1, 0)
    new = write_draft(storage, draft, arrays(seed=1), generation=1)
    with power_for(num_acts, storage):
        catalog.commit(storage, draft, new)
    remove_leftovers(storage)
    assert catalog.committed_steps(storage) == [7]
    found = catalog.read_manifest(storage, 7)
    assert found in (old, new)
    assert verify(storage, 7).is_intact
    assert files_of(storage) == {catalog.file_path(7, name) for name in (MANIFEST, *found.files)}


def test_pruning_removes_by_the_policy_and_counts_only_intact_ones(storage: Storage) -> None:
    for step in range(1, 6):
        write(storage, step, state={"score": abs(step - 2.0)})
    storage.put(catalog.file_path(5, MANIFEST), b"torn")
    storage.remove(catalog.file_path(4, min(catalog.read_manifest(storage, 4).files)))
    assert catalog.prune(storage, RetentionPolicy(keep_last=1, keep_best=1)) == [1]
    assert catalog.committed_steps(storage) == [2, 3, 4, 5]


def test_pruning_reads_a_checkpoint_that_stays_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    get = Mock(wraps=storage.get)
    monkeypatch.setattr(storage, "get", get)
    known: dict[int, CommittedCheckpoint] = {}
    for step in (1, 2, 3):
        write(storage, step)
        catalog.prune(storage, RetentionPolicy(keep_last=2), known)
    assert catalog.committed_steps(storage) == sorted(known) == [2, 3]
    assert get.call_args_list.count(call(catalog.file_path(2, MANIFEST))) == 1


# A checkpoint that is set aside is none any more, and goes when its step is saved anew.


def aside(storage: Storage, name: str) -> str:
    """Return where the manifest of a checkpoint lies that was set aside under a name."""
    return f"{name}/{MANIFEST}" if storage.renames else name


def test_only_what_is_void_and_after_the_step_is_set_aside(storage: Storage) -> None:
    for step, generation in ((5, 0), (10, 0), (15, 0), (20, 1), (25, 0)):
        write(storage, step, generation=generation)
    # What cannot be read is left where it is.
    storage.put(catalog.file_path(25, MANIFEST), b"{")
    checkpointer = Checkpointer(storage.place, Peers.alone(), Options())
    done = checkpointer.set_aside(5, lambda manifest: manifest.generation == 0)
    assert [step for step, _ in done] == [10, 15]
    assert checkpointer.committed_steps() == [5, 20, 25]
    assert checkpointer.set_aside(5, lambda manifest: manifest.generation == 0) == []


def test_a_manifest_that_was_set_aside_stays_and_no_tidying_takes_it(storage: Storage) -> None:
    for step in (5, 10):
        write(storage, step)
    before = storage.get(catalog.file_path(10, MANIFEST))
    name = catalog.set_aside(storage, 10)
    remove_leftovers(storage)
    catalog.prune(storage, RetentionPolicy(keep_last=1))
    assert catalog.committed_steps(storage) == [5]
    assert storage.get(aside(storage, name)) == before
    if storage.renames:
        assert len(storage.names(name)) > 1


def test_a_step_saved_anew_takes_the_place_of_what_was_set_aside(storage: Storage) -> None:
    write(storage, 10)
    names = [catalog.set_aside(storage, 10)]
    write(storage, 10, generation=1)
    names.append(catalog.set_aside(storage, 10))
    manifest = write(storage, 10, generation=2)
    assert catalog.read_manifest(storage, 10) == manifest
    catalog.check_sizes(storage, manifest)
    assert [storage.size(aside(storage, name)) for name in names] == [None, None]
    assert len(storage.names("")) == 1


def test_a_later_save_ends_what_was_set_aside_too(storage: Storage) -> None:
    """The interval of saves may have changed: the very step may never come again. An earlier one says
    nothing.
    """
    write(storage, 10)
    name = catalog.set_aside(storage, 10)
    write(storage, 1, generation=1)
    assert storage.size(aside(storage, name)) is not None
    write(storage, 12, generation=1)
    if storage.renames:
        assert storage.names(name) == []


# Which checkpoints go: pure rules, and the newest intact one never.

# The best is 300, then 400; 500 has no score.
STEPS = [
    CommittedCheckpoint(step, score=None if step == 500 else abs(step - 310.0))
    for step in range(100, 1100, 100)
]

CHECKPOINTS = st.lists(
    st.builds(
        CommittedCheckpoint,
        step=st.integers(0, 50),
        score=st.none() | st.floats(allow_nan=False),
        is_intact=st.booleans(),
    ),
    unique_by=lambda checkpoint: checkpoint.step,
)
POLICIES = st.builds(
    RetentionPolicy,
    keep_last=st.integers(0, 5),
    keep_every_steps=st.none() | st.integers(1, 20),
    keep_best=st.integers(0, 3),
)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (RetentionPolicy(keep_last=3), [800, 900, 1000]),
        (RetentionPolicy(keep_last=1, keep_every_steps=500), [500, 1000]),
        (RetentionPolicy(keep_last=2, keep_every_steps=400), [400, 800, 900, 1000]),
        (RetentionPolicy(keep_last=1, keep_best=2), [300, 400, 1000]),
        (RetentionPolicy(keep_last=1, keep_best=20), [100, 200, 300, 400, 600, 700, 800, 900, 1000]),
        (RetentionPolicy(keep_last=0), [1000]),
    ],
)
def test_what_a_rule_keeps(policy: RetentionPolicy, kept: list[int]) -> None:
    removed = to_remove(STEPS, policy)
    assert [checkpoint.step for checkpoint in STEPS if checkpoint.step not in removed] == kept


def test_a_damaged_one_goes_when_enough_intact_ones_are_newer() -> None:
    checkpoints = [CommittedCheckpoint(1, is_intact=False), CommittedCheckpoint(2), CommittedCheckpoint(3)]
    assert to_remove(checkpoints, RetentionPolicy(keep_last=2)) == [1]


@given(checkpoints=CHECKPOINTS, policy=POLICIES)
def test_no_rule_removes_the_newest_intact_one_or_the_last_ones(
    checkpoints: list[CommittedCheckpoint], policy: RetentionPolicy
) -> None:
    removed = to_remove(checkpoints, policy)
    assert removed == sorted(set(removed))
    assert set(removed) <= {checkpoint.step for checkpoint in checkpoints}
    intact = sorted(checkpoint.step for checkpoint in checkpoints if checkpoint.is_intact)
    assert not set(removed) & set(intact[-max(1, policy.keep_last) :])
    if not intact:
        assert removed == []
    # What was kept is kept by the same policy again.
    kept = [checkpoint for checkpoint in checkpoints if checkpoint.step not in removed]
    assert to_remove(kept, policy) == []
