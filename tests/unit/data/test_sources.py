"""Samples of a token array, of the standard library, and the record of what was trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conf.schema import DataConfig
from orchestra.data.ledger import Ledger
from orchestra.data.source import (
    SEPARATOR,
    VOCAB_SIZE,
    TokenSamples,
    open_source,
    stdlib_files,
    stdlib_tokens,
)
from orchestra.errors import DataError
from orchestra.run.files import read_json_lines
from orchestra.run.paths import RunDir


def test_each_token_is_a_target_once_and_the_rest_is_dropped() -> None:
    source = TokenSamples(np.arange(33, dtype=np.uint16), seq_len=10, vocab_size=100, name="array")
    assert source.num_samples == 3
    targets = []
    for sample_id in range(source.num_samples):
        out = np.empty(11, dtype=np.int64)
        source.read(sample_id, out)
        assert out[0] == sample_id * 10
        targets += out[1:].tolist()
    assert targets == list(range(1, 31))


def test_last_sample_may_end_with_the_last_token() -> None:
    assert TokenSamples(np.arange(31, dtype=np.uint16), 10, 100, "array").num_samples == 3
    assert TokenSamples(np.arange(30, dtype=np.uint16), 10, 100, "array").num_samples == 2


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(DataError, match=r"corpus: 10 tokens hold no sample of train\.seq_len=10"):
        TokenSamples(np.arange(10, dtype=np.uint16), 10, 100, "corpus")


def test_stdlib_is_the_interpreters_text_with_a_separator_after_each_file() -> None:
    tokens = stdlib_tokens()
    files = stdlib_files()
    assert tokens.dtype == np.uint16
    assert len(tokens) > 5_000_000
    assert (tokens == SEPARATOR).sum() == len(files)
    assert tokens[-1] == SEPARATOR
    first = files[0].read_bytes()
    assert tokens[: len(first)].astype(np.uint8).tobytes() == first
    assert tokens.max() < VOCAB_SIZE
    assert np.array_equal(tokens, stdlib_tokens())


def test_stdlib_leaves_out_tests_and_installed_packages() -> None:
    names = [path.as_posix() for path in stdlib_files()]
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("site-packages" in name or "/test/" in name or "__pycache__" in name for name in names)


def test_python_without_its_library_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match="no \\*\\.py files"):
        stdlib_tokens()


def test_default_configuration_opens_the_standard_library() -> None:
    source = open_source(DataConfig(), seq_len=128)
    out = np.empty(129, dtype=np.int64)
    source.read(int(source.ids_at(0, 1, 0)[0]), out)
    assert source.vocab_size == VOCAB_SIZE
    assert out.max() < VOCAB_SIZE


def test_ledger_holds_a_line_of_ids_for_each_step_and_mends_a_torn_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    Ledger(run, 3, attempt=0).write(1, np.array([[5, 6], [7, 8]]))
    file = tmp_path / "samples" / "rank-00003.jsonl"
    with file.open("a") as stream:
        stream.write('{"step": 2, "samp')
    Ledger(run, 3, attempt=1).write(2, np.array([[9, 10], [11, 12]]))
    assert list(read_json_lines(file)) == [
        {"step": 1, "attempt": 0, "sample_ids": [[5, 6], [7, 8]]},
        {"step": 2, "attempt": 1, "sample_ids": [[9, 10], [11, 12]]},
    ]
