"""A run that evaluates, and what is done with its checkpoint afterwards: measured again, and sampled from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import orchestra, train

from orchestra.run.metrics_file import eval_column, read_metrics
from orchestra.run.paths import RunDir

COLUMN = eval_column("held_out")


@pytest.fixture(scope="module")
def finished(folder: Path) -> RunDir:
    small = ("train.steps=6", "train.seq_len=32", "train.global_batch_size=8", "train.micro_batch_size=2")
    evaluated = ("eval.every_steps=4", "eval.steps=3", f"run.metric={COLUMN}", "checkpoint.keep_best=1")
    machine = ("wandb.mode=disabled", "cluster.device=cpu", "cluster.gpus_per_node=2")
    return train(folder, "evaluated", *small, *evaluated, *machine, "checkpoint.every_steps=4")


def test_a_checkpoint_alone_has_the_losses_of_the_training(folder: Path, finished: RunDir) -> None:
    told = {row["step"]: row[COLUMN] for row in read_metrics(finished) if COLUMN in row}
    assert list(told) == [4, 6]
    found = json.loads(orchestra(folder, "eval", "evaluated", "4", "--json").stdout)
    assert (found["step"], found["tokens"]) == (4, {"held_out": 3 * 8 * 32})
    assert found["losses"]["held_out"] == pytest.approx(told[4], rel=1e-6)
    state = json.loads(orchestra(folder, "status", "evaluated", "--json").stdout)[0]
    assert state["eval"] == {"held_out": told[6]}


def test_a_sample_is_of_the_newest_checkpoint_and_a_missing_one_is_told(
    folder: Path, finished: RunDir
) -> None:
    options = ("--max-tokens", "12", "--seed", "1", "--json")
    found = json.loads(orchestra(folder, "generate", finished.name, "import ", *options).stdout)
    # It may end its text before, even at once: what it has learned differs from machine to machine.
    assert (found["step"], len(found["tokens"]) <= 12) == (6, True)
    refused = orchestra(folder, "generate", finished.name, "x", "--step", "5", code=2)
    assert "there are 4, 6" in refused.stderr
