"""What is completed, by the hidden verb and by the shells that are installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import CommandLine
from test_home import made

from orchestra.cli import VERBS

_ROOT = Path(__file__).resolve().parents[3]
# The line that is typed, and some of what it may go on with.
TABLE = [
    ("orchestra sta", ["status"]),
    ("orchestra checkpoint ", ["export", "import", "ls", "verify"]),
    ("orchestra run --dry", ["--dry-run"]),
    ("orchestra run mod", ["model.", "model="]),
    ("orchestra run model=llama3_", ["model=llama3_405b", "model=llama3_70b", "model=llama3_8b"]),
    ("orchestra run model=min", ["model=mine"]),
    ("orchestra submit -m train.st", ["train.steps="]),
    ("orchestra plan optim.schedule=co", ["optim.schedule=constant", "optim.schedule=cosine"]),
    ("orchestra run data.ledger=", ["data.ledger=false", "data.ledger=true"]),
    ("orchestra run train.profile.e", ["train.profile.enabled="]),
    ("orchestra run train.pro", ["train.profile."]),
    ("orchestra why fi", ["first"]),
    ("orchestra why first ", []),
    *(
        (f"orchestra {verb} fi", ["first"])
        for verb in ("report", "top", "watch", "profile", "eval", "generate")
    ),
    ("orchestra submit --after fi", ["first"]),
    ("orchestra plan --goodput --like fi", ["first"]),
    ("orchestra rehearse first cluster.no", ["cluster.node_order=", "cluster.nodes="]),
    ("orchestra doctor cluster.part", ["cluster.partition="]),
    ("orchestra resume first train.log", ["train.log_every="]),
    ("orchestra config optim.l", ["optim.lr"]),
    ("orchestra completion f", ["fish"]),
    ("orchestra run 'run.name=x", []),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run, a home with a preset, and `orchestra` on PATH."""
    made(tmp_path / "runs" / "first")
    (tmp_path / "presets" / "model").mkdir(parents=True)
    (tmp_path / "presets" / "model" / "mine.yaml").write_text("hidden_size: 64\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.yaml").write_text(f"searchpath: [{tmp_path}/presets]\n")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "orchestra"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m orchestra "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("ORCHESTRA_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_word_is_completed_by_what_may_stand_there(folder: Path, orchestra: CommandLine) -> None:
    for line, expected in TABLE:
        assert orchestra("__complete", line).out.split() == expected, line
    first = {verb.split()[0] for verb in VERBS}
    assert set(orchestra("__complete", "orchestra ").out.split()) == first


def asked(command: list[str], text: str) -> list[str]:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


def test_bash_completes_verbs_keys_and_what_stands_after_an_equals_sign(folder: Path) -> None:
    script = subprocess.run(
        ["orchestra", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    lines = ["orchestra stat", "orchestra run model=llama3_7", "orchestra why fi", "orchestra run train.st"]
    tries = "".join(
        f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=(orchestra); "
        '_orchestra_complete; echo "${COMPREPLY[@]}"\n'
        for line in lines
    )
    found = asked(["bash", "--norc"], f"{script}complete -p orchestra >&2\n{tries}")
    # bash keeps `model=`, which ends a word of its own.
    assert found == ["status", "llama3_70b", "first", "train.steps="]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed here")
def test_zsh_loads_the_script(folder: Path) -> None:
    text = (
        "autoload -U compinit; compinit -u -D; source <(orchestra completion zsh); print $_comps[orchestra]\n"
    )
    assert asked(["zsh", "-f"], text) == ["_orchestra"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed here")
def test_fish_completes_presets(folder: Path) -> None:
    text = "orchestra completion fish | source; complete -C 'orchestra run model=llama3_7'\n"
    assert asked(["fish", "--no-config"], text) == ["model=llama3_70b"]


def test_completion_loads_no_slow_library(folder: Path) -> None:
    code = (
        "import sys; from orchestra.cli import main; main(['__complete', 'orchestra run train.'])\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "hydra", "omegaconf", "numpy", "rich"} & {*done.stdout.splitlines()[-1].split()}
