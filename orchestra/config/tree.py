"""The YAML tree on disk: where it is, which groups and presets it has. It reads names, not contents.

The tree is the `conf` beside the `orchestra` package that is running. It is found by path and not as a
package: a foreign `conf` in the working directory must not take its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        """Return the presets of a group."""
        files = (file for folder in self.folders for file in (folder / group).glob("*.yaml"))
        return sorted({file.stem for file in files})

    def file(self, config_path: str) -> Path | None:
        """Return the file of a preset such as `model/debug`; None when it is not a file of the tree."""
        files = (folder / f"{config_path}.yaml" for folder in self.folders)
        return next((file for file in files if file.is_file()), None)


def own_folder() -> Path:
    """Return the folder of the configuration tree that belongs to this installation."""
    return Path(__file__).resolve().parents[2] / "conf"
