"""Samples of a token array and of the standard library; blends: shares by weight everywhere, each part once
per epoch of its own, ids without ambiguity.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import BlendPart, DataConfig, Source
from orchestra.data.source import (
    VOCAB_SIZE,
    Blend,
    TokenSamples,
    open_blend,
    open_source,
    stdlib_files,
    stdlib_tokens,
)
from orchestra.data.token_files import BYTES_SEPARATOR, SOURCE_NAME, names_of_parts
from orchestra.errors import DataError


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
    # The last sample may end with the last token.
    for num_tokens, num_samples in ((31, 3), (30, 2)):
        tokens = np.arange(num_tokens, dtype=np.uint16)
        assert TokenSamples(tokens, 10, 100, "array").num_samples == num_samples
    with pytest.raises(DataError, match=r"corpus: 10 tokens hold no sample of train\.seq_len=10"):
        TokenSamples(np.arange(10, dtype=np.uint16), 10, 100, "corpus")


def test_stdlib_is_the_interpreters_text_with_a_separator_after_each_file() -> None:
    tokens = stdlib_tokens()
    files = stdlib_files()
    assert tokens.dtype == np.uint16
    assert len(tokens) > 5_000_000
    assert (tokens == BYTES_SEPARATOR).sum() == len(files)
    assert tokens[-1] == BYTES_SEPARATOR
    first = files[0].read_bytes()
    assert tokens[: len(first)].astype(np.uint8).tobytes() == first
    assert tokens.max() < VOCAB_SIZE
    assert np.array_equal(tokens, stdlib_tokens())
    names = [path.as_posix() for path in files]
    assert any(name.endswith("/ast.py") for name in names)
    assert not any("site-packages" in name or "/test/" in name or "__pycache__" in name for name in names)


def test_no_run_trains_on_what_stdlib_holds_out() -> None:
    kept, held_out = stdlib_files(), stdlib_files(held_out=True)
    assert not set(kept) & set(held_out)
    assert 0.01 < len(held_out) / len(kept) < 0.1
    # By their names alone: the same ones on every machine that has them.
    assert any(path.name == "argparse.py" for path in held_out)
    source = open_source(DataConfig(source=Source.stdlib), 256, held_out=True)
    assert source.num_samples > 1000
    opened = open_source(DataConfig(source=Source.stdlib), 256)
    out, kept_text = np.empty(257, dtype=np.int64), stdlib_tokens().astype(np.uint8).tobytes()
    source.read(7, out)
    assert out.astype(np.uint8).tobytes() not in kept_text
    opened.read(7, out)
    assert out.astype(np.uint8).tobytes() in kept_text


def test_python_without_its_library_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match="no \\*\\.py files"):
        stdlib_tokens()


WriteTokens = Callable[..., str]
SIZES = (50, 400, 70)
EQUAL = 5000


def part(num_samples: int, first: int = 0) -> TokenSamples:
    """A part whose sample i begins with the token first + i."""
    return TokenSamples(np.arange(first, first + num_samples + 1, dtype=np.uint32), 1, 1 << 30, "array")


def blend(*weights: float) -> Blend:
    return Blend([part(size, 1000 * number) for number, size in enumerate(SIZES)], weights)


def shares_of(source: Blend, num_parts: int, position: int, count: int) -> np.ndarray:
    """Return how many of the positions belong to each part of EQUAL samples."""
    return np.bincount(source.ids_at(position, count, 0) // EQUAL, minlength=num_parts)


@settings(max_examples=40)
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), count=st.integers(0, 3000))
def test_shares_are_right_at_every_moment(weights: list[float], count: int) -> None:
    source = Blend([part(EQUAL) for _ in weights], weights)
    due = np.array(weights) / sum(weights) * count
    levels = np.ceil(np.log2(len(weights)))
    assert np.abs(shares_of(source, len(weights), 0, count) - due).max() <= levels + 1e-3


def test_shares_are_right_far_from_the_beginning_and_for_a_weight_next_to_nothing() -> None:
    source = Blend([part(EQUAL) for _ in range(3)], [0.7123, 0.2, 0.0877])
    counts = shares_of(source, 3, 10**14, 10_000)
    assert np.abs(counts - [7123, 2000, 877]).max() <= 2
    source = Blend([part(EQUAL), part(EQUAL)], [1e-300, 1.0])
    # One position of about 2³⁰, and the first of them half-way.
    assert shares_of(source, 2, 0, 100).tolist() == [0, 100]
    assert shares_of(source, 2, (1 << 29) - 50, 100).tolist() == [1, 99]


def test_epochs_are_those_of_the_samples_that_a_part_gave() -> None:
    source = blend(0.5, 0.3, 0.2)
    counts = np.bincount(source.parts_of(source.ids_at(0, 2000, 0)), minlength=3)
    told = source.epochs_at(2000)
    assert told == pytest.approx(dict(zip("012", counts / SIZES, strict=True)), rel=0.01)
    assert part(50).epochs_at(125) == {"data": 2.5}


def test_each_part_keeps_its_own_order_and_epochs() -> None:
    source = blend(0.5, 0.3, 0.2)
    ids = source.ids_at(0, 3000, seed=4)
    offsets = np.cumsum([0, *SIZES])
    for number, size in enumerate(SIZES):
        own = ids[(ids >= offsets[number]) & (ids < offsets[number + 1])] - offsets[number]
        for epoch in range(own.size // size):
            assert np.array_equal(np.sort(own[epoch * size : (epoch + 1) * size]), np.arange(size))


@settings(max_examples=40)
@given(position=st.integers(0, 10**15), first=st.integers(0, 50), second=st.integers(0, 50))
def test_order_does_not_depend_on_how_the_range_is_cut(position: int, first: int, second: int) -> None:
    source = blend(5, 3, 2)
    parts = [source.ids_at(position, first, 1), source.ids_at(position + first, second, 1)]
    assert np.array_equal(np.concatenate(parts), source.ids_at(position, first + second, 1))


def test_ids_name_one_sample_of_one_part() -> None:
    source = blend(1, 1, 1)
    out = np.empty(2, dtype=np.int64)
    for sample_id, token in [(0, 0), (49, 49), (50, 1000), (449, 1399), (450, 2000), (519, 2069)]:
        source.read(sample_id, out)
        assert out.tolist() == [token, token + 1]


def test_parts_of_one_size_are_not_read_in_step() -> None:
    source = Blend([part(500), part(500)], [1, 1])
    ids = source.ids_at(0, 1000, 0)
    first, second = ids[ids < 500], ids[ids >= 500] - 500
    assert (first == second).sum() < 10


def test_a_batch_late_in_a_long_run_costs_no_more_than_the_first() -> None:
    source = blend(1, 1, 1)

    def seconds(position: int) -> float:
        """Of this process's own time: others may have the processor for a while."""
        began = time.process_time()
        source.ids_at(position, 256, 0)
        return time.process_time() - began

    assert min(seconds(10**14) for _ in range(9)) < 10 * min(seconds(0) for _ in range(9))


def test_configuration_opens_one_file_or_a_blend(write_tokens: WriteTokens) -> None:
    first = write_tokens("first", np.full(1000, 1, dtype=np.uint16))
    second = write_tokens("second", np.full(500, 2, dtype=np.uint32))
    alone = open_blend(DataConfig(source=Source.tokens, path=first), 10)
    assert isinstance(alone, TokenSamples)
    parts = [BlendPart(first, 3.0), BlendPart(second, 1.0)]
    mixed = open_blend(DataConfig(source=Source.tokens, blend=parts), 10)
    assert mixed.vocab_size == 257
    out = np.empty(11, dtype=np.int64)
    found = []
    for sample_id in mixed.ids_at(0, 400, 0):
        mixed.read(int(sample_id), out)
        found.append(int(out[0]))
    assert (found.count(1), found.count(2)) == (300, 100)
    assert isinstance(mixed, Blend)
    assert (mixed.names, np.bincount(mixed.parts_of(mixed.ids_at(0, 400, 0))).tolist()) == (
        ["first", "second"],
        [300, 100],
    )


def test_parts_are_named_by_what_tells_their_paths_apart() -> None:
    def names(*parts: str) -> list[str]:
        return names_of_parts([BlendPart(path) for path in parts])

    assert names("/data/wiki.bin", "s3://bucket/code") == ["wiki", "code"]
    assert names("/a/wiki/train", "/a/code/train", "books") == ["wiki-train", "code-train", "books"]
    assert names("x/a", "x/a") == ["0", "1"]
    assert names_of_parts([BlendPart("x/a", name="mine"), BlendPart("y/a")]) == ["mine", "y-a"]
    assert all(SOURCE_NAME.fullmatch(name) for name in names("x/a", "x/日本語"))


def test_files_of_different_tokenizers_are_not_mixed(write_tokens: WriteTokens) -> None:
    first = write_tokens("first", np.zeros(100, dtype=np.uint16))
    second = write_tokens("second", np.zeros(100, dtype=np.uint16), tokenizer_sha256="ab" * 32)
    parts = [BlendPart(first), BlendPart(second)]
    with pytest.raises(DataError, match=r"first\.bin was packed with bytes .*second\.bin with .*sha256 abab"):
        open_blend(DataConfig(source=Source.tokens, blend=parts), 10)
