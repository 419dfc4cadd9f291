"""`orchestra checkpoint ls RUN`: the checkpoints that a run has, from their manifests. Read-only, but for
`--prune`, which removes what lies off the run's line.

A first look at a checkpoint reads the manifest and the sizes of the files; only verifying reads what is in
them. The other checkpoint verbs find a run's checkpoints by what is here; it needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpointing.catalog import (
    OffLine,
    StoredCheckpoint,
    check_sizes,
    owner,
    read_manifest,
    split,
    stored_in,
)
from checkpointing.checkpoint_errors import CheckpointError, NewerVersionError
from checkpointing.lineage import Lineage
from checkpointing.manifest import Manifest
from checkpointing.outages import is_passing, is_refused, may_be_damage
from checkpointing.saving.retention import remove_off_line
from checkpointing.storage import Storage, open_storage
from conf.schema import Config
from orchestra.cli.text import figures
from orchestra.cli.text.describe import invocation
from orchestra.cli.text.resolve import add_directory_option, resolve
from orchestra.errors import EXIT_DONE, ConfigError, DataError, OrchestraError
from orchestra.report.run_state import name_of, was_verified
from orchestra.run.config_file import read_config
from orchestra.run.events import is_number, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.record import fallback_place, read_record
from orchestra.run.run_lineage import read_lineage
from orchestra.sizes.save_interval import AUTO

_NUM_LISTED = 8
_HEADER = ("STEP", "SIZE", "AGE", "LAYOUT", "LOSS", "CHECKED")
_FOUND = {"newer": "cannot be told here", "unread": "cannot be read now"}
_EXPLAINED = """\
CHECKED says `sizes` where the manifest is whole and every file has its size, else `DAMAGED`. That is a quick
look: `orchestra checkpoint verify RUN` reads every byte, and `verified` says that it has once, since the
checkpoint was written, and found all as it should be. `newer` is what a newer version wrote, and `unread`
what the storage does not give (to you) now. `off line` are those that no attempt goes on from any more: the
run went back to an earlier step since. They stay until --prune, but for those that an attempt wrote after the
next one had begun, which the next save removes.
"""


@dataclass(frozen=True)
class Place:
    """A run, its configuration, its lineage, and the storage that its checkpoints lie in; `fallback` where it
    has one and something lies there.
    """

    run: RunDir
    config: Config
    storage: Storage
    lineage: Lineage
    fallback: Storage | None = None

    @property
    def words(self) -> str:
        places = [self.storage] if self.fallback is None else [self.storage, self.fallback]
        return " and ".join(storage.place for storage in places)

    def storage_of(self, checkpoint: StoredCheckpoint) -> Storage:
        """Return the storage that holds a checkpoint of `split`."""
        return self.storage if self.fallback is None or checkpoint.place == 0 else self.fallback

    def split(self) -> tuple[list[StoredCheckpoint], list[OffLine]]:
        """Return what lies on the run's line, ascending, and what does not. Raises StorageError."""
        places = [self.storage] if self.fallback is None else [self.storage, self.fallback]
        return split(stored_in(places), self.lineage)


@dataclass(frozen=True)
class Look:
    """What a first look at one checkpoint found: its manifest where that can be read, and what is wrong.

    `off_line`: why it is not one of the run's line; None where it is. `is_newer`: what is wrong is that a
    newer version wrote it, and it may be intact; so it may where it `is_unread`: the storage does not answer,
    or not us.
    """

    checkpoint: StoredCheckpoint
    manifest: Manifest | None
    damage: str | None
    off_line: OffLine | None = None
    is_newer: bool = False
    is_unread: bool = False

    @property
    def step(self) -> int:
        return self.checkpoint.step


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
        second = fallback_place(run, config.checkpoint.fallback_dir)
        fallback = None if second is None else _fallback(second)
        theirs, mine = owner(storage), read_record(run).get("wandb_id")
    # The checkpoints of another run would pass for this run's.
    if theirs is not None and mine is not None and theirs != mine:
        raise ConfigError(
            f"{storage.place} belongs to another run: its wandb id is {theirs}, that of {run.name} is {mine}"
        )
    return Place(run, config, storage, read_lineage(run), fallback)


def _fallback(place: str) -> Storage | None:
    """Return a run's second place where something lies there."""
    try:
        storage = open_storage(place)
        return storage if storage.names() else None
    except CheckpointError as error:
        print(f"checkpoint.fallback_dir is left out: {error}", file=sys.stderr)
        return None


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Let what goes wrong with checkpoints end a command with 1 and its own words."""
    try:
        yield
    except CheckpointError as error:
        raise OrchestraError(str(error)) from error


def first_look(storage: Storage, checkpoint: StoredCheckpoint, off_line: OffLine | None = None) -> Look:
    """Read a checkpoint's manifest and compare the sizes of its files."""
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(storage, checkpoint)
        check_sizes(storage, manifest, checkpoint.folder)
    except CheckpointError as error:
        is_newer = isinstance(error, NewerVersionError)
        is_unread = is_refused(error) or (is_passing(error) and not may_be_damage(error))
        return Look(checkpoint, manifest, str(error), off_line, is_newer, is_unread)
    return Look(checkpoint, manifest, None, off_line)


def refuse_untold(look: Look) -> None:
    """Refuse the newest checkpoint where this version cannot read it, or nobody can now: it may be intact,
    and an older one is another model. Raises DataError, OrchestraError.
    """
    if look.is_unread:
        raise OrchestraError(
            f"the checkpoint of step {look.step} cannot be read now: {look.damage}; try again, or say which "
            "other step to take"
        )
    if look.is_newer:
        raise DataError(
            f"the checkpoint of step {look.step} cannot be told here: {look.damage}; or say which older step "
            "to take"
        )


def chosen_checkpoints(place: Place, step: int | None) -> list[StoredCheckpoint]:
    """Return the checkpoints on the run's line, newest first, or that of the step that was asked for.

    Raises ConfigError with the steps that there are, OrchestraError where there are none.
    """
    on, off = place.split()
    if not on:
        raise OrchestraError(f"{name_of(place.run)} has no checkpoint in {place.words}")
    if step is None:
        return on[::-1]
    found = [checkpoint for checkpoint in on if checkpoint.step == step]
    if not found:
        steps = [checkpoint.step for checkpoint in on]
        earlier = "… " if len(steps) > _NUM_LISTED else ""
        listed = ", ".join(map(str, steps[-_NUM_LISTED:]))
        void = next(
            (f" that counts ({each.words})" for each in off if each.checkpoint.step == step), " of it"
        )
        raise ConfigError(
            f"STEP {step}: {name_of(place.run)} has no checkpoint{void}; there are {earlier}{listed}"
        )
    return found


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser, step_help=None)
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object per checkpoint")
    parser.add_argument("--prune", action="store_true", help="remove what is off the run's line, then list")
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Print the checkpoints and return 0, damaged ones or not."""
    place = open_place(arguments.run, arguments.dir)
    with explained():
        if arguments.prune:
            for gone in remove_off_line(place.storage, place.lineage, place.fallback):
                print(f"removed step {gone.checkpoint.step}: {gone.words}", file=sys.stderr)
        on, off = place.split()
        looks = [first_look(place.storage_of(checkpoint), checkpoint) for checkpoint in on]
        looks += [first_look(place.storage_of(each.checkpoint), each.checkpoint, each) for each in off]
    looks.sort(key=lambda look: look.checkpoint.age)
    events, now = read_events(place.run), time.time()
    rows = [_row(look, place, _checked(look, events), now) for look in looks]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        _print_table(place, rows)
    else:
        print(f"{name_of(place.run)} has no checkpoint in {place.words}; {_when_one_is_due(place)}")
    return EXIT_DONE


def _when_one_is_due(place: Place) -> str:
    every = place.config.checkpoint.every_steps
    if every is None:
        return "it saves none (checkpoint.every_steps=null)"
    if every == AUTO:
        return "one is due as often as the ranks decide (checkpoint.every_steps=auto)"
    return f"one is due every {every} steps"


def _checked(look: Look, events: list[Record]) -> str:
    if look.off_line is not None:
        return "off line"
    if look.is_newer:
        return "newer"
    if look.is_unread:
        return "unread"
    if look.damage is not None or look.manifest is None:
        return "damaged"
    return "verified" if was_verified(events, look.step, look.manifest.created) else "sizes"


def _row(look: Look, place: Place, checked: str, now: float) -> dict[str, Any]:
    """Return a checkpoint for --json; what only the manifest knows is left out where it cannot be read."""
    row: dict[str, Any] = {"step": look.step, "checked": checked, "damage": look.damage}
    row |= {
        "place": place.storage_of(look.checkpoint).place,
        "on_line": look.off_line is None,
        "off_line": None if look.off_line is None else look.off_line.words,
    }
    manifest = look.manifest
    if manifest is None:
        return row
    return {
        **row,
        "num_bytes": manifest.num_bytes,
        "num_files": len(manifest.files),
        "num_tensors": len(manifest.tensors),
        "created": manifest.created,
        "age_s": now - manifest.created,
        "layout": dict(manifest.layout),
        "generation": manifest.generation,
        "attempt": manifest.attempt,
        "base": None if manifest.base is None else asdict(manifest.base),
        "score": _score(manifest.state),
        "state_digest": manifest.state_digest,
    }


def _score(state: Mapping[str, Any]) -> float | None:
    """Return the loss that a checkpoint was saved with, None where it says none."""
    value = state.get("score")
    return float(value) if is_number(value) and math.isfinite(value) else None


def _print_table(place: Place, rows: list[dict[str, Any]]) -> None:
    print(figures.table(_HEADER, [_cells(row) for row in rows]))
    lines = [f"in {place.storage.place}"]
    for row in rows:
        if row["place"] != place.storage.place:
            where = f"step {row['step']} is in {row['place']}"
            lines += figures.wrapped(where, indent="  ", keeps_words=True)
        if not row["on_line"]:
            lines += figures.wrapped(f"step {row['step']} is off the line: {row['off_line']}", indent="  ")
        elif row["damage"] is not None:
            found = _FOUND.get(row["checked"], "is damaged")
            lines += figures.wrapped(f"step {row['step']} {found}: {row['damage']}", indent="  ")
    lines += figures.wrapped(
        f"manifests and sizes were checked now; `{invocation('checkpoint verify', place.run)}` reads all"
    )
    print("\n".join(lines))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    checked = "DAMAGED" if row["checked"] == "damaged" else row["checked"]
    if "num_bytes" not in row:
        return (str(row["step"]), "-", "-", "-", "-", checked)
    return (
        str(row["step"]),
        figures.quantity(float(row["num_bytes"])) + "B",
        figures.age(row["age_s"]),
        layout_text(row["layout"]),
        figures.loss(row["score"]),
        checked,
    )


def layout_text(layout: Mapping[str, Any]) -> str:
    """Return the degrees of a layout that are not 1, and the ZeRO stage: `dp4 tp2 zero1`; `1 rank`."""
    parts = [f"{name}{degree}" for name, degree in layout.items() if type(degree) is int and degree > 1]
    return " ".join(part for part in parts if not part.startswith("world_size")) or "1 rank"
