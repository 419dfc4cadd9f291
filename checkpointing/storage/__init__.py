"""Where checkpoints lie: the few operations a storage must have, and which one a place means.

All paths are relative to the place, with `/`. Every failure of the storage itself is a StorageError with the
reason (`No space left on device`), a missing file included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class WritableFile(Protocol):
    """A file being written, from front to back."""

    def write(self, content: memoryview) -> None:
        """Append bytes. They may be on their way until `commit`; `content` must not change before."""

    def commit(self) -> None:
        """Finish: when this returns, the bytes survive a power cut."""

    def discard(self) -> None:
        """Give up: release what is held; the file may stay as a leftover. Never raises."""


class Storage(Protocol):
    """A place that holds checkpoints: a local folder, or what an fsspec URL names."""

    place: str
    # Whether a folder can be renamed as one act. Where not, the manifest's own put is the commit.
    renames: bool

    def create(self, path: str, num_bytes: int) -> WritableFile:
        """Open a new file of `num_bytes`, its folders made first."""

    def put(self, path: str, content: bytes) -> None:
        """Write a small file as one act: it is there with all its bytes and durable, or not at all."""

    def put_new(self, path: str, content: bytes) -> bool:
        """Write a small file unless there is one; return whether it was written."""

    def get(self, path: str) -> bytes:
        """Return a whole file."""

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `begin` on. StorageError where the file ends before."""

    def size(self, path: str) -> int | None:
        """Return a file's size in bytes, None where there is no such file."""

    def sizes(self, path: str) -> dict[str, int]:
        """Return the bytes of each file directly in a folder, by name; {} where there is no folder."""

    def names(self, path: str = "") -> list[str]:
        """Return the names of what lies directly in a folder, sorted; [] where there is no such folder."""

    def rename(self, source: str, target: str) -> None:
        """Move a folder as one durable act (only where `renames`)."""

    def sync(self, path: str) -> None:
        """Make the entries of a folder durable; nothing to do where puts are durable by themselves."""

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all it holds; nothing happens where there is none."""

    def free_bytes(self) -> int | None:
        """Return the bytes that can still be written; None where the storage does not tell."""


def open_storage(place: str | Path) -> Storage:
    """Return the storage of a local path or of any fsspec URL. Nothing is read or made yet.

    Raises StorageError where fsspec has no such protocol, or its package is missing.
    """
    text = str(place)
    if "://" not in text or text.startswith(("file://", "local://")):
        from checkpointing.storage.local import LocalStorage

        return LocalStorage(Path(text.split("://", 1)[-1]))
    from checkpointing.storage.remote import RemoteStorage

    return RemoteStorage(text)
