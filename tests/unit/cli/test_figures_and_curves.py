"""Numbers and curves as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra.cli.text import figures
from orchestra.cli.text.figures import chart, resampled, sparkline


@pytest.mark.parametrize(
    ("text_of", "value", "text"),
    [
        *((figures.quantity, *pair) for pair in ((41234.3, "41.2k"), (999.96, "1.00k"), (0.8312, "0.83"))),
        *((figures.quantity, *pair) for pair in ((1.5e6, "1.50M"), (16, "16"), (None, "-"))),
        *((figures.duration, *pair) for pair in ((42, "0:42"), (59.6, "1:00"), (3723, "1:02:03"))),
        *((figures.duration, *pair) for pair in ((273900, "3d 04:05"), (None, "-"))),
        *((figures.percent, *pair) for pair in ((0.3121, "31.2%"), (None, "n/a"))),
    ],
)
def test_quantities_have_three_digits_and_what_is_unknown_none(
    text_of: Callable[[float | None], str], value: float | None, text: str
) -> None:
    assert text_of(value) == text


def test_a_table_is_aligned_and_cuts_nothing() -> None:
    lines = figures.table(("RUN", "LOSS"), [("a-very-long-name", "2.1"), ("b", "12.25")]).splitlines()
    assert lines == ["RUN                LOSS", "a-very-long-name    2.1", "b                 12.25"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(1, 80))
def test_resampling_keeps_the_range_and_fits(values: list[float], width: int) -> None:
    points = resampled(values, width)
    assert len(points) == min(len(values), width)
    slack = 1e-6 * max(1.0, max(map(abs, values)))
    assert min(values) - slack <= min(points) <= max(points) <= max(values) + slack
    assert math.isclose(sum(values), sum(points), rel_tol=1e-9, abs_tol=1e-3) or len(values) > width


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=400), st.integers(30, 100))
def test_drawings_fit_their_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= width
    rows = chart(values, width, 8)
    assert len(rows) == 8
    assert all(len(row) <= width for row in rows)


def test_a_falling_series_falls_in_the_drawing_and_a_flat_one_is_drawn() -> None:
    assert sparkline([8.0, 4.0, 1.0], 10) == "█▄▁"
    rows = chart([3.0, 1.0], 40, 4)
    assert (rows[0][:6], rows[-1][:6]) == ("3.00 ┤", "1.00 ┤")
    assert rows[0][6] != rows[-1][6]
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert len(chart([2.0, 2.0], 40, 4)) == 4
