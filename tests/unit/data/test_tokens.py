"""Token files: mapped, checked against their index, copied once per node, and named when they are damaged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from conf.schema import DataConfig, Source
from orchestra.data import cache
from orchestra.data.index import read_index
from orchestra.data.source import open_source, open_tokens
from orchestra.errors import DataError

WriteTokens = Callable[..., str]


@pytest.fixture
def bucket() -> Iterator[Any]:
    """An empty remote file system; its URLs begin with memory://."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.fixture
def remote(bucket: Any, write_tokens: WriteTokens) -> str:
    """URL of a token file of 5,000 tokens."""
    prefix = write_tokens("corpus", np.arange(5000, dtype=np.uint16) % 257)
    for suffix in (".bin", ".json"):
        bucket.pipe_file(f"/data/corpus{suffix}", Path(prefix + suffix).read_bytes())
    return "memory://data/corpus"


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("form", ["{}", "{}.bin", "{}.json", "file://{}"])
def test_file_opens_by_prefix_name_or_url(
    write_tokens: WriteTokens, dtype: type[np.unsignedinteger[Any]], form: str
) -> None:
    tokens = np.arange(3000, dtype=dtype) % 257
    file = open_tokens(form.format(write_tokens("corpus", tokens)))
    assert file.tokens.dtype == dtype
    assert np.array_equal(file.tokens, tokens)
    assert not file.tokens.flags.writeable
    assert file.name.endswith("corpus.bin")


def test_token_outside_the_vocabulary_is_named_by_file_and_offset(write_tokens: WriteTokens) -> None:
    tokens = np.zeros(1000, dtype=np.uint16)
    tokens[777] = 300
    prefix = write_tokens("corpus", tokens)
    source = open_source(DataConfig(source=Source.tokens, path=prefix), seq_len=10)
    out = np.empty(11, dtype=np.int64)
    source.read(76, out)
    with pytest.raises(DataError, match=r"corpus\.bin: token 300 at offset 1554 \(token 777\) .* of 257"):
        source.read(77, out)


def test_size_that_disagrees_with_the_index_is_named(write_tokens: WriteTokens) -> None:
    prefix = write_tokens("corpus", np.zeros(1000, dtype=np.uint16))
    with Path(f"{prefix}.bin").open("ab") as file:
        file.truncate(1500)
    with pytest.raises(DataError, match=r"corpus\.bin: breaks off at offset 1500.*its index says 2000"):
        open_tokens(prefix)
    with Path(f"{prefix}.bin").open("ab") as file:
        file.truncate(2002)
    with pytest.raises(DataError, match=r"corpus\.bin: goes on at offset 2000"):
        open_tokens(prefix)


def test_missing_file_is_named_with_the_command_that_writes_it(
    write_tokens: WriteTokens, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"nowhere\.json: no such file; write it with `orchestra data pack`"):
        open_tokens(str(tmp_path / "nowhere"))
    prefix = write_tokens("corpus", np.zeros(10, dtype=np.uint16))
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DataError, match=r"corpus\.bin: no such file beside its index"):
        open_tokens(prefix)


def test_torn_index_is_named_with_the_place_where_it_breaks_off(write_tokens: WriteTokens) -> None:
    index = Path(write_tokens("corpus", np.zeros(10, dtype=np.uint16)) + ".json")
    whole = index.read_text()
    index.write_text(whole[:-30])
    with pytest.raises(DataError, match=r"corpus\.json: not whole JSON.* offset \d+ of \d+ bytes"):
        read_index(index)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": "other"}, "not an index of `orchestra data pack`"),
        ({"version": 2}, "version 2, this program reads 1"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"num_tokens": "many"}, "num_tokens is 'many'"),
        ({"num_tokens": -1}, "num_tokens is -1"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"tokenizer": 1}, "tokenizer is 1"),
        ({"block_bytes": 0}, "block_crc32 is not"),
        ({"block_crc32": [1, 2, 3]}, "block_crc32 is not"),
        ({"block_crc32": ["a"]}, "block_crc32 is not"),
    ],
)
def test_index_that_says_nonsense_is_refused(
    write_tokens: WriteTokens, change: dict[str, Any], expected: str
) -> None:
    index = Path(write_tokens("corpus", np.zeros(10, dtype=np.uint16)) + ".json")
    index.write_text(json.dumps({**json.loads(index.read_text()), **change}))
    with pytest.raises(DataError, match=expected):
        read_index(index)


@pytest.mark.parametrize("content", [b"[]", b"", b"\xff\xfe", b"3"])
def test_index_that_is_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.json: "):
        read_index(tmp_path / "x.json")


def test_remote_file_is_read_from_a_copy_that_is_made_once(
    remote: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    copy_tokens = cache._copy_tokens

    def counted(*given: Any) -> None:
        copies.append(given)
        copy_tokens(*given)

    monkeypatch.setattr(cache, "_copy_tokens", counted)
    opened: list[Any] = []
    threads = [
        threading.Thread(target=lambda: opened.append(open_tokens(f"{remote}.bin", str(tmp_path / "cache"))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 6
    assert len(copies) == 1
    assert all(np.array_equal(file.tokens, np.arange(5000) % 257) for file in opened)
    assert opened[0].name == "memory://data/corpus.bin"
    bucket.rm_file("/data/corpus.bin")
    assert len(open_tokens(remote, str(tmp_path / "cache")).tokens) == 5000


def test_remote_file_that_changed_is_copied_again(
    remote: str, bucket: Any, tmp_path: Path, write_tokens: WriteTokens
) -> None:
    open_tokens(remote, str(tmp_path / "cache"))
    prefix = write_tokens("changed", np.full(5000, 9, dtype=np.uint16))
    for suffix in (".bin", ".json"):
        bucket.pipe_file(f"/data/corpus{suffix}", Path(prefix + suffix).read_bytes())
    assert open_tokens(remote, str(tmp_path / "cache")).tokens.min() == 9


def test_copy_that_was_interrupted_is_made_again(remote: str, tmp_path: Path) -> None:
    open_tokens(remote, str(tmp_path / "cache"))
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "corpus.json").unlink()
    (folder / "corpus.bin").write_bytes(b"half")
    assert len(open_tokens(remote, str(tmp_path / "cache")).tokens) == 5000


def test_damaged_remote_file_is_named_with_the_offset_and_leaves_no_copy(
    remote: str, bucket: Any, tmp_path: Path
) -> None:
    content = bytearray(bucket.cat_file("/data/corpus.bin"))
    content[4321] ^= 1
    bucket.pipe_file("/data/corpus.bin", bytes(content))
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"memory://data/corpus\.bin: damaged .* offset 4000 on: checksum"
        ):
            open_tokens(remote, str(tmp_path / "cache"))


def test_remote_file_that_breaks_off_or_is_missing_is_named(remote: str, bucket: Any, tmp_path: Path) -> None:
    bucket.pipe_file("/data/corpus.bin", bucket.cat_file("/data/corpus.bin")[:999])
    with pytest.raises(DataError, match=r"memory://data/corpus\.bin: breaks off at offset 999"):
        open_tokens(remote, str(tmp_path))
    bucket.rm_file("/data/corpus.bin")
    with pytest.raises(DataError, match=r"memory://data/corpus\.bin: no such file beside its index"):
        open_tokens(remote, str(tmp_path))
    with pytest.raises(DataError, match=r"memory://data/nowhere\.json: no such file"):
        open_tokens("memory://data/nowhere", str(tmp_path))


def test_unknown_protocol_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="orchestra-train"):
        open_tokens("nonsense://bucket/corpus", str(tmp_path))


def test_cache_that_cannot_be_written_is_explained(remote: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        open_tokens(remote, str(tmp_path / "file"))
