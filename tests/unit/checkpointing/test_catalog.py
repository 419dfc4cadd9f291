"""Which checkpoints are there: those with a manifest, on a local folder and on an object store alike."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_checkpoint import arrays, memory, write, write_draft

from checkpointing import catalog
from checkpointing.catalog import StoredCheckpoint, remove_leftovers
from checkpointing.checkpoint_errors import DamagedError, StorageError, SupersededError
from checkpointing.lineage import AttemptBegin, Base, Lineage
from checkpointing.manifest import MANIFEST, Manifest, decode, encode
from checkpointing.saving.retention import (
    CommittedCheckpoint,
    RetentionPolicy,
    prune,
    removable_bytes,
    remove_off_line,
    to_remove,
)
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


def all_files_of(storage: Storage, manifest: Manifest) -> set[str]:
    """Return the paths of a checkpoint's files, and where nothing is renamed those of both manifests."""
    names = {MANIFEST, *manifest.files}
    if not storage.renames:
        names.add(catalog.draft(storage, manifest.step, manifest.generation, 0).manifest.rpartition("/")[2])
    return {catalog.file_path(manifest.step, name) for name in names}


def the(storage: Storage, step: int, generation: int = 0) -> StoredCheckpoint:
    (found,) = [
        each for each in catalog.stored(storage) if (each.step, each.generation) == (step, generation)
    ]
    return found


def test_a_new_save_of_a_step_by_its_own_attempt_replaces_the_older_one_whole(storage: Storage) -> None:
    write(storage, 7, world_size=4)
    draft = catalog.draft(storage, 7, 0, 1)
    newer = write_draft(storage, draft, arrays(seed=1), world_size=2)
    catalog.commit(storage, draft, newer)
    assert catalog.read_manifest(storage, 7) == newer
    (left,) = catalog.stored(storage)
    kept = {left.manifest, catalog.file_path(7, MANIFEST), *(f"{left.folder}/{name}" for name in newer.files)}
    assert files_of(storage) == kept
    assert verify(storage, 7).is_intact


@pytest.mark.parametrize("num_removed", range(5))
def test_whatever_is_left_of_a_replaced_save_on_an_object_store_is_whole_and_goes_later(
    monkeypatch: pytest.MonkeyPatch, num_removed: int
) -> None:
    storage = memory()
    remove, failures = storage.remove, itertools.chain([False] * num_removed, itertools.repeat(True))

    def interrupted(path: str) -> None:
        if next(failures):
            raise StorageError("killed")
        remove(path)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "remove", interrupted)
        # The hundredth comes after the 99th.
        for index, number in ((99, 1), (100, 2)):
            draft = catalog.draft(storage, 7, 3, index)
            state = {"number": number}
            catalog.commit(storage, draft, write_draft(storage, draft, generation=3, state=state))
    assert all(verify(storage, each).is_intact for each in catalog.stored(storage))
    (counts,) = catalog.on_line(storage, Lineage())
    assert catalog.read_manifest(storage, counts).state == {"number": 2}
    write(storage, 8, generation=3)
    prune(storage, RetentionPolicy())
    assert [each.step for each in catalog.stored(storage)] == [7, 8]


def test_a_save_of_an_older_attempts_step_takes_its_name_and_the_older_one_stays(storage: Storage) -> None:
    old = write(storage, 7, generation=1)
    new = write(storage, 7, arrays(seed=1), generation=3)
    assert catalog.read_manifest(storage, 7) == new
    on, off = catalog.split(catalog.stored(storage), Lineage())
    assert [(each.step, each.generation) for each in on] == [(7, 3)]
    (left,) = off
    assert catalog.read_manifest(storage, left.checkpoint) == old
    assert verify(storage, left.checkpoint).is_intact
    assert verify(storage, on[0]) == verify(storage, 7)
    assert not left.is_late
    assert "attempt 1; a newer one saved its step anew" in left.words
    # No save and no tidying takes it, a person does.
    prune(storage, RetentionPolicy(keep_last=1))
    remove_leftovers(storage)
    assert len(catalog.stored(storage)) == 2
    assert remove_off_line(storage, Lineage()) == off
    assert files_of(storage) == all_files_of(storage, new)
    assert verify(storage, 7).is_intact


def test_a_save_of_a_step_that_a_newer_attempt_has_saved_is_refused(storage: Storage) -> None:
    newer = write(storage, 7, generation=3)
    draft = catalog.draft(storage, 7, 1, 0)
    manifest = write_draft(storage, draft, arrays(seed=1), generation=1)
    with pytest.raises(SupersededError, match="attempt 3 has saved step 7 already"):
        catalog.commit(storage, draft, manifest)
    catalog.discard(storage, draft)
    assert files_of(storage) == all_files_of(storage, newer)
    assert verify(storage, 7).is_intact


def test_leftovers_go_and_checkpoints_stay(storage: Storage) -> None:
    kept = write(storage, 7)
    for step, generation in ((7, 1), (8, 0)):
        write_draft(storage, catalog.draft(storage, step, generation, 3))
    assert len(remove_leftovers(storage)) >= 2
    assert files_of(storage) == all_files_of(storage, kept)
    assert remove_leftovers(storage) == []


def test_a_manifest_that_an_interrupted_save_did_not_copy_is_copied() -> None:
    storage = memory()
    write(storage, 7, generation=1)
    newer = write(storage, 7, arrays(seed=1), generation=3)
    storage.remove("step-00000007/manifest.json")
    remove_leftovers(storage)
    assert decode(storage.get("step-00000007/manifest.json")) == newer


def test_what_a_newer_attempt_is_writing_is_no_leftover_of_an_older_ones(storage: Storage) -> None:
    draft = catalog.draft(storage, 7, 3, 0)
    manifest = write_draft(storage, draft)
    assert remove_leftovers(storage, 2) == []
    catalog.commit(storage, draft, manifest)
    assert verify(storage, 7).is_intact


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
    prune(storage, RetentionPolicy(keep_last=1))
    assert verify(storage, 7).is_intact
    kept = [name for name in storage.names() if storage.size(f"{name}/lit_model.pth") is not None]
    assert len(kept) == 1


def test_a_checkpoint_that_cannot_be_looked_at_stays_and_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    for step in range(1, 6):
        write(storage, step)
    read = LocalStorage.get

    def get(self: LocalStorage, path: str) -> bytes:
        if path.startswith("step-00000002/"):
            raise StorageError(f"{path}: Input/output error")
        return read(self, path)

    monkeypatch.setattr(LocalStorage, "get", get)
    with pytest.raises(StorageError, match=r"step-00000002.*Input/output error"):
        prune(storage, RetentionPolicy(keep_last=2))
    assert storage.names() == ["step-00000002", "step-00000004", "step-00000005"]


def test_a_save_whose_manifest_could_not_be_copied_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = memory()
    write(storage, 1)
    put = RemoteStorage.put

    def refused(self: RemoteStorage, path: str, content: bytes) -> None:
        if path == f"step-00000002/{MANIFEST}":
            raise StorageError(f"{path}: Service Unavailable")
        put(self, path, content)

    monkeypatch.setattr(RemoteStorage, "put", refused)
    write(storage, 2)
    assert catalog.committed_steps(storage) == [1, 2]
    assert MANIFEST not in storage.names("step-00000002")
    monkeypatch.undo()
    catalog.remove_leftovers(storage)
    assert MANIFEST in storage.names("step-00000002")


def test_a_checkpoint_that_may_not_be_removed_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    for step in range(1, 6):
        write(storage, step)
    rename = LocalStorage.rename

    def refused(self: LocalStorage, source: str, target: str) -> None:
        if source == "step-00000001":
            raise StorageError(f"{source}: Access Denied")
        rename(self, source, target)

    monkeypatch.setattr(LocalStorage, "rename", refused)
    with pytest.raises(StorageError, match="step-00000001: Access Denied"):
        prune(storage, RetentionPolicy(keep_last=2))
    assert storage.names() == ["step-00000001", "step-00000004", "step-00000005"]


def test_what_a_save_without_room_would_remove_is_counted(storage: Storage) -> None:
    for step in (1, 2, 3):
        write(storage, step)
    size = sum(storage.sizes("step-00000001").values())
    of = [removable_bytes(storage, RetentionPolicy(keep_last=last), Lineage()) for last in (1, 2, 3, 4)]
    # Never the newest one, whatever is kept.
    assert of == [2 * size, 2 * size, size, 0]


def test_a_checkpoint_behind_a_link_loses_only_the_link(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "place")
    for step in (1, 2):
        write(storage, step)
    (tmp_path / "place" / "step-00000001").rename(tmp_path / "archived")
    (tmp_path / "place" / "step-00000001").symlink_to(tmp_path / "archived")
    assert prune(storage, RetentionPolicy(keep_last=1)) == [1]
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
    if not storage.renames:
        # As older saves left it.
        storage.remove(the(storage, 7).manifest)
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
    with power_for(2, storage):
        catalog.remove_checkpoint(storage, the(storage, 7))
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
    (there,) = catalog.on_line(storage, Lineage())
    found = catalog.read_manifest(storage, there)
    assert found in (old, new)
    assert verify(storage, there).is_intact
    remove_off_line(storage, Lineage())
    assert verify(storage, there).is_intact
    assert len({each.generation for each in catalog.stored(storage)}) == 1


def test_pruning_removes_by_the_policy_and_counts_only_intact_ones(storage: Storage) -> None:
    for step in range(1, 6):
        write(storage, step, state={"score": abs(step - 2.0)})
    storage.put(the(storage, 5).manifest, b"torn")
    storage.remove(catalog.file_path(4, min(catalog.read_manifest(storage, 4).files)))
    assert prune(storage, RetentionPolicy(keep_last=1, keep_best=1)) == [1]
    assert catalog.committed_steps(storage) == [2, 3, 4, 5]


def test_pruning_compares_no_score_with_that_of_something_else(storage: Storage) -> None:
    """Nor with one that is measured otherwise; older versions did not say how."""
    for step, name in enumerate(["a", "b 1", None, "b", "b 2"], start=1):
        write(storage, step, state={"score": float(step), **({} if name is None else {"score_of": name})})
    assert prune(storage, RetentionPolicy(keep_last=1, keep_best=2, score_of="b 2")) == [1, 2]
    assert prune(storage, RetentionPolicy(keep_last=1, keep_best=1)) == [4]


def test_pruning_reads_a_checkpoint_that_stays_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    get = Mock(wraps=storage.get)
    monkeypatch.setattr(storage, "get", get)
    known: dict[int, CommittedCheckpoint] = {}
    for step in (1, 2, 3):
        write(storage, step)
        prune(storage, RetentionPolicy(keep_last=2), known=known)
    assert catalog.committed_steps(storage) == sorted(known) == [2, 3]
    assert get.call_args_list.count(call(catalog.file_path(2, MANIFEST))) == 1


# What is off the line: an attempt went on from an earlier state.


def lineage(**begins: tuple[int, set[tuple[int, int]] | None]) -> Lineage:
    """Return attempts (`a4=(40, {(50, 3)})`): the step each began after, and what was there of later ones."""
    return Lineage.of(
        AttemptBegin(int(name[1:]), Base(step), None if seen is None else frozenset(seen))
        for name, (step, seen) in begins.items()
    )


def test_what_an_attempt_publishes_after_the_next_one_has_begun_is_named_and_removed(
    storage: Storage,
) -> None:
    for step in (30, 40):
        write(storage, step, generation=3)
    begun = lineage(a4=(40, set()))
    write(storage, 50, generation=3)
    on, off = catalog.split(catalog.stored(storage), begun)
    assert [each.step for each in on] == [30, 40]
    (late,) = off
    assert late.words == "written by attempt 3 after attempt 4 had begun at step 40"
    assert catalog.committed_steps(storage, begun) == [30, 40]
    assert prune(storage, RetentionPolicy(keep_last=2), lambda: begun) == [50]
    assert [each.step for each in catalog.stored(storage)] == [30, 40]


def test_what_was_there_when_the_next_attempt_began_stays_and_counts_for_no_rule(storage: Storage) -> None:
    for step in (30, 40, 50):
        write(storage, step, generation=3)
    begun = lineage(a4=(30, {(40, 3), (50, 3)}))
    assert prune(storage, RetentionPolicy(keep_last=1), lambda: begun) == []
    _, off = catalog.split(catalog.stored(storage), begun)
    assert {each.words for each in off} == {"written by attempt 3; attempt 4 began at step 30"}
    write(storage, 40, arrays(seed=1), generation=4)
    assert prune(storage, RetentionPolicy(keep_last=1), lambda: begun) == [30]
    assert len(remove_off_line(storage, begun)) == 2
    assert [(each.step, each.generation) for each in catalog.stored(storage)] == [(40, 4)]
    assert verify(storage, 40).is_intact


def test_an_older_manifest_that_names_no_attempt_is_on_the_line(storage: Storage) -> None:
    draft = catalog.draft(storage, 50, 3, 0)
    manifest = dataclasses.replace(write_draft(storage, draft), attempt=None, base=None)
    storage.put(f"{draft.folder}/{MANIFEST}", encode(manifest))
    if storage.renames:
        storage.rename(draft.folder, catalog.step_name(50))
    assert catalog.committed_steps(storage, lineage(a4=(40, set()))) == [50]
    # Saved anew, it gives way and stays whole.
    write(storage, 50, arrays(seed=1), generation=4)
    on, (old,) = catalog.split(catalog.stored(storage), lineage(a4=(40, {(50, 3)})))
    assert [each.generation for each in on] == [4]
    assert verify(storage, old.checkpoint).is_intact


def test_a_removal_that_stood_still_is_taken_back_by_the_next_attempt(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for step in (30, 40):
        write(storage, step)
    leaving = the(storage, 30)

    def is_due() -> bool:
        # Meanwhile another attempt begins there.
        assert catalog.committed_steps(storage) == [30, 40]
        assert catalog.move_back(storage) == ["step-00000030"]
        return True

    with pytest.raises(StorageError):
        catalog.remove_checkpoint(storage, leaving, is_due)
    assert verify(storage, 30).is_intact
    # One that learns of it in time puts it back by itself.
    assert not catalog.remove_checkpoint(storage, leaving, lambda: False)
    assert verify(storage, 30).is_intact


def test_a_name_that_another_attempt_took_meanwhile_is_not_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, 30, generation=1)
    meant = the(storage, 30, 1)
    newer = write(storage, 30, arrays(seed=1), generation=3)
    assert not catalog.remove_checkpoint(storage, meant)
    assert catalog.read_manifest(storage, 30) == newer


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
