"""Decides what is to be done about a sweep that somebody submits, and does it: a new one, or one that exists
and goes on.

The same members under the same name are the same sweep. Members of other sweeps that are done or alive are
taken over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.schema import Config
from orchestra.config.machine import Situation
from orchestra.run.paths import RunDir, SweepDir
from orchestra.run.stop_requests import user_name
from orchestra.submit.hand_over import Outcome, SweepLedger, submit
from orchestra.submit.site import Site
from orchestra.submit.submission import Submission, parent_of_sweep, planned_sweep
from orchestra.submit.sweeps import lock
from orchestra.submit.sweeps.arrays import Numbering, PlacedSubmission, PlannedArray
from orchestra.submit.sweeps.members import Existing, Standing, adoptable, same_sweep, standings, sweeps_in
from orchestra.submit.sweeps.resume_sweep import Changes, Comeback, go_on, planned_again, returning


@dataclass(frozen=True)
class Course:
    """What is going to be done about a sweep."""

    sweep: SweepDir
    # What will be submitted; in a new sweep whose made name is taken, the same under another name.
    arrays: list[PlannedArray]
    # Members that are left alone, as they stand: of this sweep, or of others.
    kept: list[Standing]
    # One of the two.
    new: PlacedSubmission | None = None
    comeback: Comeback | None = None

    @property
    def is_new(self) -> bool:
        return self.new is not None


def course_of(submission: Submission, site: Site, now: float, *, force: bool = False) -> Course:
    """Return what to do about a sweep that is submitted; `force`: all members anew, whatever there is.

    Reads and asks only. Raises ConfigError when something else has the configured name, LaunchError when
    Slurm cannot be asked about members that exist.
    """
    existing = [] if force else sweeps_in(parent_of_sweep(submission.members))
    same = same_sweep(submission, existing)
    if same is not None:
        composed = {member.signature: member.config for member in submission.members}
        return course_again(same, site, composed=composed)
    sweep = planned_sweep(submission, now, is_forced=force)
    kept = adoptable(submission, existing)
    submission = submission.adopting({index: str(member.run.path) for index, member in kept.items()})
    numbering = Numbering(sweep.name, user_name(), now, site.array_size(), submission.throttle)
    placed = PlacedSubmission(submission, sweep, numbering)
    return Course(sweep, placed.arrays(), list(kept.values()), new=placed)


def course_again(
    existing: Existing,
    site: Site,
    overrides: Sequence[str] = (),
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
    changes = Changes(tuple(overrides), Situation("submit", cluster=site), composed or {})
    members = returning(needing, changes)
    comeback = Comeback(sweep, record, members, site.share, site.array_size())
    kept = [standing for standing in all_members if standing not in needing]
    return Course(sweep, planned_again(comeback), kept, comeback=comeback)


def carry_out(course: Course, command: Sequence[str]) -> tuple[SweepLedger, Outcome]:
    """Do it: write, submit, record. Returns the sweep's records and what became of its arrays.

    A new sweep of which Slurm refuses the very first job leaves nothing. Raises ConfigError, LaunchError as
    `hand_over` does.
    """
    if course.comeback is not None:
        if not course.comeback.members:
            return SweepLedger(course.sweep, course.comeback.record), Outcome()
        return go_on(course.comeback, command)
    assert course.new is not None
    ledger, outcome = submit(course.new)
    assert isinstance(ledger, SweepLedger)
    return ledger, outcome


def runs_of(ledger: SweepLedger) -> list[RunDir]:
    """Return the runs of all members, those of other sweeps too, in the members' order."""
    return [ledger.record.run(ledger.sweep, member) for member in ledger.record.members]
