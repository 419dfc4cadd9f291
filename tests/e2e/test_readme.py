"""What the README says: its commands are run as they stand there, its links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
# `make test` is what runs this test. `make demo` has a test of its own below.
MAKE = {"make demo", "make test"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files that the commands name, and an `orchestra` command."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("README.md", "CHANGELOG.md"):
        (folder / name).write_text((ROOT / name).read_text())
    command = folder / "bin" / "orchestra"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m orchestra "$@"\n')
    command.chmod(0o755)
    return folder


def test_every_command_is_either_run_here_or_by_make() -> None:
    assert MAKE.issubset(COMMANDS)
    assert all(command.startswith("orchestra ") for command in set(COMMANDS) - MAKE)
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in MAKE])
def test_a_command_of_the_readme_works(folder: Path, command: str) -> None:
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wrong_command_of_the_readme_gives_the_errors_it_shows(folder: Path) -> None:
    shown = re.search(r"\$ (orchestra run .*)\n((?:error: .*\n)+)", README)
    assert shown is not None
    done = subprocess.run(
        shlex.split(shown[1]),
        cwd=folder,
        env={**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(shown[2])


def test_relative_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_make_demo_trains_on_a_clean_clone(tmp_path: Path) -> None:
    """Installs into a new virtual environment, as on a fresh machine, and trains a shortened demo."""
    clone = tmp_path / "orchestra"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    demo = ["make", "demo", "OVERRIDES=train.steps=40 run.name=demo"]
    done = subprocess.run(demo, cwd=clone, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (clone / "runs" / "demo" / "metrics.jsonl").read_text().count("\n") == 40
    assert list((clone / "runs" / "demo" / "wandb").glob("offline-run-*/*.wandb"))
