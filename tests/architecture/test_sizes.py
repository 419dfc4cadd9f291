"""Files and functions stay small enough to read in one go. A schema or a table may be long."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from source_tree import PACKAGES, ROOT

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60

FILES = sorted(
    file for folder in (*PACKAGES, "benchmarks", "slurm", "tests") for file in (ROOT / folder).rglob("*.py")
)


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_and_functions_stay_small(file: Path) -> None:
    source = file.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long"
