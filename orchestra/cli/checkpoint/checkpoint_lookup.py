"""The checkpoints of a RUN as the verbs see them: where they are, and what a first look says about each.

A first look reads the manifest and the sizes of the files; only verifying reads what is in them. It knows no
tensors and needs no torch.
"""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkpointing.catalog import check_sizes, committed_steps, owner, read_manifest
from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.manifest import Manifest
from checkpointing.storage import Storage, open_storage
from conf.schema import Config
from orchestra.cli.text.resolve import add_directory_option, resolve
from orchestra.errors import ConfigError, OrchestraError
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir
from orchestra.run.record import read_record

_NUM_LISTED = 8


@dataclass(frozen=True)
class Place:
    """A run, its configuration, and the storage that its checkpoints lie in."""

    run: RunDir
    config: Config
    storage: Storage


@dataclass(frozen=True)
class Look:
    """What a first look at one checkpoint found: its manifest where that can be read, and what is wrong."""

    step: int
    manifest: Manifest | None
    damage: str | None


def add_run_arguments(parser: ArgumentParser, *, step_help: str | None) -> None:
    """Add RUN, --dir, and STEP where `step_help` says what it is for."""
    parser.add_argument("run", metavar="RUN", help="name, unique start of one, or path")
    if step_help is not None:
        parser.add_argument("step", nargs="?", type=_step, metavar="STEP", help=step_help)
    add_directory_option(parser)


def _step(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is no step; give a number such as 100")
    return int(text)


def open_place(text: str, parent: Path) -> Place:
    """Return the run that `text` means among those in `parent`, and where its checkpoints lie.

    Raises ConfigError where there is no such run, none that can be read, or the place is another run's.
    """
    run = resolve(text, parent)
    config = read_config(run.config)
    with explained():
        storage = open_storage(config.checkpoint.dir or run.checkpoints)
        _refuse_others(run, storage)
    return Place(run, config, storage)


def _refuse_others(run: RunDir, storage: Storage) -> None:
    """Refuse a place that another run has claimed: its checkpoints would pass for this run's."""
    theirs, mine = owner(storage), read_record(run).get("wandb_id")
    if theirs is not None and mine is not None and theirs != mine:
        raise ConfigError(
            f"{storage.place} belongs to another run: its wandb id is {theirs}, that of {run.name} is {mine}"
        )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Let what goes wrong with checkpoints end a command with 1 and its own words."""
    try:
        yield
    except CheckpointError as error:
        raise OrchestraError(str(error)) from error


def first_look(storage: Storage, step: int) -> Look:
    """Read a checkpoint's manifest and compare the sizes of its files."""
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(storage, step)
        check_sizes(storage, manifest)
    except CheckpointError as error:
        return Look(step, manifest, str(error))
    return Look(step, manifest, None)


def chosen_steps(place: Place, step: int | None) -> list[int]:
    """Return the committed steps, newest first, or the one that was asked for.

    Raises ConfigError with the steps that there are, OrchestraError where there are none.
    """
    steps = committed_steps(place.storage)
    if not steps:
        raise OrchestraError(f"{place.run.name} has no checkpoint in {place.storage.place}")
    if step is None:
        return steps[::-1]
    if step not in steps:
        earlier = "… " if len(steps) > _NUM_LISTED else ""
        listed = ", ".join(map(str, steps[-_NUM_LISTED:]))
        raise ConfigError(
            f"STEP {step}: {place.run.name} has no checkpoint of it; there are {earlier}{listed}"
        )
    return [step]
