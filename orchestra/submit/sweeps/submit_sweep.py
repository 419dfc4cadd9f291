"""Decides what is to be done about a sweep that somebody submits, and does it: a new one, or one that exists
and goes on.

The same members under the same name are the same sweep. Members of other sweeps that are done or alive are
taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from conf.schema import Config
from orchestra.config.machine import Situation
from orchestra.run.paths import RunDir, SweepDir
from orchestra.run.stop_requests import user_name
from orchestra.submit.job import Share
from orchestra.submit.sweeps import lock
from orchestra.submit.sweeps.arrays import (
    Numbering,
    Outcome,
    PlannedArray,
    RefusedError,
    arrays_of,
    make_sweep,
    remove,
    send,
)
from orchestra.submit.sweeps.members import Existing, Standing, adoptable, same_sweep, standings, sweeps_in
from orchestra.submit.sweeps.resume_sweep import Changes, Comeback, go_on, planned_again, returning
from orchestra.submit.sweeps.sweep_plan import SweepPlan, parent_of_sweep, planned_sweep


@dataclass(frozen=True)
class Site:
    """What a cluster says about jobs."""

    share: Callable[[Config], Share]
    array_size: int
    # The configuration with the cluster's numbers in the place of `auto`, and what the cluster cannot give.
    settled: Callable[[Config], tuple[Config, list[str]]]


@dataclass(frozen=True)
class Course:
    """What is going to be done about a sweep."""

    sweep: SweepDir
    # What will be submitted; in a new sweep whose made name is taken, the same under another name.
    arrays: list[PlannedArray]
    # Members that are left alone, as they stand: of this sweep, or of others.
    kept: list[Standing]
    # One of the two.
    plan: SweepPlan | None = None
    comeback: Comeback | None = None
    numbering: Numbering | None = None

    @property
    def is_new(self) -> bool:
        return self.plan is not None


def course_of(plan: SweepPlan, site: Site, now: float, *, force: bool = False) -> Course:
    """Return what to do about a sweep that is submitted; `force`: all members anew, whatever there is.

    Reads and asks only. Raises ConfigError when something else has the configured name, LaunchError when
    Slurm cannot be asked about members that exist.
    """
    existing = [] if force else sweeps_in(parent_of_sweep(plan.members))
    same = same_sweep(plan, existing)
    if same is not None:
        composed = {member.signature: member.config for member in plan.members}
        return course_again(same, site, composed=composed)
    sweep = planned_sweep(plan, now, is_forced=force)
    kept = adoptable(plan, existing)
    plan = plan.adopting({index: str(standing.run.path) for index, standing in kept.items()})
    numbering = Numbering(sweep.name, user_name(), now, site.array_size, plan.throttle)
    return Course(
        sweep, arrays_of(plan, sweep, numbering), list(kept.values()), plan=plan, numbering=numbering
    )


def course_again(
    existing: Existing,
    site: Site,
    overrides: Sequence[str] = (),
    situation: Situation | None = None,
    composed: Mapping[str, Config] | None = None,
) -> Course:
    """Return how a sweep that exists goes on: its members that are neither done nor alive are submitted.

    `composed` are the members' configurations by signature, where the command has them. Raises ConfigError
    when another command is submitting it or overrides cannot be applied, LaunchError when Slurm is silent.
    """
    sweep, record = existing.sweep, existing.record
    lock.refuse_busy(sweep, record)
    all_members = standings(sweep, record)
    needing = [standing for standing in all_members if standing.needs_job and not standing.is_elsewhere]
    changes = Changes(tuple(overrides), situation or Situation("submit"), site.settled, composed or {})
    members = returning(needing, changes)
    comeback = Comeback(sweep, record, members, site.share, site.array_size)
    kept = [standing for standing in all_members if standing not in needing]
    return Course(sweep, planned_again(comeback), kept, comeback=comeback)


def carry_out(course: Course, command: Sequence[str]) -> tuple[SweepDir, Outcome]:
    """Do it: write, submit, record. Returns the sweep's directory and what became of its arrays.

    A new sweep of which Slurm refuses the very first job leaves nothing. Raises ConfigError, LaunchError as
    `send` does.
    """
    if course.comeback is not None:
        if not course.comeback.members:
            return course.sweep, Outcome(course.comeback.record)
        return course.sweep, go_on(course.comeback, command)
    assert course.plan is not None
    assert course.numbering is not None
    sweep, record, arrays = make_sweep(
        replace(course.plan, command=tuple(command)), course.sweep, course.numbering
    )
    try:
        return sweep, send(sweep, record, arrays)
    except RefusedError as error:
        if error.num_accepted == 0:
            remove(sweep)
        raise


def runs_of(sweep: SweepDir, outcome: Outcome) -> list[RunDir]:
    """Return the runs of all members, those of other sweeps too, in the members' order."""
    return [outcome.record.run(sweep, member) for member in outcome.record.members]
