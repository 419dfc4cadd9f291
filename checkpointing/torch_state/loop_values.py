"""A loop's own values as JSON: what a scheduler or a counter has, whole numbers among its keys.

JSON's keys are text. Mappings with whole numbers as keys (the milestones of a MultiStepLR) are therefore
written as pairs under one key, and come back as they were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from checkpointing.checkpoint_errors import MismatchError

_PAIRS = "__pairs__"


def encoded(values: Any, what: str = "extra") -> Any:
    """Return a copy of values that JSON has. Raises MismatchError, which names `what` cannot be written."""
    content = _with_pairs(values, what)
    try:
        return json.loads(json.dumps(content, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise MismatchError(f"{what} is not JSON: {error}; put tensors into buffers of the model") from error


def decoded(values: Any) -> Any:
    """Return what was encoded."""
    if isinstance(values, dict):
        if values.keys() == {_PAIRS}:
            return {key: decoded(value) for key, value in values[_PAIRS]}
        return {key: decoded(value) for key, value in values.items()}
    return [decoded(value) for value in values] if isinstance(values, list) else values


def _with_pairs(values: Any, what: str) -> Any:
    if isinstance(values, Mapping):
        inner = {key: _with_pairs(value, f"{what}[{key!r}]") for key, value in values.items()}
        if all(isinstance(key, str) for key in inner) and _PAIRS not in inner:
            return inner
        wrong = next((key for key in inner if type(key) not in (int, str)), None)
        if wrong is not None or _PAIRS in inner:
            key = _PAIRS if wrong is None else wrong
            raise MismatchError(f"{what} has the key {key!r}; keys are text or whole numbers")
        return {_PAIRS: [[key, value] for key, value in inner.items()]}
    return [_with_pairs(value, what) for value in values] if isinstance(values, list | tuple) else values
