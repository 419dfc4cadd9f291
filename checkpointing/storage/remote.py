"""Any fsspec URL as a storage: object stores and whatever else has a protocol.

Nothing is renamed and no listing is taken from a cache. What may pass is tried again; every failure in the
end is a StorageError with its reason. Where a service lies and who we are is the client's own matter: s3://
reads AWS_ENDPOINT_URL, AWS_PROFILE and the rest of AWS's variables and files, and fsspec's configuration
(FSSPEC_S3_ENDPOINT_URL) works for every protocol.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.dircache import DirCache
from fsspec.spec import AbstractBufferedFile

from checkpointing.checkpoint_errors import StorageError
from checkpointing.outages import error_number, is_garbled, is_passing, is_refused, service_code


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
                if not is_passing(error) and not is_garbled(error):
                    raise
                time.sleep(delay_s)
        return act()

    def delays(self) -> Iterator[float]:
        """Yield the seconds to wait after each failure but the last."""
        # At random, so that the ranks that failed together do not come back together.
        for number in range(self.num_tries - 1):
            yield random.uniform(0, min(self.longest_delay_s, self.first_delay_s * 2**number))


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


Result = TypeVar("Result")

# S3 takes 10,000 parts at most, each of 5 MiB at least.
_PART_BYTES = 32 << 20
_MAX_PARTS = 9_000
# A folder is removed again when others added to it meanwhile.
_NUM_REMOVALS = 3
# Clients do not find again what they write there.
_NAMELESS = re.compile(r"[^/:]+//")
_PATTERN = re.compile(r"[*?[]")
_PASSWORD = re.compile(r"(?<=://)([^/:@]*):[^/@]*@")


class RemoteStorage:
    """The folder that an fsspec URL names; it need not exist before something is written."""

    renames = False

    def __init__(self, url: str, retries: Retries = Retries()) -> None:
        """Raise StorageError where fsspec has no such protocol, or its package is missing."""
        self.place = _PASSWORD.sub(r"\1:…@", url.rstrip("/"))
        self._url, self._retries = url, retries
        self._fs, root = _opened(url, self.place)
        self._root = root.rstrip("/")
        if _NAMELESS.match(self._root):
            raise StorageError(f"{self.place}: a folder without a name follows the bucket; write one / there")

    def create(self, path: str, num_bytes: int) -> _RemoteFile:
        return _RemoteFile(self, path, max(_PART_BYTES, -(-num_bytes // _MAX_PARTS)))

    def put(self, path: str, content: bytes) -> None:
        """Write a small file: one request to an object store, and so one act."""
        self.run(path, lambda: self.in_folder(path, lambda: self._fs.pipe_file(self._full(path), content)))

    def put_new(self, path: str, content: bytes) -> bool:
        """Write a small file unless there is one. Two who try at the same moment may both succeed: few stores
        offer more.
        """
        if self.size(path) is not None:
            return False
        self.put(path, content)
        return True

    def get(self, path: str) -> bytes:
        return bytes(self.run(path, lambda: self._fs.cat_file(self._full(path))))

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        if not buffer:
            return
        end = begin + len(buffer)
        content = self.run(path, lambda: self._fs.cat_file(self._full(path), start=begin, end=end))
        if len(content) != len(buffer):
            missing = len(buffer) - len(content)
            raise StorageError(
                f"{self.place}/{path}: ends at {begin + len(content)} bytes, {missing} more are expected"
            )
        buffer[:] = content

    def size(self, path: str) -> int | None:
        entry = self.run(path, lambda: self._unless_missing(lambda: self._fs.info(self._full(path)), None))
        return int(entry["size"]) if entry is not None and entry["type"] == "file" else None

    def sizes(self, path: str) -> dict[str, int]:
        full = self._full(path)
        entries = self.run(path, lambda: self._unless_missing(lambda: self._fs.ls(full, detail=True), []))
        files = [entry for entry in entries if entry["type"] == "file" and entry["name"].rstrip("/") != full]
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"]) for entry in files}

    def names(self, path: str = "") -> list[str]:
        full = self._full(path)
        entries = self.run(path, lambda: self._unless_missing(lambda: self._fs.ls(full, detail=False), []))
        # A folder's own marker object, or a file of that name, is nothing in it.
        return sorted(
            {entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry.rstrip("/") != full}
        )

    def rename(self, source: str, target: str) -> None:
        """Refuse: no object store moves a folder as one act."""
        raise StorageError(f"{self.place}: {source} cannot be renamed to {target} here")

    def sync(self, path: str) -> None:
        """Do nothing: what is written is durable when the storage says so."""

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all it holds; several processes may do so at once."""
        if not path:
            for name in self.names():
                self.remove(name)
            return
        full = self._full(path)
        left: list[str] = []
        for _ in range(_NUM_REMOVALS):
            self.run(path, lambda: self._unless_missing(lambda: self._remove_all(full), None))
            # A bulk removal does not tell what was refused.
            left = self.run(path, lambda: self._unless_missing(lambda: self._fs.find(full), []))
            if not left:
                return
        raise StorageError(f"{self.place}/{path}: {len(left)} files could not be removed, such as {left[0]}")

    def _remove_all(self, full: str) -> None:
        if not _PATTERN.search(full):
            self._fs.rm(full, recursive=True)
            return
        # fsspec would take it for a pattern, which others' files match.
        for file in self._fs.find(full):
            self._fs.rm_file(file)

    def free_bytes(self) -> int | None:
        """Return None: fsspec does not tell."""
        return None

    # For files that are being written.

    def open(self, path: str, part_bytes: int) -> Any:
        """Return fsspec's file for writing, sent in parts of `part_bytes`. Raises what fsspec raises."""
        return self.in_folder(path, lambda: self._fs.open(self._full(path), "wb", block_size=part_bytes))

    def in_folder(self, path: str, act: Callable[[], Result]) -> Result:
        """Call `act`, which writes to `path`; where the folder is missing, make it first.

        Object stores have no folders: asked for one, some would make a bucket.
        """
        try:
            return act()
        except FileNotFoundError as error:
            if service_code(error) is not None:
                raise
            self._fs.makedirs(self._full(path).rsplit("/", 1)[0], exist_ok=True)
            return act()

    def run(self, path: str, act: Callable[[], Result]) -> Result:
        """Call `act`, again if its failure may pass; raise what fails in the end as a StorageError."""
        try:
            try:
                return self._retries.run(act)
            except Exception as error:
                if not is_refused(error):
                    raise
                # Clients read credentials when they begin: those that were renewed since a new one has.
                self._fs, _ = _opened(self._url, self.place)
                return act()
        except Exception as error:
            where = f"{self.place}/{path}" if path else self.place
            raise StorageError(f"{where}: {reason(error)}") from error

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _unless_missing(self, act: Callable[[], Any], otherwise: Any) -> Any:
        self._fs.invalidate_cache()
        try:
            return act()
        except FileNotFoundError as error:
            # An empty place is one thing, a bucket that is not there another.
            code = service_code(error)
            if code == "NoSuchBucket":
                raise
            if code is not None:
                # No service says so of a folder: something between us and it does. Taken for an empty one,
                # files whose manifest is there would count as left over.
                said = f"the service answered {code} where it lists what there is"
                raise OSError(errno.ESTALE, said) from None
            return otherwise


class _RemoteFile:
    """A file on its way. What was written so far is remembered, not copied: where a connection breaks for
    longer than the client itself tries, all of it is sent again.
    """

    def __init__(self, storage: RemoteStorage, path: str, part_bytes: int) -> None:
        self._storage = storage
        self._path = path
        self._part_bytes = part_bytes
        self._contents: list[memoryview] = []
        self._num_sent = 0
        self._file: Any = None

    def write(self, content: memoryview) -> None:
        self._contents.append(content)
        self._storage.run(self._path, self._send)

    def commit(self) -> None:
        try:
            self._storage.run(self._path, self._finish)
        except StorageError as error:
            # Where the answer alone was lost, some services do not know the upload any more; a file is there
            # whole or not at all.
            num_bytes = sum(map(len, self._contents))
            if service_code(error) != "NoSuchUpload" or self._storage.size(self._path) != num_bytes:
                raise
        self._file = None
        self._contents.clear()

    def discard(self) -> None:
        self._drop()
        self._contents.clear()

    def _send(self) -> None:
        """Send what was not sent yet: all of it where the file had to be dropped."""
        try:
            if self._file is None:
                self._file = self._storage.open(self._path, self._part_bytes)
                self._num_sent = 0
            while self._num_sent < len(self._contents):
                self._file.write(self._contents[self._num_sent])
                self._num_sent += 1
        except BaseException:
            self._drop()
            raise

    def _finish(self) -> None:
        self._send()
        try:
            self._file.close()
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Give the unfinished file up. It may fail in any way that a client can: nothing rests on it."""
        file, self._file = self._file, None
        if isinstance(file, AbstractBufferedFile):
            # First: else fsspec finishes the file when its memory is freed.
            file.closed = True
            with contextlib.suppress(Exception):
                file.discard()
        elif file is not None:
            with contextlib.suppress(Exception):
                file.close()


def _opened(url: str, place: str) -> tuple[Any, str]:
    """Return a file system of our own, which keeps no listings, and the place's path in it."""
    try:
        file_system, root = url_to_fs(url, skip_instance_cache=True)
    except ImportError as error:
        # fsspec's own words name the package.
        raise StorageError(f"{place}: {error.args[0] or error.__cause__}") from error
    except Exception as error:
        if "Protocol not known" in str(error):
            said = "fsspec has no such protocol; give a path, or a URL such as s3://bucket/folder"
            raise StorageError(f"{place}: {said}") from error
        raise StorageError(f"{place}: {reason(error)}") from error
    listings = getattr(file_system, "dircache", None)
    # Hugging Face's keeps a dict, which cannot be told; it is emptied before each look (`_unless_missing`).
    if isinstance(listings, DirCache):
        listings.use_listings_cache = False
    return file_system, str(root)
