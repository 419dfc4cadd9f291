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

from orchestra.cli import cluster
from orchestra.cli.results import print_trials, wait
from orchestra.cli.sweep_report import limited, print_course, tell
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError, LaunchError
from orchestra.sweepdir import SweepDir, read_sweep

if TYPE_CHECKING:
    from launchers.slurm.site import Partition
    from orchestra.config.sweep import Member
    from orchestra.rundir import RunDir
    from orchestra.submit.sweeps.arrays import PlannedArray
    from orchestra.submit.sweeps.course import Course, Site
    from orchestra.submit.sweeps.plan import PlannedMember, SweepPlan
    from orchestra.submit.sweeps.sending import Outcome


def submit_sweep(arguments: Namespace) -> int:
    """Submit the members that overrides give as arrays, and return the exit code.

    1 where a limit kept some of them out. Raises ConfigError before anything exists, LaunchError when Slurm
    is silent.
    """
    from orchestra.config.sweep import compose_members
    from orchestra.submit.sweeper import names_sweeper

    overrides = cluster.with_cluster(arguments.overrides)
    if names_sweeper(overrides):
        return _submit_sweeper(arguments, overrides)
    members = compose_members(overrides, cluster.SITUATION)
    return _submit_members(arguments, members, overrides)


def _submit_members(arguments: Namespace, members: Sequence[Member], overrides: Sequence[str]) -> int:
    from orchestra.submit.sweeps.course import runs_of

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
        self._partitions = cluster.partitions_or_none(is_needed=is_needed)
        self._array_size = _array_size(self._partitions)

    def plan(self, members: Sequence[Member], overrides: Sequence[str], name: str | None = None) -> SweepPlan:
        """Return the sweep of members, `name` in the place of run.name. Raises ConfigError with all
        problems.
        """
        from orchestra.submit.sweeps.plan import SweepPlan, parent_of_sweep

        problems: dict[str, list[int]] = {}
        planned = []
        for index, member in enumerate(members):
            it, found = _planned(index, member, self._partitions, name)
            if self._checks_memory and not found:
                found += cluster.memory_problems(it.config, self._partitions)
            planned.append(it)
            for problem in found:
                problems.setdefault(problem, []).append(index)
        if problems:
            raise ConfigError([_about(text, its, members) for text, its in problems.items()])
        plan = SweepPlan(tuple(planned), tuple(overrides))
        if found := list(cluster.place_problems(parent_of_sweep(plan.members))):
            raise ConfigError(found)
        return plan

    def site(self) -> Site:
        from orchestra.submit.sweeps.course import Site

        return Site(
            share=lambda config: cluster.share_of(config, self._partitions),
            array_size=self._array_size,
            settled=lambda config: cluster.on_site(config, self._partitions),
        )

    def course(self, plan: SweepPlan, *, force: bool) -> Course:
        """Return what is to be done about the sweep."""
        from orchestra.submit.sweeps.course import course_of

        return course_of(plan, self.site(), time.time(), force=force)

    def test(self, arrays: Sequence[PlannedArray]) -> str | None:
        """Let Slurm judge each kind of job once; return when it expects the first one to start."""
        if self._partitions is None:
            return None
        scripts = {it.template: it.script() for it in reversed(arrays)}
        estimates = [cluster.tested(script) for script in reversed(scripts.values())]
        starts = [estimate.start for estimate in estimates if estimate is not None]
        return min(starts, default=None)

    def carry_out(self, course: Course) -> tuple[SweepDir, Outcome]:
        """Submit what is to be submitted."""
        from orchestra.submit.sweeps.course import carry_out

        return carry_out(course, sys.argv)


def _array_size(partitions: tuple[Partition, ...] | None) -> int:
    from launchers.errors import LauncherError
    from launchers.slurm.limits import DEFAULT, limits

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
    from orchestra.config.signature import signature
    from orchestra.submit.measured import with_measured_network
    from orchestra.submit.sweeps.plan import PlannedMember

    config, problems = cluster.on_site(member.config, partitions)
    if name is not None:
        config = replace(config, run=replace(config.run, name=name))
    share = cluster.share_of(config, partitions)
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
    from orchestra.submit.sweeps.holding import alone
    from orchestra.submit.sweeps.plan import parent_of_sweep

    with alone(parent_of_sweep(plan.members), plan.signature):
        yield


def _submit_sweeper(arguments: Namespace, overrides: Sequence[str]) -> int:
    """Let a sweeper choose, batch after batch; return 0 when all of its trials are done."""
    from orchestra.submit import waiting
    from orchestra.submit.sweeper import run_sweeper
    from orchestra.submit.sweeps.course import runs_of

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

    trials = run_sweeper(overrides, cluster.SITUATION, submit_members)
    results = [trial.result for trial in trials if trial.result is not None]
    print_trials(trials, as_json=arguments.json)
    return waiting.exit_code(results) if len(results) == len(trials) else EXIT_FAILED


def resume_sweep(arguments: Namespace, sweep: SweepDir) -> int:
    """Submit what is missing or failed of a sweep; return the exit code.

    Overrides change the members that are submitted. Raises ConfigError and LaunchError before anything is
    submitted.
    """
    from orchestra.submit.sweeps.course import course_again
    from orchestra.submit.sweeps.standing import Existing

    dry_run = arguments.dry_run
    desk = _Desk(is_needed=not dry_run)
    course = course_again(
        Existing(sweep, read_sweep(sweep)), desk.site(), arguments.overrides, cluster.SITUATION
    )
    start = desk.test(course.arrays)
    if dry_run:
        print_course(course, start, as_json=arguments.json)
        return EXIT_DONE
    sweep, outcome = desk.carry_out(course)
    return tell(course, sweep, outcome, start, as_json=arguments.json)
