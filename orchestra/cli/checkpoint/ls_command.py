"""`orchestra checkpoint ls RUN`: the checkpoints that a run has, from their manifests. Read-only."""

from __future__ import annotations

import json
import math
import textwrap
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from checkpointing.catalog import committed_steps
from orchestra.cli.checkpoint.checkpoint_lookup import (
    Look,
    Place,
    add_run_arguments,
    explained,
    first_look,
    open_place,
)
from orchestra.cli.text import figures
from orchestra.errors import EXIT_DONE
from orchestra.report.run_state import was_verified
from orchestra.run.events import is_number, read_events
from orchestra.run.files import Record
from orchestra.sizes.save_interval import AUTO

_HEADER = ("STEP", "SIZE", "AGE", "LAYOUT", "LOSS", "CHECKED")
_WIDTH = 80
_EXPLAINED = """\
CHECKED says `sizes` where the manifest is whole and every file has its size, else `DAMAGED`. That is a quick
look: `orchestra checkpoint verify RUN` reads every byte, and `verified` says that it has once, since the
checkpoint was written, and found all as it should be.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra checkpoint ls` takes."""
    add_run_arguments(parser, step_help=None)
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object per checkpoint")
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Print the checkpoints and return 0, damaged ones or not."""
    place = open_place(arguments.run, arguments.dir)
    with explained():
        looks = [first_look(place.storage, step) for step in committed_steps(place.storage)]
    events = read_events(place.run)
    checks = [_checked(look, events) for look in looks]
    now = time.time()
    if arguments.json:
        print(json.dumps([_record(*each, now) for each in zip(looks, checks, strict=True)], indent=2))
    elif looks:
        _print_table(place, looks, checks, now)
    else:
        every = place.config.checkpoint.every_steps
        why = (
            "it saves none (checkpoint.every_steps=null)"
            if every is None
            else "one is due as often as the ranks decide (checkpoint.every_steps=auto)"
            if every == AUTO
            else f"one is due every {every} steps"
        )
        print(f"{place.run.name} has no checkpoint in {place.storage.place}; {why}")
    return EXIT_DONE


def _checked(look: Look, events: list[Record]) -> str:
    if look.damage is not None or look.manifest is None:
        return "DAMAGED"
    return "verified" if was_verified(events, look.step, look.manifest.created) else "sizes"


def _print_table(place: Place, looks: list[Look], checks: list[str], now: float) -> None:
    print(figures.table(_HEADER, [_row(*each, now) for each in zip(looks, checks, strict=True)]))
    print(f"in {place.storage.place}")
    for look in looks:
        if look.damage is not None:
            print(
                textwrap.fill(f"step {look.step} is damaged: {look.damage}", _WIDTH, subsequent_indent="  ")
            )
    print(
        textwrap.fill(
            f"manifests and sizes were checked now; `orchestra checkpoint verify {place.run.name}` reads all",
            _WIDTH,
        )
    )


def _row(look: Look, checked: str, now: float) -> tuple[str, ...]:
    manifest = look.manifest
    if manifest is None:
        return (str(look.step), "-", "-", "-", "-", checked)
    return (
        str(look.step),
        figures.quantity(float(manifest.num_bytes)) + "B",
        figures.age(now - manifest.created),
        layout_text(manifest.layout),
        figures.loss(score(manifest.state)),
        checked,
    )


def layout_text(layout: Mapping[str, Any]) -> str:
    """Return the degrees of a layout that are not 1, and the ZeRO stage: `dp4 tp2 zero1`; `1 rank`."""
    parts = [f"{name}{degree}" for name, degree in layout.items() if type(degree) is int and degree > 1]
    return " ".join(part for part in parts if not part.startswith("world_size")) or "1 rank"


def score(state: Mapping[str, Any]) -> float | None:
    """Return the loss that a checkpoint was saved with, None where it says none."""
    value = state.get("score")
    return float(value) if is_number(value) and math.isfinite(value) else None


def _record(look: Look, checked: str, now: float) -> dict[str, Any]:
    manifest = look.manifest
    known = (
        {}
        if manifest is None
        else {
            "num_bytes": manifest.num_bytes,
            "num_files": len(manifest.files),
            "num_tensors": len(manifest.tensors),
            "created": manifest.created,
            "age_s": now - manifest.created,
            "layout": dict(manifest.layout),
            "generation": manifest.generation,
            "score": score(manifest.state),
            "state_digest": manifest.state_digest,
        }
    )
    return {"step": look.step, "checked": checked.lower(), "damage": look.damage, **known}
