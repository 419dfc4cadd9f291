"""What a configuration's plug-ins are like, asked of a process that imports them, once for each choice.

Called when a configuration is resolved and checked. A configuration without plug-ins starts no process.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orchestra
from conf.schema import (
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    TrainConfig,
)
from orchestra.plugins import ANSWER, named_in, spelling_problem
from orchestra.run.config_file import plain_values, write_config
from orchestra.run.paths import RunDir, SweepDir

# Importing torch from a slow file system takes a minute at worst, and a plug-in may import more.
_LIMIT_S = 180.0


@dataclass(frozen=True)
class PluginFacts:
    """As `orchestra.train.check_plugins.PluginFinding`, which says what the fields are."""

    problems: tuple[str, ...] = ()
    state_bytes: float | None = None
    parts_problem: str | None = None
    apart_problem: str | None = None
    gathers: bool = False
    vocabularies: Mapping[str, int] = field(default_factory=dict)
    separators: Mapping[str, int] = field(default_factory=dict)
    identity: str | None = None
    block_parameters: int | None = None


def plugin_facts(config: Config) -> PluginFacts:
    """Return what was found of a configuration's plug-ins."""
    plugins = named_in(config)
    if not plugins:
        return PluginFacts()
    if misspelt := [problem for problem in map(spelling_problem, plugins) if problem is not None]:
        return PluginFacts(tuple(misspelt))
    only = _told(config, {plugin.key for plugin in plugins})
    return _asked(json.dumps(plain_values(only), default=str), _Kept(only), _copies(config))


def _told(config: Config, keys: set[str]) -> Config:
    """Return all that plug-ins of these keys are told: nothing else can change what is found."""
    optim, train, data = config.optim, config.train, config.data
    reads, has_block = any(key.endswith(".source") for key in keys), "model.block" in keys
    return Config(
        model=replace(config.model, block_parameters=None) if has_block else ModelConfig(),
        precision=config.precision if has_block else PrecisionConfig(),
        optim=OptimConfig(target=optim.target, options=optim.options),
        data=DataConfig(source=data.source, source_options=data.source_options),
        eval=EvalConfig(data=config.eval.data) if reads else EvalConfig(),
        train=TrainConfig(
            loss=train.loss,
            loss_options=train.loss_options,
            callbacks=train.callbacks,
            callbacks_options=train.callbacks_options,
            seq_len=train.seq_len if reads or has_block else TrainConfig.seq_len,
        ),
    )


def import_path(config: Config) -> str:
    """Return PYTHONPATH for a process that imports a configuration's plug-ins as its ranks do: our own
    packages first, then what a submitted run took with it, and not the working directory.
    """
    return _joined(_copies(config))


def _joined(copies: tuple[str, ...]) -> str:
    own = str(Path(orchestra.__file__).parents[1])
    return os.pathsep.join([own, *copies, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def _copies(config: Config) -> tuple[str, ...]:
    """Return the folder of a submitted run, or of its sweep, that holds the plug-ins it goes on with."""
    if config.run.name is None:
        return ()
    run = RunDir(Path(config.run.dir).expanduser() / config.run.name)
    return tuple(str(place.plugins) for place in (run, SweepDir(run.path.parent)) if place.plugins.is_dir())


class _Kept:
    """A value that is equal to any other: what it is made of stands in a key beside it."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=256)
def _asked(_: str, kept: _Kept, copies: tuple[str, ...]) -> PluginFacts:
    environment = {**os.environ, "PYTHONPATH": _joined(copies), "PYTHONSAFEPATH": "1"}
    names = " and ".join(plugin.target for plugin in named_in(kept.config))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        write_config(file, kept.config)
        command = [sys.executable, "-m", "orchestra.train.check_plugins", str(file)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return PluginFacts((f"{names}: importing and trying it took longer than {_LIMIT_S:.0f} s",))
    # What a plug-in prints, at its end too, stands around it.
    lines = [line.removeprefix(ANSWER) for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return PluginFacts((f"{names}: the process that tried it ended without an answer: {last[0]}",))
    return PluginFacts(**{**answer, "problems": tuple(answer["problems"])})
