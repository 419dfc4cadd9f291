"""A loop's own values as JSON: what a scheduler or a counter has, whole numbers among its keys.

JSON's keys are text, and its numbers finite. Mappings with whole numbers as keys (the milestones of a
MultiStepLR) are therefore written as pairs under one key, numbers that are not finite (the best loss of a
ReduceLROnPlateau) by name under another, and all come back as they were.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from checkpointing.checkpoint_errors import MismatchError

PAIRS, _NUMBER = "__pairs__", "__number__"


def encoded(values: Any, what: str = "extra") -> Any:
    """Return a copy of values that JSON has. Raises MismatchError, which names `what` cannot be written."""
    try:
        return json.loads(json.dumps(_as_json(values, what), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise MismatchError(f"{what} is not JSON: {error}; put tensors into buffers of the model") from error


def decoded(values: Any) -> Any:
    """Return what was encoded."""
    if isinstance(values, dict):
        if values.keys() == {PAIRS}:
            return {key: decoded(value) for key, value in values[PAIRS]}
        if values.keys() == {_NUMBER}:
            return float(values[_NUMBER])
        return {key: decoded(value) for key, value in values.items()}
    return [decoded(value) for value in values] if isinstance(values, list) else values


def _as_json(values: Any, what: str) -> Any:
    if isinstance(values, float) and not math.isfinite(values):
        return {_NUMBER: str(values)}
    if isinstance(values, Mapping):
        inner = {key: _as_json(value, f"{what}[{key!r}]") for key, value in values.items()}
        own = next((key for key in inner if key in (PAIRS, _NUMBER)), None)
        if all(isinstance(key, str) for key in inner) and own is None:
            return inner
        wrong = next((key for key in inner if type(key) not in (int, str)), None)
        if wrong is not None or own is not None:
            key = own if wrong is None else wrong
            raise MismatchError(f"{what} has the key {key!r}; keys are text or whole numbers")
        return {PAIRS: [[key, value] for key, value in inner.items()]}
    return [_as_json(value, what) for value in values] if isinstance(values, list | tuple) else values
