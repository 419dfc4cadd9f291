"""Packing: every format gives the same tokens, whatever the workers, nothing half-written is seen, and bad
inputs are named by file and the line, row or offset where they go wrong.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from orchestra.data import pack as packing
from orchestra.data import pack_inputs, tokenizer
from orchestra.data.pack import PackRequest, PackResult, plan_pack
from orchestra.data.pack_inputs import find_inputs
from orchestra.data.source import open_tokens
from orchestra.errors import ConfigError, DataError

DOCUMENTS = ["def f():\n    return 1\n", "grüße — 你好 🎼", "", "x" * 5000, "last\n\nline"] * 20
SEPARATOR = 256
COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}


def run(tmp_path: Path, *paths: Path | str, **settings: Any) -> PackResult:
    """Pack into tmp_path/out."""
    request = PackRequest([str(path) for path in paths], str(tmp_path / "out"), **settings)
    return packing.pack(plan_pack(request))


def expected_tokens(documents: list[str]) -> list[int]:
    return [token for text in documents for token in [*text.encode(), SEPARATOR]]


def json_lines(documents: list[str]) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in documents)


def write(path: Path) -> Path:
    """Write the documents in the format that the suffix names, compressed ones in two parts."""
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": list(range(len(DOCUMENTS))), "text": DOCUMENTS})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    else:
        compress = COMPRESS.get(path.suffix, bytes)
        path.write_bytes(b"".join(compress(json_lines(part)) for part in (DOCUMENTS[:50], DOCUMENTS[50:])))
    return path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_inputs, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(pack_inputs, "_READ_BYTES", 331)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE tokenizer.json, with everything that packing must switch off."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    parsed = Tokenizer(models.BPE())
    parsed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parsed.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|begin|>", "<|endoftext|>", "[PAD]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    parsed.train_from_iterator([Path(__file__).read_text()], trainer)
    parsed.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair=None, special_tokens=[("<|begin|>", 0)]
    )
    parsed.enable_truncation(16)
    parsed.enable_padding(length=64, pad_id=2, pad_token="[PAD]")
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    parsed.save(str(path))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("block_bytes", [1, 700, 1 << 20])
def test_every_format_gives_the_documents_with_a_separator_after_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block_bytes: int
) -> None:
    monkeypatch.setattr(pack_inputs, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(pack_inputs, "_READ_BYTES", max(block_bytes // 3, 1000))
    monkeypatch.setattr(packing, "BLOCK_BYTES", 1000)
    result = run(tmp_path, write(tmp_path / name))
    file = open_tokens(str(tmp_path / "out"))
    assert file.tokens.tolist() == expected_tokens(DOCUMENTS)
    assert file.index.num_documents == result.num_documents == len(DOCUMENTS)
    assert file.index.num_tokens == result.num_tokens
    assert (file.index.vocab_size, file.index.separator_id, file.index.dtype) == (257, 256, "uint16")
    assert result.text_bytes == sum(len(text.encode()) for text in DOCUMENTS)
    content = (tmp_path / "out.bin").read_bytes()
    blocks = [content[start : start + 1000] for start in range(0, len(content), 1000)]
    assert file.index.block_crc32 == [zlib.crc32(block) for block in blocks]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst"])
@pytest.mark.parametrize("text", ["grüße\n你好 🎼\n" * 300, "🎼你é" * 900, "short"])
def test_text_file_is_one_document_however_it_is_cut(
    tmp_path: Path, small_blocks: None, suffix: str, text: str
) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(text.encode()))
    assert run(tmp_path, path).num_documents == 1
    assert open_tokens(str(tmp_path / "out")).tokens.tolist() == [*text.encode(), SEPARATOR]


def test_result_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, small_blocks: None, bpe: Path
) -> None:
    inputs = (write(tmp_path / "a.jsonl"), write(tmp_path / "b.parquet"))
    written = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        result = run(folder, *inputs, tokenizer=str(bpe), num_workers=workers)
        assert result.num_documents == 2 * len(DOCUMENTS)
        written.append([(folder / name).read_bytes() for name in ("out.bin", "out.json")])
    assert written[0] == written[1]


def test_tokenizer_adds_nothing_and_decodes_to_the_documents(tmp_path: Path, bpe: Path) -> None:
    from tokenizers import Tokenizer

    documents = ["plain words", "spelled <|endoftext|> out", "y" * 3000]
    (tmp_path / "a.jsonl").write_bytes(json_lines(documents))
    run(tmp_path, tmp_path / "a.jsonl", tokenizer=str(bpe))
    file = open_tokens(str(tmp_path / "out"))
    parsed = Tokenizer.from_file(str(bpe))
    assert file.index.separator_id == parsed.token_to_id("<|endoftext|>")
    assert file.index.vocab_size == parsed.get_vocab_size()
    assert len(file.index.tokenizer_sha256) == 64
    ends = np.flatnonzero(file.tokens == file.index.separator_id)
    starts = [0, *(ends[:-1] + 1)]
    pairs = zip(starts, ends, strict=True)
    assert [parsed.decode(file.tokens[start:end].tolist()) for start, end in pairs] == documents


def test_no_text_spells_the_separator_whatever_kind_of_token_it_is(tmp_path: Path, bpe: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    parsed = Tokenizer.from_file(str(bpe))
    parsed.add_tokens([AddedToken("<fin>", special=False)])
    parsed.save(str(tmp_path / "tokenizer.json"))
    opened = tokenizer.open_tokenizer(str(tmp_path), "<fin>")
    (encoded,) = opened.encode(["it ends with <fin> here"])
    assert opened.separator_id == parsed.token_to_id("<fin>") == opened.vocab_size - 1
    assert opened.separator_id not in encoded
    assert opened.decode(encoded.tolist()) == "it ends with <fin> here"


def test_long_document_goes_through_the_tokenizer_in_parts(
    monkeypatch: pytest.MonkeyPatch, bpe: Path
) -> None:
    text = "".join(f"line {number} of a long document\n" for number in range(400))
    (whole,) = tokenizer.open_tokenizer(str(bpe)).encode([text])
    monkeypatch.setattr(tokenizer, "_PART_CHARACTERS", 500)
    encoded = tokenizer.open_tokenizer(str(bpe)).encode([text, "short"])
    assert encoded[0].tolist() == whole.tolist()
    assert len(encoded) == 2


def test_separator_is_the_given_one_or_that_of_the_tokenizers_folder(tmp_path: Path, bpe: Path) -> None:
    from tokenizers import Tokenizer, models

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(bpe.read_bytes())
    assert tokenizer.open_tokenizer(str(folder), "[PAD]").separator_id == 2
    assert tokenizer.open_tokenizer(str(folder)).separator_id == 1
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|begin|>"}}))
    assert tokenizer.open_tokenizer(str(folder)).separator_id == 0
    (tmp_path / "none.json").write_text("{}")
    Tokenizer(models.BPE()).save(str(tmp_path / "untrained.json"))
    for name, separator, message in (
        (str(folder), "</x>", r"no token '</x>'; give --separator one of .*<\|endoftext\|>"),
        (str(tmp_path / "none.json"), None, r"not a tokenizer\.json"),
        (str(tmp_path / "untrained.json"), None, r"untrained\.json: has no tokens"),
        (str(tmp_path / "nowhere.json"), None, "No such file"),
        ("bytes", "</s>", "leave it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            tokenizer.open_tokenizer(name, separator)


def test_folders_and_patterns_are_found_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.jsonl", "notes.csv", "deep/d.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def found(*patterns: str) -> list[str]:
        files = find_inputs([str(tmp_path / pattern) for pattern in patterns])
        return [str(Path(file.url).relative_to(tmp_path)) for file in files]

    assert found("") == ["a.txt", "b.txt", "deep/c.jsonl", "deep/d.parquet"]
    assert found("b.txt", "*.txt") == ["b.txt", "a.txt"]
    assert found("**/*.jsonl") == ["deep/c.jsonl"]


def test_all_that_is_wrong_with_a_request_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "out.json").write_text("x")
    inputs = (tmp_path / "nowhere.txt", tmp_path / "a.csv")
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, *inputs, tokenizer=str(tmp_path / "t.json"), num_workers=0)
    expected = ("nowhere.txt: no such", "a.csv: not a", "t.json: ", "--workers 0", "exists")
    for problem, words in zip(caught.value.problems, expected, strict=True):
        assert words in problem


def test_an_empty_input_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("not asked for")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="INPUT '': names nothing"):
        find_inputs([""])


def test_tokens_of_another_program_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out.bin").write_text("a day's work")
    with pytest.raises(ConfigError, match=r"out\.bin exists"):
        run(tmp_path, tmp_path / "a.txt")
    assert (tmp_path / "out.bin").read_text() == "a day's work"


def test_a_host_that_cannot_be_reached_is_named_with_its_url() -> None:
    with pytest.raises(ConfigError, match=r"ftp://127\.0\.0\.1:1/a\.txt: cannot be reached"):
        find_inputs(["ftp://127.0.0.1:1/a.txt"])


class RefusedError(Exception):
    """As botocore's: no OSError."""


class ClosedStore(MemoryFileSystem):
    """Lets nobody look, or nobody write."""

    protocol = "closed"
    cachable = False

    def exists(self, path: str, **_: Any) -> bool:
        if "blind" in path:
            raise RefusedError("unable to locate credentials")
        return False

    def pipe_file(self, path: str, *_: Any, **__: Any) -> None:
        raise RefusedError(f"access denied to {path}")


def test_what_a_store_says_of_an_output_is_told(tmp_path: Path) -> None:
    fsspec.register_implementation("closed", ClosedStore, clobber=True)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        ConfigError, match=r"--output closed://blind/a: cannot .*RefusedError: unable to locate"
    ):
        plan_pack(PackRequest([str(tmp_path)], "closed://blind/a"))
    with pytest.raises(
        DataError, match=r"closed://b/a\.bin: cannot be written \(RefusedError: access denied"
    ):
        packing.pack(plan_pack(PackRequest([str(tmp_path)], "closed://b/a")))


def test_urls_are_read_and_written(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    system.pipe_file("/texts/a.jsonl", json_lines(["one", "two"]))
    plan = plan_pack(PackRequest(["memory://texts/*.jsonl"], "memory://packed/corpus.bin"))
    assert packing.pack(plan).prefix == "memory://packed/corpus"
    file = open_tokens("memory://packed/corpus", str(tmp_path / "cache"))
    assert file.tokens.tolist() == expected_tokens(["one", "two"])
    with pytest.raises(ConfigError, match=r"memory://packed/corpus\.json exists"):
        plan_pack(PackRequest(["memory://texts/*.jsonl"], "memory://packed/corpus"))
    system.store.clear()


def test_progress_reaches_the_size_of_the_inputs(tmp_path: Path, small_blocks: None) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl.gz")
    seen: list[tuple[int, int]] = []
    plan = plan_pack(PackRequest([str(tmp_path)], str(tmp_path / "out")))
    result = packing.pack(plan, lambda *progress: seen.append(progress))
    assert len(seen) > 10
    assert seen[-1] == (plan.num_bytes, result.num_tokens)
    assert all(before <= after for before, after in pairwise(seen))


def test_nothing_is_left_of_a_packing_that_fails(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    folder = tmp_path / "new" / "folder"
    with pytest.raises(DataError, match="line 2"):
        run(folder, tmp_path / "a.jsonl")
    assert list(folder.iterdir()) == []


LINE = json.dumps({"text": "some text"}).encode() + b"\n"


def message_of(path: Path, *, workers: int = 1, field: str = "text") -> str:
    """Return what packing `path` complains about."""
    with pytest.raises(DataError) as caught:
        run(path.parent, path, num_workers=workers, field=field)
    message = str(caught.value)
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": "no end', "line 4: not JSON"),
        (b"[" * 200_000, "line 4: not JSON"),
        (b'["text"]', "line 4: no field 'text', found an array"),
        (b'{"body": "x", "id": 1}', "line 4: no field 'text', found body, id; give --field"),
        (b'{"text": null}', "line 4, field 'text': null, expected a string"),
        (b'{"text": 17}', "line 4, field 'text': a number, expected a string"),
        (b'{"text": "\xff"}', "line 4, byte 10: not UTF-8"),
        (b'{"text": "a\\ud800"}', "line 4, field 'text': half a surrogate pair at character 1"),
    ],
)
def test_bad_line_is_named_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, expected: str
) -> None:
    monkeypatch.setattr(pack_inputs, "_BLOCK_BYTES", 40)
    monkeypatch.setattr(pack_inputs, "_READ_BYTES", 30)
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b"\n" + LINE + line + b"\n" + LINE)
    assert expected in message_of(path)


def test_error_and_death_of_a_worker_process_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE * 3 + b"{\n")
    assert "line 4: not JSON" in message_of(path, workers=2)
    # The environment of the workers makes them die while they start, as for want of memory.
    monkeypatch.setattr(packing, "_start_worker", os.abort)
    with pytest.raises(DataError, match="worker that encodes was killed"):
        run(tmp_path, path, num_workers=2)


TEXT = b"".join(json.dumps({"text": str(number**9)}).encode() + b"\n" for number in range(3000))
GZIP, ZSTD = gzip.compress(TEXT), zstandard.compress(TEXT)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"fine line\n" * 30 + b"gr\xfc\xdfe", "byte 0xfc at offset 302 is not UTF-8"),
        ("a.jsonl.gz", GZIP[:5000], "breaks off at offset 5000"),
        ("a.jsonl.zst", ZSTD[:5000], "breaks off at offset 5000"),
        ("a.txt.gz", GZIP[:5000], "breaks off at offset 5000"),
        ("a.txt.zst", ZSTD[:5000], "breaks off at offset 5000"),
        ("a.jsonl.gz", b"this is not compressed at all" * 10, "damaged"),
        ("a.jsonl.zst", b"this is not compressed at all" * 10, "damaged"),
        ("a.jsonl", b"\n\n", "no text in 1 file(s), and nothing was written"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, expected: str
) -> None:
    monkeypatch.setattr(pack_inputs, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(pack_inputs, "_READ_BYTES", 32)
    (tmp_path / name).write_bytes(content)
    assert expected in message_of(tmp_path / name)


def test_damage_inside_a_parquet_file_is_named_by_its_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [str(number**5) for number in range(4000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=1000, compression="zstd", use_dictionary=False)
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start + 30 : start + 900] = bytes(870)
    path.write_bytes(content)
    assert "damaged in row group 2, after row 2000" in message_of(path)


def test_parquet_column_and_row_are_named_and_where_it_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["a", "b", None, "d"], "id": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    assert "row 2, column 'text': null, expected a string" in message_of(path)
    assert "no column 'body', found text, id; give --field" in message_of(path, field="body")
    assert "row 0, column 'id': a number, expected a string" in message_of(path, field="id")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert f"not a whole Parquet file of {len(whole) - 9} bytes" in message_of(path)


def test_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/out: cannot be written"):
        run(tmp_path / "file", tmp_path / "a.txt")
