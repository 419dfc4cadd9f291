"""Which failures of a storage may pass, and trying again until they do. It knows no storage and no file.

Clients of object stores raise types of their own packages; they are told apart by what they carry (an errno,
an HTTP status, a class name), so that none of the packages is needed here.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")

_PERMANENT_TYPES = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
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
    *(
        "HTTPClientError",
        "ConnectionError",
        "ResponseStreamingError",
        "IncompleteReadError",
        "ResponseParserError",
    ),
    *("ClientConnectionError", "ClientPayloadError", "ProtocolError", "IncompleteRead"),
    *("ServiceRequestError", "ServiceResponseError"),
}
# Too slow or too many requests; of the server's own failures all pass but `not implemented`.
_PASSING_STATUSES = {408, 429}
_NOT_IMPLEMENTED = 501
_LARGEST_STATUS = 599


@dataclass(frozen=True)
class Retries:
    """How often something is tried in all, and how long is waited between: at random up to `first_delay_s`,
    doubled each time up to `longest_delay_s`.
    """

    num_tries: int = 5
    first_delay_s: float = 1.0
    longest_delay_s: float = 10.0

    def run(self, act: Callable[[], Result]) -> Result:
        """Call `act` until it does not fail, or fails for good, or the tries are over; then its error."""
        for delay_s in self.delays():
            try:
                return act()
            except Exception as error:
                if not is_passing(error):
                    raise
                time.sleep(delay_s)
        return act()

    def delays(self) -> Iterator[float]:
        """Yield the seconds to wait after each failure but the last."""
        # At random, so that the ranks that failed together do not come back together.
        for number in range(self.num_tries - 1):
            yield random.uniform(0, min(self.longest_delay_s, self.first_delay_s * 2**number))


def is_passing(error: BaseException) -> bool:
    """Whether the same request may work a moment later."""
    chain = list(causes(error))
    statuses = [status for status in map(_http_status, chain) if status is not None]
    if any(isinstance(each, _PERMANENT_TYPES) for each in chain):
        return False
    if statuses:
        return any(_is_passing_status(status) for status in statuses)
    return any(_is_passing_alone(each) for each in chain)


def _is_passing_alone(error: BaseException) -> bool:
    if isinstance(error, _PASSING_TYPES):
        return True
    if isinstance(error, OSError) and error_number(error) in _PASSING_NUMBERS:
        return True
    return any(kind.__name__ in _PASSING_NAMES for kind in type(error).__mro__)


def _is_passing_status(status: int) -> bool:
    return status in _PASSING_STATUSES or (500 <= status <= _LARGEST_STATUS and status != _NOT_IMPLEMENTED)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__


def error_number(error: OSError) -> int | None:
    """Return an OSError's number, also where it is the only argument (`OSError(errno.EIO)`)."""
    if error.errno is None and len(error.args) == 1 and isinstance(error.args[0], int):
        return error.args[0]
    return error.errno


def reason(error: BaseException) -> str:
    """Return what failed in a few words: what the client says, or the system's words for the number."""
    if isinstance(error, FileNotFoundError) and service_code(error) is None:
        # Most file systems give the path alone.
        return os.strerror(errno.ENOENT)
    text = str(error)
    if isinstance(error, OSError):
        number = error_number(error)
        if error.strerror:
            text = error.strerror
        elif number is not None:
            text = os.strerror(number)
    if not text and isinstance(error, TimeoutError):
        text = "timed out"
    return text or type(error).__name__


def service_code(error: BaseException) -> str | None:
    """Return the code by which an S3 service names a failure (`NoSuchBucket`), None where there is none."""
    for each in causes(error):
        response: Any = getattr(each, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
    return None


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of botocore, aiohttp, gcsfs or azure-core carries."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, str) and status.isdecimal():
            status = int(status)
        if isinstance(status, int) and 100 <= status <= _LARGEST_STATUS:
            return status
    return None
