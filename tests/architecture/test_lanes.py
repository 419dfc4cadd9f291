"""What `make test` runs where processors are idle."""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = SourceFileLoader("lanes", str(ROOT / ".ci" / "lanes"))
    spec = spec_from_loader("lanes", loader)
    assert spec is not None
    module = module_from_spec(spec)
    # Dataclasses look for their module.
    monkeypatch.setitem(sys.modules, "lanes", module)
    loader.exec_module(module)
    return module


def test_there_is_no_idle_lane_where_processes_may_not_be_idle(
    lanes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose system calls are filtered: every part of the lane would fail at once."""
    if not lanes.has_idle_lane():
        pytest.skip("needs root who may run processes idle (chrt), and a kernel without autogroups")
    refused = tmp_path / "chrt"
    refused.write_text("#!/bin/sh\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert not lanes.has_idle_lane()


def test_no_test_of_the_idle_lane_has_a_limit_of_its_own(lanes: Any) -> None:
    """A test's mark is stronger than the hour that the lane gives to those that wait for a processor."""
    folders = [ROOT / lanes.TESTS / "unit" / name for names in lanes.IDLE for name in names]
    files = [file for folder in folders for file in folder.rglob("test_*.py")]
    assert files
    assert not [file.name for file in files if "mark.timeout" in file.read_text()]
