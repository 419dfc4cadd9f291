"""The user's own defaults, and runs that are found by their names from anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command_line import CommandLine

from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import EXIT_USAGE
from orchestra.run.config_file import write_config
from orchestra.run.paths import RunDir
from orchestra.run.run_folders import index_folder, remember, remembered

_ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRA_CONFIG_DIR", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "config.yaml"


def made(path: Path) -> RunDir:
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"created": time.time()}))
    return RunDir(path)


def test_defaults_of_the_home_come_before_what_is_typed(home: Path, orchestra: CommandLine) -> None:
    presets = home.parent / "presets"
    (presets / "cluster").mkdir(parents=True)
    (presets / "cluster" / "lab.yaml").write_text("launcher: slurm\nname: lab\ngpus_per_node: 8\n")
    home.write_text(f"searchpath: [{presets}]\ncluster: lab\nrun_dir: {home.parent}/r\nwandb_entity: team\n")

    def value(*words: str) -> str:
        return str(orchestra(*words[:-1], "--cfg", "job", "-p", words[-1]).out.splitlines()[0])

    assert value("submit", "cluster.name") == "lab"
    assert value("plan", "cluster.name") == "lab"
    assert value("submit", "cluster=slurm", "cluster.launcher") == "slurm"
    assert value("submit", "cluster=slurm", "cluster.name") == "slurm"
    # What trains here has no default cluster.
    assert value("run", "cluster.launcher") == "local"
    assert value("run", "run.dir") == f"{home.parent}/r"
    assert value("run", "run.dir=other", "run.dir") == "other"
    assert value("run", "wandb.entity") == "team"
    info = orchestra("run", "--info").out
    assert all(word in info for word in (str(home), "cluster=lab", "run_dir="))


@pytest.mark.parametrize("verb", ["run", "doctor", "bench network", "rehearse first"])
def test_every_verb_with_overrides_finds_the_presets_of_the_home(
    verb: str, home: Path, orchestra: CommandLine
) -> None:
    for folder in ("mine", "elsewhere"):
        Path(folder, "optim").mkdir(parents=True)
        Path(folder, "optim", f"of_{folder}.yaml").write_text("lr: 1e-4\n")
    home.write_text(f"searchpath: [{Path.cwd()}/mine]\n")
    run = made(Path("runs", "first"))
    write_config(run.config, compose(["run.name=first"], Situation("run")).config)
    # What follows the preset is wrong in itself, so that nothing is started.
    words = [*verb.split(), "optim=of_mine", "train.steps=0"]
    assert "preset" not in orchestra(*words, code=EXIT_USAGE).err
    assert "no such preset" in orchestra(*verb.split(), "optim=of_elsewhere", code=EXIT_USAGE).err
    words = [*verb.split(), "optim=of_elsewhere", "train.steps=0", "--config-dir", "elsewhere"]
    assert "preset" not in orchestra(*words, code=EXIT_USAGE).err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clustr: lab", "clustr: no such key; did you mean cluster?"),
        ("cluster: 3", "cluster: expected a text, found 3"),
        ("searchpath: /x", "searchpath: expected a list"),
        ("searchpath: [/no/such/folder]", "/no/such/folder is not a folder"),
        ("run_dir: runs", "expected a path from the root"),
        ("[a", "cannot be read"),
        ("- a", "expected `key: value` lines"),
    ],
)
def test_a_mistake_in_the_home_is_told_with_its_file(
    home: Path, orchestra: CommandLine, text: str, words: str
) -> None:
    home.write_text(text)
    error = orchestra("run", "--dry-run", code=EXIT_USAGE).err
    assert f"error: {home}: " in error
    assert words in error


def test_xdg_config_home_holds_the_home_too(
    home: Path, orchestra: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ORCHESTRA_CONFIG_DIR")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home.parent / "xdg"))
    file = home.parent / "xdg" / "orchestra" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("wandb_entity: of-xdg\n")
    assert "of-xdg" in orchestra("run", "--cfg", "job", "-p", "wandb").out


def test_a_run_is_found_by_its_name_from_anywhere(
    home: Path, orchestra: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(home.parent / "project" / "runs" / "first")
    made(home.parent / "other" / "runs" / "second")
    away = home.parent / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    assert "there is no run in runs" in orchestra("why", "first", code=EXIT_USAGE).err
    # A command that meets the folder remembers it.
    monkeypatch.chdir(home.parent / "project")
    orchestra("status", "first")
    remember(home.parent / "other" / "runs")
    monkeypatch.chdir(away)
    for words in (["status", "first"], ["status", "fir"], ["why", "first"], ["cancel", "first", "--dry-run"]):
        assert "first" in orchestra(*words).out
    assert orchestra.json("status", "first")[0]["path"] == str(first.path)
    assert {state["name"] for state in orchestra.json("status")} == {"first", "second"}
    said = orchestra("status").err
    assert "no runs in runs; these lie in " in said
    assert str(first.path.parent) in said
    # What was asked for is not looked for elsewhere, and two of a name are told apart by their paths.
    assert "there is no run in" in orchestra("why", "first", "--dir", str(away), code=EXIT_USAGE).err
    made(home.parent / "other" / "runs" / "first")
    assert str(first.path) in orchestra("why", "first", code=EXIT_USAGE).err


def test_a_lost_index_is_made_again_and_a_home_needs_none(home: Path, orchestra: CommandLine) -> None:
    made(home.parent / "mine" / "third")
    home.write_text(f"run_dir: {home.parent}/mine\n")
    assert "third" in orchestra("status", "third").out
    (entry,) = index_folder().iterdir()
    entry.unlink()
    assert "third" in orchestra("status", "third").out
    assert remembered() == [home.parent / "mine"]
    entry.write_text("")
    assert remembered() == []


def test_many_processes_may_remember_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from orchestra.run.run_folders import remember, remembered\n"
        "for number in range(50):\n"
        "    folder = Path(sys.argv[1]) / str(number); folder.mkdir(exist_ok=True); remember(folder)\n"
        "    assert all(each.parent == Path(sys.argv[1]) for each in remembered())"
    )
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0] * 3
    assert remembered() == sorted(tmp_path / str(number) for number in range(50))
    assert len(list(index_folder().iterdir())) == 50
