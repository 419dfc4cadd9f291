"""Packing: every format gives the same tokens, whatever the workers, and nothing half-written is seen."""

from __future__ import annotations

import gzip
import json
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

from orchestra.data.index import read_index
from orchestra.data.pack import command, inputs, tokenizer
from orchestra.data.pack.command import PackProgress, PackRequest, PackResult, plan_pack
from orchestra.data.pack.inputs import find_inputs
from orchestra.data.source import open_tokens
from orchestra.errors import ConfigError

DOCUMENTS = ["def f():\n    return 1\n", "grüße — 你好 🎼", "", "x" * 5000, "last\n\nline"] * 20
SEPARATOR = 256


def run(tmp_path: Path, *paths: Path | str, **settings: Any) -> PackResult:
    """Pack into tmp_path/out."""
    request = PackRequest([str(path) for path in paths], str(tmp_path / "out"), **settings)
    return command.pack(plan_pack(request))


def expected_tokens(documents: list[str]) -> list[int]:
    return [token for text in documents for token in [*text.encode(), SEPARATOR]]


def json_lines(documents: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in documents)


def write_jsonl(path: Path) -> None:
    path.write_bytes(json_lines(DOCUMENTS))


def write_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(json_lines(DOCUMENTS[:50])) + gzip.compress(json_lines(DOCUMENTS[50:])))


def write_zstd(path: Path) -> None:
    frames = [zstandard.compress(json_lines(part)) for part in (DOCUMENTS[:50], DOCUMENTS[50:])]
    path.write_bytes(b"".join(frames))


def write_parquet(path: Path) -> None:
    table = pyarrow.table({"id": list(range(len(DOCUMENTS))), "text": DOCUMENTS})
    pyarrow.parquet.write_table(table, path, row_group_size=7)


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


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.jsonl.gz", write_gzip),
        ("a.jsonl.zst", write_zstd),
        ("a.parquet", write_parquet),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 700, 1 << 20])
def test_every_format_gives_the_documents_with_a_separator_after_each(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    write: Callable[[Path], None],
    block_bytes: int,
) -> None:
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(inputs, "_READ_BYTES", max(block_bytes // 3, 1000))
    write(tmp_path / name)
    result = run(tmp_path, tmp_path / name)
    file = open_tokens(str(tmp_path / "out"))
    assert file.tokens.tolist() == expected_tokens(DOCUMENTS)
    assert file.index.num_documents == result.num_documents == len(DOCUMENTS)
    assert file.index.num_tokens == result.num_tokens
    assert (file.index.vocab_size, file.index.separator_id, file.index.dtype) == (257, 256, "uint16")
    assert result.text_bytes == sum(len(text.encode()) for text in DOCUMENTS)


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst"])
@pytest.mark.parametrize("text", ["grüße\n你好 🎼\n" * 300, "🎼你é" * 900, "short"])
def test_text_file_is_one_document_however_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, text: str
) -> None:
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(inputs, "_READ_BYTES", 331)
    content = text.encode()
    if suffix.endswith(".gz"):
        content = gzip.compress(content)
    elif suffix.endswith(".zst"):
        content = zstandard.compress(content)
    (tmp_path / f"a{suffix}").write_bytes(content)
    assert run(tmp_path, tmp_path / f"a{suffix}").num_documents == 1
    assert open_tokens(str(tmp_path / "out")).tokens.tolist() == [*text.encode(), SEPARATOR]


def test_result_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe: Path
) -> None:
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 4000)
    monkeypatch.setattr(inputs, "_READ_BYTES", 2000)
    write_jsonl(tmp_path / "a.jsonl")
    write_parquet(tmp_path / "b.parquet")
    written = []
    for workers in (1, 2):
        request = PackRequest(
            [str(tmp_path / "*.*l*"), str(tmp_path / "b.parquet")],
            str(tmp_path / f"out{workers}"),
            tokenizer=str(bpe),
            num_workers=workers,
        )
        result = command.pack(plan_pack(request))
        assert result.num_documents == 2 * len(DOCUMENTS)
        written.append([(tmp_path / f"out{workers}{suffix}").read_bytes() for suffix in (".bin", ".json")])
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


def test_long_document_goes_through_the_tokenizer_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe: Path
) -> None:
    text = "".join(f"line {number} of a long document\n" for number in range(400))
    (tmp_path / "a.jsonl").write_bytes(json_lines([text]))
    run(tmp_path, tmp_path / "a.jsonl", tokenizer=str(bpe))
    whole = open_tokens(str(tmp_path / "out")).tokens.tolist()
    monkeypatch.setattr(tokenizer, "_PART_CHARACTERS", 500)
    encoded = tokenizer.open_tokenizer(str(bpe)).encode([text, "short"])
    assert encoded[0].tolist() == whole[:-1]
    assert len(encoded) == 2


def test_separator_is_the_given_one_or_that_of_the_tokenizers_folder(tmp_path: Path, bpe: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(bpe.read_bytes())
    assert tokenizer.open_tokenizer(str(folder), "[PAD]").separator_id == 2
    assert tokenizer.open_tokenizer(str(folder)).separator_id == 1
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|begin|>"}}))
    assert tokenizer.open_tokenizer(str(folder)).separator_id == 0
    with pytest.raises(ConfigError, match=r"no token '</x>'; give --separator one of .*<\|endoftext\|>"):
        tokenizer.open_tokenizer(str(folder), "</x>")


def test_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json"):
        tokenizer.open_tokenizer(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="No such file"):
        tokenizer.open_tokenizer(str(tmp_path / "nowhere.json"))
    with pytest.raises(ConfigError, match="leave it out"):
        tokenizer.open_tokenizer("bytes", "</s>")


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
    request = PackRequest(
        [str(tmp_path / "nowhere.txt"), str(tmp_path / "a.csv")],
        str(tmp_path / "out"),
        tokenizer=str(tmp_path / "t.json"),
        num_workers=0,
    )
    with pytest.raises(ConfigError) as caught:
        plan_pack(request)
    for problem, expected in zip(
        caught.value.problems,
        ("nowhere.txt: no such", "a.csv: not a", "t.json: ", "--workers 0", "exists"),
        strict=True,
    ):
        assert expected in problem


def test_urls_are_read_and_written(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    system.pipe_file("/texts/a.jsonl", json_lines(["one", "two"]))
    plan = plan_pack(PackRequest(["memory://texts/*.jsonl"], "memory://packed/corpus.bin"))
    assert command.pack(plan).prefix == "memory://packed/corpus"
    file = open_tokens("memory://packed/corpus", str(tmp_path / "cache"))
    assert file.tokens.tolist() == expected_tokens(["one", "two"])
    with pytest.raises(ConfigError, match=r"memory://packed/corpus\.json exists"):
        plan_pack(PackRequest(["memory://texts/*.jsonl"], "memory://packed/corpus"))
    system.store.clear()


def test_progress_reaches_the_size_of_the_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 2000)
    monkeypatch.setattr(inputs, "_READ_BYTES", 1000)
    write_jsonl(tmp_path / "a.jsonl")
    write_gzip(tmp_path / "b.jsonl.gz")
    seen: list[PackProgress] = []
    plan = plan_pack(PackRequest([str(tmp_path)], str(tmp_path / "out")))
    result = command.pack(plan, seen.append)
    assert len(seen) > 10
    assert seen[-1] == PackProgress(plan.num_bytes, result.num_tokens)
    assert all(before.input_bytes <= after.input_bytes for before, after in pairwise(seen))


def test_nothing_is_left_of_a_packing_that_fails(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    out = tmp_path / "new" / "folder" / "corpus"
    plan = plan_pack(PackRequest([str(tmp_path / "in")], str(out)))
    with pytest.raises(Exception, match="line 2"):
        command.pack(plan)
    assert list(out.parent.iterdir()) == []


def test_checksums_cover_each_block_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zlib

    monkeypatch.setattr(command, "BLOCK_BYTES", 1000)
    write_jsonl(tmp_path / "a.jsonl")
    run(tmp_path, tmp_path / "a.jsonl")
    content = (tmp_path / "out.bin").read_bytes()
    index = read_index(tmp_path / "out.json")
    blocks = [content[start : start + 1000] for start in range(0, len(content), 1000)]
    assert index.block_crc32 == [zlib.crc32(block) for block in blocks]
