"""What a linter cannot know of the style: names that say nothing, modules without purpose, machine paths."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

from source_tree import ROOT, modules

NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc", "base"}
# Where a developer's machine shows through: home folders and the like, but not patterns and examples.
MACHINE_PATH = re.compile(r"""["' (](/root|/home/\w+|/Users/\w+|/work)/""")


def test_every_module_says_what_it_is() -> None:
    silent = [module.name for module in modules().values() if not ast.get_docstring(module.tree)]
    assert silent == [], "a module begins by saying what it is, and who calls it"


def test_names_of_modules_and_classes_say_what_they_are() -> None:
    empty = [name for name in modules() if name.split(".")[-1] in NAMES_THAT_SAY_NOTHING]
    classes = [
        node.name
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and re.match(r"_?(Base|Abstract)[A-Z]", node.name)
    ]
    assert (empty, classes) == ([], [])


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
