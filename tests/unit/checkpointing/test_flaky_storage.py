"""A storage whose every operation fails now and then: failures that may pass, of any client, are tried again
and go unnoticed, the others are told.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import fsspec
import pytest
from aiohttp import ClientPayloadError, ServerDisconnectedError
from aiohttp.http_exceptions import ContentLengthError
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem
from s3fs.errors import translate_boto_error
from sample_checkpoint import send

from checkpointing import catalog
from checkpointing.checkpoint_errors import StorageError
from checkpointing.outages import is_passing, is_refused
from checkpointing.storage import Storage
from checkpointing.storage.remote import RemoteStorage, Retries, reason

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


def failing(operation: str) -> Callable[..., Any]:
    """Return an operation of the local disk with the failures that are planned for it."""
    call = getattr(LocalFileSystem, operation)

    def fail_or_call(self: Flaky, *arguments: Any, **options: Any) -> Any:
        self.fail(operation)
        return call(self, *arguments, **options)

    return fail_or_call


for operation in ("info", "ls", "cat_file", "pipe_file", "rm"):
    setattr(Flaky, operation, failing(operation))


@pytest.fixture
def flaky(tmp_path: Path) -> Iterator[RemoteStorage]:
    """A storage with the file step/a."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    storage = RemoteStorage(f"flaky://{tmp_path}/checkpoints", AT_ONCE)
    storage.put("step/a", b"12345")
    Flaky.calls.clear()
    yield storage
    Flaky.failures.clear()


def read(storage: Storage, path: str, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    storage.read_into(path, 0, memoryview(buffer))
    return bytes(buffer)


OPERATIONS: dict[str, tuple[str, Callable[[RemoteStorage], object], object]] = {
    "put": ("pipe_file", lambda storage: storage.put("step/b", b"1"), None),
    "get": ("cat_file", lambda storage: storage.get("step/a"), b"12345"),
    "read": ("cat_file", lambda storage: read(storage, "step/a", 3), b"123"),
    "size": ("info", lambda storage: storage.size("step/a"), 5),
    "names": ("ls", lambda storage: storage.names("step"), ["a"]),
    "remove": ("rm", lambda storage: storage.remove("step"), None),
    "open": ("open", lambda storage: send(storage, "step/b", b"1"), None),
    "write": ("write", lambda storage: send(storage, "step/b", b"1"), None),
    "close": ("close", lambda storage: send(storage, "step/b", b"1"), None),
}


def num_tries(operation: str) -> int:
    """Return how often an operation was called; a file that failed to close is opened anew, and let go."""
    return Flaky.calls.count("open" if operation == "close" else operation)


@pytest.mark.parametrize("name", OPERATIONS)
def test_two_passing_failures_are_not_noticed(flaky: RemoteStorage, name: str) -> None:
    operation, act, expected = OPERATIONS[name]
    Flaky.failures[operation] = [OSError(errno.EIO, "Input/output error"), TimeoutError()]
    assert act(flaky) == expected
    assert Flaky.failures[operation] == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("name", OPERATIONS)
def test_other_failures_are_told_with_path_and_reason_the_permanent_ones_at_once(
    flaky: RemoteStorage, name: str, number: int
) -> None:
    operation, act, _ = OPERATIONS[name]
    Flaky.failures[operation] = [OSError(number, os.strerror(number)) for _ in range(9)]
    with pytest.raises(StorageError, match=rf"checkpoints/step(/[ab])?: {os.strerror(number)}"):
        act(flaky)
    # Where we are refused a client that was made anew asks once more: credentials may have been renewed.
    tries = {errno.EIO: AT_ONCE.num_tries, errno.EACCES: 2}
    assert num_tries(operation) == tries.get(number, 1)


def service_says(status: int, code: str, kind: type[OSError] = OSError) -> OSError:
    """Return what s3fs raises for an answer of a service, from what botocore raised."""
    error = kind("said")
    error.__cause__ = RuntimeError()
    error.__cause__.response = {  # type: ignore[attr-defined]
        "Error": {"Code": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return error


def test_a_404_to_a_listing_is_no_empty_folder(flaky: RemoteStorage) -> None:
    Flaky.failures["ls"] = [service_says(404, "404", FileNotFoundError)]
    assert flaky.names("step") == ["a"]
    Flaky.failures["ls"] = [service_says(404, "404", FileNotFoundError) for _ in range(9)]
    with pytest.raises(StorageError, match="the service answered 404 where it lists what there is") as caught:
        flaky.names("step")
    assert is_passing(caught.value)
    Flaky.failures["ls"] = []
    assert flaky.names("nothing") == []


def test_leftovers_are_told_by_one_listing(flaky: RemoteStorage) -> None:
    """What the second of two listings did not show would make intact files leftovers."""
    flaky.put("step-00000001/g000-00-manifest.json", b"{}")
    flaky.put("step-00000001/g000-00-00000-00.safetensors", b"1")
    flaky.put("step-00000001/manifest.json", b"{}")
    Flaky.calls.clear()
    assert catalog.remove_leftovers(flaky, 5) == []
    assert Flaky.calls.count("ls") == 2  # of the place, and of the folder


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "ExpiredToken", "refused"),
        (400, "400", "refused"),  # to HEAD, whose answers have no body
        (403, "RequestTimeTooSkewed", "refused"),
        (400, "InvalidToken", "refused"),
        (400, "RequestTimeout", "passing"),
        (400, "BadDigest", "passing"),
        (409, "OperationAborted", "passing"),
        (503, "SlowDown", "passing"),
        (404, "NoSuchKey", ""),
        (416, "InvalidRange", ""),
    ],
)
def test_what_a_service_says_is_an_outage_or_a_refusal_or_about_what_it_holds(
    status: int, code: str, expected: str
) -> None:
    error = service_says(status, code)
    found = "passing" if is_passing(error) else "refused" if is_refused(error) else ""
    assert found == expected


def test_credentials_that_were_renewed_since_are_read(flaky: RemoteStorage) -> None:
    first = flaky._fs
    Flaky.failures["cat_file"] = [service_says(400, "ExpiredToken", PermissionError)]
    assert flaky.get("step/a") == b"12345"
    assert flaky._fs is not first


def test_a_file_whose_completion_is_not_known_any_more_is_there(
    flaky: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = flaky.create("step/b", 3)
    file.write(memoryview(b"123"))
    # The first completion was done, and its answer lost: a client asks again.
    Flaky.failures["close"] = [service_says(404, "NoSuchUpload", FileNotFoundError)]
    file.commit()
    assert flaky.get("step/b") == b"123"
    # An upload that somebody broke off.
    file = flaky.create("step/c", 3)
    file.write(memoryview(b"123"))
    monkeypatch.setattr(flaky, "size", lambda _: None)
    Flaky.failures["close"] = [service_says(404, "NoSuchUpload", FileNotFoundError)]
    with pytest.raises(StorageError):
        file.commit()


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


def test_files_that_a_removal_silently_left_are_told(
    flaky: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bulk removal on S3 does with what it may not remove."""
    monkeypatch.setattr(Flaky, "rm", lambda *_arguments, **_options: None)
    with pytest.raises(StorageError, match=r"step: 1 files could not be removed, such as .*/step/a"):
        flaky.remove("step")


def test_files_that_were_added_during_a_removal_go_too(
    flaky: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = Flaky.rm
    late = ["step/b", "step/c"]

    def interrupted(self: Flaky, path: str, **options: Any) -> None:
        remove(self, path, **options)
        if late:
            flaky.put(late.pop(), b"1")

    monkeypatch.setattr(Flaky, "rm", interrupted)
    flaky.remove("step")
    assert flaky.names() == []


# Which failures are tried again.


def answered(status: int, code: str) -> Exception:
    """Return what s3fs raises for an answer of an S3 service."""
    described = {"Code": code, "Message": code}
    response: Any = {"Error": described, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = translate_boto_error(ClientError(response, "PutObject"))
    return error


class OtherClientError(Exception):
    """As gcsfs and azure-core do: the HTTP status as an attribute."""

    def __init__(self, **attributes: object) -> None:
        super().__init__("answered")
        self.__dict__.update(attributes)


PASSING = [
    TimeoutError(),
    FSTimeoutError(),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    ConnectionError("the other side is gone"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.EIO),
    OSError(errno.ESTALE, "Stale file handle"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    OSError(errno.EHOSTUNREACH, "No route to host"),
    answered(500, "InternalError"),
    answered(503, "SlowDown"),
    answered(429, "TooManyRequests"),
    OtherClientError(status=502),
    OtherClientError(code="503"),
    OtherClientError(status_code=429),
    EndpointConnectionError(endpoint_url="http://nowhere"),
    ServerDisconnectedError(),
    ClientPayloadError("cut short"),
]
PERMANENT = [
    FileNotFoundError("a"),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    OSError(errno.EROFS, "Read-only file system"),
    IsADirectoryError(errno.EISDIR, "Is a directory"),
    answered(404, "NoSuchKey"),
    answered(404, "NoSuchBucket"),
    answered(403, "AccessDenied"),
    answered(403, "InvalidAccessKeyId"),
    answered(416, "InvalidRange"),
    answered(501, "NotImplemented"),
    OtherClientError(status=400),
    NoCredentialsError(),
    ValueError("wrong"),
    NotImplementedError(),
]


@pytest.mark.parametrize(
    ("error", "passes"),
    [*((error, True) for error in PASSING), *((error, False) for error in PERMANENT)],
    ids=repr,
)
def test_only_what_may_pass_is_tried_again_and_the_last_error_is_raised(
    error: Exception, passes: bool
) -> None:
    first = TimeoutError("the first") if passes else error
    act = Mock(side_effect=[first, error, first, "done"])
    retries = Retries(num_tries=2, first_delay_s=0.0)
    with pytest.raises(type(error)) as raised:
        retries.run(act)
    assert raised.value is error
    assert act.call_count == (2 if passes else 1)
    if passes:
        assert retries.run(act) == "done"


def test_an_answer_that_broke_off_may_pass_though_aiohttp_gives_it_a_status() -> None:
    error = ClientPayloadError("Response payload is not completed")
    error.__cause__ = ContentLengthError("Not enough data to satisfy content length header.")
    assert is_passing(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answered(403, "AccessDenied"), True),
        (answered(401, "Unauthorized"), True),
        (answered(400, "ExpiredToken"), True),
        (NoCredentialsError(), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (answered(404, "NoSuchKey"), False),
        (answered(503, "SlowDown"), False),
        (OSError(errno.EIO, "Input/output error"), False),
    ],
    ids=repr,
)
def test_what_a_storage_does_not_let_us_see_is_told_from_what_it_lacks(
    error: Exception, expected: bool
) -> None:
    told = StorageError("s3://bucket/a: no")
    told.__cause__ = error
    assert is_refused(told) is expected


def test_a_cause_that_may_pass_counts_where_the_error_itself_says_nothing() -> None:
    error = RuntimeError("upload failed")
    error.__cause__ = ConnectionResetError()
    assert is_passing(error)
    error.__cause__.__cause__ = error
    assert is_passing(error)


def test_delays_grow_at_random_up_to_a_limit() -> None:
    retries = Retries(num_tries=8, first_delay_s=1.0, longest_delay_s=10.0)
    many = [list(retries.delays()) for _ in range(200)]
    limits = [1, 2, 4, 8, 10, 10, 10]
    for position, limit in enumerate(limits):
        values = [delays[position] for delays in many]
        assert 0.7 * limit < max(values) <= limit
        assert min(values) < 0.3 * limit
    assert {len(delays) for delays in many} == {7}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError("/bucket/a"), "No such file or directory"),
        (OSError(errno.EIO), "Input/output error"),
        (TimeoutError(), "timed out"),
        (answered(404, "NoSuchBucket"), "NoSuchBucket"),
        (ValueError(), "ValueError"),
    ],
    ids=repr,
)
def test_a_reason_is_words(error: Exception, words: str) -> None:
    assert reason(error) == words
