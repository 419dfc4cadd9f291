"""`orchestra status [RUN…]`: runs and sweeps and how far they are, by their own records, then by Slurm.

It only reads, and asks Slurm once for all.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestra.cli import listing, particulars
from orchestra.cli.describe import resume_line
from orchestra.cli.resolve import Target, add_directory_option, all_targets, resolve_target
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.report.scheduler import with_scheduler
from orchestra.report.state import RunState, read_state
from orchestra.report.sweeps import SweepState, read_sweep_state, with_states
from orchestra.rundir import RunDir

_EXPLAINED = """\
  orchestra status                runs and sweeps, newest first
  orchestra status first          one run: why it waits or ended, where it runs, what to type next
  orchestra status a-sweep        the members of a sweep
  orchestra status a-sweep/3      one member

On a terminal long tables show what is alive and what is newest, and only columns that fit; --all shows all.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra status` takes."""
    parser.usage = "orchestra status [RUN…] [--all] [--json] [--dir DIR]"
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="name of a run or a sweep, unique start of one, path, or SWEEP/3 (default: all)",
    )
    parser.add_argument("--all", action="store_true", help="show every row and every column")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object per run or sweep")
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Print the states and return 0."""
    if arguments.runs:
        chosen = [resolve_target(text, arguments.dir) for text in arguments.runs]
    else:
        chosen = all_targets(arguments.dir)
    states, problems = read_states(list(dict.fromkeys(chosen)), time.time())
    for problem in problems:
        print(f"note: {problem}; what follows are the runs' own records", file=sys.stderr)
    if arguments.json:
        print(json.dumps([_record(state) for state in states], indent=2))
    else:
        for line in _page(states, arguments):
            print(line)
    return EXIT_DONE


def read_states(targets: Sequence[Target], now: float) -> tuple[list[RunState | SweepState], list[str]]:
    """Return the states of runs and sweeps, and why Slurm could not be asked if it could not.

    Slurm is asked once for all of them.
    """
    own = [_own_state(target, now) for target in targets]
    runs: list[RunDir] = []
    states: list[RunState] = []
    for target, state in zip(targets, own, strict=True):
        members = [(each.run, each.state) for each in state.members] if isinstance(state, SweepState) else []
        single = [(target, state)] if isinstance(target, RunDir) and isinstance(state, RunState) else []
        for run_, state_ in (*members, *single):
            runs.append(run_)
            states.append(state_)
    told, problems = with_scheduler(runs, states)
    rest = iter(told)
    return [_with_words(state, rest) for state in own], problems


def _own_state(target: Target, now: float) -> RunState | SweepState:
    if isinstance(target, RunDir):
        return read_state(target, now)
    try:
        return read_sweep_state(target, now)
    except ConfigError as error:
        return SweepState(target, (), problem=str(error))


def _with_words(state: RunState | SweepState, told: Iterable[RunState]) -> RunState | SweepState:
    """Return a state with Slurm's words, which come in the order of the runs."""
    words = iter(told)
    if isinstance(state, SweepState):
        return with_states(state, [next(words) for _ in state.members])
    return next(words)


def _record(state: RunState | SweepState) -> dict[str, object]:
    return state.to_json() if isinstance(state, SweepState) else {"kind": "run", **state.to_json()}


def _page(states: Sequence[RunState | SweepState], arguments: Namespace) -> list[str]:
    is_short = sys.stdout.isatty() and not arguments.all
    width = shutil.get_terminal_size().columns if is_short else None
    if not states:
        return [f"no runs in {arguments.dir}; `orchestra run` makes one"]
    if not arguments.runs:
        return listing.of_all(states, width)
    lines: list[str] = []
    runs = [state for state in states if isinstance(state, RunState)]
    if runs:
        lines += listing.of_all(runs, width, limit=None)
    if len(runs) == 1:
        lines += particulars.of_run(runs[0])
    else:
        stopped = [state for state in runs if state.state == "stopped"]
        lines += [resume_line(RunDir(Path(state.path)), state.checkpoint_step) for state in stopped]
    for state in states:
        if isinstance(state, SweepState):
            lines += ([""] if lines else []) + listing.of_sweep(state, width)
    return lines
