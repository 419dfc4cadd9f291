"""What a run leaves out and what a roll-back makes void: against the plain meaning, place by place."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra.run.files import Record
from orchestra.run.rollback import (
    EVENT,
    RollBack,
    Stretch,
    from_lists,
    kept,
    merged,
    roll_backs,
    to_lists,
)
from orchestra.run.run_lineage import lineage_of

some_stretches = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: Stretch(pair[0], sum(pair))),
    max_size=6,
)


def places(stretches: list[Stretch] | tuple[Stretch, ...]) -> set[int]:
    return {place for stretch in stretches for place in range(stretch.begin, stretch.end)}


@given(some_stretches)
def test_merged_stretches_are_the_same_places_in_order_and_apart_and_survive_json(
    stretches: list[Stretch],
) -> None:
    found = merged(stretches)
    assert places(found) == places(stretches)
    assert all(one.end < other.begin for one, other in itertools.pairwise(found))
    assert merged(found) == found
    assert from_lists(json.loads(json.dumps(to_lists(found)))) == found


@given(some_stretches, st.integers(0, 70), st.integers(1, 30))
def test_the_next_samples_are_the_first_places_that_are_not_left_out(
    stretches: list[Stretch], position: int, count: int
) -> None:
    out = places(stretches)
    expected = [place for place in range(position, position + count + 200) if place not in out][:count]
    parts = kept(position, count, merged(stretches))
    assert [place for begin, number in parts for place in range(begin, begin + number)] == expected
    assert all(number for _, number in parts)
    # In as few pieces as there are gaps.
    ends = [begin + number for begin, number in parts]
    assert all(end < begin for end, (begin, _) in zip(ends, parts[1:], strict=False))


@pytest.mark.parametrize("value", [None, 7, "x", [[1]], [["a", 2]], [[-1, 2]], [[3, 3]], [[1, 2, 3]], [None]])
def test_what_is_no_stretch_is_passed_over(value: object) -> None:
    assert from_lists(value) == ()


def event(attempt: int, **evidence: object) -> Record:
    return {"event": EVENT, "attempt": attempt, "time": 1.0, **evidence}


def test_a_roll_back_is_read_from_its_event() -> None:
    sound = event(2, step=18, to=10, cause="loss spike", left_out=[[40, 80]], data_steps=[11, 20])
    (roll_back,) = roll_backs([event(0, to="x"), sound, {"event": "failed", "attempt": 2, "time": 1.0}])
    assert roll_back == RollBack(2, 18, 10, "loss spike", (Stretch(40, 80),), (11, 20))
    assert roll_back.words == "it goes back to step 10; the data of steps 11 to 20 is left out"


@pytest.mark.parametrize(
    ("step", "attempt", "void"),
    [(10, 0, False), (10, 2, False), (11, 2, True), (15, 0, True), (11, 3, False), (40, 3, False)],
)
def test_what_was_kept_after_the_step_before_the_roll_back_is_void(
    step: int, attempt: int, void: bool
) -> None:
    found = lineage_of([{"event": EVENT, "attempt": 2, "step": 18, "to": 10, "cause": "loss spike"}])
    assert found.is_on_line(step, attempt) is not void
