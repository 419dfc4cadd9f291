"""Encodes blocks of text in worker processes, in the order of the blocks and with few of them in memory.

Processes are spawned, not forked: a fork of a process with threads (a tokenizer's, torch's) can hang.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from orchestra.data.documents import Block, Piece
from orchestra.data.index import dtype_for
from orchestra.data.request import PackRequest
from orchestra.data.tokenizer import Encoded, Tokenizer, open_tokenizer
from orchestra.errors import DataError

# Blocks on their way for each worker: one in work, one waiting, one done behind a slower one.
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
    blocks: Iterable[Block], request: PackRequest, tokenizer: Tokenizer
) -> Generator[EncodedBlock]:
    """Yield the blocks' tokens in the order of `blocks`, encoded by request.num_workers processes."""
    if request.num_workers == 1:
        return (encode_block(block, tokenizer, request.field) for block in blocks)
    return _in_processes(blocks, request)


def encode_block(block: Block, tokenizer: Tokenizer, field: str) -> EncodedBlock:
    """Encode one block. Raises DataError for text that cannot be read, or tokens outside the vocabulary."""
    dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder("<")
    separator = np.array([tokenizer.separator_id], dtype=dtype)
    arrays: list[np.ndarray] = []
    num_documents = text_bytes = 0
    for batch in _batches(block.pieces(field)):
        for piece, tokens in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
            _check_vocabulary(tokens, tokenizer, block)
            arrays.append(tokens.astype(dtype))
            text_bytes += len(piece.text.encode())
            if piece.ends_document:
                arrays.append(separator)
                num_documents += 1
    content = np.concatenate(arrays).tobytes() if arrays else b""
    return EncodedBlock(content, num_documents, text_bytes, block.input_bytes)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == _BATCH_PIECES:
            yield batch
            batch = []
    if batch:
        yield batch


def _check_vocabulary(tokens: Encoded, tokenizer: Tokenizer, block: Block) -> None:
    if tokens.size and int(tokens.max()) >= tokenizer.vocab_size:
        raise DataError(
            f"{block.url}: tokenizer {tokenizer.name} makes token {int(tokens.max())} of its text, outside "
            f"its own vocabulary of {tokenizer.vocab_size}; repair the tokenizer"
        )


def _in_processes(blocks: Iterable[Block], request: PackRequest) -> Generator[EncodedBlock]:
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


def _encode_in_worker(block: Block) -> EncodedBlock:
    assert _worker is not None
    tokenizer, field = _worker
    return encode_block(block, tokenizer, field)
