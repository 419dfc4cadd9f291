"""`orchestra data pack` from the command line, and what a configuration says about the files it wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command_line import CommandLine

from conf.schema import BlendPart, Config, DataConfig, ModelConfig, Source, TrainConfig
from orchestra.config.machine import Situation
from orchestra.config.rules.place_rules import rule_data_files
from orchestra.data.source import open_source
from orchestra.errors import EXIT_FAILED, EXIT_USAGE


@pytest.fixture
def packed(tmp_path: Path, orchestra: CommandLine) -> str:
    """Prefix of a token file of 1,001 tokens that the command wrote."""
    (tmp_path / "book.txt").write_text("ten chars\n" * 100)
    prefix = str(tmp_path / "out" / "book")
    printed = orchestra("data", "pack", str(tmp_path / "book.txt"), "--output", prefix, "--workers", "1").out
    assert "tokens 1,001 (uint16), documents 1" in printed
    return prefix


def problems(prefix: str, *, vocab_size: int = 272, seq_len: int = 256, blend: bool = False) -> list[str]:
    """Return what the rules say about a configuration that trains on `prefix`."""
    data = DataConfig(source=Source.tokens, path=prefix)
    if blend:
        data = DataConfig(source=Source.tokens, blend=[BlendPart(prefix), BlendPart(prefix)])
    config = Config(model=ModelConfig(vocab_size=vocab_size), data=data, train=TrainConfig(seq_len=seq_len))
    return list(rule_data_files(config, Situation("plan")))


def test_what_was_packed_can_be_trained_on(packed: str) -> None:
    source = open_source(DataConfig(source=Source.tokens, path=packed), seq_len=100)
    assert source.vocab_size == 257
    for path in (packed, f"{packed}.bin", f"file://{packed}"):
        assert problems(path) == []
    assert problems(packed, blend=True) == []
    assert problems("s3://bucket/corpus") == [], "remote files are left to the nodes"


def test_json_result_says_what_was_written(tmp_path: Path, orchestra: CommandLine) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    output = ["--output", str(tmp_path / "out"), "--workers", "1"]
    result = orchestra.json("data", "pack", "--field", "body", str(tmp_path), *output)
    assert (result["num_tokens"], result["num_documents"], result["vocab_size"]) == (8, 2, 257)
    assert result["prefix"] == str(tmp_path / "out")


def test_dry_run_lists_inputs_and_sizes_and_writes_nothing(tmp_path: Path, orchestra: CommandLine) -> None:
    (tmp_path / "a.txt").write_text("x" * 1234)
    command = ["data", "pack", str(tmp_path / "*.txt"), "--output", str(tmp_path / "out"), "--dry-run"]
    shown = orchestra(*command).out
    assert "1,234" in shown
    assert "separator 256" in shown
    plan = orchestra.json(*command)
    assert plan["inputs"] == [{"url": str(tmp_path / "a.txt"), "num_bytes": 1234}]
    # One process encodes bytes faster than it can hand them to others.
    assert plan["num_workers"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_wrong_requests_end_with_2_and_bad_files_with_1(tmp_path: Path, orchestra: CommandLine) -> None:
    output = ["--output", str(tmp_path / "out"), "--workers", "1"]
    refused = orchestra("data", "pack", str(tmp_path / "nowhere.txt"), *output, code=EXIT_USAGE)
    assert "no such file" in refused.err
    (tmp_path / "a.jsonl").write_text("{")
    failed = orchestra("data", "pack", str(tmp_path / "a.jsonl"), *output, code=EXIT_FAILED)
    assert "a.jsonl: line 1: not JSON" in failed.err


def test_rule_names_missing_and_damaged_files(packed: str) -> None:
    (problem,) = problems(packed + "x")
    assert "write them with `orchestra data pack`" in problem
    os.truncate(f"{packed}.bin", 1000)
    (problem,) = problems(packed)
    assert "breaks off at offset 1000" in problem
    Path(f"{packed}.json").write_text('{"format": ')
    (problem,) = problems(packed + ".bin")
    assert "not whole JSON" in problem


def test_rule_compares_the_vocabulary_and_the_length_with_the_files(packed: str) -> None:
    (problem,) = problems(packed, vocab_size=256)
    assert "model.vocab_size=256 is below the 257 tokens" in problem
    assert problems(packed, vocab_size=257) == []
    (problem,) = problems(packed, seq_len=1001)
    assert "train.seq_len=1001 needs 1002 tokens" in problem
    assert problems(packed, seq_len=1000) == []
