"""`orchestra status [RUN…]`: runs and how far they are, from their own records. Read-only."""

from __future__ import annotations

import dataclasses
import json
import time
from argparse import ArgumentParser, Namespace

from orchestra.cli import figures
from orchestra.cli.resolve import add_directory_option, all_runs, resolve
from orchestra.errors import EXIT_DONE
from orchestra.report.state import RunState, read_state

_HEADER = ("RUN", "STATE", "STEP", "LOSS", "TOK/S", "MFU", "SAVED", "ATTEMPTS", "ETA", "AGE")


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra status` takes."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="name, unique start of one, or path (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object per run")
    add_directory_option(parser)


def run(arguments: Namespace) -> int:
    """Print the states and return 0."""
    if arguments.runs:
        chosen = [resolve(text, arguments.dir) for text in arguments.runs]
    else:
        chosen = all_runs(arguments.dir)
    now = time.time()
    states = [read_state(each, now) for each in chosen]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(state) for state in states], indent=2))
    elif states:
        print(figures.table(_HEADER, [_row(state) for state in states]))
    else:
        print(f"no runs in {arguments.dir}; `orchestra run` makes one")
    return EXIT_DONE


def _row(state: RunState) -> tuple[str, ...]:
    return (
        state.name,
        state.state,
        f"{state.step or 0}/{'?' if state.steps is None else state.steps}",
        figures.loss(state.loss),
        figures.quantity(state.tokens_per_s),
        figures.percent(state.mfu),
        "-" if state.checkpoint_step is None else str(state.checkpoint_step),
        str(state.attempts),
        figures.duration(state.eta_s),
        figures.age(state.age_s),
    )
