"""A short name for what a configuration computes, so that equal runs can be recognised."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from enum import Enum
from typing import Any

from conf.schema import Config

_HEX_DIGITS = 16
# Who the run is and who watches it; nothing here changes a result.
_IDENTITY = ("run", "wandb")
# Keys of the cluster that say when a job runs, never what it computes.
_TIMING = ("array_throttle",)


def signature(config: Config) -> str:
    """Return 16 hexadecimal digits that are equal for configurations equal but for `run`, `wandb` and how
    many jobs of a sweep run at a time.
    """
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in _IDENTITY}
    for name in _TIMING:
        del values["cluster"][name]
    text = json.dumps(values, sort_keys=True, default=_name)
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]


def _name(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    raise TypeError(f"{type(value).__name__} is not a configuration value")
