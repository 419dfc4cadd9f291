"""Where a run stands between two steps: all of its state that is no tensor, as a value and as JSON.

The learning rate is not in it: it follows from the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestra.errors import UnusableCheckpointError
from orchestra.events import is_number, is_whole
from orchestra.precision.loss_scale import MOST, ScaleState
from orchestra.roll_backs import Stretch, from_lists, to_lists
from orchestra.train.metrics import Totals
from orchestra.train.nonfinite import NonFiniteSteps


@dataclass(frozen=True)
class Position:
    """The last step that was trained, and the samples that the whole run consumed, or left out, up to it.

    `num_updates` counts the optimizer's updates (skipped steps left out). `score` is the last loss, None
    where it was not finite. `totals` is None before the first step, and on ranks that keep none.
    `loss_scale` is None where the loss is not scaled. `recent_losses` are what spikes are judged by, and
    `left_out` the data that no step trains on.
    """

    step: int = 0
    samples: int = 0
    num_updates: int = 0
    nonfinite: NonFiniteSteps = field(default_factory=NonFiniteSteps)
    totals: Totals | None = None
    score: float | None = None
    loss_scale: ScaleState | None = None
    recent_losses: tuple[float, ...] = ()
    left_out: tuple[Stretch, ...] = ()


def to_json(position: Position) -> dict[str, Any]:
    """Return a position with its totals as it stands in a checkpoint's manifest."""
    assert position.totals is not None
    totals = asdict(position.totals)
    others: dict[str, Any] = {}
    if position.loss_scale is not None:
        others["loss_scale"] = asdict(position.loss_scale)
    if position.left_out:
        others["left_out"] = to_lists(position.left_out)
    return {
        "step": position.step,
        "samples": position.samples,
        "tokens": totals.pop("tokens"),
        "optimizer": {"step": position.num_updates},
        "nonfinite": asdict(position.nonfinite),
        "metrics": totals,
        "score": position.score,
        "recent_losses": list(position.recent_losses),
        **others,
    }


def from_json(state: Mapping[str, Any]) -> Position:
    """Return the position that a manifest holds. Raises UnusableCheckpointError where it holds none."""
    nonfinite, metrics = _Reader(state, "nonfinite"), _Reader(state, "metrics")
    top = _Reader(state)
    score = state.get("score")
    return Position(
        step=top.whole("step"),
        samples=top.whole("samples"),
        num_updates=_Reader(state, "optimizer").whole("step"),
        nonfinite=NonFiniteSteps(nonfinite.whole("num_skipped"), nonfinite.whole("num_in_a_row")),
        totals=Totals(metrics.number("started_at"), top.whole("tokens"), metrics.number("productive_s")),
        score=score if is_number(score) else None,
        loss_scale=_loss_scale(state),
        recent_losses=_recent_losses(state),
        left_out=from_lists(state.get("left_out")),
    )


def _loss_scale(state: Mapping[str, Any]) -> ScaleState | None:
    """Return the state of the loss's factor; None where the run that saved had none."""
    if "loss_scale" not in state:
        return None
    values = _Reader(state, "loss_scale")
    return ScaleState(
        values.power_of_two("scale", MOST), values.whole("num_good_steps"), values.whole("num_overflows")
    )


def _recent_losses(state: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the last losses; none where the run that saved did not look for spikes."""
    losses = state.get("recent_losses")
    if not isinstance(losses, list) or not all(is_number(loss) for loss in losses):
        return ()
    return tuple(float(loss) for loss in losses)


class _Reader:
    """Takes checked values out of a section of the state."""

    def __init__(self, state: Mapping[str, Any], section: str | None = None) -> None:
        values = state if section is None else state.get(section)
        self._values: Mapping[str, Any] = values if isinstance(values, Mapping) else {}
        self._prefix = "" if section is None else f"{section}."

    def whole(self, key: str) -> int:
        value = self._values.get(key)
        if not is_whole(value) or value < 0:
            raise self._wrong(key, value)
        return value

    def number(self, key: str) -> float:
        value = self._values.get(key)
        if not is_number(value):
            raise self._wrong(key, value)
        return float(value)

    def power_of_two(self, key: str, most: float) -> float:
        """Return a power of two from 1 to `most`."""
        value = self.number(key)
        if not (1.0 <= value <= most and value == 2.0 ** round(math.log2(value))):
            raise self._wrong(key, value)
        return value

    def _wrong(self, key: str, value: object) -> UnusableCheckpointError:
        return UnusableCheckpointError(
            f"the checkpoint's state has {self._prefix}{key}={value!r}: it was not written by this trainer; "
            "choose the folder of a run's checkpoints (checkpoint.dir)"
        )
