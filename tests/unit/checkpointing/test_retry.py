"""Which failures are tried again: those that may pass, of any client, and never one that stays."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from aiohttp import ClientPayloadError, ServerDisconnectedError
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from fsspec.exceptions import FSTimeoutError
from s3fs.errors import translate_boto_error

from checkpointing.storage.remote import Retries, is_passing, reason


def answered(status: int, code: str) -> Exception:
    """Return what s3fs raises for an answer of an S3 service."""
    response: Any = {
        "Error": {"Code": code, "Message": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
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
    answered(503, "ServiceUnavailable"),
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


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    failures = [error, error]

    def act() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert Retries(num_tries=3, first_delay_s=0.0).run(act) == "done"


@pytest.mark.parametrize("error", PERMANENT, ids=repr)
def test_what_stays_is_tried_once(error: Exception) -> None:
    num_calls = 0

    def act() -> None:
        nonlocal num_calls
        num_calls += 1
        raise error

    with pytest.raises(type(error)):
        Retries(num_tries=3, first_delay_s=0.0).run(act)
    assert num_calls == 1


def test_tries_end_with_the_last_error() -> None:
    numbers = iter(range(10))

    def act() -> None:
        raise TimeoutError(next(numbers))

    with pytest.raises(TimeoutError, match="3"):
        Retries(num_tries=4, first_delay_s=0.0).run(act)


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
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EIO), "Input/output error"),
        (TimeoutError(), "timed out"),
        (answered(404, "NoSuchBucket"), "NoSuchBucket"),
        (ValueError(), "ValueError"),
    ],
    ids=repr,
)
def test_a_reason_is_words(error: Exception, words: str) -> None:
    assert reason(error) == words
