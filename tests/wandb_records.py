"""Reads what wandb wrote into a file of an offline run, as `wandb sync` would."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def recorded_rows(file: Path) -> list[dict[str, Any]]:
    """Read the history of a .wandb file."""
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in _records(file, "history")
    ]


def recorded_config(file: Path) -> dict[str, Any]:
    """Read the configuration that the run was opened with."""
    run = next(_records(file, "run")).run
    return {item.key: json.loads(item.value_json) for item in run.config.update}


def recorded_table(file: Path, name: str) -> dict[str, Any]:
    """Read a table that was logged once, from the folder of the file."""
    (place,) = (file.parent / "files" / "media" / "table").glob(f"{name}_*.table.json")
    table: dict[str, Any] = json.loads(place.read_text())
    return table


def _records(file: Path, kind: str) -> Iterator[Any]:
    """Yield the records of a kind: LevelDB's log format around wandb's own protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    for block in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(block)
        if record.WhichOneof("record_type") == kind:
            yield record


def log_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log: 32 KiB blocks, 7-byte headers, after 7 bytes that name wandb."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, last
            yield parts
            parts = b""
