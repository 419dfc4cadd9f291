"""Failures of a storage that may pass: told from damage, and waited for. No torch.

A storage tries again by itself for seconds (`checkpointing.storage.remote`), a restore for minutes. Clients
of object stores raise types of their own packages; they are distinguished by what they carry (an errno, an
HTTP status, a class name), so that none of the packages is needed here.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDoneError
from typing import Any, TypeVar

from checkpointing.checkpoint_errors import StorageError
from checkpointing.options import Event, no_event

_PERMANENT_TYPES = (
    *(FileNotFoundError, PermissionError, FileExistsError),
    *(IsADirectoryError, NotADirectoryError, NotImplementedError),
)
_PASSING_TYPES = (TimeoutError, ConnectionError, InterruptedError, BlockingIOError)
_PASSING_NUMBERS = {
    getattr(errno, name)
    for name in (
        *("EIO", "EREMOTEIO", "EAGAIN", "ESTALE", "EBUSY", "EINTR", "EPIPE", "ENOBUFS", "ETIMEDOUT"),
        *("ECONNRESET", "ECONNABORTED", "ECONNREFUSED", "ENETDOWN", "ENETRESET", "ENETUNREACH"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ESHUTDOWN"),
    )
    if hasattr(errno, name)
}
# Connections that broke, as botocore, aiohttp, urllib3, azure-core and http.client call them.
_PASSING_NAMES = {
    *("HTTPClientError", "ConnectionError", "ResponseStreamingError", "IncompleteReadError"),
    *("ResponseParserError", "ClientConnectionError", "ClientPayloadError", "ProtocolError"),
    *("IncompleteRead", "ServiceRequestError", "ServiceResponseError"),
}
# Credentials that were not found or not renewed, as botocore and google-auth call them.
_REFUSED_NAMES = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"),
    *("UnauthorizedSSOTokenError", "RefreshError", "DefaultCredentialsError"),
}
# What says something of what is asked for, or of the moment; of all others below 500 the request is refused,
# as where credentials have expired (400, and to HEAD without any word).
_UNREFUSED_STATUSES = {404, 408, 410, 412, 416, 429}
# Clients that found a checksum of the service's own to differ: botocore, gcsfs, google-resumable-media.
_GARBLED_NAMES = {"FlexibleChecksumError", "ChecksumError", "DataCorruption"}
# Too slow or too many requests; of the server's own failures all pass but `not implemented`.
_LARGEST_STATUS = 599
# Codes of S3's, with 400 or 409, for a body that did not come whole or in time, and for two who act at once.
_PASSING_CODES = {
    *("RequestTimeout", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "InvalidPart"),
    "OperationAborted",
}
_PASSING_STATUSES = {408, 429, *range(500, _LARGEST_STATUS + 1)} - {501}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
# How long a place that can be done without may take to be listed.
_LISTING_S = 20.0
_Result = TypeVar("_Result")


def is_passing(error: BaseException) -> bool:
    """Whether the same request may work a moment later."""
    chain = list(causes(error))
    if any(isinstance(cause, _PERMANENT_TYPES) for cause in chain):
        return False
    if service_code(error) in _PASSING_CODES:
        return True
    statuses = {status for status in map(_http_status, chain) if status is not None}
    if statuses:
        return not statuses.isdisjoint(_PASSING_STATUSES)
    return any(_is_passing_alone(cause) for cause in chain)


def is_refused(error: BaseException) -> bool:
    """Whether the storage does not let us see what it holds, which says nothing of what that is."""
    return not is_passing(error) and any(
        isinstance(cause, PermissionError)
        or _is_refusal(_http_status(cause))
        or any(kind.__name__ in _REFUSED_NAMES for kind in type(cause).__mro__)
        for cause in causes(error)
    )


def _is_refusal(status: int | None) -> bool:
    return status is not None and 400 <= status < 500 and status not in _UNREFUSED_STATUSES


def is_garbled(error: BaseException) -> bool:
    """Whether a client saw bytes that the network may have changed on their way: no outage, but worth
    another try.
    """
    return any(kind.__name__ in _GARBLED_NAMES for cause in causes(error) for kind in type(cause).__mro__)


def _is_passing_alone(error: BaseException) -> bool:
    if isinstance(error, _PASSING_TYPES):
        return True
    if isinstance(error, OSError) and error_number(error) in _PASSING_NUMBERS:
        return True
    return any(kind.__name__ in _PASSING_NAMES for kind in type(error).__mro__)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def error_number(error: OSError) -> int | None:
    """Return an OSError's number, also where it is the only argument (`OSError(errno.EIO)`)."""
    if error.errno is None and len(error.args) == 1 and isinstance(error.args[0], int):
        return error.args[0]
    return error.errno


def service_code(error: BaseException) -> str | None:
    """Return the code by which an S3 service names a failure (`NoSuchBucket`), None where there is none."""
    for cause in causes(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
    return None


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of botocore, aiohttp, gcsfs or azure-core carries."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    if any(kind.__name__ == "HttpProcessingError" for kind in type(error).__mro__):
        # aiohttp's own code (400) for an answer that broke off: no server has said it.
        return None
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, str) and status.isdecimal():
            status = int(status)
        if isinstance(status, int) and 100 <= status <= _LARGEST_STATUS:
            return status
    return None


def may_be_damage(error: BaseException) -> bool:
    """Whether an outage that does not end may be a device that has lost these bytes (EIO)."""
    numbers = [error_number(cause) for cause in causes(error) if isinstance(cause, OSError)]
    return errno.EIO in numbers


def in_time(act: Callable[[], _Result], place: str) -> _Result:
    """Return what `act` does with a place that may stand still: it goes on in a thread, and StorageError is
    raised where it is not done in time.
    """
    done: Future[_Result] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001  raised below
            done.set_exception(error)

    threading.Thread(target=run, name=f"listing {place}", daemon=True).start()
    try:
        return done.result(_LISTING_S)
    except NotDoneError as error:
        raise StorageError(f"{place}: it did not answer in {_LISTING_S:.0f} s") from error


class OutagePatience:
    """How long one process waits for storages that do not answer: `limit_s` from the first failure on.

    `on_event` hears `restore_waits` once in each outage, before the first wait, and of all else that is to be
    told.
    """

    def __init__(self, limit_s: float = 0.0, on_event: Event = no_event) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self.tell = on_event

    @property
    def waited_s(self) -> float:
        """The seconds since the outage's first failure; 0 where there was none."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def lasts(self, why: str) -> bool:
        """Note a failure; return whether the storage is to be asked once more, after a `pause`."""
        if self._since is None:
            self._since = time.monotonic()
            if self._limit_s > 0:
                self.tell("restore_waits", {"why": why, "patience_s": self._limit_s})
        return self.waited_s < self._limit_s

    def end_outage(self) -> None:
        """Note that the storage answers: what fails later is another outage."""
        self._since, self._pause_s = None, _FIRST_PAUSE_S

    def pause(self) -> None:
        """Wait, ever longer, and at the end of the patience no longer than it lasts."""
        time.sleep(max(0.0, min(self._pause_s, self._limit_s - self.waited_s)))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
