"""The configurations that a page shows: all of one run's, and between runs or attempts only what differs.

Reads a run's frozen config.yaml as plain values, so that those of other versions are shown too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from orchestra.run.files import Record
from orchestra.run.paths import RunDir

_OF_ATTEMPT = re.compile(r"^config\.attempt-(\d+)\.yaml$")
# Numbers of tokens are none: the plural is left out on purpose.
_SECRET = re.compile(
    r"(?i)(^|[._])(passwords?|passwd|secrets?(_\w+)?|token|credentials?|(api|access|account|auth|private)_?key)$"
)
# In the place of a value that is left out.
_HIDDEN = "(not shown)"


def is_secret(key: str) -> bool:
    """Whether a dotted key is called like one whose value nobody else is to read."""
    return _SECRET.search(key) is not None


def shown_overrides(overrides: Sequence[str]) -> list[str]:
    """Return overrides as they are shown: without the values of secrets."""
    pairs = [(override, override.partition("=")[0]) for override in overrides]
    return [f"{key}={_HIDDEN}" if is_secret(key) else override for override, key in pairs]


def flat_config(path: Path) -> dict[str, Any]:
    """Return a configuration's values by dotted key; none where it cannot be read.

    Values that look like secrets by their key's name are left out.
    """
    try:
        values = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return dict(_flat(values, "")) if isinstance(values, dict) else {}


def _flat(values: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            pairs += _flat(value, f"{name}.")
        elif not is_secret(name):
            pairs.append((name, value if isinstance(value, int | float | bool | None) else _text(value)))
    return pairs


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys whose values are not the same in all, each with its values in order."""
    keys = dict.fromkeys(key for config in configs for key in config)
    table = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def changes_between_attempts(run: RunDir) -> Record | None:
    """Return what resumes changed: the attempts from which each configuration held, and the values that
    differ. None where there was one configuration all along.
    """
    try:
        files = [(match, file) for file in run.path.iterdir() if (match := _OF_ATTEMPT.match(file.name))]
    except OSError:
        return None
    old = sorted((int(match[1]), file) for match, file in files)
    if not old:
        return None
    configs = [flat_config(file) for _, file in old] + [flat_config(run.config)]
    titles = [f"up to attempt {number}" for number, _ in old] + ["since then"]
    return {"titles": titles, "keys": differing(configs)}
