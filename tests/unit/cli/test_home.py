"""The user's own defaults, and runs that are found by their names from anywhere."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.command_line import CommandLine

from orchestra.config.compose import compose, in_one_line
from orchestra.config.machine import Situation
from orchestra.config.preset_files import own_folder
from orchestra.errors import EXIT_USAGE
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter
from orchestra.run.files import write_atomically
from orchestra.run.paths import RunDir
from orchestra.run.run_folders import index_folder, remember, remembered

_ROOT = Path(__file__).resolve().parents[3]
# <sys/prctl.h>
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2


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


@pytest.mark.parametrize("name", ["a\\b", "it's", "1e5", "ends in \\"])
def test_a_default_is_read_as_it_stands_in_the_file(name: str, home: Path, orchestra: CommandLine) -> None:
    home.write_text(json.dumps({"wandb_entity": name}))
    out = orchestra("submit", "cluster=slurm", "--cfg", "job", "-p", "wandb.entity").out
    assert yaml.safe_load(out) == name


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


def test_what_takes_no_overrides_takes_none_of_the_home_s(home: Path, orchestra: CommandLine) -> None:
    home.write_text(f"searchpath: [{home.parent}]\ncluster: slurm\n")
    Path("cases.csv").write_text("model,gpus\n")
    run = made(Path("runs", "first"))
    write_config(run.config, compose(["run.name=first"], Situation("run")).config)
    orchestra("plan", "--scan", "first")
    for words in (["--table", "cases.csv"], ["--calibrate", "first"]):
        assert "leave out" not in orchestra("plan", *words, code=EXIT_USAGE).err
    # Of a run, whose own steps count, and not of what the home would have planned.
    EventWriter(run, "agent", 0).write("attempt_started", world_size=1)
    words = ["plan", "--goodput", "--like", "first"]
    assert "no step of first is recorded yet" in orchestra(*words, code=EXIT_USAGE).err
    refused = orchestra("plan", "--table", "cases.csv", "train.steps=3", code=EXIT_USAGE).err
    assert "leave out train.steps=3" in refused


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
    "typed",
    ["hydra.searchpath={}", "hydra.searchpath=[{}]", "hydra.searchpath=['{}']", "+hydra.searchpath=[{}]"],
)
def test_folders_of_presets_add_up_however_they_are_written(
    typed: str, home: Path, orchestra: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home.parent))
    for place, text in {
        "typed/optim": "lr: 0.5",
        "option/train": "steps: 77",
        "own/model": "hidden_size: 64",
    }.items():
        (home.parent / place).mkdir(parents=True)
        (home.parent / place / "mine.yaml").write_text(f"{text}\n")
    home.write_text("searchpath: [~/own]\n")
    words = [typed.format("~/typed"), "--config-dir", "~/option", "optim=mine", "train=mine", "model=mine"]
    shown = orchestra("run", *words, "--cfg", "job").out
    assert all(text in shown for text in ("lr: 0.5\n", "steps: 77\n", "hidden_size: 64\n"))


def test_a_search_path_that_cannot_be_read_is_refused_as_it_was_typed(
    home: Path, orchestra: CommandLine
) -> None:
    Path("mine").mkdir()
    for typed in ("hydra.searchpath=[~/mine", "~hydra.searchpath", "hydra.searchpath=null"):
        said = orchestra("run", typed, "--config-dir", "mine", "--cfg", "job", code=EXIT_USAGE).err
        assert said.startswith(f"error: {typed}: ")
        assert said.count("error:") == 1


def test_orchestra_s_presets_are_found_first_and_hide_none_unsaid(home: Path, orchestra: CommandLine) -> None:
    for file, text in {
        # Other words for a preset of ours are no names of ours.
        "wandb/off.yaml": "mode: disabled\nproject: mine\n",
        "wandb/offline.yaml": "mode: offline\nproject: mine\n",
        "model/debug.yaml": (own_folder() / "model" / "debug.yaml").read_text(),
    }.items():
        place = home.parent / "presets" / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    home.write_text(f"searchpath: [{home.parent}/presets]\n")
    show = ("--cfg", "job", "-p", "wandb.project")
    assert orchestra("run", "wandb=off", *show).out == "mine\n"
    assert orchestra("run", "~wandb", *show).out == "orchestra\n"
    assert "wandb=off" in orchestra("run", "-m", "wandb=off,disabled", "train.seed=1,2", "--dry-run").out
    for verb in (["run"], ["run", "-m"]):
        said = orchestra(*verb, "wandb=offline", "--dry-run", code=EXIT_USAGE).err
        assert f"{home.parent}/presets/wandb/offline.yaml would not be read" in said
    # The same words: nothing is hidden.
    orchestra("run", "model=debug", *show)


def test_a_preset_of_this_machine_is_that_whatever_it_is_called(
    home: Path, orchestra: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home.parent))
    (home.parent / "presets" / "cluster").mkdir(parents=True)
    for name, text in (("desk", "launcher: local\ngpus_per_node: 2\n"), ("lab", "launcher: slurm\n")):
        (home.parent / "presets" / "cluster" / f"{name}.yaml").write_text(f"{text}device: cpu\n")
    home.write_text(f"searchpath: [{home.parent}/presets]\n")
    run = made(Path("runs", "first"))
    write_config(run.config, compose(["run.name=first"], Situation("run", num_gpus=0)).config)
    agent = EventWriter(run, "attempt-000.node-000", 0, node=0)
    agent.write("attempt_started", node=0, nodes=1)
    agent.write("failed", node=0, code=1, cause="x")
    for words in (["resume", "first"], ["rehearse", "first"], ["bench", "network"]):
        here = orchestra(*words, "cluster=desk", "--dry-run").out
        assert "#SBATCH" not in here
        assert "2 ranks" in here or "2 cpu ranks on this machine" in here
        if words != ["bench", "network"]:
            typed = ("cluster=lab", "cluster.gpus_per_node=2", "--dry-run")
            assert "#SBATCH" in orchestra(*words, *typed).out
    typed = ("cluster=lab", "cluster.launcher=local", "--dry-run")
    assert "#SBATCH" not in orchestra("resume", "first", *typed).out
    assert "on this machine" in orchestra("bench", "network", "experiment=demo", "--dry-run").out
    # Without a cluster to ask it shows what it would submit all the same.
    shown = orchestra("bench", "network", "cluster=lab", "cluster.gpus_per_node=2", "--dry-run")
    assert "#SBATCH" in shown.out
    assert "what the cluster has was not checked" in shown.err


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


def test_what_cannot_be_read_or_written_is_told_by_its_own_name(home: Path, orchestra: CommandLine) -> None:
    run = made(Path("runs", "first"))
    run.config.mkdir()
    said = orchestra("resume", "first", "--dry-run", code=EXIT_USAGE).err
    assert said == f"error: {run.config.absolute()}: cannot be read: Is a directory\n"
    with pytest.raises(OSError, match="Is a directory") as raised:
        write_atomically(run.config, "")
    assert raised.value.filename == str(run.config)
    closed = PermissionError(13, "Permission denied", "/presets/model/mine.yaml")
    assert in_one_line(closed) == "/presets/model/mine.yaml: cannot be read: Permission denied"
    home.mkdir()
    said = orchestra("run", "--dry-run", code=EXIT_USAGE).err
    assert said == f"error: {home}: cannot be read: Is a directory; repair it or remove it\n"


def test_a_member_of_a_sweep_asks_to_be_stopped_when_its_command_ends(
    home: Path, orchestra: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prctl, wish = ctypes.CDLL(None).prctl, ctypes.c_int()

    def wished(beginner: int) -> int:
        monkeypatch.setenv("ORCHESTRA_SWEEP_COMMAND", f"{beginner}:1")
        orchestra("resume", "nothing", code=EXIT_USAGE)
        prctl(_PR_GET_PDEATHSIG, ctypes.byref(wish))
        return wish.value

    try:
        # A shell that a member began is no member.
        assert wished(os.getpid()) == 0
        assert wished(os.getppid()) == signal.SIGTERM
    finally:
        prctl(_PR_SET_PDEATHSIG, 0)


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
    # A folder that cannot be listed, as somebody else's closed one, does not hide what is remembered.
    (away / "runs").write_text("")
    assert "first" in orchestra("why", "first").out
    assert "--dir runs: cannot be listed" in orchestra("why", "neither", code=EXIT_USAGE).err
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
