"""Recorded output that a change of the code must not alter: where it lies, how commands are run for it, what
is replaced in it before it is compared, and how two values are compared.

Nothing of the product is imported here: only the public command and plain files of run directories are used,
so that modules may be moved and renamed.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked_commands import ForkedCommands
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded")
REMEDY = "is this on purpose? then `python tests/golden/record_goldens.py`, and say why in the commit"

# Where it may have to wait for a processor; each test has a limit besides.
LIMIT_S = 1000.0
# Sums of many floats differ in their last digits between processors and C libraries.
TOLERANCE = 1e-9

_PACKAGES = "orchestra|launchers|checkpointing|conf|hydra_plugins"
# What may differ between two machines, two days or two ways to cut the code into modules.
_REPLACED = (
    # Files before dotted names: orchestra/a/b.py, line 3.
    (re.compile(rf"(?:[\w./<>-]*/)?\b(?:{_PACKAGES})/[\w/]+\.py\b(?:\", line \d+|:\d+)?"), "<file>"),
    (re.compile(rf"\b(?:{_PACKAGES})(?:\.[a-z_]\w*)+\b(?!=)"), "<module>"),
    (re.compile(r"-m orchestra\b"), "-m <module>"),
    # The name that tells a submission from all others.
    (re.compile(r"\borchestra:[0-9a-f]{16}\b"), "orchestra:<token>"),
)
# Keys whose values tell how long ago something was.
_AGES = {"age_s"}
# Keys whose values are sentences for people: their words may be improved, that they are there may not change.
_SENTENCES = {"message", "reason", "traceback"}
# Variables whose values are one rank's share of the machine's cores.
_OF_CORES = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"}
# Sentences in notes and errors, of which the configuration key that they begin with is kept, and in notes the
# number of a sweep's member.
_SAID = re.compile(r"^(note:|error: [a-z_.]+)(?! +\d{3} ).*$", re.MULTILINE)


@dataclass(frozen=True)
class Output:
    """What a command left: exit code and normalised text."""

    code: int
    out: str
    err: str

    def as_text(self, words: list[str]) -> str:
        """Return a record of the command for people to read in a diff."""
        said = _SAID.sub(r"\1 <sentence>", self.err)
        return f"$ orchestra {' '.join(words)}\n{self.out}--- stderr\n{said}--- exit code\n{self.code}\n"

    def as_json(self) -> Any:
        """Return what a command with --json printed."""
        assert self.out, f"exit code {self.code}: {self.err}"
        return settled(json.loads(self.out))


def environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command, from this tree and without knowledge of this machine's user."""
    of_machine = ("SLURM_", "XDG_", "WANDB_", "ORCHESTRA_", "MASTER_", "TORCHINDUCTOR_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(of_machine)}
    homes = {f"XDG_{kind}_HOME": str(folder / "home" / kind) for kind in ("DATA", "CACHE", "CONFIG", "STATE")}
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **homes, **variables}


def start(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start `orchestra WORDS` in `folder`."""
    command = [sys.executable, "-m", "orchestra", *words]
    env, pipe = environment(folder, variables), subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `orchestra WORDS` to its end in `folder`."""
    process = start(folder, *words, **variables)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.terminate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def stopped(folder: Path, metrics: Path, *words: str) -> tuple[int, str]:
    """Start `orchestra WORDS`, ask it to stop when the file `metrics` has rows; return code and output."""
    process = start(folder, *words)
    has_rows = lambda: metrics.exists() and metrics.read_text() != ""  # noqa: E731
    eventually(lambda: has_rows() or process.poll() is not None, LIMIT_S)
    process.terminate()
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out + err


class Forked:
    """Where `output` has commands forked while this is entered: all but the first one of each verb."""

    now: Forked | None = None

    def __init__(self) -> None:
        self.commands = ForkedCommands()
        self._started: set[str] = set()

    def __enter__(self) -> None:
        Forked.now = self

    def __exit__(self, *_: object) -> None:
        Forked.now = None
        self.commands.close()

    def takes(self, verb: str) -> bool:
        """Whether a command of this verb was started before."""
        is_known = verb in self._started
        self._started.add(verb)
        return is_known


def output(folder: Path, *words: str) -> Output:
    """Run `orchestra WORDS` in `folder` where no command of Slurm is found, and normalise what it printed."""
    nowhere = {"PATH": str(folder / "no-commands")}
    if Forked.now is not None and Forked.now.takes(words[0]):
        done = Forked.now.commands.run(words, folder, environment(folder, nowhere))
    else:
        done = run(folder, *words, **nowhere)
    return Output(done.returncode, normalised(done.stdout, folder), normalised(done.stderr, folder))


def normalised(text: str, folder: Path) -> str:
    """Return text without paths of this machine, names of modules and tokens."""
    for path, name in ((folder, "<folder>"), (Path(sys.executable), "<python>"), (ROOT, "<code>")):
        for spelling in sorted({str(path), str(path.resolve())}, key=len, reverse=True):
            text = text.replace(spelling, name)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text


def settled(value: Any) -> Any:
    """Return a JSON value without ages, numbers of cores and the wording of sentences."""
    if isinstance(value, dict):
        return {key: _settled_at(key, item) for key, item in value.items()}
    return [settled(item) for item in value] if isinstance(value, list) else value


def _settled_at(key: str, value: Any) -> Any:
    if key in _AGES and value is not None:
        return "<age>"
    if key in _OF_CORES:
        return "<cores>"
    return "<sentence>" if key in _SENTENCES and isinstance(value, str) and value else settled(value)


def keys_of(value: Any, unnamed: tuple[str, ...] = (), at: str = "") -> list[str]:
    """Return the keys of a JSON value, those inside others as `outer/inner`.

    The keys of objects at the places `unnamed` are names of things (files, tensors): `*` stands for each.
    """
    found: set[str] = set()
    if isinstance(value, dict):
        for key, item in value.items():
            place = f"{at}/*" if at in unnamed else f"{at}/{key}".lstrip("/")
            found |= {place, *keys_of(item, unnamed, place)}
    elif isinstance(value, list):
        for item in value:
            found |= set(keys_of(item, unnamed, f"{at}[]"))
    return sorted(found)


def differences(recorded: Any, found: Any, at: str = "") -> list[str]:
    """Return where two JSON values differ; numbers may differ by what other processors round."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        keys = [*recorded, *(key for key in found if key not in recorded)]
        absent = "<absent>"
        pairs = [(f"{at}.{key}", recorded.get(key, absent), found.get(key, absent)) for key in keys]
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = [(f"{at}[{i}]", *pair) for i, pair in enumerate(zip(recorded, found, strict=True))]
    elif _is_same(recorded, found):
        return []
    else:
        return [f"{at or 'all'}: recorded {recorded!r}, found {found!r}"]
    return [line for place, before, now in pairs for line in differences(before, now, place)]


def _is_same(recorded: Any, found: Any) -> bool:
    if isinstance(recorded, float) and isinstance(found, float):
        both_nan = math.isnan(recorded) and math.isnan(found)
        return both_nan or math.isclose(recorded, found, rel_tol=TOLERANCE)
    return type(recorded) is type(found) and bool(recorded == found)


def read(name: str) -> Any:
    """Return what is recorded under the name of a file: text, or a JSON value for *.json."""
    text = (RECORDED / name).read_text()
    return json.loads(text) if name.endswith(".json") else text


def write(name: str, value: Any) -> None:
    """Record text, or a JSON value for *.json."""
    file = RECORDED / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1) + "\n" if name.endswith(".json") else value)


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]
