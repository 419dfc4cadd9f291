"""The score against cases whose answer is known."""

from __future__ import annotations

import math

import pytest

from benchmarks.planner.score import MeasuredRow, quantile, rank_correlation, score, without_sick


def measured(
    rate: float | None, predicted: float, *, place: str = "here", twin: str = "", fits: bool = True
) -> MeasuredRow:
    memory = None if rate is None else 10.0
    return MeasuredRow(place, twin or f"{rate}/{predicted}", rate, memory, predicted, 11.0, fits)


def test_a_row_with_a_much_faster_twin_is_sick() -> None:
    fast, near, slow = (measured(rate, 1, twin="a") for rate in (90, 61, 59))
    assert without_sick([fast, near, slow]) == [fast, near]
    # Also by a twin that is scored elsewhere.
    other = measured(70, 1)
    assert without_sick([slow, other]) == [slow, other]
    assert without_sick([slow, other], [fast, slow, other]) == [other]
    assert score([slow, other, fast], [fast]).num_rows == 2


def test_errors_ranks_and_memory_of_a_small_table() -> None:
    found = score([measured(100, 110), measured(200, 180), measured(300, 300), measured(400, 500)])
    assert found.num_rows == 4
    assert found.median == pytest.approx(0.1)
    assert found.rank_correlation == pytest.approx(1)
    assert found.memory_mean == pytest.approx(0.1)


def test_recall_and_precision_count_rows_that_failed() -> None:
    failed = [measured(None, 1, fits=False), measured(None, 1, fits=True)]
    found = score([*failed, measured(5, 5, fits=False), measured(5, 6)])
    assert (found.out_of_memory_recall, found.out_of_memory_precision) == (0.5, 0.5)


def test_a_pick_counts_where_it_reaches_ninety_five_per_cent_of_the_best() -> None:
    good = [measured(100, 1, place="a"), measured(96, 2, place="a")]
    bad = [measured(100, 1, place="b"), measured(94, 2, place="b")]
    assert score([*good, *bad]).good_picks == 0.5


def test_ranks_share_their_mean_where_values_are_equal() -> None:
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(rank_correlation([1, 1], [1, 2]))


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([0.0, 1.0, 2.0, 3.0], 0.5) == 1.5
    assert quantile([1.0], 0.9) == 1.0
