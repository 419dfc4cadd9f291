"""Blocks of input files, and the documents in them. What cannot be decoded is named by file and line or byte.

It knows no compression and no tokens; blocks are values that travel to the worker processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orchestra.data.cache import file_system
from orchestra.errors import DataError

# Rows that are decoded at once.
_BATCH_ROWS = 1024


class Piece(NamedTuple):
    """Text of a document: all of it, or a part where the document is longer than a block."""

    text: str
    ends_document: bool


class Block(Protocol):
    """A part of an input file."""

    @property
    def url(self) -> str: ...

    @property
    def input_bytes(self) -> int:
        """How far the reader went in the file for it."""

    def pieces(self, field: str) -> Iterator[Piece]:
        """Yield the text in order, of structured files that of `field`. Raises DataError."""


@dataclass(frozen=True)
class TextBlock:
    """Part of a text file, which is one document."""

    url: str
    content: bytes
    # Bytes of (decompressed) text before it.
    offset: int
    ends_document: bool
    input_bytes: int

    def pieces(self, field: str) -> Iterator[Piece]:  # noqa: ARG002  there are no fields
        try:
            text = self.content.decode()
        except UnicodeDecodeError as error:
            found = f"byte {self.content[error.start]:#04x} at offset {self.offset + error.start}"
            raise DataError(f"{self.url}: {found} is not UTF-8; convert the file to UTF-8") from error
        yield Piece(text.removeprefix("\ufeff") if self.offset == 0 else text, self.ends_document)


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of JSON, a document each."""

    url: str
    content: bytes
    # Counted from 1.
    first_line: int
    input_bytes: int

    def pieces(self, field: str) -> Iterator[Piece]:
        for number, line in enumerate(self.content.split(b"\n"), start=self.first_line):
            if not line or line.isspace():
                continue
            where = f"{self.url}: line {number}"
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}, byte {error.start}: not UTF-8; convert the file to UTF-8"
                ) from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({error}); expected an object with {field!r}") from error
            if not isinstance(record, dict) or field not in record:
                found = ", ".join(record) if isinstance(record, dict) else _kind(record)
                raise DataError(f"{where}: no field {field!r}, found {found or 'none'}; give --field")
            yield Piece(_checked(record[field], f"{where}, field {field!r}"), True)


@dataclass(frozen=True)
class RowBlock:
    """One row group of a Parquet file, read by the worker itself; a document each row."""

    url: str
    group: int
    first_row: int
    input_bytes: int

    def pieces(self, field: str) -> Iterator[Piece]:
        import pyarrow
        import pyarrow.parquet

        row = self.first_row
        system, path = file_system(self.url)
        try:
            with system.open(path, "rb") as stream:
                parquet = pyarrow.parquet.ParquetFile(stream)
                self._check_column(parquet.schema_arrow.names, field)
                for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[self.group], columns=[field]):
                    for value in batch.column(0).to_pylist():
                        yield Piece(_checked(value, f"{self.url}: row {row}, column {field!r}"), True)
                        row += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.url}: damaged in row group {self.group}, after row {row} ({error}); "
                            "copy it again") from error  # fmt: skip

    def _check_column(self, names: list[str], field: str) -> None:
        if field not in names:
            raise DataError(f"{self.url}: no column {field!r}, found {', '.join(names)}; give --field")


def _checked(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {_kind(value)}, expected a string; give --field or repair the file")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: half a surrogate pair at character {error.start}, which is no text; repair the file"
        ) from error
    return value


def _kind(value: object) -> str:
    """Return JSON's word for a value's type."""
    kinds = {list: "an array", dict: "an object", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), f"a {type(value).__name__}")
