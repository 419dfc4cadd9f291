"""`orchestra status [RUN…]`: runs and how far they are, by their own records, then by Slurm. Read-only."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path

from orchestra.cli import figures
from orchestra.cli.describe import resume_line
from orchestra.cli.resolve import add_directory_option, all_runs, resolve
from orchestra.errors import EXIT_DONE
from orchestra.report.scheduler import with_scheduler
from orchestra.report.state import RunState, read_state
from orchestra.rundir import RunDir

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
    states, problems = with_scheduler(chosen, [read_state(each, now) for each in chosen])
    for problem in problems:
        print(f"note: {problem}; what follows are the runs' own records", file=sys.stderr)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(state) for state in states], indent=2))
    elif states:
        print(figures.table(_HEADER, [_row(state) for state in states]))
        for line in _how_to_go_on(states if arguments.runs else []):
            print(line)
    else:
        print(f"no runs in {arguments.dir}; `orchestra run` makes one")
    return EXIT_DONE


def _how_to_go_on(states: Iterable[RunState]) -> list[str]:
    """Return how to continue the runs that were stopped on request."""
    stopped = [state for state in states if state.state == "stopped"]
    return [resume_line(RunDir(Path(state.path)), state.checkpoint_step) for state in stopped]


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
