"""A storage whose every operation fails now and then: passing failures go unnoticed, the others are told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from checkpointing.checkpoint_errors import StorageError
from checkpointing.storage import Storage
from checkpointing.storage.remote import RemoteStorage, Retries

AT_ONCE = Retries(num_tries=3, first_delay_s=0.0)


class FlakyFile:
    """A file that is being written."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: memoryview) -> int:
        Flaky.fail("write")
        written: int = self._file.write(content)
        return written

    def close(self) -> None:
        Flaky.fail("close")
        self._file.close()

    def __enter__(self) -> FlakyFile:
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()


class Flaky(LocalFileSystem):  # type: ignore[misc]
    """The local disk; each operation raises the failures that were planned for it, one at each call."""

    protocol = "flaky"
    failures: ClassVar[dict[str, list[Exception]]] = {}
    calls: ClassVar[list[str]] = []

    @classmethod
    def fail(cls, operation: str) -> None:
        cls.calls.append(operation)
        if cls.failures.get(operation):
            raise cls.failures[operation].pop()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("flaky://")))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.fail("open")
        file = super()._open(path, mode, **options)
        return FlakyFile(file) if mode == "wb" else file

    def info(self, path: str, **options: Any) -> Any:
        self.fail("info")
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.fail("ls")
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        self.fail("cat_file")
        return super().cat_file(path, start, end, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        self.fail("pipe_file")
        return super().pipe_file(path, value, mode, **options)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> Any:
        self.fail("rm")
        return super().rm(path, recursive, maxdepth)


@pytest.fixture
def flaky(tmp_path: Path) -> Iterator[RemoteStorage]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.failures.clear()
    Flaky.calls.clear()
    yield RemoteStorage(f"flaky://{tmp_path}/checkpoints", AT_ONCE)
    Flaky.failures.clear()


def write(storage: Storage, path: str) -> None:
    file = storage.create(path, 1)
    file.write(memoryview(b"1"))
    file.commit()


def read(storage: Storage, path: str, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    storage.read_into(path, 0, memoryview(buffer))
    return bytes(buffer)


OPERATIONS: dict[str, tuple[str, Callable[[RemoteStorage], object], object]] = {
    "put": ("pipe_file", lambda it: it.put("step/b", b"1"), None),
    "get": ("cat_file", lambda it: it.get("step/a"), b"12345"),
    "read": ("cat_file", lambda it: read(it, "step/a", 3), b"123"),
    "size": ("info", lambda it: it.size("step/a"), 5),
    "names": ("ls", lambda it: it.names("step"), ["a"]),
    "remove": ("rm", lambda it: it.remove("step"), None),
    "open": ("open", lambda it: write(it, "step/b"), None),
    "write": ("write", lambda it: write(it, "step/b"), None),
    "close": ("close", lambda it: write(it, "step/b"), None),
}


def num_tries(operation: str) -> int:
    """Return how often an operation was called; a file that failed to close is opened anew, and let go."""
    return Flaky.calls.count("open" if operation == "close" else operation)


@pytest.mark.parametrize("name", OPERATIONS)
def test_two_passing_failures_are_not_noticed(flaky: RemoteStorage, name: str) -> None:
    flaky.put("step/a", b"12345")
    operation, act, expected = OPERATIONS[name]
    Flaky.failures[operation] = [OSError(errno.EIO, "Input/output error"), TimeoutError()]
    assert act(flaky) == expected
    assert Flaky.failures[operation] == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_failures_that_do_not_pass_are_told_with_path_and_reason(flaky: RemoteStorage, name: str) -> None:
    flaky.put("step/a", b"12345")
    operation, act, _ = OPERATIONS[name]
    Flaky.failures[operation] = [OSError(errno.EIO, "Input/output error") for _ in range(9)]
    Flaky.calls.clear()
    with pytest.raises(StorageError, match=r"checkpoints/step(/[ab])?: Input/output error"):
        act(flaky)
    assert num_tries(operation) == AT_ONCE.num_tries


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("name", OPERATIONS)
def test_permanent_failures_are_told_at_once(flaky: RemoteStorage, name: str, number: int) -> None:
    flaky.put("step/a", b"12345")
    operation, act, _ = OPERATIONS[name]
    Flaky.failures[operation] = [OSError(number, os.strerror(number)) for _ in range(9)]
    Flaky.calls.clear()
    with pytest.raises(StorageError, match=os.strerror(number)):
        act(flaky)
    assert num_tries(operation) == 1


@pytest.mark.parametrize("num_good", range(5))
def test_a_file_that_broke_anywhere_is_whole_in_the_end(flaky: RemoteStorage, num_good: int) -> None:
    content = os.urandom(4000)
    file = flaky.create("step/a", len(content))
    for number, begin in enumerate(range(0, len(content), 1000)):
        if number == num_good:
            Flaky.failures["write"] = [ConnectionResetError(), ConnectionResetError()]
        file.write(memoryview(content)[begin : begin + 1000])
    if num_good == 4:
        Flaky.failures["close"] = [TimeoutError()]
    file.commit()
    assert flaky.get("step/a") == content


def test_a_missing_file_is_not_waited_for(flaky: RemoteStorage) -> None:
    with pytest.raises(StorageError, match="gone: No such file or directory"):
        flaky.get("gone")
    assert Flaky.calls == ["cat_file"] or Flaky.calls == ["cat_file", "open"]


def test_files_that_a_removal_silently_left_are_told(
    flaky: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bulk removal on S3 does with what it may not remove."""
    flaky.put("step/a", b"12345")
    monkeypatch.setattr(Flaky, "rm", lambda *_arguments, **_options: None)
    with pytest.raises(
        StorageError, match=r"checkpoints/step: 1 files could not be removed, such as .*/step/a"
    ):
        flaky.remove("step")


def test_files_that_were_added_during_a_removal_go_too(
    flaky: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky.put("step/a", b"12345")
    remove = Flaky.rm
    late = ["step/b", "step/c"]

    def interrupted(self: Flaky, path: str, **options: Any) -> None:
        remove(self, path, **options)
        if late:
            flaky.put(late.pop(), b"1")

    monkeypatch.setattr(Flaky, "rm", interrupted)
    flaky.remove("step")
    assert flaky.names() == []
