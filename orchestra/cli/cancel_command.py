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
from orchestra.cli.text.describe import invocation
from orchestra.cli.text.resolve import Target, add_directory_option, resolve_target
from orchestra.errors import EXIT_DONE, EXIT_FAILED
from orchestra.report.sweeps import runs_of
from orchestra.run.files import Record
from orchestra.run.paths import RunDir, SweepDir, read_sweep
from orchestra.run.record import RunPhase
from orchestra.submit.cancel_jobs import Cancellation, Way, cancellations, carry_out, seconds_ago

_EXPLAINED = """\
  orchestra cancel first             save, end with 75; `orchestra resume first` goes on from there
  orchestra cancel first --now       end at once; what was trained since the last checkpoint is lost
  orchestra cancel first second      several at a time
  orchestra cancel a-sweep           all members of a sweep; a-sweep/3: one of them

A run that waits in Slurm's queue is taken out of it. One that does not stop within recovery.stop_timeout_s is
ended at once.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra cancel` takes."""
    parser.usage = "orchestra cancel RUN… [--now] [--dry-run] [--json] [--dir DIR]"
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="name of a run or a sweep, unique start of one, path, or SWEEP/3",
    )
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
    for problem in problems:
        print(f"note: {problem}; what follows rests on the runs' own records", file=sys.stderr)
    done = plans if arguments.dry_run else carry_out(plans, at_once=arguments.now)
    if arguments.json:
        print(json.dumps([_record(plan, arguments) for plan in done], indent=2))
    else:
        by_run = {plan.run: plan for plan in done}
        for target, runs in zip(targets, runs_of_target, strict=True):
            for line in _told(target, [by_run[run] for run in runs], arguments):
                print(line)
    return EXIT_FAILED if any(plan.is_unreached for plan in done) and not arguments.dry_run else EXIT_DONE


def _runs(target: Target) -> list[RunDir]:
    """Return the runs that are meant; a sweep's adopted members belong to whoever submitted them."""
    if isinstance(target, RunDir):
        return [target]
    return [run for member, run in runs_of(target, read_sweep(target)) if member.adopted is None]


def _told(target: Target, plans: Sequence[Cancellation], arguments: Namespace) -> list[str]:
    if isinstance(target, RunDir):
        return [_sentence(plan, arguments) for plan in plans]
    counts = Counter(_in_short(plan, arguments) for plan in plans)
    told = figures.counts(counts) if plans else "no member of its own"
    lines = [f"{target.name}: {told}; `{invocation('status', target)}` tells more"]
    return lines + _left_alone(target)


def _in_short(plan: Cancellation, arguments: Namespace) -> str:
    if plan.attempt is None:
        return plan.state
    if plan.is_unreached:
        return "asked, though Slurm could not be reached: their jobs may still wait in the queue"
    would = "would be " if arguments.dry_run else ""
    if plan.way is Way.queue:
        return f"{would}taken out of the queue"
    if plan.way is Way.kill:
        return f"{would}ended by Slurm"
    if plan.earlier is not None:
        return "asked to stop already"
    return f"{would}asked to {_how(arguments)}"


def _left_alone(sweep: SweepDir) -> list[str]:
    adopted = sum(member.adopted is not None for member in read_sweep(sweep).members)
    return [f"{adopted} adopted members belong to other sweeps and were left alone"] if adopted else []


def _how(arguments: Namespace) -> str:
    return "end at once" if arguments.now else "save and stop"


def _is_asked(plan: Cancellation, arguments: Namespace) -> bool:
    return plan.way is Way.request and plan.earlier is None and not arguments.dry_run


def _record(plan: Cancellation, arguments: Namespace) -> Record:
    identity = {"name": plan.name, "path": str(plan.run.path), "state": plan.state, "job": plan.job}
    is_cancelled = plan.way in (Way.queue, Way.kill) and not arguments.dry_run
    asked = {"attempt": plan.attempt, "asked": _is_asked(plan, arguments), "now": arguments.now}
    return {**identity, **asked, "job_cancelled": is_cancelled, "reached": not plan.is_unreached}


def _sentence(plan: Cancellation, arguments: Namespace) -> str:
    name, follow = plan.name, f"`{invocation('status', plan.run)}` tells when it has"
    would = "would be " if arguments.dry_run else ""
    if plan.attempt is None:
        return f"{name}: {plan.state}, nothing runs that could be stopped"
    if plan.is_unreached:
        return (
            f"{name}: {would}asked to {_how(arguments)} as soon as it begins, but Slurm could not be reached "
            f"and job {plan.job or '?'} may still wait in the queue; type this again when Slurm answers"
        )
    if plan.way is Way.queue:
        return f"{name}: job {plan.job} {would or 'was '}taken out of the queue; {_goes_on(plan)}"
    if plan.way is Way.kill:
        return f"{name}: job {plan.job} {would or 'was '}ended by Slurm; {_goes_on(plan)}"
    if plan.earlier is not None:
        ago = figures.age(seconds_ago(plan.earlier))
        hint = "" if arguments.now else f"; to end it at once: {invocation('cancel', plan.run)} --now"
        return f"{name}: was asked to stop {ago} ago already ({plan.earlier}){hint}"
    if plan.state is RunPhase.restarting:
        return f"{name}: {would}asked not to begin again after attempt {plan.attempt}; {follow}"
    doubt = ", of which nothing was heard for long" if plan.state is RunPhase.unknown else ""
    return f"{name}: attempt {plan.attempt}{doubt} {would}asked to {_how(arguments)}; {follow}"


def _goes_on(plan: Cancellation) -> str:
    return f"`{invocation('resume', plan.run)}` submits it again"
