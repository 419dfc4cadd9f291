"""`orchestra data pack` from the command line, and what a configuration says about the files it wrote."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.command_line import CommandLine
from support.waiting import eventually

from conf.schema import BlendPart, Config, DataConfig, ModelConfig, Source, TrainConfig
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.config.rules.place_rules import rule_data_files
from orchestra.config.sweep import compose_members
from orchestra.data.source import open_source
from orchestra.errors import EXIT_FAILED, EXIT_USAGE, ConfigError

_ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def packed(tmp_path: Path, orchestra: CommandLine) -> str:
    """Prefix of a token file of 1,001 tokens that the command wrote."""
    (tmp_path / "book.txt").write_text("ten chars\n" * 100)
    prefix = str(tmp_path / "out" / "book")
    printed = orchestra("data", "pack", str(tmp_path / "book.txt"), "--output", prefix, "--workers", "1").out
    assert "tokens 1,001 (uint16, vocabulary 257), documents 1" in printed
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


def test_the_command_that_trains_on_it_is_read_back_by_a_shell_and_hydra(
    tmp_path: Path, orchestra: CommandLine
) -> None:
    (tmp_path / "book.txt").write_text("ten chars\n" * 100)
    prefix = str(tmp_path / "mine, and Zoë's" / "book")
    *_, last = orchestra("data", "pack", str(tmp_path / "book.txt"), "--output", prefix).out.splitlines()
    verb, *overrides = shlex.split(last.removeprefix("train on it: orchestra "))
    assert (verb, compose(overrides, Situation("plan")).config.data.path) == ("run", prefix)


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


def test_inputs_without_text_are_refused_and_an_empty_one_among_others_is_not(
    tmp_path: Path, orchestra: CommandLine
) -> None:
    (tmp_path / "empty.txt").write_text("")
    command = [
        "data",
        "pack",
        "--workers",
        "1",
        "--output",
        str(tmp_path / "out"),
        str(tmp_path / "empty.txt"),
    ]
    assert "no text in 1 file(s), and nothing was written" in orchestra(*command, code=EXIT_FAILED).err
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
    (tmp_path / "full.txt").write_text("text")
    assert "documents 2" in orchestra(*command, str(tmp_path / "full.txt")).out


def test_verify_reads_nothing_where_one_of_several_is_not_there(packed: str, orchestra: CommandLine) -> None:
    there = Path(packed).as_uri()
    for prefix in (packed, there):
        done = orchestra("data", "verify", packed, f"{prefix}x", f"{prefix}y.bin", code=EXIT_USAGE)
        assert done.out == ""
        assert [line.partition(";")[0] for line in done.err.splitlines()] == [
            f"error: {prefix}{missing}.bin: no such file, nor its index" for missing in "xy"
        ]
    assert orchestra("data", "verify", "memory://nothing", code=EXIT_USAGE).out == ""


def test_verify_reads_every_byte_and_names_each_damaged_block(packed: str, orchestra: CommandLine) -> None:
    assert f"{packed}.bin: intact, 2.00kB in 1 block, " in orchestra("data", "verify", packed).out
    content = bytearray(Path(f"{packed}.bin").read_bytes())
    content[5] ^= 1
    Path(f"{packed}.bin").write_bytes(content)
    shown = orchestra("data", "verify", f"{packed}.bin", "--threads", "2", code=EXIT_FAILED).out
    assert f"{packed}.bin: DAMAGED, 1 of 1 block\n" in shown
    assert "the 2002 bytes from offset 0 on: checksum" in " ".join(shown.split())
    done = orchestra("data", "verify", packed, "--json", code=EXIT_FAILED)
    (record,) = json.loads(done.out)
    assert (record["intact"], record["damages"][0]["offset"], record["num_blocks"]) == (False, 0, 1)
    os.truncate(f"{packed}.bin", 1000)
    assert "breaks off at offset 1000" in orchestra("data", "verify", packed, code=EXIT_FAILED).err
    Path(f"{packed}.bin").unlink()
    assert "no such file beside its index" in orchestra("data", "verify", packed, code=EXIT_FAILED).err
    assert "expected 1 or more" in orchestra("data", "verify", packed, "--threads", "0", code=EXIT_USAGE).err


def test_the_vocabulary_is_that_of_the_files_where_none_is_given(
    tmp_path: Path, packed: str, write_tokens: Callable[..., str]
) -> None:
    """Padded as the default is; two files need the larger one."""
    large = write_tokens("large", np.zeros(3000, dtype=np.uint16), vocab_size=2000)
    odd = write_tokens("odd", np.zeros(3000, dtype=np.uint16), vocab_size=2001)

    def size(*overrides: str) -> int:
        return compose(["data=tokens", *overrides], Situation("plan")).config.model.vocab_size

    assert size(f"data.path={packed}") == 272
    assert size(f"data.path={large}.bin") == 2000
    assert size(f"data.path={odd}") == 2016
    larger = write_tokens("larger", np.zeros(3000, dtype=np.uint16), vocab_size=2000, separator_id=256)
    assert size(f"data.blend=[{{path: {packed}}},{{path: {larger}}}]") == 2000
    assert size(f"data.path={large}", "model.vocab_size=3000") == 3000
    assert size(f"data.path={large}", "model=llama_1b") == 128256
    with pytest.raises(ConfigError, match=r"model\.vocab_size=272 is below the 2000 tokens"):
        size(f"data.path={large}", "model.vocab_size=272")
    members = compose_members(["data=tokens", f"data.path={packed},{large}"], Situation("plan"))
    assert [member.config.model.vocab_size for member in members] == [272, 2000]


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


# Packs, and has all but the last step behind it when it is ended.
_SLOW_PACK = """
import signal, time
from orchestra.cli import main
from orchestra.data import pack
# Under nohup it is ignored, and stays so.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
pack._publish = lambda *_: time.sleep(60)
raise SystemExit(main(["data", "pack", "text.txt", "--output", "out/text"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_packing_that_is_ended_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "text.txt").write_text("some words\n")
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    packing = subprocess.Popen([sys.executable, "-c", _SLOW_PACK], cwd=tmp_path, env=environment)
    try:
        assert eventually(lambda: any(out.glob(".pack-*/tokens")), limit_s=60)
        packing.send_signal(number)
        assert packing.wait(60) == 128 + number
    finally:
        packing.kill()
        packing.wait()
    assert not any(out.iterdir())
