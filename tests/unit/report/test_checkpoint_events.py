"""What the events say about checkpoints: where a run would go on from, and what went wrong."""

from __future__ import annotations

from typing import Any

import pytest

from orchestra.recovery.history import newest_checkpoint
from orchestra.report.run_state import failed_save, passed_over


def _event(name: str, step: object) -> dict[str, Any]:
    return {"event": name, "step": step}


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ([], None),
        ([_event("checkpoint_started", 10)], None),
        ([_event("checkpoint_committed", 10), _event("checkpoint_failed", 20)], 10),
        ([_event("checkpoint_committed", 10), _event("checkpoint_committed", 20)], 20),
        ([_event("checkpoint_committed", 20), _event("restored", 10)], 10),
        (
            [_event("checkpoint_committed", 20), _event("restored", 10), _event("checkpoint_committed", 20)],
            20,
        ),
        ([_event("restored", 0)], None),
        ([_event("checkpoint_committed", "ten")], None),
    ],
)
def test_a_run_goes_on_from_what_was_committed_or_restored_last(
    events: list[dict[str, Any]], step: int | None
) -> None:
    assert newest_checkpoint(events) == step


def test_a_failed_save_names_each_reason_once_with_its_ranks() -> None:
    event = {**_event("checkpoint_failed", 4), "reasons": {"0": "full", "1": "full", "2": "stalled"}}
    assert failed_save(event) == "the checkpoint of step 4 was not saved: full (rank 0, 1); stalled (rank 2)"
    assert "no reason given" in failed_save(_event("checkpoint_failed", 4))


def test_checkpoints_that_were_passed_over_say_why() -> None:
    event = {**_event("restored", 2), "skipped": [{"step": 4, "reason": "a flipped bit"}, "nonsense"]}
    assert passed_over(event) == ["the checkpoint of step 4 was passed over: a flipped bit"]
    assert passed_over(_event("restored", 2)) == []
