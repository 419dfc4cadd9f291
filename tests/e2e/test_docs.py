"""README and manual: their commands are run as they stand there, their example trains, the site builds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing.catalog import committed_steps
from checkpointing.storage import open_storage
from orchestra.config.keys import known_keys
from tests.support.forked_commands import ForkedCommands
from tests.support.own_environment import make_environment
from tests.support.pages import DOCS, ROOT, blocks, commands, shown_commands

COMMANDS = commands("bash")
# `make test` is what runs this test; `make demo` and the site have tests of their own below.
MAKE = {"make demo", "make test"}
OTHERS = [command for command in COMMANDS if command not in MAKE]
# Verbs that are quick but for their start: a process of its own shows that for the first command of each.
QUICK = {"plan", "status", "why", "report", "checkpoint", "watch", "data", "eval"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files that the commands name, and `orchestra` and `python` commands."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("README.md", "CHANGELOG.md"):
        (folder / name).write_text((ROOT / name).read_text())
    programs = folder / "bin"
    programs.mkdir()
    for name, arguments in {"orchestra": "-m orchestra", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


def typed(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user types it."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    words = shlex.split(command)
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)


def test_every_command_is_run_here_or_by_make() -> None:
    assert set(COMMANDS) >= MAKE
    assert all(command.startswith(("orchestra ", "python -m orchestra.")) for command in OTHERS)
    assert len(OTHERS) >= 20


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedCommands]:
    server = ForkedCommands()
    yield server
    server.close()


@pytest.mark.parametrize("command", OTHERS)
def test_a_command_of_the_docs_works(folder: Path, command: str, forked: ForkedCommands) -> None:
    verb = command.split()[1]
    is_first = command == next(other for other in OTHERS if other.split()[1] == verb)
    if verb in QUICK and not is_first:
        words = shlex.split(command)[1:]
        done = forked.run(words, folder, {**os.environ, "PYTHONPATH": str(ROOT)})
    else:
        done = typed(folder, command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_in_shown_output_are_run_by_other_tests() -> None:
    """What they printed was copied from real runs and cannot be had again at will."""
    verbs = {tuple(command.split()[:2]) for command in (*COMMANDS, *commands("sh"))}
    devcluster = (ROOT / "tests" / "slurm" / "test_devcluster.py").read_text()
    for command in shown_commands():
        words = tuple(re.sub(r'eval "\$\((.*)\)".*', r"\1", command).split())
        is_tested = words[0] == "slurm/devcluster" and re.search(rf"\W{words[1]}\W", devcluster)
        assert words[:2] in verbs or is_tested, command


def test_the_wrong_command_of_the_docs_gives_the_errors_it_shows(folder: Path) -> None:
    shown = re.search(r"\$ (orchestra run .*)\n((?:error: .*\n)+)", (DOCS / "quickstart.md").read_text())
    assert shown is not None
    done = typed(folder, shown[1])
    assert done.returncode == 2
    assert done.stderr.startswith(shown[2])


@pytest.mark.timeout(300)
def test_the_example_of_the_library_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    (source,) = blocks(DOCS / "checkpoints.md", "python")
    (tmp_path / "own_loop.py").write_text(source)
    (shown,) = blocks(DOCS / "checkpoints.md", "text")
    on_two_ranks, on_one_rank = shown.splitlines()
    storage = open_storage(str(tmp_path / "checkpoints"))

    assert "restored" not in train(tmp_path, on_two_ranks)
    assert committed_steps(storage) == [10, 20]
    assert "restored step 20, saved by 2 ranks" in train(tmp_path, on_one_rank)
    assert committed_steps(storage) == [20, 30]


def train(folder: Path, command: str) -> str:
    """Run a command that begins with `torchrun`, with this tree, and return what it printed."""
    words = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_site_builds_without_a_warning_and_explains_every_key(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in tmp_path.glob("*.html")}
    reference = (tmp_path / "configuration.html").read_text()
    keys = [name for name, key in known_keys().items() if not key.is_section]
    missing = [name for name in keys if f"{name}</code>" not in reference]
    assert missing == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_make_demo_trains_on_a_clean_clone(tmp_path: Path) -> None:
    """Trains a shortened demo where nothing is installed but what pyproject.toml declares. How that gets
    there `make test` has shown itself: its commands are those of the demo, but for the name of an extra.
    """
    clone = tmp_path / "orchestra"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    # A make inside of `make test` would say besides where it enters and leaves.
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "MAKELEVEL", "MAKEFLAGS", "MFLAGS")
    kept = {key: value for key, value in os.environ.items() if key not in left_out}

    def make(*words: str) -> list[str]:
        done = subprocess.run(["make", *words], cwd=clone, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    *installs, touched = make("--dry-run", ".venv/installed")
    *as_tests_do, also_touched = make("--dry-run", ".venv/installed-test")
    assert any("pip install" in line and "-e '.'" in line for line in installs)
    assert installs == [line.replace("'.[test]'", "'.'") for line in as_tests_do]
    assert (touched, also_touched) == ("touch .venv/installed", "touch .venv/installed-test .venv/installed")
    assert make("--dry-run", "demo")[: len(installs) + 1] == [*installs, touched]

    make_environment(clone)
    printed = make("demo", "OVERRIDES=train.steps=5 optim.warmup_steps=1 run.name=demo")
    assert "installing" not in printed[0]
    assert (clone / "runs" / "demo" / "metrics.jsonl").read_text().count("\n") == 5
    assert list((clone / "runs" / "demo" / "wandb").glob("offline-run-*/*.wandb"))
