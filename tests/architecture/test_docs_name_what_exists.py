"""README and manual name only what exists, the paths that docs/architecture.md walks through the code are
short, and so is the README.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from test_arrows import ORDER

from orchestra.config.keys import find_key
from tests.support.pages import DOCS, PAGES, README, ROOT, blocks, links, named_keys, named_targets, paths

MOST_LINES = 180
# Heading of a path, as "### From a batch to a step (at most 15 files)", and all up to the next heading.
_PATHS = re.findall(
    r"^### ([^\n]+) \(at most (\d+) files\)\n(.*?)(?=^#|\Z)",
    (DOCS / "architecture.md").read_text(),
    flags=re.DOTALL | re.MULTILINE,
)
# What the project promised; docs/architecture.md may not promise less.
_LIMITS = [25, 20, 15, 15]


def test_readme_is_read_in_one_go() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    missing = [link for link in links(page) if not (page.parent / link).exists()]
    missing += [path for path in paths(page) if not (ROOT / path).exists()]
    missing += [key for key in named_keys(page) if find_key(key) is None]
    missing += [target for target in named_targets(page) if target not in targets]
    # `name` in `file`, or `name` and `name` in `file`.
    said = re.findall(r"`([\w.]+)`(?:\s+and\s+`([\w.]+)`)?\s+in\s+`([\w/]+\.py)`", text)
    named = [(name.split(".")[-1], file) for *names, file in said for name in names if name]
    missing += [f"{name} in {file}" for name, file in named if name not in (ROOT / file).read_text()]
    assert missing == [], f"{page.relative_to(ROOT)} names what does not exist"


def test_what_the_test_above_looks_for_is_found_at_all() -> None:
    assert len(links(README)) >= 5
    assert sum(len(paths(page)) for page in PAGES) >= 30
    assert sum(len(named_keys(page)) for page in PAGES) >= 30
    assert sum(len(named_targets(page)) for page in PAGES) >= 5


def test_the_order_of_packages_is_the_one_that_is_enforced() -> None:
    (drawn,) = [text for text in blocks(DOCS / "architecture.md", "") if "inside orchestra" in text]
    floors = re.findall(r"^   (\w+(?: · \w+)*)(?:  |$)", drawn.partition("inside orchestra")[2], re.MULTILINE)
    assert [name for floor in floors for name in floor.split(" · ")] == list(ORDER[:-1])
    assert ORDER[-1] == "__main__"


def test_all_four_paths_are_there_with_their_limits() -> None:
    assert [int(limit) for _, limit, _ in _PATHS] == _LIMITS


@pytest.mark.parametrize(("name", "limit", "text"), _PATHS, ids=[name for name, *_ in _PATHS])
def test_functions_of_a_path_exist_and_lie_in_few_files(name: str, limit: str, text: str) -> None:
    walked = re.findall(r"`([\w./-]+\.py): ([\w.]+)`", text)
    assert len(walked) >= 8
    gone = [f"{file}: {function}" for file, function in walked if function not in defined(file)]
    assert gone == [], "docs/architecture.md names what does not exist: correct its list"
    assert len({file for file, _ in walked}) <= int(limit)


@cache
def defined(file: str) -> set[str]:
    """Return the functions of a file, methods as Class.method; none where there is no such file."""
    path = ROOT / file
    names = set()
    for node in ast.parse(path.read_text() if path.exists() else "").body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)
            }
    return names
