"""Which tensor goes into which safetensors file, and where in it: pure, from shapes to bytes of headers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checkpointing.format.dtypes import ITEM_BYTES
from orchestra.huggingface.folder import SINGLE_FILE

# So that the numbers behind the header are aligned, as safetensors writes it.
_HEADER_ALIGNMENT = 8
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class PlannedFile:
    """A file to write: its header, and by tensor the byte of the file at which its numbers begin."""

    name: str
    header: bytes
    begins: Mapping[str, int]
    num_bytes: int


def plan_files(shapes: Mapping[str, tuple[int, ...]], dtype: str, max_file_bytes: int) -> list[PlannedFile]:
    """Share tensors out to files of at most `max_file_bytes` of numbers, in order, as transformers does.

    A tensor that is larger gets a file of its own: tensors are never cut.
    """
    groups = list(_groups(shapes, dtype, max_file_bytes))
    if len(groups) == 1:
        return [_planned(SINGLE_FILE, groups[0], dtype)]
    return [
        _planned(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group, dtype)
        for number, group in enumerate(groups, start=1)
    ]


def index_document(files: list[PlannedFile], total_bytes: int, num_parameters: int) -> dict[str, Any]:
    """Return model.safetensors.index.json for several files."""
    weight_map = {tensor: file.name for file in files for tensor in file.begins}
    metadata = {"total_size": total_bytes, "total_parameters": num_parameters}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _groups(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, max_file_bytes: int
) -> Iterator[dict[str, tuple[int, ...]]]:
    group: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        if group and size + num_bytes > max_file_bytes:
            yield group
            group, size = {}, 0
        group[name] = shape
        size += num_bytes
    yield group


def _planned(name: str, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> PlannedFile:
    ends = [0]
    # transformers refuses files whose metadata do not say whose tensors these are.
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, shape in shapes.items():
        ends.append(ends[-1] + math.prod(shape) * ITEM_BYTES[dtype])
        document[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": ends[-2:]}
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    begins = {tensor: len(header) + end for tensor, end in zip(shapes, ends, strict=False)}
    return PlannedFile(name, header, begins, len(header) + ends[-1])
