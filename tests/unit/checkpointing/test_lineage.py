"""Which states are on a run's line: by hand, and in interleavings of attempts that freeze and thaw."""

from __future__ import annotations

import pytest
from lineage_model import check

from checkpointing.lineage import UNDIVIDED, AttemptBegin, Base, Lineage

# A few seconds; `make lineage` goes through 100,000.
_INTERLEAVINGS = 150


def begin(attempt: int, step: int, base: int | None = None, *seen: tuple[int, int]) -> AttemptBegin:
    return AttemptBegin(attempt, Base(step, base), frozenset(seen))


def test_without_records_everything_is_on_the_line() -> None:
    assert UNDIVIDED.is_on_line(10, 3)
    assert UNDIVIDED.departure(10, 3) is None


def test_a_step_after_the_base_of_a_later_attempt_is_off_the_line() -> None:
    line = Lineage.of([begin(4, 40, 3, (50, 3)), begin(3, 20, 0)])
    assert [step for step in (10, 20, 30, 40, 50, 60) if line.is_on_line(step, 3)] == [10, 20, 30, 40]
    assert [step for step in (10, 20, 30) if line.is_on_line(step, 0)] == [10, 20]
    assert all(line.is_on_line(step, attempt) for step in (10, 99) for attempt in (4, 5, None))
    there, late = line.departure(50, 3), line.departure(60, 3)
    assert there is not None
    assert late is not None
    assert not there.is_late
    assert there.words == "written by attempt 3; attempt 4 began at step 40 of attempt 3"
    assert late.is_late
    assert late.words == "written by attempt 3 after attempt 4 had begun at step 40"


def test_an_attempt_that_nobody_went_on_from_is_off_the_line_before_the_base_too() -> None:
    """Attempt 4 stood still before it recorded its begin, and trained on when attempt 5 had long begun."""
    line = Lineage.of([begin(4, 20, 3), begin(5, 40, 3)])
    # Its record changes nothing of what attempt 5 rests on.
    assert line.is_on_line(40, 3)
    assert not line.is_on_line(30, 4)
    departure = line.departure(30, 4)
    assert departure is not None
    assert departure.words == "written by attempt 4; attempt 5 began at step 40 of attempt 3"


def test_a_roll_back_ends_the_line_before_the_next_attempt_begins() -> None:
    line = Lineage.of([begin(2, 30, 1), AttemptBegin(3, Base(40, 2), has_begun=False)])
    assert line.is_on_line(40, 2)
    assert not line.is_on_line(50, 2)
    assert line.is_on_line(30, 1)
    departure = line.departure(50, 2)
    assert departure is not None
    assert (departure.is_late, departure.words) == (
        False,
        "written by attempt 2, before the run went back to step 40",
    )


def test_where_nobody_says_whose_the_state_was_all_earlier_ones_up_to_it_may_be() -> None:
    line = Lineage.of([begin(2, 30), begin(4, 40)])
    assert line.is_on_line(40, 3)
    assert line.is_on_line(30, 1)
    assert not line.is_on_line(40, 1)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_attempts_that_freeze_and_thaw_never_make_a_restore_leave_the_line(kind: str) -> None:
    counts = check(kind, range(_INTERLEAVINGS))
    assert counts["restores"]
    assert counts["saves off the line"]
