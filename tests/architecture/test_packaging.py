"""What a wheel carries: the packages, the configuration tree and Hydra's plugin, and a command that works."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from source_tree import ROOT


def built(folder: Path, target: str, source: Path = ROOT) -> Path:
    """Build with the project's own build backend, which needs no network."""
    printed(source, "-m", "hatchling", "build", "-t", target, "-d", str(folder))
    (made,) = folder.iterdir()
    return made


def printed(folder: Path, *arguments: str, **variables: str) -> str:
    """Return what Python prints in a folder."""
    environment = {**os.environ, **variables}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("dist"), "wheel")


def test_wheel_carries_the_packages_and_every_preset(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    presets = {str(file.relative_to(ROOT)) for file in (ROOT / "conf").rglob("*.yaml")}
    assert presets
    assert presets <= names
    drawn_by = {str(file.relative_to(ROOT)) for file in (ROOT / "orchestra/report/page/assets").iterdir()}
    assert drawn_by
    assert drawn_by <= names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops <= {"orchestra", "conf", "launchers", "checkpointing", "hydra_plugins"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_command_and_hydras_launcher_work_from_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    unpacked = tmp_path
    zipfile.ZipFile(wheel).extractall(unpacked)
    of_wheel = {"PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    assert printed(unpacked, "-m", "orchestra", "--version", **of_wheel)
    # Hydra's plugins of several packages share this folder: none of them may claim it.
    assert not (unpacked / "hydra_plugins" / "__init__.py").exists()
    assert not (unpacked / "launchers" / "plugin").exists()
    script = (
        "import sys; from hydra.core.plugins import Plugins; from hydra.plugins.launcher import Launcher;"
        "modules = {kind.__name__: kind.__module__ for kind in Plugins.instance().discover(Launcher)};"
        "print(sys.modules[modules['OrchestraLauncher']].__file__)"
    )
    launcher = unpacked / "hydra_plugins" / "orchestra_launcher.py"
    assert printed(unpacked, "-c", script, **of_wheel) == str(launcher)


def test_an_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    for folder in ("sdist", "source", "wheel"):
        (tmp_path / folder).mkdir()
    with tarfile.open(built(tmp_path / "sdist", "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = built(tmp_path / "wheel", "wheel", source)
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_an_editable_install_points_at_the_plugin_too(tmp_path: Path) -> None:
    script = "import sys, hatchling.build; print(hatchling.build.build_editable(sys.argv[1]))"
    printed(ROOT, "-c", script, str(tmp_path))
    (made,) = tmp_path.glob("*.whl")
    editable = zipfile.ZipFile(made)
    (pointer,) = [name for name in editable.namelist() if name.endswith(".pth")]
    folders = editable.read(pointer).decode().split()
    assert folders == [str(ROOT), str(ROOT / "launchers" / "plugin")]
