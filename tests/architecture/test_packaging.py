"""What a wheel carries: the packages and the configuration tree, nothing else, and a command that works."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from source_tree import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the project's own build backend, which needs no network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_carries_the_packages_and_every_preset(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    presets = {str(file.relative_to(ROOT)) for file in (ROOT / "conf").rglob("*.yaml")}
    assert presets
    assert presets <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} <= {
        "orchestra",
        "conf",
        "launchers",
        "checkpointing",
        "hydra_plugins",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_command_works_from_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "orchestra", "--version"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
