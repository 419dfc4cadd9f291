"""Storages: the same on a local folder, in memory and on S3 over real HTTP; then what is each one's own."""

from __future__ import annotations

import gc
import mmap
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from sample_checkpoint import memory, send

from checkpointing.checkpoint_errors import StorageError
from checkpointing.storage import Storage, open_storage
from checkpointing.storage.local import LocalStorage

MIB = 1 << 20


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "new" / "place")
    if request.param == "memory":
        return memory()
    return open_storage(f"s3://{request.getfixturevalue('bucket')}/runs/checkpoints/")


def test_a_file_is_read_back_as_it_was_put_last(storage: Storage) -> None:
    for content in (b"", b"one", b"two" * 1000):
        storage.put("step/manifest.json", content)
        assert storage.get("step/manifest.json") == content
        assert storage.size("step/manifest.json") == len(content)
    assert storage.names("step") == ["manifest.json"]


@pytest.mark.parametrize("num_bytes", [0, 1, 5 * MIB, 17 * MIB + 17])
def test_a_large_file_is_sent_in_parts_and_read_in_ranges(
    storage: Storage, num_bytes: int, small_parts: None
) -> None:
    content = os.urandom(num_bytes)
    send(storage, "step/a.safetensors", content)
    assert storage.size("step/a.safetensors") == num_bytes
    assert storage.get("step/a.safetensors") == content
    begin, end = num_bytes // 3, num_bytes - num_bytes // 5
    buffer = bytearray(end - begin)
    storage.read_into("step/a.safetensors", begin, memoryview(buffer))
    assert buffer == content[begin:end]


def test_a_read_past_the_end_says_where_the_file_ends(storage: Storage) -> None:
    storage.put("a", b"12345")
    buffer = bytearray(4)
    storage.read_into("a", 1, memoryview(buffer))
    assert buffer == b"2345"
    with pytest.raises(StorageError, match="a: ends at 5 bytes, 2 more are expected"):
        storage.read_into("a", 3, memoryview(buffer))
    with pytest.raises(StorageError):
        storage.read_into("a", 30, memoryview(buffer))


def test_names_and_sizes_are_of_what_lies_directly_in_a_folder(storage: Storage) -> None:
    for path in ("b/x", "b/y", "b/deep/z", "a", "bb/x"):
        storage.put(path, b"12")
    assert storage.names() == ["a", "b", "bb"]
    assert storage.names("b") == ["deep", "x", "y"]
    assert storage.sizes("b") == {"x": 2, "y": 2}
    assert storage.names("gone") == storage.names("a") == []
    assert storage.sizes("gone") == storage.sizes("a") == {}
    assert storage.size("b") is storage.size("gone") is storage.size("a/manifest.json") is None
    with pytest.raises(StorageError, match=r"gone: No such file or directory"):
        storage.get("gone")


def test_what_is_removed_is_gone_and_nothing_beside_it(storage: Storage) -> None:
    for path in ("step-1/a", "step-1/b", "step-10/a", "step-1x"):
        storage.put(path, b"1")
    storage.remove("step-1/a")
    assert storage.names("step-1") == ["b"]
    storage.remove("step-1")
    storage.remove("gone")
    assert storage.names() == ["step-10", "step-1x"]
    storage.remove("")
    assert storage.names() == []


@pytest.mark.parametrize("kind", ["local", "memory", "s3"])
def test_a_place_whose_name_is_a_pattern_removes_its_own_files_alone(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    bucket = f"s3://{request.getfixturevalue('bucket')}" if kind == "s3" else ""
    parent = {"local": str(tmp_path), "memory": "memory://patterns", "s3": bucket}[kind]
    places = [open_storage(f"{parent}/{name}") for name in ("lr1", "lr[12]", "lr?", "l*")]
    for place in places:
        place.put("step-1/a", b"1")
        place.put("step-1/b", b"1")
    for place in places[1:]:
        place.remove("step-1/a")
        assert place.names("step-1") == ["b"]
        place.remove("step-1")
        assert place.names("step-1") == []
    assert places[0].names("step-1") == ["a", "b"]


def test_a_folder_without_a_name_behind_the_bucket_is_refused() -> None:
    with pytest.raises(StorageError, match="a folder without a name follows the bucket"):
        open_storage("s3://bucket//runs")


def test_what_another_process_did_is_seen_at_once(storage: Storage) -> None:
    other = open_storage(storage.place)
    for round_number in range(3):
        assert storage.names() == other.names() == []
        other.put("step/a", b"x" * round_number)
        assert (storage.names(), storage.names("step")) == (["step"], ["a"])
        assert storage.size("step/a") == round_number
        other.remove("step")
        assert storage.size("step/a") is None


def test_many_threads_at_once_do_not_disturb_each_other(storage: Storage) -> None:
    def work(number: int) -> None:
        for step in range(3):
            path = f"step-{step}/{number}"
            send(storage, path, bytes([number]) * 100_000)
            assert storage.size(path) == 100_000
            assert f"{number}" in storage.names(f"step-{step}")
            assert storage.get(path) == bytes([number]) * 100_000

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


# A local folder.


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
    folder = Path("/dev/shm") / f"orchestra-test-{os.getpid()}"
    storage = LocalStorage(folder)
    try:
        send(storage, "a", b"x" * 5000)
        assert storage.get("a") == b"x" * 5000
    finally:
        storage.remove("")
    assert not folder.exists()


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


# What an fsspec URL names.


def test_an_object_store_does_not_tell_what_is_free_and_renames_nothing() -> None:
    storage = memory()
    assert storage.free_bytes() is None
    assert not storage.renames
    storage.sync("")
    with pytest.raises(StorageError, match="cannot be renamed"):
        storage.rename("a", "b")


class Counting(AbstractFileSystem):  # type: ignore[misc]
    """Takes files in parts and forgets them."""

    protocol = "counting"
    sizes: ClassVar[list[int]] = []

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        return CountingFile(self, path, mode, block_size=block_size, **options)


class CountingFile(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        """Nothing to announce."""

    def _upload_chunk(self, final: bool = False) -> bool:  # noqa: ARG002  fsspec's signature
        Counting.sizes.append(self.buffer.tell())
        return True


@pytest.fixture
def counting() -> Storage:
    fsspec.register_implementation("counting", Counting, clobber=True)
    Counting.sizes.clear()
    return open_storage("counting://someone:secret@host/place")


def test_a_file_on_its_way_takes_the_memory_of_a_part_not_of_the_file(counting: Storage) -> None:
    content = bytes(512 * MIB)
    tracemalloc.start()
    try:
        send(counting, "a", content, block_bytes=16 * MIB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(Counting.sizes) == len(content)
    assert peak < 100 * MIB


def test_a_discarded_file_sends_nothing_more_not_even_when_it_is_freed(counting: Storage) -> None:
    file = counting.create("a", 1)
    file.write(memoryview(b"1"))
    file.discard()
    del file
    gc.collect()
    assert Counting.sizes == []


def test_an_unknown_protocol_and_a_missing_package_are_told() -> None:
    with pytest.raises(StorageError, match="nothing://a: fsspec has no such protocol; give a path, or a URL"):
        open_storage("nothing://a")
    words = "Install no_such_package to use absent://"
    fsspec.register_implementation("absent", "no_such_package.FileSystem", clobber=True, errtxt=words)
    with pytest.raises(StorageError, match=words):
        open_storage("absent://a")


def test_the_hub_of_hugging_face_is_a_storage() -> None:
    """Its file system keeps what it has listed in a dict of its own. Nothing is asked for here."""
    assert open_storage("hf://someone/model").place == "hf://someone/model"


def test_a_password_is_not_told(counting: Storage) -> None:
    assert counting.place == "counting://someone:…@host/place"
