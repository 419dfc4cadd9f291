"""README and manual name only files that exist, their links lead somewhere, and the README stays short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import PAGES, README, ROOT, links, paths

MOST_LINES = 180


def test_readme_is_read_in_one_go() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_to_files(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link).exists()]
    missing += [path for path in paths(page) if not (ROOT / path).exists()]
    assert missing == [], f"{page.relative_to(ROOT)} names what does not exist"


def test_links_and_paths_are_found_at_all() -> None:
    """So that the test above compares something."""
    assert len(links(README)) >= 5
    assert sum(len(paths(page)) for page in PAGES) >= 30
