"""`orchestra why RUN`: what ended a run: first failing rank, host, traceback, from its events. And what ended
each attempt before, with what was decided then.

Of a run that could not say it: Slurm's word and the end of its job's log. Of a sweep: the causes, and which
members have them. It only reads.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from argparse import ArgumentParser, Namespace

from orchestra.cli.text import listing
from orchestra.cli.text.describe import (
    end_of,
    failure,
    invocation,
    last_lines_of,
    resume_lines,
    shown,
    spent_lines,
    spent_record,
)
from orchestra.cli.text.resolve import add_directory_option, resolve_target
from orchestra.errors import EXIT_DONE, EXIT_FAILED
from orchestra.recovery.history import last_attempt, newest_checkpoint
from orchestra.recovery.incidents import Verdict
from orchestra.report.attempts import attempt_lines, ended_attempts, node_lines
from orchestra.report.run_state import RunState, read_ending, read_state
from orchestra.report.scheduler import job_logs, with_scheduler
from orchestra.report.sweeps import MemberState, read_sweep_state, with_states
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir, SweepDir
from orchestra.run.record import RunPhase
from orchestra.sizes.units import first_few

# Members named for each cause.
_NAMED = 8


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra why` takes."""
    parser.add_argument(
        "run", metavar="RUN", help="name of a run or a sweep, unique start of one, path, or SWEEP/3"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_directory_option(parser)


def run(arguments: Namespace) -> int:
    """Print the cause and return 0."""
    target = resolve_target(arguments.run, arguments.dir)
    lines = _of_sweep(target, arguments) if isinstance(target, SweepDir) else _of_run(target, arguments)
    for line in lines:
        print(line)
    return EXIT_DONE


def _of_run(run: RunDir, arguments: Namespace) -> list[str]:
    events = read_events(run)
    attempt = last_attempt(events)
    now = time.time()
    _, verdict = read_ending(run, events, now)
    state = _told(run, read_state(run, now))
    attempts = ended_attempts(events)
    if verdict is not None and attempts and attempts[-1].code is not None:
        # Why the run was given up is more than what ended its last attempt.
        verdict = dataclasses.replace(verdict, code=attempts[-1].code)
    if arguments.json:
        found = None if verdict is None else dataclasses.asdict(verdict)
        saved = newest_checkpoint(events)
        told = {"name": state.name, "state": state.state, "attempt": attempt, "checkpoint_step": saved}
        slurm = {"cause": state.cause, "job": state.job, "job_state": state.job_state}
        spent = spent_record(run, events, state.state, now)
        history = {"attempts": [each.record() for each in attempts]}
        return [json.dumps({**told, **slurm, **spent, "verdict": found, **history}, indent=2)]
    before = [*attempt_lines(attempts), *node_lines(events), *spent_lines(run, events, state.state, now)]
    if verdict is None or attempt is None or state.state not in (RunPhase.failed, verdict.state):
        return [*_without_verdict(run, state), *before, *_how_to_go_on(run, state, None, events)]
    if verdict.state is RunPhase.failed:
        head = f"{state.name}: failed with exit code {verdict.code}, attempt {attempt}"
        lines = [head, failure(run, attempt, verdict)]
    else:
        step = "" if verdict.step is None else f" at step {verdict.step}"
        lines = [f"{state.name}: {verdict.state}{step}{': ' + verdict.message if verdict.message else ''}"]
    return [*lines, *before, *_how_to_go_on(run, state, verdict, events)]


def _told(run: RunDir, own: RunState) -> RunState:
    ((state,), problems) = with_scheduler([run], [own])
    for problem in problems:
        print(f"note: {problem}; what follows are the run's own records", file=sys.stderr)
    return state


def _without_verdict(run: RunDir, state: RunState) -> list[str]:
    """Return what is known of a run that could not say how it ended: Slurm's word, its job's last words."""
    told = f": {state.cause}" if state.cause else _EXPLAINED.get(state.state, "")
    lines = [f"{state.name}: {state.state}{told}"]
    if not _ended_without_a_verdict(state):
        return lines
    for log in job_logs(run, state.submitted):
        if words := last_lines_of(end_of(log)):
            return [*lines, *words, f"log: {shown(log)}"]
    return lines


def _how_to_go_on(run: RunDir, state: RunState, verdict: Verdict | None, events: list[Record]) -> list[str]:
    """Return the command that goes on with a run that ended too early."""
    if verdict is not None:
        return resume_lines(run, verdict, events)
    if _ended_without_a_verdict(state):
        return resume_lines(run, Verdict(EXIT_FAILED, state.state), events)
    return []


def _ended_without_a_verdict(state: RunState) -> bool:
    return state.state.ended_badly or state.state is RunPhase.cancelled


_EXPLAINED = {
    RunPhase.died: ": the process that led it is gone and left no verdict (killed, or the machine went down)",
    RunPhase.unknown: ": it was led from another host, and its files have been silent for long",
}


def _of_sweep(sweep: SweepDir, arguments: Namespace) -> list[str]:
    own = read_sweep_state(sweep, time.time())
    runs = [member.run for member in own.members]
    told, problems = with_scheduler(runs, [member.state for member in own.members])
    for problem in problems:
        print(f"note: {problem}; what follows are the runs' own records", file=sys.stderr)
    state = with_states(own, told)
    causes = _by_cause([member for member in state.members if member.state.state.ended_badly])
    if arguments.json:
        failed = [
            {"cause": cause, "members": [each.member.index for each in members]}
            for cause, members in causes.items()
        ]
        return [json.dumps({"name": sweep.name, "counts": state.counts, "failed": failed}, indent=2)]
    lines = [f"{sweep.name}: {listing.summary(state)}"]
    for cause, members in causes.items():
        names = first_few([f"{each.member.index:03d}" for each in members], _NAMED)
        lines += [f"{len(members)} × {cause}", f"  {names}: `{invocation('why', members[0].run)}`"]
    if not causes:
        return [*lines, "no member failed"]
    return [*lines, f"resume  `{invocation('resume', sweep)}` runs what is missing or failed"]


def _by_cause(members: list[MemberState]) -> dict[str, list[MemberState]]:
    """Return the members by what ended them, most frequent first; they differ in hosts, ranks and job ids."""
    groups: dict[str, list[MemberState]] = {}
    for member in members:
        groups.setdefault(_cause(member), []).append(member)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _cause(member: MemberState) -> str:
    """Return the cause in a line, without what is different for each member though the cause is the same."""
    state = member.state
    events = read_events(member.run)
    _, verdict = read_ending(member.run, events, time.time())
    if verdict is not None and verdict.state is RunPhase.failed:
        message = verdict.message.partition("\n")[0]
        return f"failed: {verdict.cause}{': ' + message if message else ''}"
    cause = state.cause or _EXPLAINED.get(state.state, "").removeprefix(": ")
    if state.job:
        cause = cause.replace(f"job {state.job}", "the job")
    return f"{state.state}: {cause}" if cause else state.state
