"""Packs text into a token file: one reader, worker processes that encode, one writer in the reader's order.

The result depends on the inputs and the tokenizer alone, not on the number of workers. The token file is
written under another name and renamed, its index comes last: whatever ends a packing early leaves no token
file. It prints nothing; whoever wants to see progress passes a callable.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from orchestra.data.cache import file_system
from orchestra.data.encoding import EncodedBlock, encoded_blocks
from orchestra.data.index import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    TokenIndex,
    dtype_for,
    index_text,
    local_prefix,
    token_file_prefix,
)
from orchestra.data.inputs import InputFile, find_inputs, read_blocks
from orchestra.data.request import PackRequest
from orchestra.data.tokenizer import Tokenizer, open_tokenizer
from orchestra.errors import ConfigError, DataError

OnProgress = Callable[["Progress"], None]


@dataclass(frozen=True)
class PackPlan:
    """A checked request: nothing is wrong with it that can be seen before reading."""

    files: list[InputFile]
    prefix: str
    tokenizer: Tokenizer
    request: PackRequest

    @property
    def num_bytes(self) -> int:
        """Size of all inputs as they lie there."""
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True)
class Progress:
    """How far a packing is; `input_bytes` counts towards the plan's num_bytes."""

    input_bytes: int
    num_tokens: int


@dataclass(frozen=True)
class PackResult:
    """What was written."""

    prefix: str
    num_files: int
    num_documents: int
    num_tokens: int
    # Of UTF-8 text, without markup and compression.
    text_bytes: int
    vocab_size: int
    dtype: str
    seconds: float


def plan_pack(request: PackRequest) -> PackPlan:
    """Check a request and find its files. Raises ConfigError with all that is wrong; writes nothing."""
    problems: list[str] = []
    prefix = token_file_prefix(request.output)
    files: list[InputFile] = []
    tokenizer: Tokenizer | None = None
    try:
        files = find_inputs(request.inputs)
    except ConfigError as error:
        problems += error.problems
    try:
        tokenizer = open_tokenizer(request.tokenizer, request.separator)
    except ConfigError as error:
        problems += error.problems
    if request.num_workers < 1:
        problems.append(f"--workers {request.num_workers}: give 1 or more")
    problems += _problems_of_output(prefix)
    if problems or tokenizer is None:
        raise ConfigError(problems)
    return PackPlan(files, prefix, tokenizer, request)


def _problems_of_output(prefix: str) -> list[str]:
    if not prefix or prefix.endswith("/"):
        return [f"--output {prefix}: names a folder; give a PREFIX, as in folder/name"]
    try:
        system, path = file_system(prefix)
        is_taken = system.exists(f"{path}.json")
    except (DataError, OSError) as error:
        return [f"--output {prefix}: cannot be looked at ({error})"]
    if is_taken:
        return [f"--output {prefix}: {prefix}.json exists; give another name or remove it"]
    return []


def pack(plan: PackPlan, on_progress: OnProgress = lambda _: None) -> PackResult:
    """Read, encode and write. Raises DataError naming file and line, row or offset of what cannot be read."""
    began = time.perf_counter()
    totals = _Totals()
    with _unfinished_file(plan.prefix) as unfinished:
        with unfinished.open("wb") as file:
            writer = _TokenWriter(file)
            blocks = (block for each in plan.files for block in read_blocks(each))
            with closing(encoded_blocks(blocks, plan.request, plan.tokenizer)) as encoded:
                for block in encoded:
                    writer.write(block.tokens)
                    totals.add(block)
                    on_progress(Progress(totals.input_bytes, writer.num_bytes // _token_bytes(plan)))
            index = _index(plan, writer, totals)
        _publish(unfinished, index, plan.prefix)
    return PackResult(
        prefix=plan.prefix,
        num_files=len(plan.files),
        num_documents=index.num_documents,
        num_tokens=index.num_tokens,
        text_bytes=totals.text_bytes,
        vocab_size=index.vocab_size,
        dtype=index.dtype,
        seconds=time.perf_counter() - began,
    )


class _Totals:
    """Sums over the encoded blocks."""

    def __init__(self) -> None:
        self.num_documents = 0
        self.text_bytes = 0
        self.input_bytes = 0

    def add(self, block: EncodedBlock) -> None:
        self.num_documents += block.num_documents
        self.text_bytes += block.text_bytes
        self.input_bytes += block.input_bytes


class _TokenWriter:
    """Writes to the token file and keeps the checksum of each BLOCK_BYTES."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0
        self.block_crc32: list[int] = []

    def write(self, content: bytes) -> None:
        self._file.write(content)
        rest = memoryview(content)
        while rest:
            filled = self.num_bytes % BLOCK_BYTES
            if filled == 0:
                self.block_crc32.append(0)
            piece = rest[: BLOCK_BYTES - filled]
            self.block_crc32[-1] = zlib.crc32(piece, self.block_crc32[-1])
            self.num_bytes += len(piece)
            rest = rest[len(piece) :]


def _index(plan: PackPlan, writer: _TokenWriter, totals: _Totals) -> TokenIndex:
    if writer.num_bytes == 0:
        raise DataError(
            f"{', '.join(plan.request.inputs)}: no text in {len(plan.files)} files; nothing written"
        )
    return TokenIndex(
        dtype=dtype_for(plan.tokenizer.vocab_size),
        num_tokens=writer.num_bytes // _token_bytes(plan),
        num_documents=totals.num_documents,
        vocab_size=plan.tokenizer.vocab_size,
        separator_id=plan.tokenizer.separator_id,
        tokenizer=plan.tokenizer.name,
        tokenizer_sha256=plan.tokenizer.sha256,
        block_bytes=BLOCK_BYTES,
        block_crc32=writer.block_crc32,
    )


def _token_bytes(plan: PackPlan) -> int:
    return DTYPE_BYTES[dtype_for(plan.tokenizer.vocab_size)]


@contextmanager
def _unfinished_file(prefix: str) -> Iterator[Path]:
    """Yield a path to write tokens to, beside the output or (for a remote one) in a temporary folder."""
    local = local_prefix(prefix)
    try:
        if local is not None:
            Path(local).parent.mkdir(parents=True, exist_ok=True)
        parent = Path(local).parent if local is not None else None
        folder = Path(tempfile.mkdtemp(prefix=".pack-", dir=parent))
    except OSError as error:
        raise DataError(f"{prefix}: cannot be written ({error}); give another --output") from error
    try:
        yield folder / "tokens"
    except OSError as error:
        raise DataError(f"{prefix}.bin: cannot be written ({error}); give another --output") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(unfinished: Path, index: TokenIndex, prefix: str) -> None:
    """Give the tokens their name, then write the index."""
    local = local_prefix(prefix)
    if local is None:
        system, path = file_system(prefix)
        system.put_file(str(unfinished), f"{path}.bin")
        system.pipe_file(f"{path}.json", index_text(index).encode())
        return
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(f"{local}.bin")
    index_file = unfinished.with_name("index")
    index_file.write_text(index_text(index))
    index_file.replace(f"{local}.json")
