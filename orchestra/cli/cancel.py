"""`orchestra cancel RUN…`: ask runs to stop behind a step, with a checkpoint; `--now`: to end at once.

It writes the request and ends; what became of it `orchestra status` tells.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace

from orchestra.cli import figures
from orchestra.cli.describe import invocation
from orchestra.cli.resolve import add_directory_option, resolve
from orchestra.errors import EXIT_DONE
from orchestra.jsonl import Record
from orchestra.submit.cancel import Cancellation, ask, cancellation, seconds_ago

_EXPLAINED = """\
  orchestra cancel first             save, end with 75; `orchestra resume first` goes on from there
  orchestra cancel first --now       end at once; what was trained since the last checkpoint is lost
  orchestra cancel first second      several at a time

A run that does not stop within recovery.stop_timeout_s is ended at once.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra cancel` takes."""
    parser.usage = "orchestra cancel RUN… [--now] [--dry-run] [--json] [--dir DIR]"
    parser.add_argument("runs", nargs="+", metavar="RUN", help="name, unique start of one, or path")
    parser.add_argument("--now", action="store_true", help="end at once, without a checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="say what would be asked; ask nothing")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object per run")
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Ask, say what was done, and return 0: also where nothing runs that could be stopped."""
    # All names are resolved before the first is asked.
    chosen = [resolve(text, arguments.dir) for text in arguments.runs]
    told = []
    for each in dict.fromkeys(chosen):
        plan = cancellation(each, time.time(), at_once=arguments.now)
        if not arguments.dry_run:
            ask(plan, at_once=arguments.now)
        told.append(_record(plan, arguments))
        if not arguments.json:
            print(_sentence(plan, arguments))
    if arguments.json:
        print(json.dumps(told, indent=2))
    return EXIT_DONE


def _is_asked(plan: Cancellation, arguments: Namespace) -> bool:
    return plan.attempt is not None and plan.earlier is None and not arguments.dry_run


def _record(plan: Cancellation, arguments: Namespace) -> Record:
    identity = {"name": plan.run.name, "path": str(plan.run.path), "state": plan.state}
    return {**identity, "attempt": plan.attempt, "asked": _is_asked(plan, arguments), "now": arguments.now}


def _sentence(plan: Cancellation, arguments: Namespace) -> str:
    name, follow = plan.run.name, f"`{invocation('status', plan.run)}` tells when it has"
    if plan.attempt is None:
        return f"{name}: {plan.state}, nothing runs that could be stopped"
    if plan.earlier is not None:
        ago = figures.age(seconds_ago(plan.earlier))
        hint = "" if arguments.now else f"; to end it at once: {invocation('cancel', plan.run)} --now"
        return f"{name}: was asked to stop {ago} ago already ({plan.earlier}){hint}"
    verb = "would be asked" if arguments.dry_run else "asked"
    how = "end at once" if arguments.now else "save and stop"
    doubt = ", of which nothing was heard for long" if plan.state == "unknown" else ""
    return f"{name}: attempt {plan.attempt}{doubt} {verb} to {how}; {follow}"
