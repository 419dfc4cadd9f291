"""Copies of remote token files on this node: made once, checked on the way, and visible only when whole.

The folder of a copy is named by its URL and its index's bytes, so a file that changed gets a new one and an
old one never needs to be asked whether it is fresh. Ranks of a node take a lock on that folder; the kernel
drops it when its holder dies. Nothing here is ever deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from orchestra.data.index import TokenIndex, check_size, parse_index
from orchestra.errors import DataError
from orchestra.sizes.units import MIB

_READ_BYTES = 8 * MIB


def local_copy(prefix: str, cache_dir: str | None) -> str:
    """Return the prefix of a whole local copy of the token file at the URL `prefix`. *Any rank.*"""
    system, path = file_system(prefix)
    text = _read_remote(system, f"{path}.json", f"{prefix}.json")
    index = parse_index(text, f"{prefix}.json")
    key = hashlib.blake2b(prefix.encode() + b"\x00" + text, digest_size=12).hexdigest()
    folder = _folder(cache_dir) / key
    copy = folder / Path(path).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            # The index is written last, so where it stands the tokens were whole; somebody may have tidied
            # up since.
            if not (Path(f"{copy}.json").exists() and Path(f"{copy}.bin").exists()):
                _copy_tokens(system, f"{path}.bin", f"{prefix}.bin", Path(f"{copy}.bin"), index)
                _write_whole(Path(f"{copy}.json"), text)
    except OSError as error:
        raise DataError(
            f"{prefix}.bin: cannot be copied to {folder}: {error}; set data.cache_dir to a local folder with "
            f"{index.num_bytes} free bytes"
        ) from error
    return str(copy)


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of `url` and the path in it. Raises DataError for an unknown protocol."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"{url}: {error}; for s3:// install orchestra-train[s3]") from error
    return system, str(path)


def _folder(cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "orchestra" / "tokens"


def _read_remote(system: Any, path: str, name: str) -> bytes:
    try:
        return bytes(system.cat_file(path))
    except FileNotFoundError as error:
        raise DataError(f"{name}: no such file; write it with `orchestra data pack`") from error
    except Exception as error:  # drivers raise what their own libraries do: no credentials, no route …
        raise DataError(f"{name}: cannot be read ({type(error).__name__}: {error})") from error


def _copy_tokens(system: Any, path: str, name: str, target: Path, index: TokenIndex) -> None:
    try:
        check_size(int(system.size(path)), index, name)
        source = system.open(path, "rb", block_size=_READ_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"{name}: no such file beside its index; copy it again or pack again") from error
    unfinished = target.with_name(f"{target.name}.unfinished")
    with source, unfinished.open("wb") as file:
        for number, expected in enumerate(index.block_crc32):
            found, left = 0, min(index.block_bytes, index.num_bytes - number * index.block_bytes)
            while left and (piece := _read(source, min(_READ_BYTES, left), name)):
                file.write(piece)
                found, left = zlib.crc32(piece, found), left - len(piece)
            if left or found != expected:
                offset = number * index.block_bytes
                raise DataError(
                    f"{name}: damaged in the {index.block_bytes} bytes from offset {offset} on: checksum "
                    f"{found:08x}, its index says {expected:08x}; upload it again or pack again"
                )
    unfinished.replace(target)


def _read(source: Any, count: int, name: str) -> bytes:
    try:
        return cast(bytes, source.read(count))
    except Exception as error:
        raise DataError(f"{name}: cannot be read: {type(error).__name__}: {error}") from error


def _write_whole(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
