"""Packs text into a token file: one reader, worker processes that encode, one writer in the reader's order.

The result depends on the inputs and the tokenizer alone, not on the number of workers. The token file is
written under another name and renamed, its index comes last: whatever ends a packing early leaves no token
file. Whoever wants to see progress passes a callable.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from orchestra.data.pack_inputs import InputBlock, InputFile, find_inputs, read_blocks
from orchestra.data.token_files import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    TokenIndex,
    dtype_for,
    file_system,
    index_text,
    local_prefix,
    token_file_prefix,
)
from orchestra.data.tokenizer import BYTES, Encoded, Tokenizer, open_tokenizer
from orchestra.errors import ConfigError, DataError


@dataclass(frozen=True)
class PackRequest:
    """What to pack, and where to."""

    # Files, folders, patterns or fsspec URLs: .txt, .md, .rst, .jsonl (also .gz, .zst) or .parquet.
    inputs: list[str]
    # PREFIX of the token file: writes PREFIX.bin and PREFIX.json; any fsspec URL.
    output: str
    # `bytes`, or the path of a Hugging Face tokenizer.json.
    tokenizer: str = BYTES
    # Name of the token that ends a document; None: the tokenizer's own end of text.
    separator: str | None = None
    # Field of JSON lines, or column of Parquet files, that holds the text.
    field: str = "text"
    # Processes that encode; 1 encodes in this process.
    num_workers: int = 1


# Encodes blocks of text in worker processes, in the order of the blocks and with few of them in memory.
#
# Processes are spawned, not forked: a fork of a process with threads (a tokenizer's, torch's) can hang.


# Blocks on their way for each worker: one in work, one waiting, one done that waits for a slower one.
_BLOCKS_PER_WORKER = 3
# Pieces of short documents that are encoded at once.
_BATCH_PIECES = 256


@dataclass(frozen=True)
class EncodedBlock:
    """Tokens of a block as the bytes of the token file, and what they were made from."""

    tokens: bytes
    num_documents: int
    # Of UTF-8 text.
    text_bytes: int
    # Of the input file, as the reader counted them.
    input_bytes: int


def encoded_blocks(
    blocks: Iterable[InputBlock], request: PackRequest, tokenizer: Tokenizer
) -> Generator[EncodedBlock]:
    """Yield the blocks' tokens in the order of `blocks`, encoded by request.num_workers processes."""
    if request.num_workers == 1:
        return (encode_block(block, tokenizer, request.field) for block in blocks)
    return _in_processes(blocks, request)


def encode_block(block: InputBlock, tokenizer: Tokenizer, field: str) -> EncodedBlock:
    """Encode one block. Raises DataError for text that cannot be read, or tokens outside the vocabulary."""
    dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder("<")
    separator = np.array([tokenizer.separator_id], dtype=dtype)
    arrays: list[np.ndarray] = []
    num_documents = text_bytes = 0
    pieces = block.pieces(field)
    while batch := list(itertools.islice(pieces, _BATCH_PIECES)):
        for piece, tokens in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
            _check_vocabulary(tokens, tokenizer, block)
            arrays.append(tokens.astype(dtype))
            text_bytes += len(piece.text.encode())
            if piece.ends_document:
                arrays.append(separator)
                num_documents += 1
    content = np.concatenate(arrays).tobytes() if arrays else b""
    return EncodedBlock(content, num_documents, text_bytes, block.input_bytes)


def _check_vocabulary(tokens: Encoded, tokenizer: Tokenizer, block: InputBlock) -> None:
    if tokens.size and int(tokens.max()) >= tokenizer.vocab_size:
        raise DataError(
            f"{block.url}: tokenizer {tokenizer.name} makes token {int(tokens.max())} of its text, outside "
            f"its own vocabulary of {tokenizer.vocab_size}; repair the tokenizer"
        )


def _in_processes(blocks: Iterable[InputBlock], request: PackRequest) -> Generator[EncodedBlock]:
    pool = ProcessPoolExecutor(
        request.num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(request.tokenizer, request.separator, request.field),
    )
    waiting: deque[Future[EncodedBlock]] = deque()
    try:
        for block in blocks:
            waiting.append(pool.submit(_encode_in_worker, block))
            if len(waiting) > _BLOCKS_PER_WORKER * request.num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker that encodes was killed, often for memory; try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


# What a worker process encodes with; set once when it starts, since a tokenizer is too large to send with
# each block.
_worker: tuple[Tokenizer, str] | None = None


def _start_worker(tokenizer: str, separator: str | None, field: str) -> None:
    global _worker
    # Ctrl-C reaches the whole group of processes; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # One process each is the parallelism; threads of the tokenizer on top would fight for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (open_tokenizer(tokenizer, separator), field)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _encode_in_worker(block: InputBlock) -> EncodedBlock:
    assert _worker is not None
    tokenizer, field = _worker
    return encode_block(block, tokenizer, field)


# Called with the bytes of the inputs that were read, of the plan's num_bytes, and the tokens written so far.
OnProgress = Callable[[int, int], None]


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
    files: list[InputFile] = []
    tokenizer: Tokenizer | None = None
    prefix = token_file_prefix(request.output)
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
    if not prefix or prefix.endswith("/") or prefix.rpartition("/")[2] in (".", ".."):
        return [f"--output {prefix}: names a folder; give a PREFIX, as in folder/name"]
    try:
        system, path = file_system(prefix)
        # Without an index a .bin may be anybody's: other programs call their tokens so too.
        taken = [name for name in (".json", ".bin") if system.exists(f"{path}{name}")]
    except DataError as error:
        return [f"--output {error}"]
    except Exception as error:  # noqa: BLE001  drivers raise what their own libraries do: no credentials …
        return [f"--output {prefix}: cannot be looked at ({type(error).__name__}: {error})"]
    if taken:
        return [f"--output {prefix}: {prefix}{taken[0]} exists; give another name or remove it"]
    return []


def pack(plan: PackPlan, on_progress: OnProgress = lambda _bytes, _tokens: None) -> PackResult:
    """Read, encode and write. Raises DataError naming file and line, row or offset of what cannot be read."""
    began = time.perf_counter()
    with _unfinished_file(plan.prefix) as unfinished:
        with unfinished.open("wb") as stream:
            writer = _TokenWriter(stream, DTYPE_BYTES[dtype_for(plan.tokenizer.vocab_size)])
            blocks = (block for file in plan.files for block in read_blocks(file))
            with closing(encoded_blocks(blocks, plan.request, plan.tokenizer)) as encoded:
                for block in encoded:
                    writer.write(block)
                    on_progress(writer.input_bytes, writer.num_tokens)
            index = _index(plan, writer)
            if plan.tokenizer.name != BYTES:
                _copy_tokenizer(plan, unfinished)
        _publish(unfinished, index, plan.prefix)
    return PackResult(
        prefix=plan.prefix,
        num_files=len(plan.files),
        num_documents=index.num_documents,
        num_tokens=index.num_tokens,
        text_bytes=writer.text_bytes,
        vocab_size=index.vocab_size,
        dtype=index.dtype,
        seconds=time.perf_counter() - began,
    )


def _copy_tokenizer(plan: PackPlan, unfinished: Path) -> None:
    """Put the tokenizer beside the tokens, where `generate` and `export` look; one that is there stays."""
    local, given = local_prefix(plan.prefix), Path(plan.request.tokenizer).expanduser()
    if local is None:
        return
    target = Path(local).parent / plan.tokenizer.name
    if target.exists() or target == Path(f"{local}.json"):
        return
    source = given / plan.tokenizer.name if given.is_dir() else given
    draft = unfinished.with_name(plan.tokenizer.name)
    draft.write_bytes(source.read_bytes())
    draft.replace(target)


class _TokenWriter:
    """Writes to the token file; keeps the checksum of each BLOCK_BYTES, and sums over the encoded blocks."""

    def __init__(self, file: BinaryIO, token_bytes: int) -> None:
        self._file = file
        self._token_bytes = token_bytes
        self.num_bytes = 0
        self.block_crc32: list[int] = []
        self.num_documents = 0
        self.text_bytes = 0
        self.input_bytes = 0

    @property
    def num_tokens(self) -> int:
        return self.num_bytes // self._token_bytes

    def write(self, block: EncodedBlock) -> None:
        self.num_documents += block.num_documents
        self.text_bytes += block.text_bytes
        self.input_bytes += block.input_bytes
        self._file.write(block.tokens)
        rest = memoryview(block.tokens)
        while rest:
            filled = self.num_bytes % BLOCK_BYTES
            if filled == 0:
                self.block_crc32.append(0)
            piece = rest[: BLOCK_BYTES - filled]
            self.block_crc32[-1] = zlib.crc32(piece, self.block_crc32[-1])
            self.num_bytes += len(piece)
            rest = rest[len(piece) :]


def _index(plan: PackPlan, writer: _TokenWriter) -> TokenIndex:
    if writer.text_bytes == 0:
        raise DataError(
            f"{', '.join(plan.request.inputs)}: no text in {len(plan.files)} file(s), and nothing was "
            f"written; give files with text"
        )
    return TokenIndex(
        dtype=dtype_for(plan.tokenizer.vocab_size),
        num_tokens=writer.num_tokens,
        num_documents=writer.num_documents,
        vocab_size=plan.tokenizer.vocab_size,
        separator_id=plan.tokenizer.separator_id,
        tokenizer=plan.tokenizer.name,
        tokenizer_sha256=plan.tokenizer.sha256,
        block_bytes=BLOCK_BYTES,
        block_crc32=writer.block_crc32,
    )


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
        raise DataError(
            f"{prefix}: cannot be written ({error.strerror or error}); give another --output"
        ) from error
    try:
        yield folder / "tokens"
    except OSError as error:
        # What goes to a URL is put together here first.
        where, advice = f"{prefix}.bin", "give another --output"
        if local is None:
            where = str(folder / "tokens")
            advice = f"let TMPDIR name a folder with room for all of {prefix}.bin"
        raise DataError(f"{where}: cannot be written ({error.strerror or error}); {advice}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(unfinished: Path, index: TokenIndex, prefix: str) -> None:
    """Give the tokens their name, then write the index."""
    local = local_prefix(prefix)
    if local is None:
        system, path = file_system(prefix)
        try:
            system.put_file(str(unfinished), f"{path}.bin")
            system.pipe_file(f"{path}.json", index_text(index).encode())
        except Exception as error:  # as above
            raise DataError(
                f"{prefix}.bin: cannot be written ({type(error).__name__}: {error}); give another --output"
            ) from error
        return
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(f"{local}.bin")
    index_file = unfinished.with_name("index")
    index_file.write_text(index_text(index))
    index_file.replace(f"{local}.json")
