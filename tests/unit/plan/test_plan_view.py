"""What a plain `orchestra plan` says of a layout, and the note under one that does not fit."""

from __future__ import annotations

import re

import pytest

from orchestra.cli import main


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """Return output, no wider than 80 columns, and notes."""
    assert main(["plan", *words]) == 0
    text, notes = capsys.readouterr()
    assert max(len(line) for line in text.splitlines()) <= 80
    return text, notes


def test_usable_memory_stands_beside_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    text, notes = printed(capsys, "model=llama3_405b", "parallelism=tp8_pp4", "cluster.nodes=4")
    assert re.search(
        r"^memory  .* of 79.6 GiB, 72.5 usable, stage \d of 4: does not fit$", text, re.MULTILINE
    )
    assert notes.startswith("note: ")


def test_layouts_that_submit_refuses_are_advised_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=llama3_8b", "parallelism.cp=2", "precision=bf16", "train.seq_len=8192")
    assert "note: it would fit with " in printed(capsys, *words)[1]


def test_an_idle_stage_is_told_and_no_memory_advised(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--framework", "nanotron", "model=llama_1b", "parallelism.pp=16", "cluster.nodes=2")
    text, notes = printed(capsys, *words)
    assert "does not fit" not in text
    assert "but a pipeline stage has nothing to do: use a smaller parallelism.pp" in text
    assert notes == ""


def test_the_ranks_that_zero_shards_over_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=llama3_8b", "parallelism=zero3", "cluster.nodes=2")
    assert "layout  dp 16, zero 3\n" in printed(capsys, *words)[0]
    assert "layout  dp 16, zero 3 over 8 ranks\n" in printed(capsys, *words, "parallelism.shard_degree=8")[0]


def test_goodput_says_how_it_was_reckoned(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = printed(capsys, "model=llama_1b", "checkpoint.every_steps=10")
    assert "; by Daly's formula" in " ".join(text.split())
    assert "Daly" not in printed(capsys, "model=llama_1b", "checkpoint.every_steps=null")[0]
