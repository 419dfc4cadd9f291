"""Which checkpoints are there: those with a manifest, on a local folder and on an object store alike."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

import pytest
from sample_checkpoint import arrays, write, write_draft

from checkpointing import catalog
from checkpointing.catalog import CommittedCheckpoint, RetentionPolicy, move_back, remove_leftovers
from checkpointing.checkpoint_errors import DamagedError, StorageError
from checkpointing.manifest import MANIFEST, encode
from checkpointing.storage import Storage
from checkpointing.storage.local import LocalStorage
from checkpointing.storage.remote import RemoteStorage
from checkpointing.verify import verify


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(tmp_path / "checkpoints")
    return RemoteStorage(f"memory://{uuid.uuid4()}/checkpoints")


def files_of(storage: Storage) -> set[str]:
    """Return the paths of all files, in the place and in its folders."""
    paths = set()
    for name in storage.names():
        is_file = "." in name and not name.startswith(".")
        paths |= {name} if is_file else {f"{name}/{each}" for each in storage.names(name)}
    return paths


def test_a_place_that_is_not_there_holds_no_checkpoints(storage: Storage) -> None:
    assert catalog.committed_steps(storage) == []
    assert remove_leftovers(storage) == []


def test_a_committed_checkpoint_is_found_and_read(storage: Storage) -> None:
    for step in (200, 5, 123_456_789):
        write(storage, step, state={"samples": step})
    assert catalog.committed_steps(storage) == [5, 200, 123_456_789]
    manifest = catalog.read_manifest(storage, 200)
    assert manifest.state == {"samples": 200}
    catalog.check_sizes(storage, manifest)


@pytest.mark.parametrize(
    "name",
    [
        *("step-7", "step-000000007", "step-0000000x", "xstep-00000007", "step-00000007x", "Step-00000007"),
        *(".step-00000007.g000-00.tmp", ".step-00000007.replaced-00ff", "latest", "step--0000007"),
    ],
)
def test_only_exact_names_count(storage: Storage, name: str) -> None:
    write(storage, 7)
    storage.put(f"{name}/{MANIFEST}", storage.get(catalog.file_path(7, MANIFEST)))
    assert catalog.committed_steps(storage) == [7]


def test_a_folder_without_a_manifest_is_no_checkpoint(storage: Storage) -> None:
    write_draft(storage, catalog.draft(storage, 7, 0, 0))
    storage.put("step-00000008/00000-00.safetensors", b"data")
    assert catalog.committed_steps(storage) == []


def test_a_manifest_of_another_step_is_damage(storage: Storage) -> None:
    write(storage, 7)
    storage.put(catalog.file_path(8, MANIFEST), storage.get(catalog.file_path(7, MANIFEST)))
    with pytest.raises(DamagedError, match="that of step 7, found in step-00000008"):
        catalog.read_manifest(storage, 8)


def test_sizes_that_are_not_the_manifests_are_named(storage: Storage) -> None:
    manifest = write(storage, 7)
    name = sorted(manifest.files)[1]
    path = catalog.file_path(7, name)
    content = storage.get(path)
    for changed, words in ((content[:-1], "expected"), (content + b"x", "expected")):
        storage.put(path, changed)
        with pytest.raises(
            DamagedError, match=rf"{name}: it has {len(changed)} bytes, {words} {len(content)}"
        ):
            catalog.check_sizes(storage, manifest)
    storage.remove(path)
    with pytest.raises(DamagedError, match=f"{name}: it is missing"):
        catalog.check_sizes(storage, manifest)


def test_two_saves_never_share_a_place(storage: Storage) -> None:
    places = {
        (draft.folder, draft.prefix)
        for step in (1, 2)
        for generation in (0, 1)
        for index in (0, 1)
        for draft in [catalog.draft(storage, step, generation, index)]
    }
    assert len(places) == 8


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
    removed = remove_leftovers(storage)
    assert len(removed) >= 2
    assert files_of(storage) == {catalog.file_path(7, name) for name in (MANIFEST, *kept.files)}
    assert remove_leftovers(storage) == []


def test_what_is_not_ours_is_left_alone(storage: Storage) -> None:
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


def test_a_checkpoint_that_was_moved_aside_comes_back(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, 7)
    storage.rename("step-00000007", ".step-00000007.replaced-0123abcd")
    assert catalog.committed_steps(storage) == []
    assert move_back(storage) == ["step-00000007"]
    assert verify(storage, 7).is_intact
    assert move_back(storage) == []


def test_nothing_after_the_manifest_can_fail_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = RemoteStorage(f"memory://{uuid.uuid4()}/checkpoints")
    write(storage, 7)

    def fail(*_: object) -> None:
        raise StorageError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStorage, "names", fail)
        write(storage, 7, arrays(seed=1), generation=1)
    assert catalog.read_manifest(storage, 7).generation == 1
    assert verify(storage, 7).is_intact


def test_a_commit_whose_answer_was_lost_is_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = RemoteStorage(f"memory://{uuid.uuid4()}/checkpoints")
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


def test_a_half_removed_checkpoint_is_none(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    write(storage, 7)
    remove = type(storage).remove

    def once(self: Storage, path: str) -> None:
        if not path.endswith(MANIFEST):
            raise PowerLostError
        remove(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "remove", once)
        with pytest.raises(PowerLostError):
            catalog.remove_checkpoint(storage, 7)
    assert catalog.committed_steps(storage) == []
    remove_leftovers(storage)
    assert files_of(storage) == set()


@pytest.mark.parametrize("num_acts", range(6))
def test_power_lost_at_any_act_of_a_commit_leaves_the_old_or_the_new_one(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, num_acts: int
) -> None:
    """Stop before act `num_acts` of a commit over an existing step; clean up as at the next start."""
    old = write(storage, 7)
    draft = catalog.draft(storage, 7, 1, 0)
    new = write_draft(storage, draft, arrays(seed=1), generation=1)
    done = 0
    with monkeypatch.context() as patch:
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
        with contextlib.suppress(PowerLostError):
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


def test_a_manifest_that_cannot_be_read_is_the_storages_error(storage: Storage) -> None:
    with pytest.raises(StorageError, match="No such file"):
        catalog.read_manifest(storage, 7)


def test_the_manifest_says_the_same_whoever_reads_it(storage: Storage) -> None:
    manifest = write(storage, 7, state={"samples": 3, "score": 0.1})
    assert encode(catalog.read_manifest(storage, 7)) == encode(manifest)


class Reading(LocalStorage):
    """A local folder that remembers what was read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: list[str] = []

    def get(self, path: str) -> bytes:
        self.read.append(path)
        return super().get(path)


def test_pruning_reads_a_checkpoint_that_stays_only_once(tmp_path: Path) -> None:
    storage = Reading(tmp_path)
    known: dict[int, CommittedCheckpoint] = {}
    for step in (1, 2, 3):
        write(storage, step)
        catalog.prune(storage, RetentionPolicy(keep_last=2), known)
    assert catalog.committed_steps(storage) == [2, 3]
    assert sorted(known) == [2, 3]
    assert [path for path in storage.read if path.startswith(catalog.step_name(2))] == [
        "step-00000002/manifest.json"
    ]
