"""`orchestra cancel RUN…`: ask runs to stop after a step, with a checkpoint; `--now`: to end at once. Jobs
that wait are taken out of Slurm's queue.

It writes the request and ends; what became of it `orchestra status` tells.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence

from orchestra.cli.text import figures
from orchestra.cli.text.describe import invocation, note_unanswered
from orchestra.cli.text.resolve import (
    TARGET_HELP,
    Target,
    add_directory_option,
    all_targets,
    elsewhere,
    resolve_target,
)
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from orchestra.report.run_state import name_of, runs_of
from orchestra.run.control.stop_requests import user_name
from orchestra.run.files import Record
from orchestra.run.paths import RunDir, is_sweep, read_sweep
from orchestra.run.record import RunPhase
from orchestra.sizes.units import first_few
from orchestra.submit.cancel_jobs import Cancellation, Way, cancellations, carry_out
from orchestra.submit.fair.predecessors import followers_of

_EXPLAINED = """\
  orchestra cancel first         save, end with 75; `orchestra resume` goes on
  orchestra cancel first --now   end at once: what was trained since the last
                                 checkpoint is lost
  orchestra cancel first second  several at a time
  orchestra cancel a-sweep       all members of a sweep; a-sweep/3: one of them

A run that waits in Slurm's queue is taken out of it. One that does not stop within recovery.stop_timeout_s is
ended at once.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "orchestra cancel RUN… [--now] [--dry-run] [--json] [--dir DIR]"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=TARGET_HELP)
    parser.add_argument("--now", action="store_true", help="end at once, without a checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; do nothing")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object per run")
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Stop, say what was done, and return 0: also where nothing runs that could be stopped. 1 where a job may
    wait in the queue that could not be reached."""
    # All names are resolved before the first is asked.
    targets = list(dict.fromkeys(resolve_target(text, arguments.dir) for text in arguments.runs))
    runs_of_target = [_runs(target) for target in targets]
    flat = list(dict.fromkeys(run for runs in runs_of_target for run in runs))
    plans, problems = cancellations(flat, time.time(), at_once=arguments.now)
    note_unanswered(problems)
    done = plans if arguments.dry_run else carry_out(plans, at_once=arguments.now)
    if arguments.json:
        print(json.dumps([_record(plan, arguments) for plan in done], indent=2))
    else:
        by_run = {plan.run: plan for plan in done}
        for target, runs in zip(targets, runs_of_target, strict=True):
            for line in _told(target, [by_run[run] for run in runs], arguments):
                print(line)
            is_stopped = any(by_run[run].attempt is not None for run in runs)
            if waiting := _followers(target) if is_stopped else []:
                print(_about_followers(target, waiting))
    for plan in done:
        if plan.problem is not None:
            print(f"error: {plan.problem}", file=sys.stderr)
    went_wrong = any(plan.is_unreached or plan.problem is not None for plan in done)
    return EXIT_FAILED if went_wrong and not arguments.dry_run else EXIT_DONE


def _runs(target: Target) -> list[RunDir]:
    """Return the runs that are meant; a sweep's adopted members belong to whoever submitted them."""
    if isinstance(target, RunDir):
        return [target]
    return [run for member, run in runs_of(target, read_sweep(target)) if member.adopted is None]


def _followers(target: Target) -> list[str]:
    """Return the runs that are to begin after one, or after the sweep."""
    parent = target.path.parent.parent if is_sweep(target.path.parent) else target.path.parent
    try:
        candidates = [*all_targets(parent), *elsewhere(parent)]
    except ConfigError:
        # The run is stopped already; its path was given, and its folder cannot be listed.
        return []
    return followers_of(target, candidates, time.time())


def _about_followers(target: Target, waiting: Sequence[str]) -> str:
    them, begins = ("it", "begins") if len(waiting) == 1 else ("them", "begin")
    name = name_of(target) if isinstance(target, RunDir) else target.name
    return (
        f"{first_few(waiting)} {begins} after {name} and, unless that goes on or is done by then, "
        f"will end without training; `orchestra cancel {' '.join(waiting)}` takes {them} out of the queue"
    )


def _told(target: Target, plans: Sequence[Cancellation], arguments: Namespace) -> list[str]:
    if isinstance(target, RunDir):
        return [f"{plan.name}: {_words(plan, arguments)[1]}" for plan in plans]
    counts = Counter(_words(plan, arguments)[0] for plan in plans)
    what = figures.counts(counts) if plans else "no member of its own"
    lines = [f"{target.name}: {what}; `{invocation('status', target)}` tells more"]
    if adopted := sum(member.adopted is not None for member in read_sweep(target).members):
        lines.append(f"{adopted} adopted members belong to other sweeps and were left alone")
    return lines


def _record(plan: Cancellation, arguments: Namespace) -> Record:
    is_done = not arguments.dry_run
    return {
        "name": plan.name,
        "path": str(plan.run.path),
        "state": plan.state,
        "job": plan.job,
        "attempt": plan.attempt,
        "asked": plan.way is Way.request and plan.earlier is None and plan.problem is None and is_done,
        "now": arguments.now,
        "job_cancelled": plan.way in (Way.place, Way.queue, Way.kill) and is_done,
        "reached": not plan.is_unreached,
        "problem": plan.problem,
    }


def _words(plan: Cancellation, arguments: Namespace) -> tuple[str, str]:
    """Return what is done about a run: in short, for the counts of a sweep, and as a sentence."""
    would = "would be " if arguments.dry_run else ""
    asked = f"{would}asked to {'end at once' if arguments.now else 'save and stop'}"
    follow = f"`{invocation('status', plan.run)}` tells when it has"
    if plan.attempt is None:
        return plan.state, f"{plan.state}, nothing runs that could be stopped"
    if plan.problem is not None:
        return "not asked, as told below", "not asked, as told below"
    if plan.is_unreached and plan.refusal is not None:
        mine = plan.user == user_name()
        who = "" if mine or plan.user is None else f"; it is {plan.user}'s, who can type this too"
        sentence = (
            f"{asked} as soon as it begins; Slurm leaves job {plan.job or '?'} in the queue: "
            f"{plan.refusal}{who}"
        )
        return "asked, but Slurm leaves their jobs in the queue", sentence
    if plan.is_unreached:
        sentence = (
            f"{asked} as soon as it begins, but Slurm could not be reached and job {plan.job or '?'} may "
            "still wait in the queue; type this again when Slurm answers"
        )
        return "asked, though Slurm could not be reached: their jobs may still wait in the queue", sentence
    if plan.way is Way.place:
        goes_on = f"`{invocation('resume', plan.run)}` submits it again"
        return (
            f"{would}taken off the list",
            f"{would or 'was '}taken off the list of job {plan.job}; {goes_on}",
        )
    if plan.way in (Way.queue, Way.kill):
        what = "taken out of the queue" if plan.way is Way.queue else "ended by Slurm"
        goes_on = f"`{invocation('resume', plan.run)}` submits it again"
        return f"{would}{what}", f"job {plan.job} {would or 'was '}{what}; {goes_on}"
    if plan.earlier is not None:
        ago = figures.age(max(0.0, time.time() - plan.earlier.time))
        hint = "" if arguments.now else f"; to end it at once: {invocation('cancel', plan.run)} --now"
        return "asked to stop already", f"was asked to stop {ago} ago already ({plan.earlier}){hint}"
    if plan.state is RunPhase.restarting:
        return asked, f"{would}asked not to begin again after attempt {plan.attempt}; {follow}"
    doubt = ", which has not been heard of for a long time," if plan.state is RunPhase.unknown else ""
    return asked, f"attempt {plan.attempt}{doubt} {asked}; {follow}"
