"""Headers of safetensors files: which tensors a file holds, of what type and shape, and where. No tensors.

A header comes from strangers and decides which bytes are taken for what, so every number in it is checked.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from checkpointing.format.dtypes import ITEM_BYTES
from checkpointing.storage import Storage
from orchestra.errors import DataError

_LENGTH_BYTES = 8
# The limit of safetensors itself.
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_MAX_DIMS = 32
_LARGEST = 1 << 62


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; its bytes begin `begin` bytes after the file's own beginning."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """A file's size and its tensors by name."""

    num_bytes: int
    entries: dict[str, Entry]


def read_header(storage: Storage, path: str, file: str) -> Header:
    """Read the header of `path`; `file` is what its entries call the file.

    Raises DataError where it is no whole safetensors file, StorageError where it cannot be read.
    """
    place = f"{storage.place}/{path}"
    size = storage.size(path)
    if size is None:
        raise DataError(f"{place}: there is no such file; copy the folder again")
    if size < _LENGTH_BYTES:
        raise DataError(f"{place}: {size} bytes are no safetensors file; copy it again")
    length = int.from_bytes(_read(storage, path, 0, _LENGTH_BYTES), "little")
    if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise DataError(
            f"{place}: not a safetensors file, or cut off: a header of {length} bytes in a file of {size}"
        )
    try:
        document = json.loads(_read(storage, path, _LENGTH_BYTES, length))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: its header is not JSON ({error}); this is no safetensors file") from error
    if not isinstance(document, dict):
        raise DataError(f"{place}: its header is {type(document).__name__}, expected an object")
    document.pop(_METADATA, None)
    data_begin = _LENGTH_BYTES + length
    entries = {name: _entry(value, name, file, data_begin, place) for name, value in document.items()}
    _refuse_gaps(entries, data_begin, size, place)
    return Header(size, entries)


def _read(storage: Storage, path: str, begin: int, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    storage.read_into(path, begin, memoryview(content))
    return content


def _entry(value: Any, name: str, file: str, data_begin: int, place: str) -> Entry:
    document = value if isinstance(value, dict) else {}
    dtype = document.get("dtype")
    shape, offsets = _counts(document.get("shape")), _counts(document.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DataError(f"{place}: {name}: dtype is {dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
    if shape is None or offsets is None or len(offsets) != 2:
        raise DataError(f"{place}: {name}: its shape or its data_offsets are no lists of whole numbers")
    num_bytes = offsets[1] - offsets[0]
    if num_bytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise DataError(f"{place}: {name}: {num_bytes} bytes are not the size of {dtype} {list(shape)}")
    return Entry(file, dtype, shape, data_begin + offsets[0], num_bytes)


def _counts(value: Any) -> tuple[int, ...] | None:
    """Return a short list of whole numbers from 0 on; None for anything else."""
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        return None
    return tuple(value) if all(type(number) is int and 0 <= number < _LARGEST for number in value) else None


def _refuse_gaps(entries: dict[str, Entry], data_begin: int, size: int, place: str) -> None:
    """The tensors of a safetensors file lie side by side and fill it, so what is cut off or doubled shows."""
    end = data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if entry.begin != end:
            raise DataError(
                f"{place}: {name} begins at byte {entry.begin}, the tensor before it ends at {end}"
            )
        end += entry.num_bytes
    if end != size:
        what = "cut off" if end > size else "followed by other bytes"
        raise DataError(f"{place}: {what}: its tensors end at byte {end}, the file has {size}; copy it again")
