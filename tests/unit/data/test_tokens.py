"""Token files: mapped, checked against their index, copied once per node, and named when they are damaged."""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest

from conf.schema import BlendPart, Config, DataConfig, Source, TrainConfig
from orchestra.config.machine import Situation
from orchestra.config.rules.place_rules import rule_data_files
from orchestra.data import token_files
from orchestra.data.source import open_source, open_tokens, separator_of
from orchestra.data.token_files import index_text, read_index
from orchestra.errors import DataError, DataOutageError

WriteTokens = Callable[..., str]


@pytest.fixture
def bucket() -> Iterator[Any]:
    """An empty remote file system; its URLs begin with memory://."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def upload(bucket: Any, prefix: str) -> str:
    for suffix in (".bin", ".json"):
        bucket.pipe_file(f"/data/corpus{suffix}", Path(prefix + suffix).read_bytes())
    return "memory://data/corpus"


@pytest.fixture
def remote(bucket: Any, write_tokens: WriteTokens) -> str:
    """URL of a token file of 5,000 tokens."""
    return upload(bucket, write_tokens("corpus", np.arange(5000, dtype=np.uint16) % 257))


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


def test_separator_is_read_from_the_index_alone_of_local_and_remote_files(
    write_tokens: WriteTokens, bucket: Any
) -> None:
    prefix = write_tokens("corpus", np.arange(3000, dtype=np.uint16) % 100, vocab_size=100)
    Path(f"{prefix}.bin").unlink()
    assert separator_of(DataConfig(Source.tokens, path=prefix), 16) == 99
    bucket.pipe_file("/data/corpus.json", Path(f"{prefix}.json").read_bytes())
    assert separator_of(DataConfig(Source.tokens, path="memory://data/corpus.bin"), 16) == 99
    blend = [BlendPart(path=prefix), BlendPart(path="nowhere")]
    assert separator_of(DataConfig(Source.tokens, blend=blend), 16) == 99
    assert separator_of(DataConfig(), 16) == 256


def test_a_separator_that_no_token_can_be_is_refused_where_documents_are_masked(
    write_tokens: WriteTokens,
) -> None:
    prefix = write_tokens("corpus", np.arange(3000, dtype=np.uint16) % 100, vocab_size=100)
    index = replace(read_index(Path(f"{prefix}.json")), separator_id=100)
    Path(f"{prefix}.json").write_text(index_text(index))
    with pytest.raises(DataError, match=r"separator_id=100 is outside .* data.document_masks=false"):
        separator_of(DataConfig(Source.tokens, path=prefix), 16)
    config = Config(data=DataConfig(Source.tokens, path=prefix), train=TrainConfig(seq_len=64))
    assert not list(rule_data_files(config, Situation()))
    masked = replace(config, data=replace(config.data, document_masks=True))
    (problem,) = rule_data_files(masked, Situation())
    assert "separator_id=100" in problem


def test_token_outside_the_vocabulary_is_named_by_file_and_offset(write_tokens: WriteTokens) -> None:
    tokens = np.zeros(1000, dtype=np.uint16)
    tokens[777] = 300
    prefix = write_tokens("corpus", tokens)
    source = open_source(DataConfig(source=Source.tokens, path=prefix), seq_len=10)
    out = np.empty(11, dtype=np.int64)
    source.read(76, out)
    with pytest.raises(DataError, match=r"corpus\.bin: token 300 at offset 1554 \(token 777\) .* of 257"):
        source.read(77, out)


def test_size_that_disagrees_with_the_index_and_missing_and_torn_files_are_named(
    write_tokens: WriteTokens, tmp_path: Path
) -> None:
    prefix = write_tokens("corpus", np.zeros(1000, dtype=np.uint16))
    os.truncate(f"{prefix}.bin", 1500)
    with pytest.raises(DataError, match=r"corpus\.bin: breaks off at offset 1500.*its index says 2000"):
        open_tokens(prefix)
    os.truncate(f"{prefix}.bin", 2002)
    with pytest.raises(DataError, match=r"corpus\.bin: goes on at offset 2000"):
        open_tokens(prefix)
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DataError, match=r"corpus\.bin: no such file beside its index"):
        open_tokens(prefix)
    index = Path(f"{prefix}.json")
    index.write_text(index.read_text()[:-30])
    with pytest.raises(DataError, match=r"corpus\.json: not whole JSON.* offset \d+ of \d+ bytes"):
        read_index(index)
    with pytest.raises(DataError, match=r"nowhere\.json: no such file; write it with `orchestra data pack`"):
        open_tokens(str(tmp_path / "nowhere"))


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


def test_index_that_is_something_else_is_refused(tmp_path: Path) -> None:
    for content in (b"[]", b"", b"\xff\xfe", b"3", b"[" * 100_000):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(DataError, match=r"x\.json: "):
            read_index(tmp_path / "x.json")


def test_remote_file_is_read_from_a_copy_that_is_made_once(
    remote: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Mock(wraps=token_files._copy_tokens)
    monkeypatch.setattr(token_files, "_copy_tokens", counted)
    with ThreadPoolExecutor(6) as pool:
        opened = list(pool.map(lambda _: open_tokens(f"{remote}.bin", str(tmp_path / "cache")), range(6)))
    assert counted.call_count == 1
    assert all(np.array_equal(file.tokens, np.arange(5000) % 257) for file in opened)
    assert opened[0].name == "memory://data/corpus.bin"
    bucket.rm_file("/data/corpus.bin")
    assert len(open_tokens(remote, str(tmp_path / "cache")).tokens) == 5000


def test_remote_file_that_changed_or_whose_copy_was_interrupted_is_copied_again(
    remote: str, bucket: Any, tmp_path: Path, write_tokens: WriteTokens
) -> None:
    open_tokens(remote, str(tmp_path / "cache"))
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "corpus.json").unlink()
    (folder / "corpus.bin").write_bytes(b"half")
    assert len(open_tokens(remote, str(tmp_path / "cache")).tokens) == 5000
    upload(bucket, write_tokens("changed", np.full(5000, 9, dtype=np.uint16)))
    assert open_tokens(remote, str(tmp_path / "cache")).tokens.min() == 9


def test_damaged_or_missing_remote_file_is_named_with_the_offset_and_leaves_no_copy(
    remote: str, bucket: Any, tmp_path: Path
) -> None:
    whole = bucket.cat_file("/data/corpus.bin")
    content = bytearray(whole)
    content[4321] ^= 1
    for stored, message in (
        (bytes(content), r"corpus\.bin: damaged .* offset 4000 on: checksum"),
        (whole[:999], r"corpus\.bin: breaks off at offset 999"),
    ):
        bucket.pipe_file("/data/corpus.bin", stored)
        for _ in range(2):
            with pytest.raises(DataError, match=r"memory://data/" + message):
                open_tokens(remote, str(tmp_path / "cache"))
    bucket.rm_file("/data/corpus.bin")
    with pytest.raises(DataError, match=r"memory://data/corpus\.bin: no such file beside its index"):
        open_tokens(remote, str(tmp_path))
    with pytest.raises(DataError, match=r"memory://data/nowhere\.json: no such file"):
        open_tokens("memory://data/nowhere", str(tmp_path))


@pytest.mark.parametrize(
    ("answer", "words"), [(404, "no such file beside its index"), (403, "403"), (503, "503")]
)
def test_what_a_web_server_refuses_is_told_as_it_says(
    write_tokens: WriteTokens, tmp_path: Path, answer: int, words: str
) -> None:
    prefix = write_tokens("corpus", np.arange(100, dtype=np.uint16) % 257)

    class Refusing(SimpleHTTPRequestHandler):
        def send_head(self) -> Any:
            if self.path.endswith(".bin"):
                self.send_error(answer)
                return None
            return super().send_head()

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Refusing, directory=str(Path(prefix).parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/corpus"
        try:
            with pytest.raises(DataError, match=re.escape(f"{url}.bin") + f".*{words}"):
                open_tokens(url, str(tmp_path / "cache"))
        finally:
            server.shutdown()


def test_unknown_protocol_and_a_cache_that_cannot_be_written_are_explained(
    remote: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="orchestra-train"):
        open_tokens("nonsense://bucket/corpus", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        open_tokens(remote, str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("error", "kind"), [(TimeoutError(), DataOutageError), (PermissionError(13, "no"), DataError)]
)
def test_an_index_whose_storage_does_not_answer_is_told_from_one_that_cannot_be_read(
    error: Exception, kind: type[DataError]
) -> None:
    with pytest.raises(DataError, match="cannot be read") as raised:
        token_files._read_remote(Mock(cat_file=Mock(side_effect=error)), "a.json", "s3://bucket/a.json")
    assert type(raised.value) is kind
