"""The JSON index beside a token file: what the tokens are, and the sums that prove they are whole.

`PREFIX.bin` holds nothing but tokens, little-endian; `PREFIX.json` says the rest and is written last, so a
token file exists if and only if its index does. Each document ends with the separator, so offsets of
documents are not stored. Standard library only: the rules of a configuration read the index too. It opens
no tokens.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from orchestra.errors import DataError
from orchestra.sizes.units import MIB

FORMAT = "orchestra tokens"
VERSION = 1
DTYPE_BYTES = {"uint16": 2, "uint32": 4}
# One checksum for this many bytes: small enough to say where a file is damaged, and 15e12 tokens of 4 bytes
# still need only 3 MB of index.
BLOCK_BYTES = 256 * MIB


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


def local_prefix(prefix: str) -> str | None:
    """Return `prefix` as a path on this machine, or None for a URL of somewhere else."""
    if prefix.startswith(("file://", "local://")):
        prefix = prefix.split("://", 1)[1]
    elif "://" in prefix:
        return None
    return str(Path(prefix).expanduser())


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
    except ValueError as error:
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


def check_size(num_bytes: int, index: TokenIndex, name: str) -> None:
    """Raise DataError when the token file `name` of `num_bytes` is not as long as its index says."""
    if num_bytes != index.num_bytes:
        offset = min(num_bytes, index.num_bytes)
        where = "breaks off" if num_bytes < index.num_bytes else "goes on"
        raise DataError(
            f"{name}: {where} at offset {offset}: it has {num_bytes} bytes, its index says {index.num_bytes} "
            f"({index.num_tokens} tokens of {index.dtype}); copy it again or pack again"
        )


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
    if not isinstance(sums, list) or len(sums) != num_blocks or not all(type(each) is int for each in sums):
        raise DataError(
            f"{name}: block_crc32 is not a checksum for each {index.block_bytes} bytes; pack again"
        )
    return index
