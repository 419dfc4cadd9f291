"""Hooks of somebody else's (`train.callbacks`): they see each row of metrics and may add numbers to it.

*Rank 0 only.* A callback has `on_step(step, metrics)`, called for every step that is logged, which returns
numbers for the row by name, or None. With `state_dict()` and `load_state_dict(state)` (JSON) it has a state,
which checkpoints hold under its target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from checkpointing.saving.save import other_key
from orchestra.errors import ConfigError, TrainingError
from orchestra.run.events import is_number
from orchestra.run.metrics_file import METRIC_KEYS


class Callback(Protocol):
    """What a callback has to have."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float] | None:
        """Look at the row of a step; return numbers that are added to it."""


@dataclass(frozen=True)
class NamedCallback:
    """A callback, and the target that names it."""

    target: str
    callback: Callback


class Callbacks:
    """All callbacks of a run, in their order."""

    def __init__(self, named: Sequence[NamedCallback], states: Mapping[str, Any] | None = None) -> None:
        self._named = named
        for each in named:
            if states and each.target in states:
                each.callback.load_state_dict(states[each.target])  # type: ignore[attr-defined]

    def columns(self, step: int, row: Mapping[str, Any]) -> dict[str, float]:
        """Return what the callbacks add to a row. Raises TrainingError where that is no number of its own."""
        added: dict[str, float] = {}
        for each in self._named:
            # A copy: what a callback does to it must not reach the file.
            for name, value in (each.callback.on_step(step, {**row, **added}) or {}).items():
                if not isinstance(name, str) or name in METRIC_KEYS or name in row or name in added:
                    raise TrainingError(
                        f"train.callbacks={each.target} gave {name!r} for the row of step {step}, which has "
                        "that column already; choose a name of its own"
                    )
                if not is_number(value):
                    raise TrainingError(
                        f"train.callbacks={each.target} gave {name}={value!r} for the row of step {step}; "
                        "expected a finite number"
                    )
                added[name] = value
        return added

    def states(self) -> dict[str, Any]:
        """Return the states of those that have one, by target."""
        return {each.target: state_of(each) for each in self._named if hasattr(each.callback, "state_dict")}


def state_of(named: NamedCallback) -> Any:
    """Return a callback's state. Raises TrainingError where it is no JSON."""
    state = named.callback.state_dict()  # type: ignore[attr-defined]
    try:
        if (key := other_key(state)) is not None:
            raise TypeError(f"key {key!r} is no text, and would come back as {str(key)!r}")
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise TrainingError(
            f"train.callbacks={named.target}: its state_dict() is no JSON ({error}); return dictionaries, "
            "lists, texts and finite numbers"
        ) from error


def made(target: str, make: Callable[[], Any]) -> NamedCallback:
    """Make a callback. Raises ConfigError where it lacks a method."""
    callback = make()
    if not callable(getattr(callback, "on_step", None)):
        raise ConfigError(
            f"train.callbacks={target} made a {type(callback).__name__}, which has no on_step(step, metrics)"
        )
    has = [callable(getattr(callback, name, None)) for name in ("state_dict", "load_state_dict")]
    if has[0] != has[1]:
        raise ConfigError(
            f"train.callbacks={target} has one of state_dict() and load_state_dict(); add the other"
        )
    return NamedCallback(target, callback)
