"""Blocks of token files: compared before the first sample of them is read, once for all ranks of a node."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from conf.schema import DataConfig, Source
from orchestra.data import block_checks
from orchestra.data.block_checks import forget_blocks, verified
from orchestra.data.source import SampleSource, open_source
from orchestra.errors import EXIT_DO_NOT_RESTART, DamagedDataError, DataError
from orchestra.run.heartbeat import FOLDER_VARIABLE

WriteTokens = Callable[..., str]
SEQ_LEN = 99
# Of 1,000 bytes; a sample of 100 tokens has 200.
NUM_BLOCKS = 10


@pytest.fixture
def prefix(write_tokens: WriteTokens) -> str:
    return write_tokens("corpus", np.arange(5000, dtype=np.uint16) % 257)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a node's heartbeats."""
    folder = tmp_path / "beats"
    folder.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


@pytest.fixture
def read_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that this process has read for their checksum, in order."""
    read: list[int] = []
    checksum = block_checks.block_checksum

    def counted(binary: Path, index: Any, number: int) -> int:
        read.append(number)
        return checksum(binary, index, number)

    monkeypatch.setattr(block_checks, "block_checksum", counted)
    return read


def opened(prefix: str, cache_dir: str | None = None) -> SampleSource:
    return open_source(DataConfig(source=Source.tokens, path=prefix, cache_dir=cache_dir), SEQ_LEN)


def read(source: SampleSource, *samples: int) -> None:
    out = np.empty(SEQ_LEN + 1, dtype=np.int64)
    for sample in samples:
        source.read(sample, out)


def damage(prefix: str, offset: int) -> None:
    """Put another token in the place of one; size and time of the file stay."""
    file = Path(f"{prefix}.bin")
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[offset] = content[offset] + 1 if content[offset] < 100 else 0
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_damaged_block_is_named_with_its_offset_and_the_others_are_read(prefix: str) -> None:
    damage(prefix, 4321)
    source = opened(prefix)
    read(source, 0, 19, 26, 49)
    words = (
        r"corpus\.bin: damaged in block 4 of 10 .* 1000 bytes from offset 4000 on: checksum .* data verify"
    )
    for _ in range(2):
        with pytest.raises(DamagedDataError, match=words) as caught:
            read(source, 21)
    assert caught.value.exit_code == EXIT_DO_NOT_RESTART
    # The last token of sample 20 is the first of the next one, and lies in the damaged block's neighbour.
    read(source, 18)
    with pytest.raises(DamagedDataError):
        read(source, 20)


def test_the_last_block_may_be_shorter(write_tokens: WriteTokens) -> None:
    short = write_tokens("short", np.zeros(1234, dtype=np.uint16))
    read(opened(short), 11)
    damage(short, 2300)
    with pytest.raises(DamagedDataError, match=r"block 2 of 3 .* 468 bytes from offset 2000"):
        read(opened(short), 11)


def test_each_block_is_read_once_and_only_when_it_is_needed(prefix: str, read_blocks: list[int]) -> None:
    source = opened(prefix)
    assert read_blocks == []
    read(source, 0, 1, 0, 49, 9, 10)
    assert read_blocks == [0, 9, 1, 2]


def test_ranks_of_a_node_share_what_they_found_until_the_file_is_another(
    prefix: str, node: Path, read_blocks: list[int]
) -> None:
    first, second = opened(prefix), opened(prefix)
    read(first, 0, 20)
    read(second, 0, 20, 49)
    assert read_blocks == [0, 3, 4, 9]
    os.utime(f"{prefix}.bin", ns=(1, 1))
    read(opened(prefix), 0)
    assert read_blocks == [0, 3, 4, 9, 0]
    assert len(list(node.iterdir())) == 2
    forget_blocks(node)
    assert not node.exists()
    read(opened(prefix), 0)
    assert read_blocks[-2:] == [0, 0], "a node whose folder is gone goes on alone"


def test_what_is_damaged_is_told_by_every_rank(prefix: str, node: Path) -> None:
    damage(prefix, 100)
    for _ in range(2):
        with pytest.raises(DamagedDataError):
            read(opened(prefix), 0)


def _read_all(prefix: str, folder: str, ready: Any, num_read: Any) -> None:
    os.environ[FOLDER_VARIABLE] = folder
    checksum = block_checks.block_checksum

    def counted(binary: Path, index: Any, number: int) -> int:
        with num_read.get_lock():
            num_read.value += 1
        return checksum(binary, index, number)

    block_checks.block_checksum = counted
    source = opened(prefix)
    ready.wait()
    read(source, *range(50))


def test_processes_that_read_at_once_check_no_block_twice(prefix: str, node: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, num_read = context.Barrier(4), context.Value("i", 0)
    ranks = [context.Process(target=_read_all, args=(prefix, str(node), ready, num_read)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert num_read.value == NUM_BLOCKS


def test_a_copy_that_was_damaged_later_is_named_with_the_file_it_is_of(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = fsspec.filesystem("memory")
    bucket.store.clear()
    for suffix in (".bin", ".json"):
        bucket.pipe_file(f"/data/corpus{suffix}", Path(prefix + suffix).read_bytes())
    cache = tmp_path / "cache"
    read(opened("memory://data/corpus", str(cache)), 0)
    (copy,) = cache.iterdir()
    damage(str(copy / "corpus"), 0)
    with pytest.raises(
        DamagedDataError, match=r"memory://data/corpus\.bin \(its copy .*/cache/.*\): damaged"
    ):
        read(opened("memory://data/corpus", str(cache)), 0)
    assert verified("memory://data/corpus", 1)[1] == []
    with monkeypatch.context() as patched:
        # As of a web server that sends no Content-Length.
        patched.setattr(type(bucket), "size", lambda _self, _path: None)
        assert verified("memory://data/corpus", 1)[1] == []
    bucket.pipe_file("/data/corpus.bin", bytes(10000))
    index, damages = verified("memory://data/corpus", 1)
    assert [block.offset for block in damages] == list(range(0, index.num_bytes, 1000))
    bucket.store.clear()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_damaged_blocks_are_found_in_their_order(
    prefix: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_checks, "_AT_ONCE", 4)
    for offset in (9999, 0, 5000):
        damage(prefix, offset)
    sizes: list[int] = []
    _, damages = verified(prefix, num_threads, sizes.append)
    assert [block.number for block in damages] == [0, 5, 9]
    assert sizes == [1000] * NUM_BLOCKS


def test_a_file_that_cannot_be_read_is_named_with_the_block(prefix: str) -> None:
    source = opened(prefix)
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DataError, match=r"cannot be read in block 3, from offset 3000 on"):
        read(source, 16)
