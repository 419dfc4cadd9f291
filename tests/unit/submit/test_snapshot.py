"""The copy of the code: what is in it, what is not, and how much it may be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestra.errors import ConfigError
from orchestra.submit.code_snapshot import PACKAGES, take_snapshot


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for package in PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text("# uncommitted\n")
    (root / "conf" / "model").mkdir()
    (root / "conf" / "model" / "debug.yaml").write_text("name: debug\n")
    return root


def test_it_holds_the_packages_as_they_lie_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    (tree / "data.bin").write_bytes(b"0" * 1000)
    (tree / "conf" / "__pycache__").mkdir()
    (tree / "conf" / "__pycache__" / "x.pyc").write_text("")
    (tree / "conf" / ".hidden").write_text("")
    take_snapshot(tmp_path / "code", tree)
    copied = {
        str(file.relative_to(tmp_path / "code")) for file in (tmp_path / "code").rglob("*") if file.is_file()
    }
    assert copied == {*(f"{package}/__init__.py" for package in PACKAGES), "conf/model/debug.yaml"}
    assert (tmp_path / "code" / "orchestra" / "__init__.py").read_text() == "# uncommitted\n"


def test_what_is_too_large_is_named(tree: Path, tmp_path: Path) -> None:
    (tree / "orchestra" / "weights.bin").write_bytes(b"0" * (3 << 20))
    with pytest.raises(ConfigError, match=r"has 3 MiB, at most 1 MiB.*orchestra/weights\.bin \(3 MiB\)"):
        take_snapshot(tmp_path / "code", tree, max_bytes=1 << 20)
    assert not (tmp_path / "code").exists()


def test_a_copy_of_this_code_runs_by_itself(tmp_path: Path) -> None:
    take_snapshot(tmp_path / "code")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "code"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", "import orchestra.agents.agent as it; print(it.__file__)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path / "code"))
