"""Checks single values against the schema by assigning them to a scratch copy of it, as Hydra will."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestra.config.keys import element_problems, find_key, shown, unknown_key, wrong_type
from orchestra.config.numbers import plain_list, plain_number
from orchestra.run.config_file import writable_schema

# The YAML tree on disk: where it is, which groups and presets it has. It reads names, not contents.
#
# The tree is the `conf` beside the `orchestra` package that is running. It is found by path and not as a
# package: a foreign `conf` in the working directory must not take its place.


GROUPS = (
    "experiment",
    "model",
    "parallelism",
    "precision",
    "data",
    "optim",
    "train",
    "checkpoint",
    "cluster",
    "recovery",
    "wandb",
    "run",
)


@dataclass(frozen=True)
class Tree:
    """Our folder, and after it the user's own (`hydra.searchpath`); for the same name the first one wins."""

    folders: tuple[Path, ...]

    def options(self, group: str) -> list[str]:
        """Return the presets of a group, none of a folder that may not be read."""
        found: set[str] = set()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                found |= {file.stem for file in (folder / group).glob("*.yaml")}
        return sorted(found)

    def file(self, config_path: str) -> Path | None:
        """Return the file of a preset such as `model/debug`; None when it is not a file of the tree."""
        files = (folder / f"{config_path}.yaml" for folder in self.folders)
        return next((file for file in files if file.is_file()), None)

    def hidden_by_ours(self, config_path: str) -> Path | None:
        """Return the user's file of the name of one of our presets, which is not read; None where there is
        none, or it says the same.
        """
        ours, *others = (folder / f"{config_path}.yaml" for folder in self.folders)
        if not ours.is_file():
            return None
        said = ours.read_bytes()
        return next((file for file in others if file.is_file() and file.read_bytes() != said), None)


def own_folder() -> Path:
    """Return the folder of the configuration tree that belongs to this installation."""
    return Path(__file__).resolve().parents[2] / "conf"


# YAML 1.1 reads an unquoted 4:00:00 as a number to the base 60.
_UNQUOTED_TIME = re.compile(r"^\s*time_limit:\s*(\d+(?::\d+)+)\s*(?:#.*)?$", re.MULTILINE)


class Scratch:
    """A copy of the schema that values are tried on; values tried earlier stay in it."""

    def __init__(self) -> None:
        self._node: DictConfig = writable_schema()
        OmegaConf.set_struct(self._node, True)

    def problems(self, name: str, value: Any) -> Iterator[str]:
        """Yield what is wrong with assigning `value` (a mapping for a section) to the key `name`."""
        key = find_key(name)
        if key is None:
            yield unknown_key(name)
        elif key.is_free:
            is_whole = isinstance(value, dict) or (value is None and key.takes_null)
            if key.name == name and not is_whole:
                yield wrong_type(key, name, value)
        elif key.is_section and isinstance(value, dict):
            for child, inner in value.items():
                yield from self.problems(f"{name}.{child}", inner)
        elif inner_problems := list(element_problems(key, name, value)):
            yield from inner_problems
        elif key.type is bool and isinstance(value, int) and value not in (0, 1):
            # OmegaConf takes -1 and 2 for true.
            yield wrong_type(key, name, value)
        else:
            try:
                OmegaConf.update(self._node, name, value)
            except (OmegaConfBaseException, ValueError, TypeError, IndexError, OverflowError):
                plain = plain_number(key, str(value)) or plain_list(key, value)
                wrong = wrong_type(key, name, value)
                yield wrong if plain is None else f"{name}={shown(value)}: write {shown(plain)}"


def file_problems(file: Path, section: str) -> list[str]:
    """Return what is wrong in one YAML file whose content belongs below `section` (empty: at the top).

    Each sentence begins with the file's path. YAML errors are left to whoever loads the file next.
    """
    content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    if content is None:
        return []
    if not isinstance(content, dict):
        return [f"{file}: expected `key: value` lines"]
    scratch = Scratch()
    prefix = section + "." if section else ""
    problems: list[str] = []
    for name, value in content.items():
        if name not in ("defaults", "hydra"):
            problems += scratch.problems(f"{prefix}{name!s}", value)
    return [f"{file}: {problem}" for problem in problems]


def header_problems(file: Path, group: str, tree: Tree) -> list[str]:
    """Return what is wrong with the package line and the defaults list of a preset's file."""
    problems: list[str] = []
    if group == "experiment" and "# @package _global_" not in file.read_text():
        problems.append("an experiment needs the line `# @package _global_` at its top")
    content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    entries = content.get("defaults", []) if isinstance(content, dict) else []
    for entry in entries if isinstance(entries, list) else []:
        for name, preset in entry.items() if isinstance(entry, dict) else ():
            path = str(name).removeprefix("override ").strip()
            options = tree.options(path.removeprefix("/"))
            if path in GROUPS:
                problems.append(f"defaults: {name}: write `override /{path}: {preset}`, from the top")
            elif not options:
                problems.append(f"defaults: {name}: no such group; the groups are {', '.join(GROUPS)}")
            elif isinstance(preset, str) and preset not in options:
                problems.append(f"defaults: {name}: {preset}: no such preset; there are {', '.join(options)}")
    return [f"{file}: {problem}" for problem in problems]


def unquoted_times(file: Path) -> list[str]:
    """Return a sentence for each time limit in a YAML file that YAML reads as a number to the base 60."""
    advice = "YAML reads it as a number to the base 60"
    return [
        f'{file}: time_limit: {time} needs quotes, time_limit: "{time}"; {advice}'
        for time in _UNQUOTED_TIME.findall(file.read_text())
    ]
