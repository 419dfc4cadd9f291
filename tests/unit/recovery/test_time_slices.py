"""Whether a run gets on in slices of time is read from what its attempts saved."""

from __future__ import annotations

from typing import Any

import pytest

from orchestra.recovery.time_slices import in_words, time_slices


def events(*slices: tuple[float, float | None, list[int], str]) -> list[dict[str, Any]]:
    """Return the events of attempts: seconds, those before the first step, steps that were saved, its end."""
    written: list[dict[str, Any]] = []
    for attempt, (seconds, start_s, saved, end) in enumerate(slices):
        began = 1000.0 * attempt
        written.append({"event": "attempt_started", "attempt": attempt, "time": began})
        if start_s is not None:
            written.append({"event": "training_started", "attempt": attempt, "time": began + start_s})
        end_s = {"attempt": attempt, "time": began + seconds}
        written += [{"event": "checkpoint_committed", "step": step, **end_s} for step in saved]
        written.append({"event": "requeued", "reason": end, **end_s})
    return written


@pytest.mark.parametrize(
    ("slices", "steps", "words"),
    [
        ([(600.0, 60.0, [10], "preempted")], [10], ""),
        (
            [(600.0, 60.0, [10, 20], "preempted"), (300.0, 60.0, [25], "time_limit")],
            [20, 5],
            "2 slices of 7.5 min made 25 steps, 5 at least in each",
        ),
        (
            [
                (600.0, 60.0, [10], "preempted"),
                (120.0, 90.0, [], "preempted"),
                (120.0, 60.0, [10], "preempted"),
            ],
            [10, 0, 0],
            "the last 2 slices of 2.0 min, of which a start took 1.2, made no step that is saved",
        ),
        (
            [(600.0, 60.0, [10], "preempted"), (60.0, None, [], "time_limit")],
            [10, 0],
            "the last 1 slice of 1.0 min, all of it to start, made no step that is saved",
        ),
        # Another end than that of a slice.
        ([(600.0, 60.0, [10], "preempted"), (60.0, 5.0, [12], "node failed")], [10], ""),
    ],
)
def test_slices_are_told_by_what_they_saved(
    slices: list[tuple[float, float | None, list[int], str]], steps: list[int], words: str
) -> None:
    found = time_slices(events(*slices))
    assert [each.steps for each in found] == steps
    assert in_words(found) == words
