"""The checksums of token files, compared block by block: where a rank is about to read, or all of them.

A rank checks a block before the first sample of it is handed out, in the loader's thread. What one rank found
intact no other one of its node reads again: a byte for each block says so, in a file in the folder of the
node's heartbeats, which outlives attempts and is removed with the job. A lock on that byte keeps ranks from
checking the same block at once. Only the standard library is loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestra.data.token_files import (
    DamagedBlock,
    TokenIndex,
    block_span,
    check_size,
    damage_of,
    local_prefix,
    read_index,
    remote_blocks,
)
from orchestra.errors import DamagedDataError, DataError
from orchestra.run.heartbeat import FOLDER_VARIABLE
from orchestra.sizes.units import MIB

_PIECE_BYTES = 1 * MIB
_INTACT = b"\x01"
_PREFIX = "blocks-"
# Blocks that wait for a thread at a time: a large file has hundreds of thousands.
_AT_ONCE = 256


class BlockChecks:
    """The blocks of one open token file that were found intact. *One thread*."""

    def __init__(self, binary: Path, name: str, index: TokenIndex) -> None:
        """`binary` is read; errors call it `name`, which is the URL of a remote file's copy."""
        self._binary = binary
        self._name = name if name == str(binary) else f"{name} (its copy {binary})"
        self._index = index
        self._is_intact = bytearray(len(index.block_crc32))
        self._shared = _shared_file(binary, index)

    def require(self, begin: int, end: int) -> None:
        """Check the blocks of the bytes from `begin` up to `end` that were not yet.

        Raises DamagedDataError naming file, block and offset, DataError where the file cannot be read.
        """
        for number in range(begin // self._index.block_bytes, (end - 1) // self._index.block_bytes + 1):
            if not self._is_intact[number]:
                with self._found_by_others(number) as is_known:
                    if not is_known:
                        self._check(number)
                self._is_intact[number] = True

    def _check(self, number: int) -> None:
        try:
            damage = damage_of(self._index, number, block_checksum(self._binary, self._index, number))
        except OSError as error:
            offset = block_span(self._index, number)[0]
            raise DataError(
                f"{self._name}: cannot be read in block {number}, from offset {offset} on ({error.strerror})"
            ) from error
        if damage is not None:
            raise DamagedDataError(
                f"{self._name}: {damage}; copy the file again or pack again, and see with "
                f"`orchestra data verify` that it is whole"
            )

    @contextlib.contextmanager
    def _found_by_others(self, number: int) -> Iterator[bool]:
        """Tell whether another rank of this node found a block intact, once none is about it any more; else
        let them know where the caller finds it so.
        """
        if self._shared is None:
            yield False
            return
        fcntl.lockf(self._shared, fcntl.LOCK_EX, 1, number)
        try:
            is_known = os.pread(self._shared, 1, number) == _INTACT
            yield is_known
            if not is_known:
                # Where its memory is full the others check it themselves.
                with contextlib.suppress(OSError):
                    os.pwrite(self._shared, _INTACT, number)
        finally:
            fcntl.lockf(self._shared, fcntl.LOCK_UN, 1, number)


def _shared_file(binary: Path, index: TokenIndex) -> int | None:
    """Open what this node's ranks know of a file as it is now; None where nobody looks after them, or nothing
    can be written.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return None
    with contextlib.suppress(OSError):
        status = binary.stat()
        facts = (str(binary), status.st_ino, status.st_size, status.st_mtime_ns, index.block_crc32)
        key = hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()
        return os.open(Path(folder) / f"{_PREFIX}{key}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return None


def forget_blocks(folder: Path) -> None:
    """Remove what ranks wrote down of blocks in the folder of a node's heartbeats. *The node agent*, last."""
    with contextlib.suppress(OSError):
        for file in folder.glob(f"{_PREFIX}*"):
            file.unlink(missing_ok=True)
        folder.rmdir()


def block_checksum(binary: Path, index: TokenIndex, number: int) -> int:
    """Return the checksum of a block as it lies on disk. Raises OSError.

    It is read, not mapped: where a disk fails, a mapped file would end the process with SIGBUS.
    """
    offset, left = block_span(index, number)
    checksum = 0
    with binary.open("rb", buffering=0) as file:
        file.seek(offset)
        while left:
            piece = file.read(min(_PIECE_BYTES, left))
            if not piece:
                break
            checksum, left = zlib.crc32(piece, checksum), left - len(piece)
    return checksum


# All blocks of a file, for `orchestra data verify`.

# Called after each block with the bytes that it has.
OnBlock = Callable[[int], None]


def verified(
    prefix: str, num_threads: int, on_block: OnBlock = lambda _: None
) -> tuple[TokenIndex, list[DamagedBlock]]:
    """Read the token file at `prefix`, a URL too, once; return its index and the blocks that are damaged.

    A local file is read by `num_threads` threads. Raises DataError where the file cannot be read at all.
    """
    local = local_prefix(prefix)
    if local is None:
        index, found = remote_blocks(prefix)
        return index, _damaged(index, found, on_block)
    binary = Path(f"{local}.bin")
    index = read_index(Path(f"{local}.json"))
    try:
        check_size(binary.stat().st_size, index, str(binary))
        with ThreadPoolExecutor(num_threads) as pool:
            return index, _damaged(index, _found(pool, binary, index), on_block)
    except FileNotFoundError as error:
        raise DataError(f"{binary}: no such file beside its index; copy it again or pack again") from error
    except OSError as error:
        raise DataError(f"{binary}: cannot be read ({error.strerror or error})") from error


def _found(pool: ThreadPoolExecutor, binary: Path, index: TokenIndex) -> Iterator[DamagedBlock | None]:
    """Yield for each block what is wrong with it."""
    num_blocks = len(index.block_crc32)
    for first in range(0, num_blocks, _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, num_blocks))
        checksums = pool.map(lambda number: block_checksum(binary, index, number), numbers)
        yield from (damage_of(index, *pair) for pair in zip(numbers, checksums, strict=True))


def _damaged(
    index: TokenIndex, found: Iterator[DamagedBlock | None], on_block: OnBlock
) -> list[DamagedBlock]:
    damages = []
    for number, damage in enumerate(found):
        if damage is not None:
            damages.append(damage)
        on_block(block_span(index, number)[1])
    return damages
