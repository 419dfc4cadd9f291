"""`orchestra submit -m` and `orchestra resume SWEEP`: what is going to be submitted, and what became of it.

What is to be done about a sweep is decided in `orchestra.submit.sweeps`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from orchestra.cli.text import describe
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError, LaunchError
from orchestra.run.paths import SweepDir, read_sweep
from orchestra.sizes.units import first_few
from orchestra.submit.site import note

if TYPE_CHECKING:
    from orchestra.config.sweep import Member
    from orchestra.run.paths import RunDir
    from orchestra.submit.hand_over import Outcome, SweepLedger
    from orchestra.submit.site import Site
    from orchestra.submit.submission import Submission
    from orchestra.submit.sweeps.arrays import PlannedArray
    from orchestra.submit.sweeps.submit_sweep import Course
    from orchestra.submit.sweeps.sweeper import Trial
    from orchestra.submit.wait import Result

# How runs ended that a command waited for: a table, or JSON. It waits through `orchestra.submit.wait`.


def _trial(trial: Trial) -> dict[str, Any]:
    row = {"overrides": list(trial.chosen), "state": "refused"}
    return row if trial.result is None else {**row, **_result(trial.result)}


def wait(runs: Sequence[RunDir], metric: str, *, as_json: bool) -> int:
    """Wait for runs, print how each ended, and return the code of the worst end."""
    from orchestra.submit import wait as waiting

    results = waiting.wait_for(runs, metric)
    rows = [_result(result) for result in results]
    print(json.dumps({"results": rows}, indent=2) if as_json else _table(rows))
    return waiting.exit_code(results)


def _result(result: Result) -> dict[str, Any]:
    from orchestra.report.run_state import name_of

    identity = {"name": name_of(result.run), "path": str(result.run.path), "state": result.state}
    value = {"metric": result.metric, "value": result.value, "cause": result.cause}
    return {**identity, "code": result.code, **value}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        (row.get("name", "–"), row["state"], _value(row), " ".join(row.get("overrides", ()))) for row in rows
    ]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell[column].ljust(widths[column]) for column in range(3)), cell[3]]).rstrip()
        for cell in cells
    )


def _value(row: dict[str, Any]) -> str:
    if "metric" not in row:
        return ""
    return f"{row['metric']} {'none' if row['value'] is None else format(row['value'], '.6g')}"


def print_trials(trials: Sequence[Trial], *, as_json: bool) -> None:
    """Print what a sweeper chose, and how each of its trials ended."""
    rows = [_trial(trial) for trial in trials]
    print(json.dumps({"trials": rows}, indent=2) if as_json else _table(rows))


# What `orchestra submit -m` and `resume SWEEP` print: what would be submitted, and what became of it.


def print_course(course: Course, start: str | None, *, as_json: bool) -> None:
    """Print the scripts and the members that would be submitted."""
    scripts = [it.script() for it in course.arrays]
    rows = _members(course)
    if as_json:
        facts = {"name": course.sweep.name, "path": str(course.sweep.path), "is_new": course.is_new}
        told = [
            {"number": it.array.number, "members": list(it.array.members), "script": text}
            for it, text in zip(course.arrays, scripts, strict=True)
        ]
        print(json.dumps({**facts, "members": rows, "arrays": told, "estimated_start": start}, indent=2))
        return
    print("\n".join(scripts), end="")
    for row in rows:
        what = f"array {row['array']}" if row["array"] is not None else f"{row['state']}, left alone"
        note(f"{row['index']:03d}  {' '.join(row['overrides'])}  ({what})")
    if start is not None:
        note(f"Slurm would take the jobs and expects the first one to start at {start}")


def _members(course: Course) -> list[dict[str, Any]]:
    """Return what would become of each member."""
    arrays = {index: it.array.number for it in course.arrays for index in it.array.members}
    members = (
        [it.record for it in course.new.submission.members]
        if course.new is not None
        else list(read_sweep(course.sweep).members)
    )
    states = _kept_states(course)
    return [
        {
            "index": it.index,
            "overrides": list(it.overrides),
            "array": arrays.get(it.index),
            "state": states.get(it.index),
            "adopted": it.adopted,
        }
        for it in members
    ]


def _kept_states(course: Course) -> dict[int, str]:
    if course.new is None:
        return {it.member.index: it.state.state for it in course.kept}
    by_path = {str(it.run.path): it.state.state for it in course.kept}
    return {it.index: by_path[it.adopted] for it in course.new.submission.members if it.adopted is not None}


def tell(
    course: Course,
    ledger: SweepLedger,
    outcome: Outcome,
    start: str | None,
    *,
    as_json: bool,
    stream: TextIO | None = None,
) -> int:
    """Print what became of a sweep; return 0, or 1 where a limit kept members out."""
    if as_json:
        print(json.dumps(_facts(course, ledger, outcome, start)), file=stream)
    else:
        print("\n".join(_lines(course, ledger, outcome, start)), file=stream, flush=True)
    if outcome.limit is None:
        return EXIT_DONE
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {limited(ledger, outcome)}\n")
    return EXIT_FAILED


def limited(ledger: SweepLedger, outcome: Outcome) -> str:
    """Return how many members a limit kept out, and what to do."""
    return (
        f"{outcome.num_refused} of {len(ledger.record.members)} members were not submitted, for a limit on "
        f"how many jobs there may be ({outcome.limit}); `orchestra resume {ledger.sweep.name}` submits them "
        f"once others have ended"
    )


def _facts(course: Course, ledger: SweepLedger, outcome: Outcome, start: str | None) -> dict[str, Any]:
    states = _kept_states(course)
    members = [
        {
            "index": it.index,
            "overrides": list(it.overrides),
            "path": str(ledger.record.run(ledger.sweep, it).path),
            "adopted": it.adopted,
            "state": states.get(it.index),
        }
        for it in ledger.record.members
    ]
    arrays: list[dict[str, Any]] = [
        {"id": it.id, "members": list(it.members), "nodes": nodes}
        for it, nodes in zip(outcome.accepted, _nodes(course, outcome), strict=True)
    ]
    return {
        "name": ledger.sweep.name,
        "path": str(ledger.sweep.path),
        "is_new": course.is_new,
        "arrays": arrays,
        "num_submitted": outcome.num_accepted,
        "num_not_submitted": outcome.num_refused,
        "limit": outcome.limit,
        "estimated_start": start,
        "members": members,
    }


def _nodes(course: Course, outcome: Outcome) -> list[int | None]:
    """Return the nodes of each array's jobs, from its script."""
    from orchestra.submit.sweeps.arrays import num_nodes

    templates = {index: it.template for it in course.arrays for index in it.array.members}
    return [num_nodes(templates[array.members[0]]) for array in outcome.accepted]


def _lines(course: Course, ledger: SweepLedger, outcome: Outcome, start: str | None) -> Iterator[str]:
    from orchestra.submit.sweeps.members import counted

    total = len(ledger.record.members)
    is_same = "" if course.is_new else ", submitted before"
    yield f"sweep   {ledger.sweep.name}: {_count(total, 'member')}{is_same}"
    for array, nodes in zip(outcome.accepted, _nodes(course, outcome), strict=True):
        yield f"array   {array.id}: {_count(len(array.tasks), 'job')} of {_count(nodes or 1, 'node')}"
    if course.kept and course.is_new:
        num_members = sum(it.adopted is not None for it in ledger.record.members)
        sweeps = sorted({it.run.path.parent.name for it in course.kept})
        yield (
            f"adopted {_count(num_members, 'member')} from {first_few(sweeps)}: {counted(course.kept)} "
            f"(--force trains them anew)"
        )
    elif course.kept:
        yield f"kept    {_count(len(course.kept), 'member')} as they are: {counted(course.kept)}"
        owners = sorted({it.run.path.parent.name for it in course.kept if it.needs_job})
        yield from (
            f"        `orchestra resume {name}` goes on with those that are its own" for name in owners
        )
    if not outcome.accepted and outcome.limit is None:
        yield "nothing is missing: nothing was submitted"
    if start is not None and outcome.accepted:
        yield f"starts  {start}, as Slurm expects of the first one"
    status, resume = (describe.invocation(verb, ledger.sweep) for verb in ("status", "resume"))
    yield f"next    `{status}`, `{resume}`"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def submit_sweep(arguments: Namespace) -> int:
    """Submit the members that overrides give as arrays, and return the exit code.

    1 where a limit kept some of them out. Raises ConfigError before anything exists, LaunchError when Slurm
    is silent.
    """
    from orchestra.config.machine import Situation
    from orchestra.config.sweep import compose_members
    from orchestra.submit.site import ask
    from orchestra.submit.submission import with_cluster
    from orchestra.submit.sweeps.sweeper import names_sweeper

    overrides = with_cluster(arguments.overrides)
    if names_sweeper(overrides):
        return _submit_sweeper(arguments, overrides)
    site = ask(is_dry=arguments.dry_run)
    members = compose_members(overrides, Situation("submit", cluster=site))
    return _submit_members(arguments, members, overrides, site)


def _submit_members(
    arguments: Namespace, members: Sequence[Member], overrides: Sequence[str], site: Site
) -> int:
    from orchestra.submit.submission import plan_sweep
    from orchestra.submit.sweeps.submit_sweep import carry_out, runs_of

    checks_memory = not arguments.skip_memory_check
    submission = plan_sweep(members, overrides, site, sys.argv, checks_memory=checks_memory)
    if arguments.dry_run:
        course, start = _course(submission, site, force=arguments.force)
        print_course(course, start, as_json=arguments.json)
        return EXIT_DONE
    with _alone(submission):
        course, start = _course(submission, site, force=arguments.force)
        ledger, outcome = carry_out(course, sys.argv)
    # With --wait the JSON on standard output is the results'.
    stream = sys.stderr if arguments.json and arguments.wait else sys.stdout
    code = tell(course, ledger, outcome, start, as_json=arguments.json, stream=stream)
    if arguments.wait and code == EXIT_DONE:
        return wait(runs_of(ledger), members[0].config.run.metric, as_json=arguments.json)
    return code


def _course(submission: Submission, site: Site, *, force: bool) -> tuple[Course, str | None]:
    """Return what is to be done about the sweep, and when Slurm expects its first job to start."""
    from orchestra.submit.sweeps.submit_sweep import course_of

    course = course_of(submission, site, time.time(), force=force)
    return course, _tested(course.arrays, site)


def _tested(arrays: Sequence[PlannedArray], site: Site) -> str | None:
    """Let Slurm judge each kind of job once; return when it expects the first one to start."""
    scripts = {planned.template: planned.script() for planned in reversed(arrays)}
    estimates = [site.tested(script) for script in reversed(scripts.values())]
    starts = [estimate.start for estimate in estimates if estimate is not None]
    return min(starts, default=None)


@contextmanager
def _alone(submission: Submission) -> Iterator[None]:
    from orchestra.submit.submission import parent_of_sweep
    from orchestra.submit.sweeps.lock import alone

    with alone(parent_of_sweep(submission.members), submission.signature):
        yield


def _submit_sweeper(arguments: Namespace, overrides: Sequence[str]) -> int:
    """Let a sweeper choose, batch after batch; return 0 when all of its trials are done."""
    from orchestra.config.machine import Situation
    from orchestra.submit import wait
    from orchestra.submit.site import ask
    from orchestra.submit.submission import plan_sweep
    from orchestra.submit.sweeps.submit_sweep import carry_out, runs_of
    from orchestra.submit.sweeps.sweeper import run_sweeper

    if arguments.dry_run:
        raise ConfigError(
            "--dry-run: what a sweeper chooses depends on the results of the trials before; leave "
            "hydra/sweeper out to see the jobs of a plain sweep"
        )
    site, checks_memory = ask(), not arguments.skip_memory_check
    site.require()

    def submit_members(members: list[Member], name: str) -> list[RunDir]:
        submission = plan_sweep(members, overrides, site, sys.argv, name=name, checks_memory=checks_memory)
        with _alone(submission):
            course, _ = _course(submission, site, force=arguments.force)
            ledger, outcome = carry_out(course, sys.argv)
        if outcome.limit is not None:
            raise LaunchError(limited(ledger, outcome))
        return runs_of(ledger)

    trials = run_sweeper(overrides, Situation("submit", cluster=site), submit_members)
    results = [trial.result for trial in trials if trial.result is not None]
    print_trials(trials, as_json=arguments.json)
    return wait.exit_code(results) if len(results) == len(trials) else EXIT_FAILED


def resume_sweep(arguments: Namespace, sweep: SweepDir) -> int:
    """Submit what is missing or failed of a sweep; return the exit code.

    Overrides change the members that are submitted. Raises ConfigError and LaunchError before anything is
    submitted.
    """
    from orchestra.submit.site import ask
    from orchestra.submit.sweeps.members import Existing
    from orchestra.submit.sweeps.submit_sweep import carry_out, course_again

    site = ask(is_dry=arguments.dry_run, folder=sweep.path.parent)
    site.require()
    course = course_again(Existing(sweep, read_sweep(sweep)), site, arguments.overrides)
    start = _tested(course.arrays, site)
    if arguments.dry_run:
        print_course(course, start, as_json=arguments.json)
        return EXIT_DONE
    ledger, outcome = carry_out(course, sys.argv)
    return tell(course, ledger, outcome, start, as_json=arguments.json)
