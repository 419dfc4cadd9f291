"""What a trained run must show: falling losses, every sample once, its trace; or which step was bad."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from commands import events_of, orchestra, run_of, train

from orchestra.data.order import read_ledger
from orchestra.run.files import Record, read_json_lines
from orchestra.run.metrics_file import METRIC_KEYS, read_metrics
from orchestra.run.paths import RunDir

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


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> RunDir:
    """Two ranks with one micro-batch each, deterministic, traced in steps 3 and 4."""
    traced = ("train.profile.enabled=true", "train.profile.steps=[3,4]")
    return train(folder, "two", *COMMON, "cluster.gpus_per_node=2", "train.deterministic=true", *traced)


def test_the_loss_falls_every_row_has_every_key_and_no_sample_comes_twice(two_ranks: RunDir) -> None:
    seen = [sample for ids in read_ledger(two_ranks).values() for sample in ids]
    assert len(seen) == STEPS * 8 == len(set(seen))
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


def verdict(run: RunDir) -> Record:
    """Return the first verdict that a rank wrote."""
    return next(event for event in events_of(run, "failed") if "rank" in event)


def test_a_loss_that_stays_non_finite_ends_with_93_and_names_the_step(folder: Path) -> None:
    exploding = (
        "optim.lr=100",
        "optim.weight_decay=100",
        "optim.warmup_steps=0",
        "train.max_nonfinite_steps=3",
    )
    run = train(folder, "exploding", *COMMON, *exploding, "cluster.gpus_per_node=2", code=93)
    assert verdict(run)["cause"] == "NonFiniteError"
    assert "3 steps in a row" in verdict(run)["message"]
    skipped = {event["step"] for event in events_of(run, "nonfinite_step")}
    assert skipped == set(range(min(skipped), min(skipped) + 3))


def test_on_nonfinite_stop_ends_at_the_first_bad_step_with_the_verdict_of_the_worker(folder: Path) -> None:
    """torchrun itself turns every failure into 1."""
    exploding = ("optim.lr=100", "optim.weight_decay=100", "optim.warmup_steps=0", "train.on_nonfinite=stop")
    words = ("run.name=stopping", *COMMON, *exploding, "cluster.gpus_per_node=1")
    done = orchestra(folder, "run", *words, "--json", code=93)
    result, run = json.loads(done.stdout), run_of(folder, "stopping")
    assert (result["code"], result["state"], result["cause"]) == (93, "failed", "NonFiniteError")
    assert "NonFiniteError" in done.stderr
    assert len(events_of(run, "nonfinite_step")) == 1
    assert "train.on_nonfinite=stop" in verdict(run)["message"]
    # The advice in the message holds: the step's samples and its row are there.
    ledger = list(read_json_lines(run.samples / "rank-00000.jsonl"))
    assert ledger[-1]["step"] == read_metrics(run)[-1]["step"] == verdict(run)["step"]
