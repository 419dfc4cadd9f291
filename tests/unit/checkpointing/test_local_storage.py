"""The local storage: what it writes is durable and whole, and what it refuses is said."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from checkpointing.checkpoint_errors import StorageError
from checkpointing.storage.local import LocalStorage


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 3 * 4096, 5 * 4096 + 17])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_file_holds_what_was_written_aligned_or_not(tmp_path: Path, num_bytes: int, skip: int) -> None:
    pages = mmap.mmap(-1, num_bytes + 2 * 4096)
    pages[:] = os.urandom(len(pages))
    content = memoryview(pages)[skip : skip + num_bytes]
    storage = LocalStorage(tmp_path / "new" / "place")
    file = storage.create("step/a.safetensors", num_bytes)
    file.write(content[: 2 * 4096])
    file.write(content[2 * 4096 :])
    file.commit()
    assert storage.get("step/a.safetensors") == bytes(content)
    assert storage.size("step/a.safetensors") == num_bytes
    content.release()


def test_files_on_tmpfs_are_written_without_direct_access() -> None:
    shared_memory = Path("/dev/shm")
    folder = shared_memory / f"orchestra-test-{os.getpid()}"
    storage = LocalStorage(folder)
    try:
        file = storage.create("a", 5000)
        file.write(memoryview(b"x" * 5000))
        file.commit()
        assert storage.get("a") == b"x" * 5000
    finally:
        storage.remove("")
    assert not folder.exists()


def test_a_put_replaces_as_one_act_and_leaves_no_draft(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a/manifest.json", b"one")
    storage.put("a/manifest.json", b"two")
    assert storage.get("a/manifest.json") == b"two"
    assert storage.names("a") == ["manifest.json"]


def test_a_read_behind_the_end_says_where_the_file_ends(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a", b"12345")
    buffer = bytearray(4)
    storage.read_into("a", 1, memoryview(buffer))
    assert buffer == b"2345"
    with pytest.raises(StorageError, match="ends at 5 bytes, 1 more"):
        storage.read_into("a", 2, memoryview(buffer))


def test_what_is_not_there_is_none_empty_or_an_error_that_names_it(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert storage.size("gone") is None
    assert storage.names("gone") == []
    storage.remove("gone")
    with pytest.raises(StorageError, match=r"gone: No such file or directory"):
        storage.get("gone")


def test_a_file_in_the_place_of_a_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "place").write_text("a file")
    with pytest.raises(StorageError, match="place"):
        LocalStorage(tmp_path / "place").create("step/a", 1)


def test_a_discarded_file_can_be_removed_with_its_folder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    file = storage.create("draft/a", 1)
    file.discard()
    file.discard()
    storage.remove("draft")
    assert storage.names() == []
    assert (storage.free_bytes() or 0) > 0


def test_only_files_have_a_size_and_strays_do_no_harm(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("step/a", b"12345")
    storage.put("step/inner/b", b"1")
    storage.put("stray", b"a file in the place of a folder")
    assert storage.sizes("step") == {"a": 5}
    assert storage.size("step") is None
    assert storage.size("stray/manifest.json") is None
    assert storage.sizes("stray") == storage.sizes("gone") == {}
    assert storage.names("stray") == []
