"""Shares of a step: arithmetic on intervals, overlap counted once, and a record that may be damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestra.sizes.step_shares import OTHER, Part, StepShares, read_shares, shares_of, without

SECOND = 10**9


def seconds(*pairs: tuple[float, float]) -> list[tuple[int, int]]:
    return [(round(begin * SECOND), round(end * SECOND)) for begin, end in pairs]


def test_communication_inside_of_a_phase_is_taken_from_it_once() -> None:
    parts = {
        Part.data: seconds((0, 1)),
        Part.forward: seconds((1, 4)),
        Part.backward: seconds((4, 9)),
        Part.communication: seconds((3, 5), (4.5, 6)),
    }
    total, found, communication = shares_of(seconds((0, 10)), parts, in_flight=seconds((2, 6), (9, 12)))
    assert total == 10.0
    assert found == {"data": 1, "forward": 2, "backward": 3, "optimizer": 0, "communication": 3, OTHER: 1}
    assert communication == 5.0


def test_on_a_device_communication_is_exposed_where_nothing_computes() -> None:
    parts = {Part.forward: seconds((0, 6)), Part.backward: seconds((6, 10))}
    _, found, communication = shares_of(
        seconds((0, 10)), parts, in_flight=seconds((5, 8)), computing=seconds((0, 6), (7, 10))
    )
    assert communication == 3.0
    assert (found["communication"], found["forward"], found["backward"]) == (1.0, 6.0, 3.0)


def test_what_lies_between_the_steps_does_not_count() -> None:
    assert without([(0, 10), (20, 30)], [(0, 2), (4, 5), (9, 21)]) == [(2, 4), (5, 9), (21, 30)]
    parts = {Part.forward: seconds((0, 10))}
    total, found, _ = shares_of(seconds((0, 2), (5, 6)), parts, in_flight=[])
    assert total == found["forward"] == 3.0


def test_a_record_comes_back_as_it_was_and_a_damaged_one_counts_as_none(tmp_path: Path) -> None:
    parts = {**{part.value: 0.1 for part in Part}, OTHER: 0.5}
    shares = StepShares(0, 3, 5, 1.0, parts, 0.4, {"all_gather": 5e6})
    file = tmp_path / "summary.json"
    assert read_shares(tmp_path) is None
    file.write_text(json.dumps(shares.record()))
    assert read_shares(tmp_path) == shares
    assert shares.hidden_share == pytest.approx(0.75)
    file.write_text("{")
    assert read_shares(tmp_path) is None
