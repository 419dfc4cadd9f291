"""What a run's rows say of the gradient's noise, and so of the batch."""

from __future__ import annotations

import pytest

from orchestra.report.batch_advice import noise_scale, words
from orchestra.run.metrics_file import NOISE_GRADIENT, NOISE_VARIANCE


def row(step: int, gradient: float, variance: float) -> dict[str, float]:
    return {"step": step, NOISE_GRADIENT: gradient, NOISE_VARIANCE: variance}


def test_means_are_divided_and_rows_without_a_measurement_passed_over() -> None:
    rows = [row(1, 1.0, 30.0), {"step": 2, "loss": 1.0}, row(3, 3.0, 10.0)]
    assert noise_scale(rows) == pytest.approx(10.0)
    # More noise than signal in all of them says nothing.
    assert noise_scale([row(1, -1.0, 30.0)]) is None
    assert noise_scale([]) is None


def test_a_batch_far_below_the_noise_still_pays_and_one_far_above_does_not() -> None:
    rows = [row(1, 1.0, 100.0)]
    small = words(rows, seq_len=10, batch_tokens=100)
    assert small is not None
    # 1 + 1000/100 times the steps of no noise become 1 + 1000/200, and 1.1 times the tokens 1.2.
    assert small == (
        "gradient noise scale 1,000 tokens, batch 100: twice the batch would take 45 % fewer steps and "
        "9 % more tokens; a larger batch still pays"
    )
    large = words(rows, seq_len=10, batch_tokens=9000)
    assert large is not None
    assert large.endswith(
        "twice the batch would take 5 % fewer steps and 90 % more tokens; a larger batch pays little"
    )
    assert words([], seq_len=10, batch_tokens=100) is None
