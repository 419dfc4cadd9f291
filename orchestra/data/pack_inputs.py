"""The files that text is packed from: found by path, URL or pattern, and cut into blocks for the workers.

A reader knows formats and compression, never tokens. Blocks come in the order of the files and of their
lines, and depend on nothing but the files. Workers decode them, and name what cannot be decoded by file and
line or byte; blocks are plain values, since they are pickled to the workers.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from orchestra.data.token_files import file_system
from orchestra.errors import ConfigError, DataError
from orchestra.sizes.units import MIB

# Rows that are decoded at once.
_BATCH_ROWS = 1024


class DocumentPiece(NamedTuple):
    """Text of a document: all of it, or a part where the document is longer than a block."""

    text: str
    ends_document: bool


class InputBlock(Protocol):
    """A part of an input file."""

    @property
    def url(self) -> str: ...

    @property
    def input_bytes(self) -> int:
        """How far the reader went in the file for it."""

    def pieces(self, field: str) -> Iterator[DocumentPiece]:
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

    def pieces(self, field: str) -> Iterator[DocumentPiece]:  # noqa: ARG002  there are no fields
        try:
            text = self.content.decode()
        except UnicodeDecodeError as error:
            where = f"byte {self.content[error.start]:#04x} at offset {self.offset + error.start}"
            raise DataError(f"{self.url}: {where} is not UTF-8; convert the file to UTF-8") from error
        yield DocumentPiece(text.removeprefix("\ufeff") if self.offset == 0 else text, self.ends_document)


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of JSON, a document each."""

    url: str
    content: bytes
    # Counted from 1.
    first_line: int
    input_bytes: int

    def pieces(self, field: str) -> Iterator[DocumentPiece]:
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
                fields = ", ".join(record) if isinstance(record, dict) else _kind(record)
                raise DataError(f"{where}: no field {field!r}, found {fields or 'none'}; give --field")
            yield DocumentPiece(_checked(record[field], f"{where}, field {field!r}"), True)


@dataclass(frozen=True)
class RowBlock:
    """One row group of a Parquet file, read by the worker itself; a document each row."""

    url: str
    group: int
    first_row: int
    input_bytes: int

    def pieces(self, field: str) -> Iterator[DocumentPiece]:
        import pyarrow
        import pyarrow.parquet

        row = self.first_row
        system, path = file_system(self.url)
        try:
            with system.open(path, "rb") as stream:
                parquet = pyarrow.parquet.ParquetFile(stream)
                if field not in (names := parquet.schema_arrow.names):
                    raise DataError(
                        f"{self.url}: no column {field!r}, found {', '.join(names)}; give --field"
                    )
                for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[self.group], columns=[field]):
                    for value in batch.column(0).to_pylist():
                        yield DocumentPiece(_checked(value, f"{self.url}: row {row}, column {field!r}"), True)
                        row += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.url}: damaged in row group {self.group}, after row {row} ({error}); "
                            "copy it again") from error  # fmt: skip


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


TEXT, LINES, ROWS = (".txt", ".md", ".rst"), (".jsonl", ".ndjson"), (".parquet",)
COMPRESSIONS = (".gz", ".zst")
_KNOWN = f"{', '.join(TEXT + LINES)} (or with {' or '.join(COMPRESSIONS)}) or {ROWS[0]}"
# Of text: long enough that the hand-over costs nothing, short enough that all workers end together.
_BLOCK_BYTES = 2 * MIB
_READ_BYTES = MIB
# Archives of long distance (zstd --long=31) need it.
_ZSTD_WINDOW_BYTES = 1 << 31


@dataclass(frozen=True)
class InputFile:
    """One file to pack."""

    # As fsspec opens it; plain paths stay plain.
    url: str
    num_bytes: int

    @property
    def suffix(self) -> str:
        """The suffix that names the format, without the one of a compression."""
        name = self.url.lower()
        return "." + name.removesuffix(self.compression).rpartition(".")[2]

    @property
    def compression(self) -> str:
        return next((suffix for suffix in COMPRESSIONS if self.url.lower().endswith(suffix)), "")


def find_inputs(patterns: list[str]) -> list[InputFile]:
    """Return the files that paths, folders, patterns (`*`, `**`) and URLs name: as given, then by name.

    Raises ConfigError with all that is wrong: nothing found, or a format that is not known.
    """
    inputs: dict[str, InputFile] = {}
    problems = []
    for pattern in patterns:
        if not pattern.strip():
            # As a path it would be the working directory and all that lies below it.
            problems.append(f"INPUT {pattern!r}: names nothing; give files, folders, patterns or URLs")
            continue
        try:
            files = _matches(pattern)
        except DataError as error:
            problems.append(str(error))
            continue
        if not files:
            problems.append(_nothing(pattern))
        for file in files:
            if _is_known(file):
                inputs.setdefault(file.url, file)
            else:
                problems.append(f"{file.url}: not a format that is read; give {_KNOWN}")
    if problems:
        raise ConfigError(problems)
    return list(inputs.values())


def read_blocks(file: InputFile) -> Iterator[InputBlock]:
    """Yield the file's text in blocks. Raises DataError naming the file and where it breaks off."""
    try:
        if file.suffix in ROWS:
            yield from _row_blocks(file)
        elif file.suffix in LINES:
            yield from _line_blocks(file)
        else:
            yield from _text_blocks(file)
    except FileNotFoundError as error:
        raise DataError(f"{file.url}: it was there and is gone; pack again") from error
    except OSError as error:
        raise DataError(f"{file.url}: cannot be read ({error})") from error


def _matches(pattern: str) -> list[InputFile]:
    system, path = file_system(pattern)
    try:
        if system.isfile(path):
            paths = [path]
        elif system.isdir(path):
            paths = [file for file in system.find(path) if _is_known(InputFile(file, 0))]
        else:
            paths = [file for file in system.glob(path) if system.isfile(file)]
        is_local = "://" not in pattern
        urls = {file: file if is_local else system.unstrip_protocol(file) for file in sorted(paths)}
        return [InputFile(url, int(system.size(file))) for file, url in urls.items()]
    except Exception as error:  # drivers raise what their own libraries do: no credentials, no route …
        raise DataError(f"{pattern}: cannot be listed ({type(error).__name__}: {error})") from error


def _nothing(pattern: str) -> str:
    """Return the sentence for an input without a file."""
    system, path = file_system(pattern)
    if system.isdir(path):
        return f"{pattern}: a folder without text; what is read ends in {_KNOWN}"
    found = "no such file"
    if "://" not in pattern:
        try:
            Path(path).stat()
            found = "is no file of bytes"
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            found = f"cannot be read: {error.strerror}"
    return f"{pattern}: {found}; give files, folders, patterns or URLs"


def _is_known(file: InputFile) -> bool:
    return file.suffix in TEXT + LINES or (file.suffix in ROWS and not file.compression)


def open_input(url: str) -> BinaryIO:
    """Open a file at a path or URL to read its bytes."""
    system, path = file_system(url)
    return cast(BinaryIO, system.open(path, "rb"))


def _line_blocks(file: InputFile) -> Iterator[LineBlock]:
    held, first_line, consumed = bytearray(), 1, 0
    for chunk, position in _chunks(file):
        cut = chunk.rfind(b"\n") + 1 if len(held) + len(chunk) >= _BLOCK_BYTES else 0
        if not cut:
            held += chunk
            continue
        content = bytes(held) + chunk[:cut]
        yield LineBlock(file.url, content, first_line, position - consumed)
        held, consumed = bytearray(chunk[cut:]), position
        first_line += content.count(b"\n")
    yield LineBlock(file.url, bytes(held), first_line, file.num_bytes - consumed)


def _text_blocks(file: InputFile) -> Iterator[TextBlock]:
    """A text file is one document; it is cut after a line break, or between two characters without one."""
    held, offset, consumed = bytearray(), 0, 0
    for chunk, position in _chunks(file):
        held += chunk
        if len(held) < _BLOCK_BYTES:
            continue
        cut = held.rfind(b"\n") + 1 or _character_boundary(held)
        yield TextBlock(file.url, bytes(held[:cut]), offset, False, position - consumed)
        offset, consumed = offset + cut, position
        del held[:cut]
    yield TextBlock(file.url, bytes(held), offset, True, file.num_bytes - consumed)


def _character_boundary(text: bytearray) -> int:
    """Return where the last UTF-8 character of `text` begins: four bytes at most from the end."""
    for cut in range(len(text) - 1, max(0, len(text) - 4), -1):
        if text[cut] & 0xC0 != 0x80:
            return cut
    return len(text)


def _row_blocks(file: InputFile) -> Iterator[RowBlock]:
    import pyarrow
    import pyarrow.parquet

    with open_input(file.url) as stream:
        try:
            metadata = pyarrow.parquet.ParquetFile(stream).metadata
        except pyarrow.ArrowException as error:
            raise DataError(
                f"{file.url}: not a whole Parquet file of {file.num_bytes} bytes ({error}); copy it again"
            ) from error
    first_row = 0
    for group in range(metadata.num_row_groups):
        yield RowBlock(file.url, group, first_row, file.num_bytes // metadata.num_row_groups)
        first_row += metadata.row_group(group).num_rows


def _chunks(file: InputFile) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed bytes, each with the position reached in the file itself."""
    with open_input(file.url) as stream:
        if file.compression == ".gz":
            yield from _gzip_chunks(file, stream)
        elif file.compression == ".zst":
            yield from _zstd_chunks(file, stream)
        else:
            while chunk := stream.read(_READ_BYTES):
                yield chunk, stream.tell()


def _gzip_chunks(file: InputFile, stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    unpacked = gzip.GzipFile(fileobj=stream)
    try:
        while chunk := unpacked.read(_READ_BYTES):
            yield chunk, stream.tell()
    except EOFError as error:
        raise _broken_off(file) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{file.url}: damaged near offset {stream.tell()} ({error}); copy it again"
        ) from error


def _zstd_chunks(file: InputFile, stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Frames one after the other. (zstandard's own reader takes one that breaks off for a whole one.)"""
    import zstandard

    frame: Any = None
    while packed := stream.read(_READ_BYTES):
        while packed:
            if frame is None:
                frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
            try:
                unpacked = frame.decompress(packed)
            except zstandard.ZstdError as error:
                begin = stream.tell() - len(packed)
                raise DataError(
                    f"{file.url}: damaged after offset {begin} ({error}); copy it again"
                ) from error
            packed = b""
            if frame.eof:
                packed, frame = frame.unused_data, None
            for start in range(0, len(unpacked), _READ_BYTES):
                yield unpacked[start : start + _READ_BYTES], stream.tell() - len(packed)
    if frame is not None:
        raise _broken_off(file)


def _broken_off(file: InputFile) -> DataError:
    return DataError(
        f"{file.url}: breaks off at offset {file.num_bytes}, inside the compressed data; copy it again"
    )
