"""`orchestra submit -m` and `orchestra resume SWEEP`: what is going to be submitted, and what became of it.

What is to be done about a sweep is decided in `orchestra.submit.sweeps`.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestra.cli import on_cluster
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError, LaunchError
from orchestra.run.paths import SweepDir, read_sweep

if TYPE_CHECKING:
    from launchers.slurm.cluster import Partition
    from orchestra.config.sweep import Member
    from orchestra.run.paths import RunDir
    from orchestra.submit.sweeps.arrays import Outcome, PlannedArray
    from orchestra.submit.sweeps.submit_sweep import Course, Site
    from orchestra.submit.sweeps.sweep_plan import PlannedMember, SweepPlan


import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestra.run.paths import RunDir
    from orchestra.submit.sweeps.sweeper import Trial
    from orchestra.submit.wait import Result


import contextlib
from typing import TYPE_CHECKING, TextIO

from orchestra.cli.text import describe

if TYPE_CHECKING:
    from orchestra.submit.sweeps.arrays import Outcome
    from orchestra.submit.sweeps.submit_sweep import Course


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
        on_cluster.note(f"{row['index']:03d}  {' '.join(row['overrides'])}  ({what})")
    if start is not None:
        on_cluster.note(f"Slurm would take the jobs and expects the first one to start at {start}")


def _members(course: Course) -> list[dict[str, Any]]:
    """Return what would become of each member."""
    arrays = {index: it.array.number for it in course.arrays for index in it.array.members}
    members = (
        [it.record for it in course.plan.members]
        if course.plan is not None
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
    if course.plan is None:
        return {it.member.index: it.state.state for it in course.kept}
    by_path = {str(it.run.path): it.state.state for it in course.kept}
    return {it.index: by_path[it.adopted] for it in course.plan.members if it.adopted is not None}


def tell(
    course: Course,
    sweep: SweepDir,
    outcome: Outcome,
    start: str | None,
    *,
    as_json: bool,
    stream: TextIO | None = None,
) -> int:
    """Print what became of a sweep; return 0, or 1 where a limit kept members out."""
    if as_json:
        print(json.dumps(_facts(course, sweep, outcome, start)), file=stream)
    else:
        print("\n".join(_lines(course, sweep, outcome, start)), file=stream, flush=True)
    if outcome.limit is None:
        return EXIT_DONE
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {limited(sweep, outcome)}\n")
    return EXIT_FAILED


def limited(sweep: SweepDir, outcome: Outcome) -> str:
    """Return how many members a limit kept out, and what to do."""
    return (
        f"{outcome.num_refused} of {len(outcome.record.members)} members were not submitted, for a limit on "
        f"how many jobs there may be ({outcome.limit}); `orchestra resume {sweep.name}` submits them once "
        f"others have ended"
    )


def _facts(course: Course, sweep: SweepDir, outcome: Outcome, start: str | None) -> dict[str, Any]:
    states = _kept_states(course)
    members = [
        {
            "index": it.index,
            "overrides": list(it.overrides),
            "path": str(outcome.record.run(sweep, it).path),
            "adopted": it.adopted,
            "state": states.get(it.index),
        }
        for it in outcome.record.members
    ]
    arrays: list[dict[str, Any]] = [
        {"id": it.id, "members": list(it.members), "nodes": nodes}
        for it, nodes in zip(outcome.accepted, _nodes(course, outcome), strict=True)
    ]
    return {
        "name": sweep.name,
        "path": str(sweep.path),
        "is_new": course.is_new,
        "arrays": arrays,
        "num_submitted": sum(len(it.tasks) for it in outcome.accepted),
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


def _lines(course: Course, sweep: SweepDir, outcome: Outcome, start: str | None) -> Iterator[str]:
    from orchestra.submit.sweeps.members import counted

    total = len(outcome.record.members)
    is_same = "" if course.is_new else ", submitted before"
    yield f"sweep   {sweep.name}: {_count(total, 'member')}{is_same}"
    for array, nodes in zip(outcome.accepted, _nodes(course, outcome), strict=True):
        yield f"array   {array.id}: {_count(len(array.tasks), 'job')} of {_count(nodes or 1, 'node')}"
    if course.kept and course.is_new:
        num_members = sum(it.adopted is not None for it in outcome.record.members)
        sweeps = sorted({it.run.path.parent.name for it in course.kept})
        yield (
            f"adopted {_count(num_members, 'member')} from {_listed(sweeps)}: {counted(course.kept)} "
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
    yield f"next    `{describe.invocation('status', sweep)}`, `{describe.invocation('resume', sweep)}`"


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def submit_sweep(arguments: Namespace) -> int:
    """Submit the members that overrides give as arrays, and return the exit code.

    1 where a limit kept some of them out. Raises ConfigError before anything exists, LaunchError when Slurm
    is silent.
    """
    from orchestra.config.sweep import compose_members
    from orchestra.submit.sweeps.sweeper import names_sweeper

    overrides = on_cluster.with_cluster(arguments.overrides)
    if names_sweeper(overrides):
        return _submit_sweeper(arguments, overrides)
    members = compose_members(overrides, on_cluster.SITUATION)
    return _submit_members(arguments, members, overrides)


def _submit_members(arguments: Namespace, members: Sequence[Member], overrides: Sequence[str]) -> int:
    from orchestra.submit.sweeps.submit_sweep import runs_of

    desk = _Desk(is_needed=not arguments.dry_run, checks_memory=not arguments.skip_memory_check)
    plan = desk.plan(members, overrides)
    if arguments.dry_run:
        course = desk.course(plan, force=arguments.force)
        print_course(course, desk.test(course.arrays), as_json=arguments.json)
        return EXIT_DONE
    with _alone(plan):
        course = desk.course(plan, force=arguments.force)
        start = desk.test(course.arrays)
        sweep, outcome = desk.carry_out(course)
    # With --wait the JSON on standard output is the results'.
    stream = sys.stderr if arguments.json and arguments.wait else sys.stdout
    code = tell(course, sweep, outcome, start, as_json=arguments.json, stream=stream)
    if arguments.wait and code == EXIT_DONE:
        return wait(runs_of(sweep, outcome), members[0].config.run.metric, as_json=arguments.json)
    return code


class _Desk:
    """What the cluster has, asked once, and what is submitted with it."""

    def __init__(self, *, is_needed: bool, checks_memory: bool = False) -> None:
        self._checks_memory = checks_memory
        self._partitions = on_cluster.partitions_or_none(is_needed=is_needed)
        self._array_size = _array_size(self._partitions)

    def plan(self, members: Sequence[Member], overrides: Sequence[str], name: str | None = None) -> SweepPlan:
        """Return the sweep of members, `name` in the place of run.name. Raises ConfigError with all
        problems.
        """
        from orchestra.submit.sweeps.sweep_plan import SweepPlan, parent_of_sweep

        problems: dict[str, list[int]] = {}
        planned = []
        for index, member in enumerate(members):
            it, found = _planned(index, member, self._partitions, name)
            if self._checks_memory and not found:
                found += on_cluster.memory_problems(it.config, self._partitions)
            planned.append(it)
            for problem in found:
                problems.setdefault(problem, []).append(index)
        if problems:
            raise ConfigError([_about(text, its, members) for text, its in problems.items()])
        plan = SweepPlan(tuple(planned), tuple(overrides))
        if found := list(on_cluster.place_problems(parent_of_sweep(plan.members))):
            raise ConfigError(found)
        return plan

    def site(self) -> Site:
        from orchestra.submit.sweeps.submit_sweep import Site

        return Site(
            share=lambda config: on_cluster.share_of(config, self._partitions),
            array_size=self._array_size,
            settled=lambda config: on_cluster.on_site(config, self._partitions),
        )

    def course(self, plan: SweepPlan, *, force: bool) -> Course:
        """Return what is to be done about the sweep."""
        from orchestra.submit.sweeps.submit_sweep import course_of

        return course_of(plan, self.site(), time.time(), force=force)

    def test(self, arrays: Sequence[PlannedArray]) -> str | None:
        """Let Slurm judge each kind of job once; return when it expects the first one to start."""
        if self._partitions is None:
            return None
        scripts = {it.template: it.script() for it in reversed(arrays)}
        estimates = [on_cluster.tested(script) for script in reversed(scripts.values())]
        starts = [estimate.start for estimate in estimates if estimate is not None]
        return min(starts, default=None)

    def carry_out(self, course: Course) -> tuple[SweepDir, Outcome]:
        """Submit what is to be submitted."""
        from orchestra.submit.sweeps.submit_sweep import carry_out

        return carry_out(course, sys.argv)


def _array_size(partitions: tuple[Partition, ...] | None) -> int:
    from launchers.launch_errors import LauncherError
    from launchers.slurm.commands import DEFAULT, limits

    if partitions is None:
        return DEFAULT.array_size
    try:
        size = limits().array_size
    except LauncherError as error:
        raise LaunchError(f"{error}; nothing was submitted") from error
    if size < 1:
        raise ConfigError(
            "this cluster takes no job arrays (MaxArraySize=0), which sweeps are submitted as; ask its "
            "administrator, or submit the runs one by one"
        )
    return size


def _planned(
    index: int, member: Member, partitions: tuple[Partition, ...] | None, name: str | None
) -> tuple[PlannedMember, list[str]]:
    from orchestra.config.machine import signature
    from orchestra.submit.network_bench import with_measured_network
    from orchestra.submit.sweeps.sweep_plan import PlannedMember

    config, problems = on_cluster.on_site(member.config, partitions)
    if name is not None:
        config = replace(config, run=replace(config.run, name=name))
    share = on_cluster.share_of(config, partitions)
    known = with_measured_network(config)
    planned = PlannedMember(index, signature(config), member.overrides, member.chosen, known, share)
    return planned, problems


def _about(text: str, indices: Sequence[int], members: Sequence[Member]) -> str:
    """Say whose problem it is, unless all members have it."""
    if len(indices) == len(members):
        return text
    first = " ".join(members[indices[0]].chosen)
    more = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
    return f"{first}{more}: {text}"


@contextmanager
def _alone(plan: SweepPlan) -> Iterator[None]:
    from orchestra.submit.sweeps.lock import alone
    from orchestra.submit.sweeps.sweep_plan import parent_of_sweep

    with alone(parent_of_sweep(plan.members), plan.signature):
        yield


def _submit_sweeper(arguments: Namespace, overrides: Sequence[str]) -> int:
    """Let a sweeper choose, batch after batch; return 0 when all of its trials are done."""
    from orchestra.submit import wait
    from orchestra.submit.sweeps.submit_sweep import runs_of
    from orchestra.submit.sweeps.sweeper import run_sweeper

    if arguments.dry_run:
        raise ConfigError(
            "--dry-run: what a sweeper chooses depends on the results of the trials before; leave "
            "hydra/sweeper out to see the jobs of a plain sweep"
        )
    desk = _Desk(is_needed=True, checks_memory=not arguments.skip_memory_check)

    def submit_members(members: list[Member], name: str) -> list[RunDir]:
        plan = desk.plan(members, overrides, name)
        with _alone(plan):
            course = desk.course(plan, force=arguments.force)
            desk.test(course.arrays)
            sweep, outcome = desk.carry_out(course)
        if outcome.limit is not None:
            raise LaunchError(limited(sweep, outcome))
        return runs_of(sweep, outcome)

    trials = run_sweeper(overrides, on_cluster.SITUATION, submit_members)
    results = [trial.result for trial in trials if trial.result is not None]
    print_trials(trials, as_json=arguments.json)
    return wait.exit_code(results) if len(results) == len(trials) else EXIT_FAILED


def resume_sweep(arguments: Namespace, sweep: SweepDir) -> int:
    """Submit what is missing or failed of a sweep; return the exit code.

    Overrides change the members that are submitted. Raises ConfigError and LaunchError before anything is
    submitted.
    """
    from orchestra.submit.sweeps.members import Existing
    from orchestra.submit.sweeps.submit_sweep import course_again

    dry_run = arguments.dry_run
    desk = _Desk(is_needed=not dry_run)
    course = course_again(
        Existing(sweep, read_sweep(sweep)), desk.site(), arguments.overrides, on_cluster.SITUATION
    )
    start = desk.test(course.arrays)
    if dry_run:
        print_course(course, start, as_json=arguments.json)
        return EXIT_DONE
    sweep, outcome = desk.carry_out(course)
    return tell(course, sweep, outcome, start, as_json=arguments.json)
