"""What a linter cannot know of the style: names that say nothing, modules without purpose, machine paths."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import ROOT, Module, modules

NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc", "base"}
# Where a developer's machine shows through: home folders and the like, but not patterns and examples.
MACHINE_PATH = re.compile(r"""["' (](/root|/home/\w+|/Users/\w+|/work)/""")


@pytest.mark.parametrize("module", modules().values(), ids=lambda module: module.name)
def test_module_says_what_it_is(module: Module) -> None:
    assert ast.get_docstring(module.tree), (
        "every module begins by saying what it is and what it refuses to know"
    )
    assert module.name.split(".")[-1] not in NAMES_THAT_SAY_NOTHING


@pytest.mark.parametrize("module", modules().values(), ids=lambda module: module.name)
def test_classes_are_named_for_what_they_are(module: Module) -> None:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            assert not re.match(r"_?(Base|Abstract)[A-Z]", node.name)


def test_no_machine_shows_through() -> None:
    places = list(_written_files())
    assert len(places) > len(modules())
    for file in places:
        match = MACHINE_PATH.search(file.read_text())
        assert match is None, f"{file.relative_to(ROOT)}: {match and match.group()}"


def _written_files() -> Iterator[Path]:
    """Files of ours by their endings, without going into folders that others fill."""
    for folder, children, names in os.walk(ROOT):
        children[:] = [child for child in children if child not in {".venv", ".git", "runs", "dist"}]
        yield from (
            Path(folder, name)
            for name in names
            if name.endswith((".py", ".yaml", ".toml", ".md", "Makefile"))
        )
