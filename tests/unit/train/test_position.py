"""The state that is no tensor: the same value through JSON, and clear words for anything else."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from orchestra.errors import EXIT_DO_NOT_RESTART, UnusableCheckpointError
from orchestra.precision.loss_scale import ScaleState
from orchestra.run.rollback import Stretch
from orchestra.train.metrics import Totals
from orchestra.train.state import Position, position_from_json, position_to_json
from orchestra.train.watch.nonfinite import NonFiniteSteps

POSITION = Position(
    step=7,
    samples=84,
    num_updates=6,
    nonfinite=NonFiniteSteps(num_skipped=1, num_in_a_row=0),
    totals=Totals(started_at=1.7e9 + 0.1, tokens=1344, productive_s=0.1 + 0.2),
    score=1 / 3,
    recent_losses=(2.5, 0.1 + 0.2, 1e-3),
    left_out=(Stretch(40, 80), Stretch(96, 100)),
)


def test_a_position_survives_json_bit_for_bit() -> None:
    assert position_from_json(json.loads(json.dumps(position_to_json(POSITION)))) == POSITION


@pytest.mark.parametrize("losses", [None, "3.0", [1.0, "2"], [float("nan")]])
def test_without_sound_losses_the_window_of_spikes_begins_anew(losses: Any) -> None:
    state = {**position_to_json(POSITION), "recent_losses": losses}
    assert position_from_json(state).recent_losses == ()
    del state["recent_losses"]
    assert position_from_json(state).recent_losses == ()


def test_a_loss_that_is_not_finite_is_no_score() -> None:
    state = position_to_json(Position(step=1, totals=POSITION.totals))
    assert state["score"] is None
    assert position_from_json(state).score is None


@pytest.mark.parametrize(
    ("section", "key"),
    [
        *((None, key) for key in ("step", "samples", "tokens", "optimizer", "nonfinite", "metrics")),
        ("optimizer", "step"),
        ("nonfinite", "num_in_a_row"),
        ("metrics", "productive_s"),
    ],
)
@pytest.mark.parametrize("value", [None, -1, "7", True, [], {"a": 1}])
def test_a_state_of_somebody_else_is_refused_by_the_key_that_is_wrong(
    section: str | None, key: str, value: Any
) -> None:
    state: dict[str, Any] = copy.deepcopy(position_to_json(POSITION))
    (state if section is None else state[section])[key] = value
    if (key, value) == ("productive_s", -1):
        return  # a number all the same
    with pytest.raises(UnusableCheckpointError, match=section or key) as caught:
        position_from_json(state)
    assert caught.value.exit_code == EXIT_DO_NOT_RESTART


SCALED = replace(POSITION, loss_scale=ScaleState(4096.0, 12, 3))


def test_the_factor_of_a_scaled_loss_survives_json() -> None:
    assert position_from_json(json.loads(json.dumps(position_to_json(SCALED)))) == SCALED
    assert "loss_scale" not in position_to_json(POSITION)


@pytest.mark.parametrize(
    ("key", "value"),
    [("scale", 3.0), ("scale", 0.5), ("scale", 2.0**30), ("num_good_steps", -1), ("scale", None)],
)
def test_a_factor_that_no_run_has_is_refused(key: str, value: Any) -> None:
    state: dict[str, Any] = copy.deepcopy(position_to_json(SCALED))
    state["loss_scale"][key] = value
    with pytest.raises(UnusableCheckpointError, match=key):
        position_from_json(state)
