"""`orchestra why RUN`: what ended a run, from its events: first failing rank, host, traceback. Read-only."""

from __future__ import annotations

import dataclasses
import json
import time
from argparse import ArgumentParser, Namespace

from orchestra.cli.describe import failure, resume_lines
from orchestra.cli.resolve import add_directory_option, resolve
from orchestra.errors import EXIT_DONE, EXIT_FAILED
from orchestra.events import read_events
from orchestra.jsonl import Record
from orchestra.report.checkpoints import newest_checkpoint
from orchestra.report.state import read_ending
from orchestra.report.verdict import Verdict, last_attempt
from orchestra.rundir import RunDir


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra why` takes."""
    parser.add_argument("run", metavar="RUN", help="name, unique start of one, or path")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_directory_option(parser)


def run(arguments: Namespace) -> int:
    """Print the cause and return 0."""
    chosen = resolve(arguments.run, arguments.dir)
    events = read_events(chosen)
    attempt = last_attempt(events)
    state, verdict = read_ending(chosen, events, time.time())
    if arguments.json:
        found = None if verdict is None else dataclasses.asdict(verdict)
        saved = newest_checkpoint(events)
        told = {"name": chosen.name, "state": state, "attempt": attempt, "checkpoint_step": saved}
        print(json.dumps({**told, "verdict": found}, indent=2))
        return EXIT_DONE
    if verdict is None or attempt is None:
        print(f"{chosen.name}: {state}{_EXPLAINED.get(state, '')}")
    elif verdict.state == "failed":
        print(f"{chosen.name}: failed with exit code {verdict.code}, attempt {attempt}")
        print(failure(chosen, attempt, verdict))
    else:
        step = "" if verdict.step is None else f" at step {verdict.step}"
        print(f"{chosen.name}: {verdict.state}{step}{': ' + verdict.message if verdict.message else ''}")
    for line in _how_to_go_on(chosen, state, verdict, events):
        print(line)
    return EXIT_DONE


def _how_to_go_on(run: RunDir, state: str, verdict: Verdict | None, events: list[Record]) -> list[str]:
    """Return the command that goes on with a run that ended too early."""
    if verdict is None and state != "died":
        return []
    return resume_lines(run, verdict or Verdict(EXIT_FAILED, state), events)


_EXPLAINED = {
    "died": ": the process that led it is gone and left no verdict (killed, or the machine went down)",
    "unknown": ": it was led from another host, and its files have been silent for long",
}
