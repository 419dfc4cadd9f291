"""Decides what is to be done about a sweep that somebody submits or resumes, and does it.

The same members under the same name are the same sweep, which goes on; members of other sweeps that are done
or alive are taken over. Of a sweep that goes on, the members that are neither done nor alive get new arrays.
They train on in the same run directories, with the code as it is now. Called by `orchestra submit -m` and
`orchestra resume SWEEP`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.schema import Config
from orchestra.config.compose import changed_config
from orchestra.config.machine import Situation, this_machine
from orchestra.errors import ConfigError
from orchestra.recovery.history import last_attempt
from orchestra.run.config_file import read_config
from orchestra.run.control.stop_requests import user_name
from orchestra.run.events import read_events
from orchestra.run.files import write_atomically
from orchestra.run.paths import RunDir, Sweep, SweepDir, SweepMember, to_json
from orchestra.run.permissions import close_to_others, open_to_group
from orchestra.run.record import read_record, write_record
from orchestra.run.run_lineage import newest_checkpoint
from orchestra.sizes.topology import length_of
from orchestra.sizes.units import first_few
from orchestra.submit.claims import (
    array_numbers,
    next_attempt_number,
    refuse_busy_sweep,
    release_arrays,
    take_array,
    take_turn,
)
from orchestra.submit.hand_over import (
    SubmitOutcome,
    SweepLedger,
    hand_over,
    record_jobs,
    submit,
    write_member,
)
from orchestra.submit.job import Share
from orchestra.submit.job_record import JobEntry, member_intent, number_of_jobs
from orchestra.submit.new_run import (
    code_revision,
    is_snapshot,
    made_as_one,
    origin,
    renew_snapshot,
    share_checkpoints,
)
from orchestra.submit.resume_changes import ResumeChanges
from orchestra.submit.resume_run import freeze_config, without_past_faults
from orchestra.submit.site import Site
from orchestra.submit.submission import (
    PlannedMember,
    Submission,
    fitted,
    parent_of_sweep,
    planned_sweep,
)
from orchestra.submit.sweeps.arrays import (
    Numbering,
    PlacedSubmission,
    PlannedArray,
    Templates,
    planned_arrays,
    template_of,
    with_code,
)
from orchestra.submit.sweeps.members import (
    ExistingSweep,
    MemberRun,
    adoptable_runs,
    member_states,
    same_sweep,
    sweeps_in,
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


def submit_action(
    submission: Submission, site: Site | None, now: float, *, force: bool = False
) -> SweepAction:
    """Return what to do about a sweep that is submitted to `site`, or trained on this machine (None);
    `force`: all members anew, whatever there is.

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
    adopted = {index: str(member.run.path) for index, member in kept.items()}
    members = (replace(member, adopted=adopted.get(member.index)) for member in submission.members)
    submission = replace(submission, members=tuple(members))
    array_size = 1 if site is None else site.array_size()
    numbering = Numbering(sweep.name, user_name(), now, array_size, submission.throttle)
    placed = PlacedSubmission(submission, sweep, numbering)
    return SweepAction(sweep, placed.arrays(), list(kept.values()), new=placed)


def resume_action(
    existing: ExistingSweep,
    site: Site | None,
    overrides: Sequence[str] = (),
    composed: Mapping[str, Config] | None = None,
    *,
    accepts_jump: bool = False,
    checks_memory: bool = True,
) -> SweepAction:
    """Return how a sweep that exists goes on: its members that are neither done nor alive are submitted to
    `site`, or train on this machine (None).

    `composed` are the members' configurations by signature, where the command has them; `accepts_jump`: of
    the learning rate, by a changed schedule; `checks_memory`: whether changed members fit their GPUs. Raises
    ConfigError when another command is submitting it or overrides cannot be applied, LaunchError when Slurm
    is silent.
    """
    sweep, record = existing.sweep, existing.record
    refuse_busy_sweep(sweep, record)
    all_members = member_states(sweep, record)
    needing = [member for member in all_members if member.needs_job and not member.is_elsewhere]
    situation = this_machine("resume", starts=True) if site is None else Situation("resume", cluster=site)
    changes = MemberChanges(tuple(overrides), situation, composed or {}, accepts_jump, site, checks_memory)
    members = resumed_members(needing, changes)
    kept = [member for member in all_members if member not in needing]
    # Members that share a node have one job.
    jobs = (member.state.job for member in kept if member.is_own_and_alive)
    living = tuple(dict.fromkeys(job for job in jobs if job))
    if site is None:
        here = SweepResume(sweep, record, members, is_here=True, overrides=changes.overrides)
        return SweepAction(sweep, [], kept, resume=here)
    size = site.array_size()
    resume = SweepResume(sweep, record, members, site.share, size, living, overrides=changes.overrides)
    return SweepAction(sweep, resumed_arrays(resume), kept, resume=resume)


def carry_out(action: SweepAction, command: Sequence[str]) -> tuple[SweepLedger, SubmitOutcome]:
    """Write, submit and record what was planned. Returns the sweep's records and what became of its arrays.

    A new sweep of which Slurm refuses the very first job leaves nothing. Raises ConfigError, LaunchError as
    `hand_over` does.
    """
    if action.resume is not None:
        if not action.resume.members:
            return SweepLedger(action.sweep, action.resume.record), SubmitOutcome()
        if action.resume.is_here:
            return go_on_here(action.resume, command), SubmitOutcome()
        return submit_resumed(action.resume, command)
    assert action.new is not None
    ledger, outcome = submit(action.new)
    assert isinstance(ledger, SweepLedger)
    return ledger, outcome


def runs_of(ledger: SweepLedger) -> list[RunDir]:
    """Return the runs of all members, those of other sweeps too, in the members' order."""
    return [ledger.record.run(ledger.sweep, member) for member in ledger.record.members]


def runs_to_train(action: SweepAction, ledger: SweepLedger) -> list[RunDir]:
    """Return the runs of the members that an action on this machine is about, in their order."""
    if action.resume is not None:
        return [ledger.sweep.member(resumed.member.index) for resumed in action.resume.members]
    return [ledger.sweep.member(member.index) for member in ledger.record.members if member.adopted is None]


@dataclass(frozen=True)
class ResumedMember:
    """A member that gets a further job, and how it goes on."""

    member: SweepMember
    # The attempt that it goes on with.
    attempt: int
    # The configuration where overrides change it, or where the run is made anew; None: as it is frozen.
    config: Config | None = None
    # Whether its directory is gone, or it was another sweep's run: it gets a directory of its own now.
    is_new: bool = False
    # How many jobs it had when this was decided.
    num_jobs: int = 0


@dataclass(frozen=True)
class SweepResume:
    """The members of a sweep that get a further job."""

    sweep: SweepDir
    # As it was read, before its members' states were asked for.
    record: Sweep
    members: tuple[ResumedMember, ...]
    share: Callable[[Config], Share] = lambda _: Share()
    array_size: int = 1
    # The jobs of members that need no other one.
    living: tuple[str, ...] = ()
    # Whether its members train on this machine, without jobs.
    is_here: bool = False
    # What changes them, as typed.
    overrides: tuple[str, ...] = ()

    @property
    def attempts(self) -> dict[int, int]:
        """The attempts that the members go on with, by their index."""
        return {resumed.member.index: resumed.attempt for resumed in self.members}

    def group(self) -> str | None:
        """Return the Unix group that the members' files were given to; None where they were to none."""
        resumed = self.members[0]
        with suppress(ConfigError):
            return (resumed.config or read_config(self.sweep.member(resumed.member.index).config)).run.group
        return None

    def code(self, number: int) -> Path:
        """Return the snapshot that the members train on with: the newest, or one of the code as it is now."""
        newest = self.sweep.newest_code()
        return newest if is_snapshot(newest) else self.sweep.code_of_array(number)

    def templates(self, code: Path) -> dict[int, str]:
        """Return the template of each member's script: the one it was submitted with unless it changes."""
        made = Templates(self.sweep)
        before = _templates_before(self.sweep, self.record)
        templates = {}
        for resumed in self.members:
            index = resumed.member.index
            if resumed.config is None and index in before:
                templates[index] = before[index]
            else:
                config = resumed.config or read_config(self.sweep.member(index).config)
                templates[index] = made.of(config, self.share(config))
        return {index: with_code(template, self.sweep, code) for index, template in templates.items()}


def _templates_before(sweep: SweepDir, record: Sweep) -> dict[int, str]:
    """Return what members were submitted with last; without those whose script cannot be read."""
    templates: dict[int, str] = {}
    for array in record.arrays:
        try:
            template = template_of(sweep.script(array.number).read_text())
        except OSError:
            continue
        templates.update(dict.fromkeys(array.members, template))
    return templates


@dataclass(frozen=True)
class MemberChanges:
    """What changes about members that go on."""

    overrides: tuple[str, ...]
    situation: Situation
    # Configurations by signature, for members whose run another sweep made and somebody removed.
    composed: Mapping[str, Config]
    accepts_jump: bool
    # None: they train on this machine.
    site: Site | None = None
    checks_memory: bool = True


def resumed_members(member_states: Sequence[MemberRun], changes: MemberChanges) -> tuple[ResumedMember, ...]:
    """Return how members go on. Raises ConfigError with what they may not change, each problem once."""
    problems: dict[str, list[str]] = {}
    resumed = []
    for existing in member_states:
        try:
            resumed.append(_resumed_member(existing, changes))
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(f"{existing.member.index:03d}")
    if problems:
        raise ConfigError([f"member {first_few(members)}: {text}" for text, members in problems.items()])
    return tuple(resumed)


def _resumed_member(existing: MemberRun, changes: MemberChanges) -> ResumedMember:
    member, run = existing.member, existing.run
    attempt = next_attempt_number(run, last_attempt(read_events(run)))
    # Whoever still wrote into a removed or renamed run made its folder anew, without what it begins with.
    is_gone = not run.config.exists()
    is_new = member.adopted is not None or is_gone
    if not changes.overrides and not is_new:
        return ResumedMember(member, attempt, num_jobs=existing.num_jobs)
    before = changes.composed.get(member.signature) if is_new else None
    if is_gone and member.adopted is None and run.path.exists():
        raise ConfigError(
            f"{run.path} was removed or renamed, and what was written since lies there alone; remove it, or "
            f"move its checkpoints to where the run is now, then {_made_anew(changes)}"
        )
    if before is None and is_gone:
        what = "" if member.adopted is None else ", which this sweep took over,"
        raise ConfigError(f"{run.path}{what} is gone; {_made_anew(changes)}")
    number = 0 if is_new else attempt
    frozen = config = without_past_faults(before or read_config(run.config), number)
    if changes.overrides:
        step = None if is_new else newest_checkpoint(read_events(run))
        situation = replace(changes.situation, from_step=step or 0)
        config = changed_config(frozen, changes.overrides, situation)
        ways = ResumeChanges(frozen, config, step)
        ways.refuse_other_past(run)
        ways.refuse_jump(changes.accepts_jump)
        if changes.site is not None:
            config = fitted(config, changes.site, checks_memory=changes.checks_memory)
    return ResumedMember(member, number, config, is_new, existing.num_jobs)


def _made_anew(changes: MemberChanges) -> str:
    """Return how a member is made anew that is gone."""
    verb = "run" if changes.site is None else "submit"
    return f"{verb} the sweep again with its own values (`orchestra {verb} -m …`), which makes it anew"


def submit_resumed(resume: SweepResume, command: Sequence[str]) -> tuple[SweepLedger, SubmitOutcome]:
    """Submit a further job for each member; return the sweep's records and what became of the arrays.

    Raises ConfigError when another command is doing the same, `RefusedError` and LaunchError as `hand_over`
    does.
    """
    sweep = resume.sweep
    try:
        # Until the record is written, what was claimed is given back where anything fails.
        with ExitStack() as undo:
            close_to_others((sweep.path, sweep.control, sweep.newest_code()), resume.group())
            open_to_group(resume.group())
            claimed = [take_array(sweep, resume.record)]
            undo.callback(release_arrays, sweep, claimed)
            _take_turns(resume, undo)
            arrays = _planned(resume, claimed)
            record = _written(resume, arrays, command)
            undo.pop_all()
    except OSError as error:
        raise ConfigError(
            f"{sweep.path}: cannot be written: {error.strerror}; nothing was submitted"
        ) from error
    ledger = SweepLedger(sweep, record, resume.attempts)
    return ledger, hand_over(ledger, arrays)


def go_on_here(resume: SweepResume, command: Sequence[str]) -> SweepLedger:
    """Write how members go on that this process is about to train; return the sweep's records.

    Raises ConfigError where they cannot be written.
    """
    sweep = resume.sweep
    try:
        close_to_others((sweep.path, sweep.control, sweep.newest_code()), resume.group())
        open_to_group(resume.group())
        renew_snapshot(resume.code(0))
        record = _written(resume, (), command)
        starter = {key: origin()[key] for key in ("host", "pid", "pid_started")}
        for resumed in resume.members:
            run = sweep.member(resumed.member.index)
            write_record(run, {**read_record(run), **starter}, is_synced=False)
    except OSError as error:
        raise ConfigError(
            f"{sweep.path}: cannot be written: {error.strerror}; nothing was started"
        ) from error
    return SweepLedger(sweep, record)


def _take_turns(resume: SweepResume, undo: ExitStack) -> None:
    """Claim each member's next job. Raises ConfigError where somebody resumes, or resumed, one by itself."""
    now = time.time()
    for resumed in resume.members:
        if resumed.is_new:
            continue
        run = resume.sweep.member(resumed.member.index)
        if (turn := take_turn(run, resumed.num_jobs, now)) is not None:
            undo.callback(turn.unlink, missing_ok=True)
        if turn is None or number_of_jobs(run) != resumed.num_jobs:
            name = f"{resume.sweep.name}/{run.name}"
            raise ConfigError(
                f"{name} is being resumed by another command, and nothing was submitted by this one: look at "
                f"it (`orchestra status {name}`) and try again"
            )


def resumed_arrays(resume: SweepResume) -> list[PlannedArray]:
    """Return the arrays that `submit_resumed` would submit, for a dry run."""
    begin = max((array.number for array in resume.record.arrays), default=-1) + 1
    templates = resume.templates(resume.code(begin))
    return planned_arrays(templates, _numbering(resume), itertools.count(begin))


def _planned(resume: SweepResume, claimed: list[int]) -> list[PlannedArray]:
    def numbers() -> Iterator[int]:
        yield claimed[0]
        for number in array_numbers(resume.sweep, resume.record):
            claimed.append(number)
            yield number

    code = resume.code(claimed[0])
    renew_snapshot(code)
    return planned_arrays(resume.templates(code), _numbering(resume), numbers())


def _numbering(resume: SweepResume) -> Numbering:
    changed = [resumed.config.cluster for resumed in resume.members if resumed.config is not None]
    given = [cluster.array_throttle for cluster in changed if cluster.array_throttle is not None]
    throttle = min(given, default=resume.record.facts.get("array_throttle"))
    return Numbering(resume.sweep.name, user_name(), time.time(), resume.array_size, throttle, resume.living)


def _written(resume: SweepResume, arrays: Sequence[PlannedArray], command: Sequence[str]) -> Sweep:
    """Write all that is to be on disk before sbatch; return the sweep's new record."""
    sweep, record = resume.sweep, resume.record
    jobs = {index: planned.array for planned in arrays for index in planned.array.members}
    for resumed in resume.members:
        index = resumed.member.index
        if resumed.is_new:
            array = jobs.get(index)
            entry = None if array is None else member_intent(array, index, resumed.attempt)
            _make_member(resumed, sweep, record, entry)
        elif resumed.config is not None:
            freeze_config(
                sweep.member(index), resumed.config, resumed.attempt - 1 if resumed.attempt > 0 else None
            )
    made = {resumed.member.index for resumed in resume.members if resumed.is_new}
    members = (replace(member, adopted=None) if member.index in made else member for member in record.members)
    now = {"time": time.time(), "command": list(command), "code_revision": code_revision()}
    if resume.overrides:
        # Whoever submits the same members again finds that these are others now.
        now["overrides"] = list(resume.overrides)
    resumes = [*record.facts.get("resumes", []), now]
    new = replace(
        record,
        members=tuple(members),
        arrays=(*record.arrays, *(planned.array for planned in arrays)),
        facts={**record.facts, "resumes": resumes},
    )
    for planned in arrays:
        sweep.script(planned.array.number).write_text(planned.script())
    write_atomically(sweep.record, to_json(new))
    for planned in arrays:
        record_jobs(sweep, planned.array, resume.attempts, but=made)
    for resumed in resume.members:
        if resumed.config is not None and (resume.overrides or not resumed.is_new):
            _record_change(
                sweep.member(resumed.member.index), resumed.config, {**now, "attempt": resumed.attempt}
            )
    return new


def _make_member(resumed: ResumedMember, sweep: SweepDir, record: Sweep, entry: JobEntry | None) -> None:
    assert resumed.config is not None
    member = PlannedMember(
        resumed.member.index,
        resumed.member.signature,
        record.overrides,
        resumed.member.overrides,
        resumed.config,
        Share(),
    )

    def write(draft: Path, _: Path) -> None:
        # The draft of this one member's folder.
        write_member(member, RunDir(draft), sweep, record, entry)

    run = sweep.member(resumed.member.index)
    if made_as_one(run.path, write, may_rename=False) is None:
        raise ConfigError(f"{run.path} is in the way; remove it")
    share_checkpoints(run, resumed.config)


def _record_change(run: RunDir, config: Config, resume: dict[str, Any]) -> None:
    record = read_record(run)
    resumes = [*(record.get("resumes") or []), resume]
    # sweep.json, which is synced, has what matters.
    write_record(run, {**record, **length_of(config.train), "resumes": resumes}, is_synced=False)
