"""Runs `orchestra` in this process and hands out what it printed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestra.cli import main


class CommandLine:
    """The command as a function; each call returns what this one printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> Any:
        """Run `orchestra WORDS…`, which must end with `code`; return `out` and `err`."""
        self._capsys.readouterr()
        assert main(list(words)) == code
        return self._capsys.readouterr()

    def json(self, *words: str, code: int = 0) -> Any:
        """Run it with --json and return what that says."""
        return json.loads(self(*words, "--json", code=code).out)


@pytest.fixture
def orchestra(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)
