"""Token files on disk: the JSON index beside the tokens, and local copies of remote ones. It opens no tokens.

`PREFIX.bin` holds nothing but tokens, little-endian; `PREFIX.json` says the rest and is written last, so a
token file exists if and only if its index does. Each document ends with the separator, so offsets of
documents are not stored. Only the standard library is loaded, and fsspec for a URL: the rules of a
configuration read the index too.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import resource
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from checkpointing.outages import is_passing
from conf.schema import BlendPart, DataConfig, Source
from orchestra.errors import DataError, DataOutageError
from orchestra.sizes.units import MIB

FORMAT = "orchestra tokens"
VERSION = 1
# The token that ends documents of bytes: the id after their 256 values.
BYTES_SEPARATOR = 256
DTYPE_BYTES = {"uint16": 2, "uint32": 4}
# One checksum for this many bytes, which are read when the first of their samples is: small, so that the
# first batches wait for few of them, and 1e12 tokens of 4 bytes still need only 11 MB of index.
BLOCK_BYTES = 4 * MIB
# The key of `tokens_fact` among what a checkpoint keeps of its configuration.
TOKENS_FACT = "data.tokens"
# What a source has as its name, and what no such name holds.
SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAMES_OF_SOURCES = "a name has up to 64 letters, digits, dots, dashes and underscores"
# What a web server answers where there is no such file.
_NOT_FOUND = 404
# Of more parts than these allow no blend was heard of.
_OPEN_FILES = 1 << 20
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class TokenIndex:
    """What a token file holds."""

    # `uint16` up to 65,536 tokens of vocabulary, else `uint32`.
    dtype: str
    num_tokens: int
    num_documents: int
    # Every token is below it.
    vocab_size: int
    # Follows each document.
    separator_id: int
    # `bytes`, or the file name of the tokenizer.json.
    tokenizer: str
    # Of the tokenizer.json; empty for `bytes`.
    tokenizer_sha256: str
    # zlib.crc32 of each block_bytes of the token file, the last one shorter.
    block_bytes: int
    block_crc32: list[int]

    @property
    def num_bytes(self) -> int:
        """Size of the token file."""
        return self.num_tokens * DTYPE_BYTES[self.dtype]


def token_file_prefix(path: str) -> str:
    """Return the PREFIX that `path` (PREFIX, PREFIX.bin or PREFIX.json; a URL too) stands for."""
    return path.removesuffix(".bin").removesuffix(".json")


def names_of_parts(parts: Sequence[BlendPart]) -> list[str]:
    """Return the names of a blend's parts: those given, else the ends of their paths, as long as it takes to
    tell them apart (a-train and b-train of a/train and b/train; a file that comes twice has its number).
    """
    paths = [_NO_NAME.split(token_file_prefix(part.path)) for part in parts]

    @functools.cache
    def ends_of(length: int) -> tuple[list[str], Counter[str]]:
        ends = ["-".join(path[-length:]) for path in paths]
        return ends, Counter(ends)

    def end(number: int) -> str:
        for length in range(1, len(paths[number]) + 1):
            ends, counts = ends_of(length)
            # Of letters that no name has nothing may be left.
            if counts[ends[number]] == 1 and SOURCE_NAME.fullmatch(ends[number]):
                return ends[number]
        return str(number)

    return [part.name or end(number) for number, part in enumerate(parts)]


def local_prefix(prefix: str) -> str | None:
    """Return `prefix` as a path on this machine, or None for a URL of somewhere else."""
    if prefix.startswith(("file://", "local://")):
        prefix = prefix.split("://", 1)[1]
    elif "://" in prefix:
        return None
    return str(Path(prefix).expanduser())


def allow_many_files() -> None:
    """Raise the limit of open files as far as this process may: each part of a blend keeps two, and 1,024 is
    what most systems begin with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def dtype_for(vocab_size: int) -> str:
    """Return the smallest type that holds every token."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def index_text(index: TokenIndex) -> str:
    """Return the index as the JSON that `parse_index` takes."""
    return json.dumps({"format": FORMAT, "version": VERSION, **asdict(index)}, indent=1) + "\n"


def read_index(path: Path) -> TokenIndex:
    """Read the index at `path`. Raises DataError naming the file when it is missing, torn or a stranger."""
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; write it with `orchestra data pack`") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse_index(text, str(path))


def parse_index(text: bytes, name: str) -> TokenIndex:
    """Return the index that `text` holds; errors are DataErrors that call it `name`."""
    try:
        record = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: byte {error.start} is not UTF-8, so this is no index; pack again"
        ) from error
    except (ValueError, RecursionError) as error:
        position = getattr(error, "pos", len(text))
        raise DataError(
            f"{name}: not whole JSON, it breaks off or goes wrong at offset {position} of {len(text)} bytes; "
            "copy it again or pack again"
        ) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DataError(f"{name}: not an index of `orchestra data pack` (no format {FORMAT!r})")
    if record.get("version") != VERSION:
        raise DataError(f"{name}: version {record.get('version')}, this program reads {VERSION}; pack again")
    return _checked({key: record.get(key) for key in (field.name for field in fields(TokenIndex))}, name)


def index_of(path: str) -> TokenIndex:
    """Read the index of the token file at `path`: PREFIX, PREFIX.bin, or any fsspec URL of one."""
    prefix = token_file_prefix(path)
    local = local_prefix(prefix)
    if local is not None:
        return read_index(Path(f"{local}.json"))
    system, remote = file_system(prefix)
    return parse_index(_read_remote(system, f"{remote}.json", f"{prefix}.json"), f"{prefix}.json")


def tokens_fact(data: DataConfig) -> str | None:
    """Return what tells token files from others that take their place: how many tokens, of which type, and a
    checksum of their blocks' checksums. None for other sources, and what cannot be read: whoever opens it
    says so.
    """
    if data.source != Source.tokens:
        return None
    found = []
    for path in [part.path for part in data.blend] if data.path is None else [data.path]:
        try:
            index = index_of(path)
        except (DataError, OSError):
            return None
        checksums = zlib.crc32(json.dumps([index.block_bytes, index.block_crc32]).encode())
        found.append(f"{index.num_tokens} {index.dtype} {checksums:08x}")
    return ", ".join(found)


def is_missing(path: str) -> bool:
    """Whether there is neither a token file at `path` (as of `index_of`) nor its index; False where that
    cannot be seen: who reads it is told why.
    """
    prefix = token_file_prefix(path)
    local = local_prefix(prefix)
    try:
        if local is not None:
            return not (Path(f"{local}.json").exists() or Path(f"{local}.bin").exists())
        system, remote = file_system(prefix)
        return not (system.exists(f"{remote}.json") or system.exists(f"{remote}.bin"))
    except Exception:  # noqa: BLE001  as `_read_remote`
        return False


def check_separator(index: TokenIndex, name: str) -> None:
    """Raise DataError when no token of the token file `name` can be its separator."""
    if index.separator_id >= index.vocab_size:
        raise DataError(
            f"{name}: data.document_masks=true needs the token that ends each document, and separator_id="
            f"{index.separator_id} is outside the file's vocabulary of {index.vocab_size}; pack it again "
            "with a separator, or use data.document_masks=false"
        )


def unlike_parts(parts: Sequence[tuple[str, TokenIndex]], key: str = "data.blend") -> str | None:
    """Return what keeps token files, by their names, from being parts of one blend: a token must mean the
    same in each of them. None where nothing does.
    """
    (first, packed), *others = [(name, _packed_with(index)) for name, index in parts]
    for name, other in others:
        if other != packed:
            both = f"{first} was packed with {packed}, {name} with {other}"
            return f"{key}: {both}; pack them with the same one"
    return None


def _packed_with(index: TokenIndex) -> str:
    sha256 = f"sha256 {index.tokenizer_sha256[:16]}, " if index.tokenizer_sha256 else ""
    return f"{'tokenizer.json' if sha256 else index.tokenizer} ({sha256}separator {index.separator_id})"


def check_size(num_bytes: int, index: TokenIndex, name: str) -> None:
    """Raise DataError when the token file `name` of `num_bytes` is not as long as its index says."""
    if num_bytes != index.num_bytes:
        offset = min(num_bytes, index.num_bytes)
        where = "breaks off" if num_bytes < index.num_bytes else "goes on"
        raise DataError(
            f"{name}: {where} at offset {offset}: it has {num_bytes} bytes, its index says {index.num_bytes} "
            f"({index.num_tokens} tokens of {index.dtype}); copy it again or pack again"
        )


@dataclass(frozen=True)
class DamagedBlock:
    """A block whose bytes are not those that were packed."""

    number: int
    num_blocks: int
    # Of its first byte in the token file.
    offset: int
    num_bytes: int
    checksum: int
    expected: int

    def __str__(self) -> str:
        return (
            f"damaged in block {self.number} of {self.num_blocks} (the first is 0), the {self.num_bytes} "
            f"bytes from offset {self.offset} on: checksum {self.checksum:08x}, its index says "
            f"{self.expected:08x}"
        )


def damage_of(index: TokenIndex, number: int, checksum: int) -> DamagedBlock | None:
    """Return what is wrong with a block that has this checksum; None where it is intact."""
    expected = index.block_crc32[number]
    if checksum == expected:
        return None
    offset, num_bytes = block_span(index, number)
    return DamagedBlock(number, len(index.block_crc32), offset, num_bytes, checksum, expected)


def block_span(index: TokenIndex, number: int) -> tuple[int, int]:
    """Return a block's first byte in the token file, and how many it has."""
    offset = number * index.block_bytes
    return offset, min(index.block_bytes, index.num_bytes - offset)


def _checked(values: dict[str, Any], name: str) -> TokenIndex:
    for key in ("num_tokens", "num_documents", "vocab_size", "separator_id", "block_bytes"):
        if type(values[key]) is not int or values[key] < 0:
            raise DataError(f"{name}: {key} is {values[key]!r}, expected a whole number; pack again")
    for key in ("tokenizer", "tokenizer_sha256"):
        if not isinstance(values[key], str):
            raise DataError(f"{name}: {key} is {values[key]!r}, expected a string; pack again")
    if values["dtype"] not in DTYPE_BYTES:
        raise DataError(f"{name}: dtype is {values['dtype']!r}, expected one of {', '.join(DTYPE_BYTES)}")
    index = TokenIndex(**values)
    sums = index.block_crc32
    num_blocks = -(-index.num_bytes // index.block_bytes) if index.block_bytes else -1
    if not isinstance(sums, list) or len(sums) != num_blocks or any(type(crc) is not int for crc in sums):
        raise DataError(
            f"{name}: block_crc32 is not a checksum for each {index.block_bytes} bytes; pack again"
        )
    return index


# Copies of remote token files on this node: made once, checked on the way, and visible only when whole.
#
# The folder of a copy is named by its URL and its index's bytes, so a file that changed gets a new one and an
# old one never needs to be asked whether it is fresh. Ranks of a node take a lock on that folder; the kernel
# drops it when its holder dies. Nothing here is ever deleted.

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
                unfinished = Path(f"{copy}.json.unfinished")
                unfinished.write_bytes(text)
                unfinished.replace(f"{copy}.json")
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
    except OSError as error:
        raise DataError(f"{url}: cannot be reached ({error.strerror or error})") from error
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
        raise _unread(name, error) from error


def _unread(name: str, error: BaseException) -> DataError:
    kind = DataOutageError if is_passing(error) else DataError
    return kind(f"{name}: cannot be read ({type(error).__name__}: {error})")


def _copy_tokens(system: Any, path: str, name: str, target: Path, index: TokenIndex) -> None:
    unfinished = target.with_name(f"{target.name}.unfinished")
    with _opened(system, path, name, index) as source, unfinished.open("wb") as file:
        for damage in _compared(source, name, index, file.write):
            if damage is not None:
                raise DataError(f"{name}: {damage}; upload it again or pack again")
    unfinished.replace(target)


def remote_blocks(prefix: str) -> tuple[TokenIndex, Iterator[DamagedBlock | None]]:
    """Read the token file at the URL `prefix` once: its index, and for each block what is wrong with it.

    Nothing is kept. Raises DataError, also while the blocks are read.
    """
    system, path = file_system(prefix)
    index = parse_index(_read_remote(system, f"{path}.json", f"{prefix}.json"), f"{prefix}.json")
    name = f"{prefix}.bin"

    def blocks() -> Iterator[DamagedBlock | None]:
        with _opened(system, f"{path}.bin", name, index) as source:
            yield from _compared(source, name, index, lambda _: None)

    return index, blocks()


def _opened(system: Any, path: str, name: str, index: TokenIndex) -> Any:
    try:
        # A web server may not tell it (no Content-Length); a file that is too short breaks off later.
        if (num_bytes := system.size(path)) is not None:
            check_size(int(num_bytes), index, name)
        return system.open(path, "rb", block_size=_READ_BYTES)
    except FileNotFoundError as error:
        # What a web server refuses or never answers comes as this error too; the cause tells it.
        cause = error.__cause__
        is_silent = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
        if is_silent or getattr(cause, "status", _NOT_FOUND) != _NOT_FOUND:
            raise _unread(name, cause or error) from error
        raise DataError(f"{name}: no such file beside its index; copy it again or pack again") from error


def _compared(
    source: Any, name: str, index: TokenIndex, take: Callable[[bytes], object]
) -> Iterator[DamagedBlock | None]:
    """Yield for each block what is wrong with it, once `take` has its bytes."""
    for number in range(len(index.block_crc32)):
        checksum, left = 0, block_span(index, number)[1]
        while left:
            piece = _read(source, min(_READ_BYTES, left), name)
            if not piece:
                raise DataError(f"{name}: breaks off in block {number}; upload it again or pack again")
            take(piece)
            checksum, left = zlib.crc32(piece, checksum), left - len(piece)
        yield damage_of(index, number, checksum)


def _read(source: Any, count: int, name: str) -> bytes:
    try:
        return cast(bytes, source.read(count))
    except Exception as error:
        raise _unread(name, error) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
