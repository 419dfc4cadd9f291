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
from orchestra.submit.hand_over import SubmitOutcome, SweepLedger, submit
from orchestra.submit.site import Site
from orchestra.submit.submission import Submission, parent_of_sweep, planned_sweep
from orchestra.submit.sweeps import lock
from orchestra.submit.sweeps.arrays import Numbering, PlacedSubmission, PlannedArray
from orchestra.submit.sweeps.members import (
    ExistingSweep,
    MemberRun,
    adoptable_runs,
    member_states,
    same_sweep,
    sweeps_in,
)
from orchestra.submit.sweeps.resume_sweep import (
    MemberChanges,
    SweepResume,
    resumed_arrays,
    resumed_members,
    submit_resumed,
)


@dataclass(frozen=True)
class SweepAction:
    """What a command does with a sweep: makes it, or submits further jobs for it."""

    sweep: SweepDir
    # What will be submitted; in a new sweep whose made name is taken, the same under another name.
    arrays: list[PlannedArray]
    # Members that are left alone: of this sweep, or of others.
    kept: list[MemberRun]
    # One of the two.
    new: PlacedSubmission | None = None
    resume: SweepResume | None = None

    @property
    def is_new(self) -> bool:
        return self.new is not None


def submit_action(submission: Submission, site: Site, now: float, *, force: bool = False) -> SweepAction:
    """Return what to do about a sweep that is submitted; `force`: all members anew, whatever there is.

    Reads and asks only. Raises ConfigError when something else has the configured name, LaunchError when
    Slurm cannot be asked about members that exist.
    """
    existing = [] if force else sweeps_in(parent_of_sweep(submission.members))
    same = same_sweep(submission, existing)
    if same is not None:
        composed = {member.signature: member.config for member in submission.members}
        return resume_action(same, site, composed=composed)
    sweep = planned_sweep(submission, now, is_forced=force)
    kept = adoptable_runs(submission, existing)
    submission = submission.adopting({index: str(member.run.path) for index, member in kept.items()})
    numbering = Numbering(sweep.name, user_name(), now, site.array_size(), submission.throttle)
    placed = PlacedSubmission(submission, sweep, numbering)
    return SweepAction(sweep, placed.arrays(), list(kept.values()), new=placed)


def resume_action(
    existing: ExistingSweep,
    site: Site,
    overrides: Sequence[str] = (),
    composed: Mapping[str, Config] | None = None,
) -> SweepAction:
    """Return how a sweep that exists goes on: its members that are neither done nor alive are submitted.

    `composed` are the members' configurations by signature, where the command has them. Raises ConfigError
    when another command is submitting it or overrides cannot be applied, LaunchError when Slurm is silent.
    """
    sweep, record = existing.sweep, existing.record
    lock.refuse_busy(sweep, record)
    all_members = member_states(sweep, record)
    needing = [member for member in all_members if member.needs_job and not member.is_elsewhere]
    changes = MemberChanges(tuple(overrides), Situation("submit", cluster=site), composed or {})
    members = resumed_members(needing, changes)
    resume = SweepResume(sweep, record, members, site.share, site.array_size())
    kept = [member for member in all_members if member not in needing]
    return SweepAction(sweep, resumed_arrays(resume), kept, resume=resume)


def carry_out(action: SweepAction, command: Sequence[str]) -> tuple[SweepLedger, SubmitOutcome]:
    """Write, submit and record what was planned. Returns the sweep's records and what became of its arrays.

    A new sweep of which Slurm refuses the very first job leaves nothing. Raises ConfigError, LaunchError as
    `hand_over` does.
    """
    if action.resume is not None:
        if not action.resume.members:
            return SweepLedger(action.sweep, action.resume.record), SubmitOutcome()
        return submit_resumed(action.resume, command)
    assert action.new is not None
    ledger, outcome = submit(action.new)
    assert isinstance(ledger, SweepLedger)
    return ledger, outcome


def runs_of(ledger: SweepLedger) -> list[RunDir]:
    """Return the runs of all members, those of other sweeps too, in the members' order."""
    return [ledger.record.run(ledger.sweep, member) for member in ledger.record.members]
