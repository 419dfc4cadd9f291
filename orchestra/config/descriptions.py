"""What each key, section and preset means, for people: types, defaults, units and text, from `conf/` itself.

A key's text is the comment above its field in `conf/schema.py`, a section's and an enum's is its docstring, a
preset's the comment that its file begins with. The reference of the manual and `orchestra config` print it,
shell completion names it. Standard library only: it answers while somebody types.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from conf.schema import Config
from orchestra.config.keys import known_keys, shown

_WORDS = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}
# By the end of a key's name, the first that fits.
_UNITS = {
    "_bytes_per_s": "bytes per second",
    "_device_hours": "hours of one device",
    "_hours": "hours",
    "_s": "seconds",
    "_gib": "GiB",
    "_mib": "MiB",
    "_tflops": "TFLOP/s",
    "_batch_size": "sequences",
    "steps": "steps",
    "tokens": "tokens",
    "seq_len": "tokens",
}
EXPERIMENT = "experiment"


@dataclass(frozen=True)
class KeyDescription:
    """One key: its dotted name, what it accepts, its default as an override has it, its unit (empty: none)
    and its meaning.
    """

    name: str
    accepts: str
    default: str
    unit: str
    meaning: str


@cache
def described_keys() -> dict[str, KeyDescription]:
    """Return every key of the schema that takes a value, by its dotted name, in the schema's order."""
    known = known_keys()
    sections: dict[str, Any] = {
        "": Config,
        **{key.name: key.type for key in known.values() if key.is_section},
    }
    comments = {name: _comments(section) for name, section in sections.items()}
    described = {}
    for key in known.values():
        section, _, last = key.name.rpartition(".")
        if not key.is_section:
            described[key.name] = KeyDescription(
                name=key.name,
                accepts=accepted(key.type),
                default=shown(key.default),
                unit=next((unit for end, unit in _UNITS.items() if last.endswith(end)), ""),
                meaning=_meaning(comments[section][last], key.type),
            )
    return described


def section_text(name: str) -> str:
    """Return what a section of the schema is."""
    if name == EXPERIMENT:
        return "Presets that choose several groups at once."
    return text_of(known_keys()[name].type)


def conf_folder() -> Path:
    """Return the folder of the schema and of our presets."""
    return Path(inspect.getfile(Config)).parent


def group_names() -> list[str]:
    """Return the names of all groups: the schema's sections, and experiments."""
    return [*(field.name for field in dataclasses.fields(Config)), EXPERIMENT]


def described_presets(group: str, folders: Sequence[Path] = ()) -> dict[str, str]:
    """Return the presets of a group by name, those of further folders too, each with its first comment."""
    files = [file for folder in (conf_folder(), *folders) for file in sorted((folder / group).glob("*.yaml"))]
    found: dict[str, str] = {}
    for file in files:
        lines = [line for line in file.read_text(errors="replace").splitlines() if "# @package" not in line]
        comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
        found.setdefault(file.stem, " ".join(line.lstrip("# ") for line in comment))
    return found


def text_of(documented: Any) -> str:
    """Return a docstring in one line."""
    return " ".join((inspect.getdoc(documented) or "").split())


def accepted(hint: Any) -> str:
    """Return what a key takes, in words. Beside numbers or truth values the schema's only text is `auto`."""
    kinds = _alternatives(hint)
    is_auto = str in kinds and len([kind for kind in kinds if kind in (bool, int, float, str)]) > 1
    return ", ".join("auto" if kind is str and is_auto else _accepted_alone(kind) for kind in kinds)


def _accepted_alone(hint: Any) -> str:
    if _is_enum(hint):
        return ", ".join(member.name for member in hint)
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        if dataclasses.is_dataclass(inner):
            return f"list of {{{', '.join(field.name for field in dataclasses.fields(inner))}}}"
        return f"list of: {_accepted_alone(inner)}"
    return _WORDS.get(hint, "{name: value}")


def _meaning(comment: str, hint: Any) -> str:
    enums = [text_of(kind) for kind in _alternatives(hint) if _is_enum(kind)]
    return " ".join(part for part in (comment, *enums) if part)


def _comments(section: type) -> dict[str, str]:
    """Return the comment above each field of a dataclass, by the field's name; empty where there is none."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(section).splitlines():
        comment = re.match(r"\s+# ?(.*)", line)
        field = re.match(r"    (\w+): ", line)
        if comment:
            above.append(comment[1])
            continue
        if field:
            found[field[1]] = " ".join(above)
        above = []
    return found


def _alternatives(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)
