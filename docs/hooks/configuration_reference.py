"""Generates the configuration reference from `conf/schema.py` and the presets of `conf/`.

mkdocs calls `on_page_markdown` for each page while it builds the site; the sections are appended to
`configuration.md`. A key's text is the comment above its field, a section's and an enum's is its docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from conf.schema import Config

PAGE = "configuration.md"
_CONF = Path(__file__).resolve().parents[2] / "conf"
_WORDS = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", type(None): "`null`"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text with the reference appended where it is the page of the reference."""
    return markdown + "\n" + reference() if page.file.src_uri == PAGE else markdown


def reference() -> str:
    """Return the sections of all groups as Markdown: presets, text, and a table of keys."""
    defaults = Config()
    hints = typing.get_type_hints(Config)
    names = [field.name for field in dataclasses.fields(Config)]
    groups = [_group(name, hints[name], getattr(defaults, name)) for name in names]
    return "\n\n".join([*groups, _experiments()]) + "\n"


def _group(name: str, section: type, defaults: Any) -> str:
    parts = [f"## {name}", _text(section), _preset_list(name), *_tables(section, defaults, name)]
    return "\n\n".join(part for part in parts if part)


def _experiments() -> str:
    text = "Presets that choose several groups at once."
    return f"## experiment\n\n{text}\n\n{_preset_list('experiment')}"


def _tables(section: type, defaults: Any, prefix: str) -> Iterator[str]:
    """Yield the table of a section's own keys, then a heading, text and tables for each section inside it."""
    hints, comments = typing.get_type_hints(section), _comments(section)
    names = [field.name for field in dataclasses.fields(section)]
    own = [name for name in names if not dataclasses.is_dataclass(hints[name])]
    rows = [
        f"| `{prefix}.{name}` | {_accepted(hints[name])} | `{_shown(getattr(defaults, name))}` "
        f"| {_meaning(comments[name], hints[name])} |"
        for name in own
    ]
    yield "\n".join(["| key | accepts | default | meaning |", "|---|---|---|---|", *rows])
    for name in (name for name in names if name not in own):
        yield f"### {prefix}.{name}"
        yield _text(hints[name])
        yield from _tables(hints[name], getattr(defaults, name), f"{prefix}.{name}")


def _meaning(comment: str, hint: Any) -> str:
    enums = [_text(alternative) for alternative in _alternatives(hint) if _is_enum(alternative)]
    return " ".join(part for part in (comment, *enums) if part)


def _text(documented: Any) -> str:
    return " ".join((inspect.getdoc(documented) or "").split())


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
            found[field[1]] = " ".join(above).replace("|", "\\|")
        above = []
    return found


def _alternatives(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _accepted(hint: Any) -> str:
    """Return what a key takes, in words. Beside numbers or truth values the schema's only text is `auto`."""
    alternatives = _alternatives(hint)
    is_auto = str in alternatives and len([it for it in alternatives if it in (bool, int, float, str)]) > 1
    return ", ".join("`auto`" if it is str and is_auto else _accepted_alone(it) for it in alternatives)


def _accepted_alone(hint: Any) -> str:
    if _is_enum(hint):
        return ", ".join(f"`{member.name}`" for member in hint)
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        if dataclasses.is_dataclass(inner):
            return f"list of `{{{', '.join(field.name for field in dataclasses.fields(inner))}}}`"
        return f"list of: {_accepted_alone(inner)}"
    return _WORDS.get(hint, "`{name: value}`")


def _shown(value: Any) -> str:
    """Return a value as it is written in an override."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return "[" + ",".join(map(_shown, value)) + "]"
    return str(value)


def _preset_list(group: str) -> str:
    """Return a group's presets as a list, each with the comment that its file begins with."""
    items = []
    for file in sorted((_CONF / group).glob("*.yaml")):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]
        comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
        items.append(f"- `{group}={file.stem}`: {' '.join(line.lstrip('# ') for line in comment)}")
    return "\n".join(items)
