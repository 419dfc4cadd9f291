"""What a trained run must show whatever its layout: the same losses, the same bits, every sample once."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestra.run.events import read_events
from orchestra.run.files import read_json_lines
from orchestra.run.metrics_file import METRIC_KEYS, read_metrics
from orchestra.run.paths import RunDir

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
COMMON = (
    f"train.steps={STEPS}",
    "train.seq_len=64",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
    "optim.lr=1e-3",
    "data.ledger=true",
    "wandb.mode=disabled",
    "cluster.device=cpu",
)


def run(folder: Path, name: str, *overrides: str, expected_code: int = 0) -> RunDir:
    """Train with `orchestra run` and return the run."""
    words = [sys.executable, "-m", "orchestra", "run", f"run.name={name}", f"run.dir={folder}"]
    done = subprocess.run(
        [*words, *COMMON, *overrides],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == expected_code, done.stdout + done.stderr
    return RunDir(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> RunDir:
    """Two ranks with one micro-batch each, deterministic, traced in steps 3 and 4."""
    traced = ("train.profile.enabled=true", "train.profile.steps=[3,4]")
    return run(folder, "two", "cluster.gpus_per_node=2", "train.deterministic=true", *traced)


def losses(done: RunDir) -> list[float]:
    return [row["loss"] for row in read_metrics(done)]


def test_one_rank_with_two_micro_batches_has_the_losses_of_two_ranks(folder: Path, two_ranks: RunDir) -> None:
    one = run(folder, "one", "cluster.gpus_per_node=1")  # and with twice the threads
    assert len(losses(one)) == STEPS
    assert losses(one) == pytest.approx(losses(two_ranks), rel=1e-6)
    assert samples(one) == samples(two_ranks)


def samples(done: RunDir) -> list[list[int]]:
    """Return the sorted sample ids of each step over all ranks."""
    files = sorted(done.samples.glob("rank-*.jsonl"))
    steps: list[list[int]] = [[] for _ in range(STEPS)]
    for file in files:
        for line in read_json_lines(file):
            steps[line["step"] - 1] += [sample for row in line["sample_ids"] for sample in row]
    return [sorted(step) for step in steps]


def test_no_sample_comes_twice_in_an_epoch(two_ranks: RunDir) -> None:
    seen = [sample for step in samples(two_ranks) for sample in step]
    assert len(seen) == STEPS * 8 == len(set(seen))


def test_two_runs_with_the_same_seed_are_bit_identical(folder: Path, two_ranks: RunDir) -> None:
    again = run(folder, "again", "cluster.gpus_per_node=2", "train.deterministic=true")
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[row[key] for key in keys] for row in read_metrics(again)] == [
        [row[key] for key in keys] for row in read_metrics(two_ranks)
    ]


def test_the_loss_falls_and_every_row_has_every_key(two_ranks: RunDir) -> None:
    rows = read_metrics(two_ranks)
    assert all(set(METRIC_KEYS) <= row.keys() for row in rows)
    assert rows[0]["loss"] == pytest.approx(5.6, abs=0.15)  # ln(272): nothing known yet
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert rows[-1]["tokens"] == STEPS * 8 * 64
    assert 0 < rows[-1]["mfu_causal"] < rows[-1]["mfu"] < 1.5
    assert rows[-1]["hfu"] == rows[-1]["mfu"]  # nothing is recomputed


def test_the_trace_holds_the_steps_that_were_asked_for(two_ranks: RunDir) -> None:
    (trace,) = two_ranks.profile.glob("rank-00000-*.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"step 3", "step 4"} <= names
    assert not {"step 2", "step 5"} & names
    assert not list(two_ranks.profile.glob("rank-00001*"))


def verdict(done: RunDir) -> dict[str, Any]:
    """Return the first verdict that a rank wrote."""
    ended = [event for event in read_events(done) if event["event"] in ("finished", "failed")]
    return next(event for event in ended if "rank" in event)


def test_a_loss_that_stays_non_finite_ends_with_93_and_names_the_step(folder: Path) -> None:
    exploding = ("optim.lr=1e30", "optim.warmup_steps=0", "train.max_nonfinite_steps=3")
    done = run(folder, "exploding", *exploding, "cluster.gpus_per_node=2", expected_code=93)
    assert verdict(done)["cause"] == "NonFiniteError"
    assert "3 steps in a row" in verdict(done)["message"]
    skipped = [event["step"] for event in read_events(done) if event["event"] == "nonfinite_step"]
    first = min(skipped)
    assert sorted(set(skipped)) == [first, first + 1, first + 2]


def test_on_nonfinite_stop_ends_at_the_first_bad_step(folder: Path) -> None:
    exploding = ("optim.lr=1e30", "optim.warmup_steps=0", "train.on_nonfinite=stop")
    done = run(folder, "stopping", *exploding, "cluster.gpus_per_node=1", expected_code=93)
    assert len([event for event in read_events(done) if event["event"] == "nonfinite_step"]) == 1
    assert "train.on_nonfinite=stop" in verdict(done)["message"]
    # The advice in the message holds: the step's samples and its row are there.
    step = verdict(done)["step"]
    ledger = list(read_json_lines(done.samples / "rank-00000.jsonl"))
    assert ledger[-1]["step"] == read_metrics(done)[-1]["step"] == step


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp32_grad"])
def test_bf16_follows_fp32(folder: Path, two_ranks: RunDir, precision: str) -> None:
    done = run(folder, precision, "cluster.gpus_per_node=2", f"precision={precision}")
    assert losses(done) == pytest.approx(losses(two_ranks), rel=0.02)


def test_a_gpt_with_tied_embeddings_trains_with_wsd(folder: Path) -> None:
    shape = ("model.family=gpt", "model.num_key_value_heads=8", "model.tie_word_embeddings=true")
    done = run(folder, "gpt", *shape, "optim.schedule=wsd", "cluster.gpus_per_node=1")
    assert losses(done)[-1] < losses(done)[0] - 0.3
