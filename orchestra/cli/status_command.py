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

from orchestra.cli.text import figures, listing
from orchestra.cli.text.describe import invocation, resume_line, spent_lines, spent_record
from orchestra.cli.text.resolve import Target, add_directory_option, all_targets, resolve_target
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_DONE, ConfigError
from orchestra.recovery.history import newest_attempt
from orchestra.recovery.incidents import Verdict, node_verdict
from orchestra.report.run_state import RunState, read_state
from orchestra.report.scheduler import with_scheduler
from orchestra.report.sweeps import SweepState, read_sweep_state, with_states
from orchestra.run.events import read_events
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.run.rollback import RollBack, roll_backs

# What `orchestra status RUN` says of one run beyond its row: why, where, since when, what to type. It reads
# the run's events.


# By the decision that another attempt follows: on which nodes.
_NODES = {"replace": ", on other nodes where these failed", "shrink": ", on fewer nodes"}


def of_run(state: RunState) -> list[str]:
    """Return lines of a word and a text, the command to type next last."""
    run = RunDir(Path(state.path))
    events = read_events(run) if state.state is not RunPhase.unreadable else []
    attempt = newest_attempt(events)
    told = () if attempt is None else attempt.events
    hosts = sorted({str(event["host"]) for event in told if "host" in event and "node" in event})
    facts = {
        "reason": _reason(state, None if attempt is None else node_verdict(attempt)),
        "restart": _restart(state, time.time()),
        "job": _job(state),
        # Where Slurm names the nodes they stand with the job.
        "nodes": ", ".join(hosts) if state.state is RunPhase.running and not state.job_nodes else "",
        "saved": _saved(state),
        "starts": _starts(state),
        "back": _back(roll_backs(events)),
    }
    spent = spent_lines(run, events, state.state, time.time()) if events else []
    return [*(f"{word:<7} {text}" for word, text in facts.items() if text), *spent, *_next(state, run)]


def _reason(state: RunState, verdict: Verdict | None) -> str:
    if state.cause is None or state.state is RunPhase.finished:
        return ""
    message = verdict.message if verdict is not None and verdict.cause == state.cause else ""
    first_line = message.partition("\n")[0]
    return f"{state.cause}: {first_line}" if first_line else state.cause


def _restart(state: RunState, now: float) -> str:
    if state.state is not RunPhase.restarting or state.restart is None:
        return ""
    left = state.restart.due - now
    when = "now" if left < 1 else f"in {figures.duration(left)}"
    return f"{when}{_NODES.get(state.restart.decision, '')}"


def _job(state: RunState) -> str:
    if state.job is None:
        return ""
    if state.job_state in (None, "UNKNOWN"):
        return f"{state.job}, of which Slurm tells nothing here"
    where = f" on {state.job_nodes}" if state.job_nodes else ""
    if not state.state.is_alive or state.job_start is None:
        return f"{state.job}, {state.job_state}{where}"
    start = state.job_start.replace("T", " ")
    when = f", expected to start {start}" if state.state.is_before_start else f" since {start}"
    return f"{state.job}, {state.job_state}{where}{when}"


def _saved(state: RunState) -> str:
    if state.checkpoint_step is None:
        return "nothing yet" if state.attempts else ""
    return f"step {state.checkpoint_step}"


def _starts(state: RunState) -> str:
    if state.attempts < 2:
        return ""
    restarts = state.attempts - 1
    return f"{state.attempts} attempts: {restarts} restart{'' if restarts == 1 else 's'}"


def _back(found: list[RollBack]) -> str:
    if not found:
        return ""
    times = "1 roll-back" if len(found) == 1 else f"{len(found)} roll-backs"
    steps = [
        f"{roll_back.data_steps[0]} to {roll_back.data_steps[1]}"
        for roll_back in found
        if roll_back.data_steps is not None
    ]
    return times + (f": the data of steps {', '.join(steps)} is left out" if steps else "")


def _next(state: RunState, run: RunDir) -> list[str]:
    if state.state.is_alive:
        eta = f"; {figures.duration(state.eta_s)} left" if state.eta_s is not None else ""
        return [f"next    `{invocation('logs', run)} -f`{eta}"]
    asks_why = state.state.ended_badly or state.state is RunPhase.unknown
    lines = [f"next    `{invocation('why', run)}`"] if asks_why else []
    if (
        state.state in (RunPhase.finished, RunPhase.unknown, RunPhase.unreadable)
        or state.code == EXIT_DO_NOT_RESTART
    ):
        return lines
    return [*lines, resume_line(run, state.checkpoint_step)]


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
        print(json.dumps([_record(state, with_accounts=bool(arguments.runs)) for state in states], indent=2))
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


def _record(state: RunState | SweepState, *, with_accounts: bool) -> dict[str, object]:
    if isinstance(state, SweepState):
        return state.to_json()
    spent: dict[str, object] = {}
    if with_accounts and state.state is not RunPhase.unreadable:
        run = RunDir(Path(state.path))
        spent = spent_record(run, read_events(run), state.state, time.time())
    return {"kind": "run", **state.to_json(), **spent}


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
        lines += of_run(runs[0])
    else:
        stopped = [state for state in runs if state.state is RunPhase.stopped]
        lines += [resume_line(RunDir(Path(state.path)), state.checkpoint_step) for state in stopped]
    for state in states:
        if isinstance(state, SweepState):
            lines += ([""] if lines else []) + listing.of_sweep(state, width)
    return lines
