"""The checksums of a checkpoint: xxHash's XXH3, 64 bits for a chunk and 128 for a file, as lower-case hex.

They find accidents, not forgers. `xxhsum -H128 FILE` prints the checksum of a file.
"""

from __future__ import annotations

from typing import TypeAlias

import xxhash

Buffer: TypeAlias = "bytes | bytearray | memoryview"


def of_chunk(content: Buffer) -> str:
    """Return the checksum of a chunk's bytes (XXH3, 64 bits)."""
    return xxhash.xxh3_64_hexdigest(content)


class ChunkChecksum:
    """The checksum of a chunk, fed while its bytes pass (XXH3, 64 bits)."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def add(self, content: Buffer) -> None:
        """Take in the chunk's next bytes."""
        self._state.update(content)

    def value(self) -> str:
        """Return the checksum of what passed so far."""
        return self._state.hexdigest()


class FileChecksum:
    """The checksum of a file, fed while its bytes pass (XXH3, 128 bits)."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, content: Buffer) -> None:
        """Take in the file's next bytes."""
        self._state.update(content)

    def value(self) -> str:
        """Return the checksum of what passed so far."""
        return self._state.hexdigest()


def of_file(content: Buffer) -> str:
    """Return the checksum of a file's whole content."""
    return xxhash.xxh3_128_hexdigest(content)
