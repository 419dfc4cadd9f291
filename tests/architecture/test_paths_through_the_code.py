"""The paths that docs/architecture.md walks: their functions exist, and their files are few."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.support.pages import DOCS, ROOT

# Heading of a path, as "### From a batch to a step (at most 15 files)", and all up to the next heading.
_PATHS = re.findall(
    r"^### ([^\n]+) \(at most (\d+) files\)\n(.*?)(?=^#|\Z)",
    (DOCS / "architecture.md").read_text(),
    flags=re.DOTALL | re.MULTILINE,
)
# What the project promised; docs/architecture.md may not promise less.
_LIMITS = [25, 20, 15, 15]


@cache
def defined(file: str) -> set[str]:
    """Return the functions of a file, methods as Class.method; none where there is no such file."""
    path = ROOT / file
    tree = ast.parse(path.read_text() if path.exists() else "")
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{it.name}" for it in node.body if isinstance(it, ast.FunctionDef)}
    return names


def steps(text: str) -> list[tuple[str, str]]:
    """Return the file and function of each step of a path."""
    return re.findall(r"`([\w./-]+\.py): ([\w.]+)`", text)


def test_all_four_paths_are_there_with_their_limits() -> None:
    assert [int(limit) for _, limit, _ in _PATHS] == _LIMITS


@pytest.mark.parametrize(("name", "limit", "text"), _PATHS, ids=[name for name, *_ in _PATHS])
def test_functions_of_a_path_exist_and_lie_in_few_files(name: str, limit: str, text: str) -> None:
    walked = steps(text)
    assert len(walked) >= 8
    gone = [f"{file}: {function}" for file, function in walked if function not in defined(file)]
    assert gone == [], "docs/architecture.md names what does not exist: correct its list"
    assert len({file for file, _ in walked}) <= int(limit)
