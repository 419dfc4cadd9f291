"""Test files have one name each over all of tests/: pytest imports them by it, and a second is an error."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_no_two_test_files_have_the_same_name() -> None:
    names = Counter(file.name for file in Path(__file__).parents[1].rglob("test_*.py"))
    assert len(names) > 10
    assert [name for name, count in names.items() if count > 1] == []
