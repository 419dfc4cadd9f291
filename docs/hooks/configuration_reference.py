"""Generates the configuration reference from `conf/schema.py` and the presets of `conf/`.

mkdocs calls `on_page_markdown` for each page while it builds the site; the sections are appended to
`configuration.md`. `orchestra config` prints the same texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestra.config.descriptions import (
    KeyDescription,
    described_keys,
    described_presets,
    group_names,
    section_text,
)
from orchestra.config.keys import known_keys

PAGE = "configuration.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text with the reference appended where it is the page of the reference."""
    return markdown + "\n" + reference() if page.file.src_uri == PAGE else markdown


def reference() -> str:
    """Return the sections of all groups as Markdown: presets, text, and a table of keys."""
    return "\n\n".join(part for group in group_names() for part in _group(group) if part) + "\n"


def _group(group: str) -> Iterator[str]:
    presets = described_presets(group).items()
    yield f"## {group}"
    yield section_text(group)
    yield "\n".join(f"- `{group}={name}`: {comment}" for name, comment in presets)
    yield _table(group)
    for name in known_keys():
        if name.startswith(f"{group}.") and known_keys()[name].is_section:
            yield f"### {name}"
            yield section_text(name)
            yield _table(name)


def _table(section: str) -> str:
    """Return the table of a section's own keys; nothing where it has none."""
    own = [key for key in described_keys().values() if key.name.rpartition(".")[0] == section]
    rows = [[f"`{key.name}`", _accepts(key), f"`{key.default}`", key.meaning] for key in own]
    lines = [["key", "accepts", "default", "meaning"], ["---"] * 4, *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines if own
    )


def _accepts(key: KeyDescription) -> str:
    return f"{key.accepts} ({key.unit})" if key.unit else key.accepts
