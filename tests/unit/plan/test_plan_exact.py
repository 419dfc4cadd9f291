"""`orchestra plan --exact` as it is typed: both counts, their difference, and what it refuses."""

from __future__ import annotations

import json

import pytest

from orchestra.cli import main
from orchestra.cli.plan.exact_mode import Compared, lines
from orchestra.errors import EXIT_USAGE

MODEL = ("model.hidden_size=256", "model.num_hidden_layers=2", "train.seq_len=128", "precision=bf16")


@pytest.mark.slow
def test_both_counts_and_their_difference_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--exact", *MODEL, "parallelism=zero3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    for name in ("parameters", "gradients", "masters", "optimizer", "gathered", "peak"):
        row = facts[name]
        assert row["difference"] == pytest.approx(
            row["closed_form_bytes"] / row["counted_bytes"] - 1, abs=1e-6
        )
        assert abs(row["difference"]) < 0.02


def test_the_comparison_fits_eighty_columns() -> None:
    text = "\n".join(lines([Compared("later_steps", 3e13, 2 * 10**13), Compared("gathered", 3e9, 0)]))
    assert max(len(line) for line in text.splitlines()) <= 80


def test_layouts_that_the_trainer_lacks_are_refused_with_what_to_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--exact", *MODEL, "parallelism.pp=2"]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "parallelism.pp=2: orchestra's trainer does not have pipeline parallelism yet" in said
    assert "plan without --exact" in said
    assert main(["plan", "--exact", *MODEL, "--framework", "nanotron"]) == EXIT_USAGE
    assert "there are none of nanotron here" in capsys.readouterr().err
