"""A run whose loss is not finite any more: it ends with 93, and says which step was bad.

What a run must show that trains well: test_orchestra_run.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from commands import TINY, events_of, orchestra, run_of, train

from orchestra.run.files import Record, read_json_lines
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

COMMON = (*TINY, "train.steps=20", "data.ledger=true")


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
