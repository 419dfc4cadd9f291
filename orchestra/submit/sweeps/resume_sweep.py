"""Submits further jobs for members of a sweep that are neither done nor alive (`members.member_states`).

The jobs are new arrays of the same sweep. The members train on in the same run directories, with the code as
it is now. Called by `orchestra resume SWEEP`, and by `orchestra submit -m` where the same sweep exists.
"""

from __future__ import annotations

import itertools
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.schema import Config
from orchestra.config.compose import changed_config
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.recovery.history import last_attempt
from orchestra.run.config_file import read_config
from orchestra.run.events import read_events
from orchestra.run.files import write_atomically
from orchestra.run.paths import RunDir, Sweep, SweepDir, SweepMember, to_json
from orchestra.run.record import read_record
from orchestra.run.stop_requests import user_name
from orchestra.sizes.units import first_few
from orchestra.submit.claims import next_attempt_number, take_turn
from orchestra.submit.code_snapshot import is_snapshot, take_snapshot
from orchestra.submit.hand_over import SubmitOutcome, SweepLedger, hand_over, record_jobs, write_member
from orchestra.submit.job import Share
from orchestra.submit.job_record import JobEntry, member_intent, number_of_jobs, write_member_record
from orchestra.submit.new_run import made_as_one, origin
from orchestra.submit.resume_run import freeze_config, without_past_faults
from orchestra.submit.submission import PlannedMember
from orchestra.submit.sweeps import lock
from orchestra.submit.sweeps.arrays import (
    Numbering,
    PlannedArray,
    Templates,
    planned_arrays,
    template_of,
    with_code,
)
from orchestra.submit.sweeps.members import MemberRun


@dataclass(frozen=True)
class ResumedMember:
    """A member that gets a further job, and how it goes on."""

    member: SweepMember
    # The attempt that it goes on with.
    attempt: int
    # The configuration where overrides change it, or where the run is made anew; None: as it is frozen.
    config: Config | None = None
    # Whether it was another sweep's run, and gets a directory of its own now.
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
    share: Callable[[Config], Share]
    array_size: int

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

    def applied_to(self, config: Config) -> Config:
        """Return a frozen configuration with the changes. Raises ConfigError where it may not change so."""
        return changed_config(config, self.overrides, self.situation) if self.overrides else config


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
    is_new = member.adopted is not None
    if not changes.overrides and not is_new:
        return ResumedMember(member, attempt, num_jobs=existing.num_jobs)
    before = changes.composed.get(member.signature) if is_new else None
    if before is None and not run.path.exists():
        raise ConfigError(
            f"{run.path}, which this sweep took over, is gone; submit the sweep again with its own values "
            f"(`orchestra submit -m …`)"
        )
    before = before or read_config(run.config)
    number = 0 if is_new else attempt
    config = changes.applied_to(without_past_faults(before, number))
    return ResumedMember(member, number, config, is_new, existing.num_jobs)


def submit_resumed(resume: SweepResume, command: Sequence[str]) -> tuple[SweepLedger, SubmitOutcome]:
    """Submit a further job for each member; return the sweep's records and what became of the arrays.

    Raises ConfigError when another command is doing the same, `RefusedError` and LaunchError as `hand_over`
    does.
    """
    sweep, record = resume.sweep, resume.record
    claimed = [lock.take(sweep, record)]
    turns: list[Path] = []
    try:
        _take_turns(resume, turns)
        arrays = _planned(resume, claimed)
        record = _written(resume, arrays, command)
    except BaseException as error:
        lock.release(sweep, claimed)
        for turn in turns:
            turn.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError(
                f"{sweep.path}: cannot be written: {error.strerror}; nothing was submitted"
            ) from error
        raise
    ledger = SweepLedger(sweep, record, {resumed.member.index: resumed.attempt for resumed in resume.members})
    return ledger, hand_over(ledger, arrays)


def _take_turns(resume: SweepResume, turns: list[Path]) -> None:
    """Claim each member's next job. Raises ConfigError where somebody resumes, or resumed, one by itself."""
    now = time.time()
    for resumed in resume.members:
        if resumed.is_new:
            continue
        run = resume.sweep.member(resumed.member.index)
        if (turn := take_turn(run, resumed.num_jobs, now)) is not None:
            turns.append(turn)
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
        for number in lock.numbers(resume.sweep, resume.record):
            claimed.append(number)
            yield number

    code = resume.code(claimed[0])
    _ensure_snapshot(code)
    return planned_arrays(resume.templates(code), _numbering(resume), numbers())


def _ensure_snapshot(code: Path) -> None:
    if code.exists() and is_snapshot(code):
        return
    draft = code.with_name(f".{code.name}.{secrets.token_hex(4)}")
    try:
        take_snapshot(draft)
        # Of a command that ended before it submitted anything.
        shutil.rmtree(code, ignore_errors=True)
        draft.rename(code)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _numbering(resume: SweepResume) -> Numbering:
    throttle = resume.record.facts.get("array_throttle")
    changed = [
        resumed.config.cluster.array_throttle for resumed in resume.members if resumed.config is not None
    ]
    given = [number for number in changed if number is not None]
    return Numbering(
        resume.sweep.name,
        user_name(),
        time.time(),
        resume.array_size,
        min(given) if given else throttle,
    )


def _written(resume: SweepResume, arrays: Sequence[PlannedArray], command: Sequence[str]) -> Sweep:
    """Write all that is to be on disk before sbatch; return the sweep's new record."""
    sweep, record = resume.sweep, resume.record
    jobs = {index: planned.array for planned in arrays for index in planned.array.members}
    for resumed in resume.members:
        index = resumed.member.index
        if resumed.is_new:
            _make_member(resumed, sweep, record, member_intent(jobs[index], index, resumed.attempt))
        elif resumed.config is not None:
            freeze_config(
                sweep.member(index), resumed.config, resumed.attempt - 1 if resumed.attempt > 0 else None
            )
    made = {resumed.member.index for resumed in resume.members if resumed.is_new}
    members = (replace(member, adopted=None) if member.index in made else member for member in record.members)
    now = {"time": time.time(), "command": list(command), "code_revision": origin()["code_revision"]}
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
    attempts = {resumed.member.index: resumed.attempt for resumed in resume.members}
    for planned in arrays:
        record_jobs(sweep, planned.array, attempts, but=made)
    for resumed in resume.members:
        if resumed.config is not None and not resumed.is_new:
            _record_change(
                sweep.member(resumed.member.index), resumed.config, {**now, "attempt": resumed.attempt}
            )
    return new


def _make_member(resumed: ResumedMember, sweep: SweepDir, record: Sweep, entry: JobEntry) -> None:
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

    if made_as_one(sweep.member(resumed.member.index).path, write, may_rename=False) is None:
        raise ConfigError(f"{sweep.member(resumed.member.index).path} is in the way; remove it")


def _record_change(run: RunDir, config: Config, resume: dict[str, Any]) -> None:
    record = read_record(run)
    resumes = [*(record.get("resumes") or []), resume]
    write_member_record(run, {**record, "steps": config.train.steps, "resumes": resumes})
