"""A folder of this machine or of a shared file system, as a storage. POSIX only.

Large files are written past the page cache (O_DIRECT) where the file system can: the kernel then copies no
byte, which leaves the cores and the cache to the training. What is not aligned is written the usual way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from checkpointing.checkpoint_errors import StorageError

# The unit of O_DIRECT: no disk in use asks for more than 4 KiB.
ALIGNMENT = 4096


class LocalStorage:
    """A folder; it need not exist before something is written."""

    renames = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser().absolute()
        self.place = str(self._folder)

    def create(self, path: str, num_bytes: int) -> _LocalFile:
        """Open a new file of `num_bytes`, its folders made first; an older one of that name is replaced."""
        del num_bytes  # a local file needs no announcement
        target = self._folder / path
        with _explained(target):
            _make_folders(target.parent)
            return _LocalFile(target)

    def put(self, path: str, content: bytes) -> None:
        target = self._folder / path
        with _explained(target), _drafted(target, content) as draft:
            draft.rename(target)
            sync_folder(target.parent)

    def put_new(self, path: str, content: bytes) -> bool:
        """Write a small file unless there is one: of several who try, one succeeds."""
        target = self._folder / path
        with _explained(target), _drafted(target, content) as draft:
            try:
                target.hardlink_to(draft)
            except FileExistsError:
                return False
            sync_folder(target.parent)
        return True

    def get(self, path: str) -> bytes:
        with _explained(self._folder / path):
            return (self._folder / path).read_bytes()

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        source = self._folder / path
        with _explained(source):
            descriptor = os.open(source, os.O_RDONLY)
            try:
                # Without it the kernel reads ahead little for one large read of a file that was just opened:
                # 0.5 instead of 2 GB/s from a disk, measured in pieces of 32 MiB.
                os.posix_fadvise(descriptor, begin, len(buffer), os.POSIX_FADV_SEQUENTIAL)
                _fill(descriptor, begin, buffer, source)
            finally:
                os.close(descriptor)

    def size(self, path: str) -> int | None:
        with _explained(self._folder / path):
            try:
                status = (self._folder / path).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def sizes(self, path: str) -> dict[str, int]:
        with _explained(self._folder / path):
            try:
                entries = list(os.scandir(self._folder / path))
            except (FileNotFoundError, NotADirectoryError):
                return {}
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def names(self, path: str = "") -> list[str]:
        with _explained(self._folder / path):
            try:
                return sorted(os.listdir(self._folder / path))  # noqa: PTH208  names, not paths
            except FileNotFoundError:
                return []
            except NotADirectoryError:
                if not path:
                    # The place itself: whoever meant a folder is to know that it is a file.
                    raise
                return []

    def rename(self, source: str, target: str) -> None:
        """Move a folder as one durable act; one that is in the place must be empty."""
        with _explained(self._folder / target):
            (self._folder / source).rename(self._folder / target)
            sync_folder((self._folder / target).parent)

    def sync(self, path: str) -> None:
        with _explained(self._folder / path):
            sync_folder(self._folder / path)

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all it holds; several processes may do so at once."""
        target = self._folder / path
        with _explained(target):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target, onerror=_unless_gone)
            else:
                target.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Return what this user can still write to the file system."""
        with _explained(self._folder):
            existing = next(folder for folder in (self._folder, *self._folder.parents) if folder.exists())
            figures = os.statvfs(existing)
            return figures.f_bavail * figures.f_frsize


class _LocalFile:
    """A file being written, past the page cache as long as that goes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o666)
            self._is_direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # tmpfs and some network file systems.
            self._descriptor = os.open(path, flags, 0o666)
            self._is_direct = False

    def write(self, content: memoryview) -> None:
        with _explained(self._path):
            while content:
                whole = len(content) - len(content) % ALIGNMENT
                if self._is_direct and not whole:
                    self._leave_direct()
                content = content[self._write_some(content[:whole] if self._is_direct else content) :]

    def _write_some(self, content: memoryview) -> int:
        try:
            written = os.write(self._descriptor, content)
        except OSError as error:
            if not (self._is_direct and error.errno == errno.EINVAL):
                raise
            # The memory or the file system asks for another alignment.
            self._leave_direct()
            return 0
        if self._is_direct and written % ALIGNMENT:
            # A short write: what follows begins off the grid.
            self._leave_direct()
        return written

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False

    def commit(self) -> None:
        with _explained(self._path):
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def discard(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


@contextlib.contextmanager
def _drafted(target: Path, content: bytes) -> Iterator[Path]:
    """Write a durable file beside its place; whatever is left of it at the end is removed."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    _make_folders(target.parent)
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def _fill(descriptor: int, begin: int, buffer: memoryview, path: Path) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], begin + done)
        if count == 0:
            raise StorageError(
                f"{path}: ends at {begin + done} bytes, {len(buffer) - done} more are expected"
            )
        done += count


def _make_folders(folder: Path) -> None:
    """Make a folder and those above it, each durable in the one that holds it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        # Other ranks make the same ones.
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_scratch(folder: str, num_bytes: int) -> int:
    """Open a new file without a name, all of its bytes taken on the disk; return the descriptor.

    The disk has them back when the last process ends that has it open or mapped. Raises OSError.
    """
    descriptor, path = tempfile.mkstemp(prefix=".orchestra-", dir=folder)
    try:
        os.unlink(path)  # noqa: PTH108  a name, not a path
        os.posix_fallocate(descriptor, 0, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unless_gone(_function: object, _path: str, failure: tuple[type, BaseException, object]) -> None:
    error = failure[1]
    if not isinstance(error, FileNotFoundError):
        raise error
