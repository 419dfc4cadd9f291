"""Storages behind fsspec URLs: the same in the memory and on S3 over real HTTP."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
import uuid
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from sample_checkpoint import write

from checkpointing import catalog
from checkpointing.checkpoint_errors import StorageError
from checkpointing.storage import Storage, open_storage
from checkpointing.verify import verify

MIB = 1 << 20
Send: TypeAlias = Callable[[Storage, str, bytes], None]


@pytest.fixture(params=["memory", "s3"])
def storage(request: pytest.FixtureRequest) -> Storage:
    if request.param == "memory":
        return open_storage(f"memory://{uuid.uuid4()}/checkpoints")
    return open_storage(f"s3://{request.getfixturevalue('bucket')}/runs/checkpoints/")


def test_a_file_is_read_back_as_it_was_put(storage: Storage) -> None:
    for content in (b"", b"one", b"two" * 1000):
        storage.put("step/manifest.json", content)
        assert storage.get("step/manifest.json") == content
        assert storage.size("step/manifest.json") == len(content)


@pytest.mark.parametrize("num_bytes", [0, 1, 5 * MIB, 17 * MIB + 17])
def test_a_large_file_is_sent_in_parts_and_read_in_ranges(
    storage: Storage, num_bytes: int, small_parts: None, send: Send
) -> None:
    content = os.urandom(num_bytes)
    send(storage, "step/a.safetensors", content)
    assert storage.size("step/a.safetensors") == num_bytes
    assert storage.get("step/a.safetensors") == content
    begin, end = num_bytes // 3, num_bytes - num_bytes // 5
    buffer = bytearray(end - begin)
    storage.read_into("step/a.safetensors", begin, memoryview(buffer))
    assert buffer == content[begin:end]


def test_a_read_behind_the_end_says_where_the_file_ends(storage: Storage) -> None:
    storage.put("a", b"12345")
    with pytest.raises(StorageError, match="a: ends at 5 bytes, 2 more are expected"):
        storage.read_into("a", 3, memoryview(bytearray(4)))
    with pytest.raises(StorageError):
        storage.read_into("a", 30, memoryview(bytearray(4)))


def test_names_are_those_directly_in_a_folder(storage: Storage) -> None:
    for path in ("b/x", "b/y", "b/deep/z", "a", "bb/x"):
        storage.put(path, b"1")
    assert storage.names() == ["a", "b", "bb"]
    assert storage.names("b") == ["deep", "x", "y"]
    assert storage.names("gone") == storage.names("a") == []
    assert storage.size("b") is None
    assert storage.size("gone") is None


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


def test_what_another_process_did_is_seen_at_once(storage: Storage) -> None:
    other = open_storage(storage.place)
    for round_number in range(3):
        assert storage.names() == other.names() == []
        other.put("step/a", b"x" * round_number)
        assert (storage.names(), storage.names("step")) == (["step"], ["a"])
        assert storage.size("step/a") == round_number
        other.remove("step")
        assert storage.size("step/a") is None


def test_a_place_does_not_tell_what_is_free_and_renames_nothing(storage: Storage) -> None:
    assert storage.free_bytes() is None
    assert not storage.renames
    storage.sync("")
    with pytest.raises(StorageError, match="cannot be renamed"):
        storage.rename("a", "b")


def test_many_threads_at_once_do_not_disturb_each_other(storage: Storage, send: Send) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(3):
                path = f"step-{step}/{number}"
                send(storage, path, bytes([number]) * 100_000)
                assert storage.size(path) == 100_000
                assert f"{number}" in storage.names(f"step-{step}")
                assert storage.get(path) == bytes([number]) * 100_000
        except BaseException as error:  # noqa: BLE001  told below
            failures.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_checkpoints_are_committed_replaced_and_removed(storage: Storage) -> None:
    for step, generation in ((1, 0), (2, 0), (2, 1)):
        write(storage, step, generation=generation)
    assert catalog.committed_steps(storage) == [1, 2]
    assert verify(storage, 2).is_intact
    assert verify(storage, 2).strays == ()
    catalog.remove_checkpoint(storage, 1)
    assert storage.names() == ["step-00000002"]


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


def test_a_file_on_its_way_takes_the_memory_of_a_part_not_of_the_file() -> None:
    fsspec.register_implementation("counting", Counting, clobber=True)
    Counting.sizes.clear()
    storage = open_storage("counting://place")
    content = memoryview(bytes(512 * MIB))
    tracemalloc.start()
    try:
        file = storage.create("a", len(content))
        for begin in range(0, len(content), 16 * MIB):
            file.write(content[begin : begin + 16 * MIB])
        file.commit()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(Counting.sizes) == len(content)
    assert peak < 100 * MIB


def test_a_discarded_file_sends_nothing_more_not_even_when_it_is_freed() -> None:
    fsspec.register_implementation("counting", Counting, clobber=True)
    Counting.sizes.clear()
    file = open_storage("counting://place").create("a", 1)
    file.write(memoryview(b"1"))
    file.discard()
    del file
    gc.collect()
    assert Counting.sizes == []


# What a URL means.


def test_an_unknown_protocol_is_told_with_what_to_give() -> None:
    with pytest.raises(
        StorageError, match=r"nothing://a: fsspec has no such protocol; give a path, or a URL"
    ):
        open_storage("nothing://a")


def test_a_missing_package_is_named() -> None:
    fsspec.register_implementation(
        "absent",
        "no_such_package.FileSystem",
        clobber=True,
        errtxt="Install no_such_package to use absent://",
    )
    with pytest.raises(StorageError, match="Install no_such_package"):
        open_storage("absent://a")


def test_a_password_is_not_told() -> None:
    fsspec.register_implementation("counting", Counting, clobber=True)
    storage = open_storage("counting://someone:secret@host/place")
    assert storage.place == "counting://someone:…@host/place"
