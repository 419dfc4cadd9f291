"""The user's own defaults: `config.yaml` in $ORCHESTRA_CONFIG_DIR, else $XDG_CONFIG_HOME/orchestra or
~/.config/orchestra. They become overrides in front of what is typed, so that a run's record has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from orchestra.config.keys import nearest, written
from orchestra.errors import ConfigError

FILE = "config.yaml"
_EXAMPLE = "searchpath: [~/presets], cluster: lab, run_dir: /scratch/me/runs, wandb_entity: team"
_CHOOSE_CLUSTER = ("cluster=", "cluster.launcher=", "experiment=")


@dataclass(frozen=True)
class Home:
    """What the file says; None and nothing where it is silent."""

    # Folders with presets, as hydra.searchpath.
    searchpath: tuple[str, ...] = ()
    # The preset that `submit`, `plan` and `doctor` take where no cluster is chosen.
    cluster: str | None = None
    # run.dir, and where the commands look for runs.
    run_dir: str | None = None
    # wandb.entity.
    wandb_entity: str | None = None

    def overrides(self, typed: Sequence[str], verb: str) -> list[str]:
        """Return what is typed for a verb (run, submit, plan, doctor) behind the defaults it leaves open."""
        keys = {text.partition("=")[0].lstrip("+") for text in typed}
        ours = []
        if self.cluster is not None and verb != "run" and not any(map(chooses_cluster, typed)):
            ours.append(f"cluster={self.cluster}")
        for key, value in (("run.dir", self.run_dir), ("wandb.entity", self.wandb_entity)):
            if value is not None and key not in keys and verb != "plan":
                ours.append(f"{key}={written(value)}")
        return [*ours, *typed]


def home_file() -> Path:
    """Return where the user's defaults lie, or would lie."""
    own = os.environ.get("ORCHESTRA_CONFIG_DIR")
    if own:
        return Path(own).expanduser() / FILE
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "orchestra" / FILE


def run_folder() -> Path:
    """Return where runs lie where no command says otherwise: the file's run_dir, else ./runs."""
    return Path(read_home().run_dir or "runs")


def read_home() -> Home:
    """Return the user's defaults; those of no file are empty. Raises ConfigError for a file that is wrong."""
    file = home_file()
    try:
        content = yaml.safe_load(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return Home()
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ConfigError(f"{file}: cannot be read: {reason}; repair it or remove it") from error
    if content is None:
        return Home()
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected `key: value` lines, such as {_EXAMPLE}")
    if problems := [f"{file}: {problem}" for problem in _problems(content)]:
        raise ConfigError(problems)
    folders = [str(Path(folder).expanduser()) for folder in content.get("searchpath") or ()]
    texts = {name: value for name, value in content.items() if name != "searchpath"}
    if texts.get("run_dir"):
        texts["run_dir"] = str(Path(texts["run_dir"]).expanduser())
    return Home(searchpath=tuple(folders), **texts)


def _problems(content: dict[Any, Any]) -> Iterator[str]:
    names = [field.name for field in fields(Home)]
    for name, value in content.items():
        if name not in names:
            meant = nearest(str(name), names)
            hint = f"did you mean {meant}? There are" if meant else "there are"
            yield f"{name}: no such key; {hint} {', '.join(names)}"
        elif name == "searchpath":
            if not isinstance(value, list) or not all(isinstance(folder, str) for folder in value):
                yield f"searchpath: expected a list of folders, such as [~/presets], found {value}"
                continue
            missing = (folder for folder in value if not Path(folder).expanduser().is_dir())
            yield from (
                f"searchpath: {folder} is not a folder; make it or leave it out" for folder in missing
            )
        elif value is not None and not (isinstance(value, str) and value.strip()):
            yield f"{name}: expected a text, found {value!r}"
        elif name == "run_dir" and value is not None and not Path(value).expanduser().is_absolute():
            yield f"run_dir: {value}: expected a path from the root or from ~, the same everywhere"


def chooses_cluster(text: str) -> bool:
    """Whether an override chooses a cluster, or an experiment that does."""
    return text.lstrip("+").startswith(_CHOOSE_CLUSTER)
