"""`orchestra why RUN`: what ended a run: first failing rank, host, traceback, from its events. And what ended
each attempt before, with what was decided then.

Of a run that could not say it: Slurm's word and the end of its job's log. Of a sweep: the causes, and which
members have them. It only reads.
"""

from __future__ import annotations

import dataclasses
import json
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from orchestra.cli.text import figures
from orchestra.cli.text.describe import (
    end_of,
    failed_saves_words,
    failure,
    invocation,
    last_lines_of,
    note_unanswered,
    resume_lines,
    shown,
    skipped_words,
    spent_lines,
    spent_record,
    sweep_summary,
)
from orchestra.cli.text.resolve import TARGET_HELP, add_directory_option, resolve_target
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from orchestra.recovery.history import last_attempt
from orchestra.recovery.incidents import Incident, Kind, Verdict
from orchestra.recovery.time_slices import in_words, time_slices
from orchestra.report.attempts import GAVE_UP, EndedAttempt, ended_attempts
from orchestra.report.run_state import MemberState, RunState, SweepState, read_ending, start_failure
from orchestra.report.scheduler import job_logs, read_states
from orchestra.report.stalled import stalled_words
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import FollowedRows
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.run.run_lineage import newest_checkpoint
from orchestra.sizes.units import first_few

# Members named for each cause.
_NAMED = 8
# Of a run with more attempts the first one and the last ones are shown.
_MOST_ATTEMPTS = 12
# Of a job with a thousand nodes that share one fault.
_MOST_NODES = 8
_INDENT = " " * 5
_WORDS_OF_DECISIONS = {
    "restart": "restarted in place",
    "replace": "restarted with a spare",
    "shrink": "restarted on fewer nodes",
    "grow": "went on with more nodes",
    "requeue": "requeued",
    GAVE_UP: "gave up",
    "end": "ended",
}
_EXPLAINED = {
    RunPhase.died: "the process that led it is gone and left no verdict (killed, or the machine went down)",
    RunPhase.unknown: "it was led from another host, and its files have not changed for a long time",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=TARGET_HELP)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_directory_option(parser)


def run(arguments: Namespace) -> int:
    """Print the cause and return 0."""
    (state,), problems = read_states([resolve_target(arguments.run, arguments.dir)], time.time())
    note_unanswered(problems)
    lines = _of_sweep(state, arguments) if isinstance(state, SweepState) else _of_run(state, arguments)
    print("\n".join(lines))
    return EXIT_DONE


def _of_run(state: RunState, arguments: Namespace) -> list[str]:
    run, now = RunDir(Path(state.path)), time.time()
    events = read_events(run)
    attempt = last_attempt(events)
    _, verdict = read_ending(run, events, now)
    attempts = ended_attempts(events)
    began = start_failure(run, events) is None
    if verdict is not None and began and attempts and attempts[-1].code is not None:
        # Why the run was given up is more than what ended its last attempt.
        verdict = dataclasses.replace(verdict, code=attempts[-1].code)
    if arguments.json:
        answer = {
            "name": state.name,
            "state": state.state,
            "attempt": attempt,
            "checkpoint_step": newest_checkpoint(events),
            "checkpoint_fallback": state.checkpoint_fallback,
            "failed_saves": None if state.failed_saves is None else dataclasses.asdict(state.failed_saves),
            "nonfinite_steps": state.nonfinite_steps,
            "cause": state.cause,
            "job": state.job,
            "job_state": state.job_state,
            **spent_record(run, events, FollowedRows(run.metrics).read(), state.state, now),
            "verdict": None if verdict is None else dataclasses.asdict(verdict),
            "stalled_collectives": (stalled_words(run, events) or (None, []))[1],
            "attempts": [ended.record() for ended in attempts],
        }
        return [json.dumps(answer, indent=2)]
    unsaved = [] if state.failed_saves is None else [failed_saves_words(state.failed_saves)]
    if state.checkpoint_fallback is not None:
        unsaved.append(f"the checkpoint of step {state.checkpoint_step} is in {state.checkpoint_fallback}")
    slices = in_words(time_slices(events))
    skipped = skipped_words(state.nonfinite_steps)
    before = [
        *([f"skipped {skipped}"] if skipped else []),
        *unsaved,
        *attempt_lines(attempts),
        *([f"slices  {slices}"] if slices else []),
        *_stalled_lines(run, events),
        *node_lines(events),
        *spent_lines(run, events, FollowedRows(run.metrics).read(), state.state, now),
    ]
    if not began:
        return [*_without_verdict(run, state), *before, *_how_to_go_on(run, state, verdict, events)]
    if verdict is None or attempt is None or state.state is not verdict.state:
        return [*_without_verdict(run, state), *before, *_how_to_go_on(run, state, None, events)]
    if verdict.state is RunPhase.failed:
        head = f"{state.name}: failed with exit code {verdict.code}, attempt {attempt}"
        lines = [head, failure(run, attempt, verdict)]
    else:
        step = "" if verdict.step is None else f" at step {verdict.step}"
        lines = [f"{state.name}: {verdict.state}{step}{': ' + verdict.message if verdict.message else ''}"]
    return [*lines, *before, *_how_to_go_on(run, state, verdict, events)]


def _stalled_lines(run: RunDir, events: Sequence[Record]) -> list[str]:
    """Return which collectives stalled in the newest attempt that hung in one."""
    found = stalled_words(run, events)
    if found is None:
        return []
    attempt, words = found
    wrapped = [line for text in words for line in figures.wrapped(text, _INDENT, f"{_INDENT}  ")]
    return [f"collectives that stalled in attempt {attempt}", *wrapped]


def _without_verdict(run: RunDir, state: RunState) -> list[str]:
    """Return what is known of a run that could not say how it ended: Slurm's word, its job's last words."""
    cause = state.cause or _EXPLAINED.get(state.state)
    lines = [f"{state.name}: {state.state}{f': {cause}' if cause else ''}"]
    if not _ended_without_a_verdict(state):
        return lines
    for log in job_logs(run, state.submitted):
        if words := last_lines_of(end_of(log)):
            return [*lines, *words, f"log: {shown(log)}"]
    return lines


def _how_to_go_on(run: RunDir, state: RunState, verdict: Verdict | None, events: list[Record]) -> list[str]:
    """Return the command that goes on with a run that ended too early."""
    if verdict is None and _ended_without_a_verdict(state):
        verdict = Verdict(EXIT_FAILED, state.state)
    return [] if verdict is None else resume_lines(run, verdict, events)


def _ended_without_a_verdict(state: RunState) -> bool:
    return state.state.ended_badly or state.state is RunPhase.cancelled


def attempt_lines(attempts: Sequence[EndedAttempt]) -> list[str]:
    """Return what happened to the run, two or three lines an attempt, each of at most 80 columns.

    Nothing where there was one attempt and nothing was decided about it.
    """
    if len(attempts) < 2 and not any(ended.decision for ended in attempts):
        return []
    lines = ["attempts"]
    left_out = max(0, len(attempts) - _MOST_ATTEMPTS)
    for index, ended in enumerate(attempts):
        if index == 1 and left_out:
            lines.append(f"  … {left_out} more")
        if not 0 < index <= left_out:
            what = f"{_steps(ended.incident)}{_what(ended.incident)}"
            lines += figures.wrapped(what, f"{ended.incident.attempt:>3}  ", _INDENT)
            if ended.decision is not None:
                lines += figures.wrapped(_decided(ended), f"{_INDENT}→ ", f"{_INDENT}  ")
    return lines


def _steps(incident: Incident) -> str:
    if incident.before_first_step:
        return "before the first step: "
    if incident.step is None:
        return f"from step {incident.began + 1}: "
    about = "" if incident.step_is_exact or incident.kind is Kind.finished else "about "
    return f"steps {incident.began + 1} to {about}{max(incident.step, incident.began + 1)}: "


def _what(incident: Incident) -> str:
    if incident.kind is Kind.finished:
        return "finished"
    who = "" if incident.rank is None else f"rank {incident.rank}"
    where = "" if incident.host is None else f"on {incident.host}" if who else incident.host
    place = " ".join(part for part in (who, where) if part)
    saved = f"; saved: step {incident.committed}" if incident.committed else "; nothing was saved"
    cause = f"stopped ({incident.cause})" if incident.kind is Kind.stopped else incident.cause
    return f"{cause}{f' ({place})' if place else ''}{saved}"


def _decided(ended: EndedAttempt) -> str:
    words = _WORDS_OF_DECISIONS.get(str(ended.decision), str(ended.decision))
    if ended.replaced:
        words += f" ({', '.join(f'{new} for {old}' for old, new in ended.replaced)})"
    if ended.wait_s:
        words += f" after {ended.wait_s:g} s"
    replaced = [old for old, _ in ended.replaced]
    if others := [host for host in ended.exclude if host not in replaced]:
        words += f", without {', '.join(others)}"
    # An ordinary restart has no other reason than what is told above it.
    if ended.reason is not None and not ended.reason.startswith(ended.incident.cause):
        words += f": {ended.reason}"
    return f"{words} [{ended.rule}]" if ended.rule else words


def node_lines(events: Sequence[Record]) -> list[str]:
    """Return what the node checks of the last job said against which node, and whether it was used.

    Nothing where all were sound.
    """
    checked = [event for event in events if event["event"] == "node_checked"]
    if not checked:
        return []
    last = checked[-1]
    reasons_of: dict[str, list[str]] = defaultdict(list)
    for host, words in [*_texts(last, "unfit"), *_texts(last, "doubt")]:
        reasons_of[host].append(words)
    for event in events:
        if event["event"] == "node_slow" and event["time"] >= last["time"]:
            reasons_of[str(event.get("host"))].append(str(event.get("cause")))
    left_out = last.get("left_out")
    out = left_out if isinstance(left_out, list) else []
    told = [
        f"{host}, {'left out' if host in out else 'used all the same'}: {'; '.join(reasons)}"
        for host, reasons in reasons_of.items()
    ]
    more = [f"… {len(told) - _MOST_NODES} more"] if len(told) > _MOST_NODES else []
    told = [*told[:_MOST_NODES], *more, *_clocks(last)]
    # Paths stay whole, to be copied.
    wrapped = [figures.wrapped(text, _INDENT, f"{_INDENT}  ", keeps_words=True) for text in told]
    return ["nodes", *(line for lines in wrapped for line in lines)] if told else []


def _texts(event: Record, key: str) -> list[tuple[str, str]]:
    value = event.get(key)
    return [(host, str(words)) for host, words in value.items()] if isinstance(value, Mapping) else []


def _clocks(event: Record) -> list[str]:
    clocks = []
    for host, text in _texts(event, "clock_off_s"):
        direction = "behind" if text.startswith("-") else "ahead of"
        clocks.append(f"{host}: its clock is {text.removeprefix('-')} s {direction} the others'")
    return clocks


def _of_sweep(state: SweepState, arguments: Namespace) -> list[str]:
    if state.problem is not None:
        raise ConfigError(state.problem)
    sweep = state.sweep
    causes = _by_cause(member for member in state.members if member.state.state.ended_badly)
    if arguments.json:
        failed = [
            {"cause": cause, "members": [each.member.index for each in members]}
            for cause, members in causes.items()
        ]
        return [json.dumps({"name": sweep.name, "counts": state.counts, "failed": failed}, indent=2)]
    lines = [f"{sweep.name}: {sweep_summary(state)}"]
    for cause, members in causes.items():
        names = first_few([f"{each.member.index:03d}" for each in members], _NAMED)
        lines += [f"{len(members)} × {cause}", f"  {names}: `{invocation('why', members[0].run)}`"]
    if not causes:
        return [*lines, "no member failed"]
    return [*lines, f"resume  `{invocation('resume', sweep)}` runs what is missing or failed"]


def _by_cause(members: Iterable[MemberState]) -> dict[str, list[MemberState]]:
    """Return the members by what ended them, most frequent first; they differ in hosts, ranks and job ids."""
    groups: dict[str, list[MemberState]] = defaultdict(list)
    for member in members:
        groups[_cause(member)].append(member)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _cause(member: MemberState) -> str:
    """Return the cause in a line, without what is different for each member though the cause is the same."""
    state = member.state
    _, verdict = read_ending(member.run, read_events(member.run), time.time())
    if verdict is not None and verdict.state is RunPhase.failed:
        message = verdict.message.partition("\n")[0]
        return f"failed: {verdict.cause}{': ' + message if message else ''}"
    cause = state.cause or _EXPLAINED.get(state.state, "")
    if state.job:
        cause = cause.replace(f"job {state.job}", "the job")
    return f"{state.state}: {cause}" if cause else state.state
