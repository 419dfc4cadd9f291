"""README and manual name only files that exist, their links lead somewhere, and the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_arrows import ORDER

from orchestra.config.keys import find_key
from tests.support.pages import DOCS, PAGES, README, ROOT, blocks, links, named_keys, named_targets, paths

MOST_LINES = 180


def test_readme_is_read_in_one_go() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_to_files(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link).exists()]
    missing += [path for path in paths(page) if not (ROOT / path).exists()]
    assert missing == [], f"{page.relative_to(ROOT)} names what does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_said_to_be_in_a_file_are_there(page: Path) -> None:
    """Where a page says `name` in `file`, or `name` and `name` in `file`."""
    said = re.findall(r"`([\w.]+)`(?:\s+and\s+`([\w.]+)`)?\s+in\s+`([\w/]+\.py)`", page.read_text())
    named = [(name.split(".")[-1], file) for *names, file in said for name in names if name]
    missing = [f"{name} in {file}" for name, file in named if name not in (ROOT / file).read_text()]
    assert missing == [], f"{page.relative_to(ROOT)} names what does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_and_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    missing = [key for key in named_keys(page) if find_key(key) is None]
    missing += [target for target in named_targets(page) if target not in targets]
    assert missing == [], f"{page.relative_to(ROOT)} names what does not exist"


def test_the_order_of_packages_is_the_one_that_is_enforced() -> None:
    (drawn,) = [text for text in blocks(DOCS / "architecture.md", "") if "inside orchestra" in text]
    floors = re.findall(r"^   (\w+(?: · \w+)*)(?:  |$)", drawn.partition("inside orchestra")[2], re.MULTILINE)
    assert [name for floor in floors for name in floor.split(" · ")] == list(ORDER[:-1])
    assert ORDER[-1] == "__main__"


def test_what_the_tests_above_look_for_is_found_at_all() -> None:
    assert len(links(README)) >= 5
    assert sum(len(paths(page)) for page in PAGES) >= 30
    assert sum(len(named_keys(page)) for page in PAGES) >= 30
    assert sum(len(named_targets(page)) for page in PAGES) >= 5
