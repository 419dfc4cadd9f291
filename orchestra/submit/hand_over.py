"""Writes the directory of a submission and hands its jobs to Slurm, each once.

The order is the contract: the directory with scripts, runs, code, claims and the intents to submit, as one
act; then sbatch; then the jobs' ids. Whatever is lost in between, a job is found again by its token. Where
Slurm refuses the first job, nothing is left.

An array that is too large for what a user may submit is cut in halves until a part fits. What Slurm does not
take stays recorded, for a later `orchestra resume`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conf.schema import Config
from launchers import LauncherError, SlurmRefused
from launchers.slurm import sbatch
from launchers.slurm.commands import is_full
from orchestra.errors import ConfigError, LaunchError
from orchestra.run.config_file import write_config
from orchestra.run.control.chosen_alternative import chosen_alternative
from orchestra.run.control.stop_requests import claimed_attempt
from orchestra.run.files import write_atomically
from orchestra.run.paths import RunDir, Sweep, SweepArray, SweepDir, to_json
from orchestra.run.permissions import give_to_group, open_to_group
from orchestra.run.record import jobs_of, read_record, write_record
from orchestra.submit.claims import array_numbers, release_arrays, write_claim
from orchestra.submit.fair.predecessors import record_of
from orchestra.submit.job_record import JobEntry, intent, member_intent, number_of_jobs, record_id
from orchestra.submit.new_run import (
    frozen_config,
    made_as_one,
    name_taken,
    origin,
    share_checkpoints,
    take_plugins,
    take_snapshot,
    write_run,
)
from orchestra.submit.submission import PlannedMember, Submission
from orchestra.submit.sweeps.arrays import PlacedSubmission, PlannedArray, arrays_of

_FIRST_ATTEMPT = 0
_FIRST_JOB = 0
# What sweep.json says beyond what its members' records do.
_OF_THE_SWEEP = ("array_throttle", "resumes")


@dataclass
class SubmitOutcome:
    """What became of the jobs of a submission: the accepted arrays with their ids, and the others."""

    accepted: list[SweepArray] = field(default_factory=list)
    refused: list[SweepArray] = field(default_factory=list)
    # Slurm's words for the limit on the number of jobs; None where all was accepted.
    limit: str | None = None

    @property
    def num_accepted(self) -> int:
        return sum(len(array.members) for array in self.accepted)

    @property
    def num_refused(self) -> int:
        return sum(len(array.members) for array in self.refused)


class RefusedError(ConfigError):
    """Slurm refuses the jobs themselves; `num_accepted` were taken before."""

    def __init__(self, words: str, num_accepted: int) -> None:
        super().__init__(words)
        self.num_accepted = num_accepted


class RunLedger:
    """Writes down what becomes of the job of one run, which begins `attempt`."""

    def __init__(self, run: RunDir, attempt: int = _FIRST_ATTEMPT, num_jobs: int = 1) -> None:
        """`num_jobs`: of which the first that starts trains the run."""
        self.run = run
        self.num_jobs = num_jobs
        self._attempt = attempt

    def script(self, array: SweepArray) -> Path:
        """Return the file that sbatch is given."""
        return self.run.script_of_alternative(array.number)

    def accept(self, array: SweepArray) -> None:
        """Write the id of the accepted job into run.json."""
        assert array.id is not None
        record_id(self.run, array.token, array.id, self._attempt)
        if self.num_jobs > 1 and chosen_alternative(self.run) not in (None, array.number):
            # Another one has begun before this one was known.
            with contextlib.suppress(LauncherError):
                sbatch.cancel([array.id])

    def halves(self, planned: PlannedArray) -> list[PlannedArray]:
        """Return nothing: one job cannot be cut."""
        del planned
        return []

    def release(self, arrays: Sequence[SweepArray]) -> None:
        """The claim of a run's job is its submitter's to give back, whatever the answer is."""

    def kept(self, array: SweepArray) -> str:
        """Return what is kept of a job that Slurm may have or not, and what to do."""
        return (
            f"Slurm may have the job or not. {self.run.path} is kept, with the job's token {array.token}: "
            f"`orchestra status {self.run.name}` finds the job when Slurm answers; do not submit it again "
            f"before"
        )


class SweepLedger:
    """Writes down what becomes of a sweep's arrays; `attempts` are those that members go on with, by index,
    where they are not the first.
    """

    def __init__(self, sweep: SweepDir, record: Sweep, attempts: Mapping[int, int] | None = None) -> None:
        self.sweep = sweep
        self.record = record
        self._attempts = attempts or {}

    def script(self, array: SweepArray) -> Path:
        """Return the file that sbatch is given."""
        return self.sweep.script(array.number)

    def accept(self, array: SweepArray) -> None:
        """Write the id of an accepted array into sweep.json."""
        self._record(array)

    def halves(self, planned: PlannedArray) -> list[PlannedArray]:
        """Write two halves in the place of an array and return them; nothing where it has one task."""
        if len(planned.array.tasks) < 2:
            return []
        number = next(array_numbers(self.sweep, self.record))
        head, rest = planned.split(len(planned.array.tasks) // 2, number)
        self.sweep.script(rest.array.number).write_text(rest.script())
        self.sweep.script(head.array.number).write_text(head.script())
        self._record(head.array, rest.array)
        record_jobs(self.sweep, rest.array, self._attempts, instead_of=planned.array.token)
        return [head, rest]

    def release(self, arrays: Sequence[SweepArray]) -> None:
        """Give the claims of arrays back that are not submitted."""
        release_arrays(self.sweep, [array.number for array in arrays])

    def kept(self, array: SweepArray) -> str:
        """Return what is kept of an array that Slurm may have or not, and what to do."""
        name = self.sweep.name
        return (
            f"Slurm may have array {array.number} of {name} ({len(array.members)} members) or not. "
            f"{self.sweep.path} is kept, with the array's token {array.token}: when Slurm answers, "
            f"`orchestra status {name}` finds what it has, and `orchestra resume {name}` submits the rest"
        )

    def _record(self, *changed: SweepArray) -> None:
        """Write sweep.json with these arrays in the place of those with their numbers."""
        arrays = {array.number: array for array in (*self.record.arrays, *changed)}
        self.record = replace(self.record, arrays=tuple(arrays.values()))
        write_atomically(self.sweep.record, to_json(self.record))


Ledger = RunLedger | SweepLedger


def submit(placed: PlacedSubmission) -> tuple[Ledger, SubmitOutcome]:
    """Make the directory of a submission and submit its jobs; return its records and what became of them.

    The directory is the planned one, or with a made name that is taken the first free one of NAME-2, -3 …
    Raises ConfigError when the directory cannot be made or Slurm refuses the first job, and leaves nothing
    then; LaunchError when it stays unknown whether Slurm has a job: its record then keeps the token.
    """
    ledger, arrays = make(placed)
    try:
        return ledger, hand_over(ledger, arrays)
    except RefusedError as error:
        if error.num_accepted == 0:
            _discard(ledger)
        raise
    finally:
        if isinstance(ledger, RunLedger):
            ledger.run.turn(_FIRST_JOB, 0).unlink(missing_ok=True)


def make(placed: PlacedSubmission) -> tuple[Ledger, list[PlannedArray]]:
    """Write the directory of a submission, and return its records and the jobs that are to be submitted.

    Their claims name this process. Raises ConfigError when a configured name was taken meanwhile, or when
    nothing can be written there.
    """
    submission, planned = placed.submission, placed.place
    made: list[tuple[Ledger, list[PlannedArray]]] = []
    group = submission.members[0].config.run.group
    open_to_group(group)

    def write(draft: Path, path: Path) -> None:
        # What waits for Slurm waits for no process; what trains here is started by this one.
        facts = origin() if submission.is_here else {**origin(), "pid": None, "pid_started": None}
        place = SweepDir(path) if submission.is_sweep else RunDir(path)
        arrays = arrays_of(submission, place, replace(placed.numbering, name=place.name))
        if isinstance(place, SweepDir):
            record = _sweep_record(submission, place, arrays, facts)
            _write_sweep(submission, SweepDir(draft), place, record, arrays)
            made.append((SweepLedger(place, record), arrays))
        else:
            if placed.numbering.following.predecessors:
                facts["after"] = record_of(placed.numbering.following.predecessors)
            _write_run(submission, RunDir(draft), place, facts, arrays)
            made.append((RunLedger(place, num_jobs=len(arrays)), arrays))
        give_to_group(draft, group)

    path = made_as_one(planned.path, write, may_rename=submission.configured_name is None)
    if path is None:
        raise ConfigError(name_taken(planned))
    for member in submission.members:
        if member.adopted is None:
            run = SweepDir(path).member(member.index) if submission.is_sweep else RunDir(path)
            share_checkpoints(run, member.config)
    return made[-1]


def _write_run(
    submission: Submission, draft: RunDir, run: RunDir, facts: dict[str, Any], jobs: Sequence[PlannedArray]
) -> None:
    (member,) = submission.members
    entries = [intent(run.name, planned.array.token, _FIRST_ATTEMPT) for planned in jobs]
    if member.alternatives:
        entries = [{**entry, "alternative": number} for number, entry in enumerate(entries)]
    request = member.request(submission.command)
    write_run(request, draft, run, {**facts, "jobs": entries})
    _write_folders(draft, [request.config])
    for number, (config, _) in enumerate(member.alternatives):
        write_config(draft.config_of_alternative(number), frozen_config(replace(request, config=config), run))
    for planned in jobs:
        draft.script_of_alternative(planned.array.number).write_text(planned.script())
    # Whoever resumes the run meanwhile finds that it is being submitted.
    write_claim(draft.turn(_FIRST_JOB, 0))


def _write_sweep(
    submission: Submission, draft: SweepDir, sweep: SweepDir, record: Sweep, arrays: Sequence[PlannedArray]
) -> None:
    _write_folders(draft, [member.config for member in submission.members])
    tasks = {index: planned.array for planned in arrays for index in planned.array.members}
    for member in submission.members:
        if member.adopted is None:
            array = tasks.get(member.index)
            entry = None if array is None else member_intent(array, member.index, _FIRST_ATTEMPT)
            write_member(member, draft.member(member.index), sweep, record, entry)
    for planned in arrays:
        draft.script(planned.array.number).write_text(planned.script())
        write_claim(draft.claim(planned.array.number))
    draft.record.write_text(to_json(record))


def _write_folders(draft: RunDir | SweepDir, configs: Sequence[Config]) -> None:
    take_snapshot(draft.code)
    take_plugins(configs, draft.plugins)
    draft.job_logs.mkdir(parents=True)
    draft.control.mkdir()


def _sweep_record(
    submission: Submission, sweep: SweepDir, arrays: Sequence[PlannedArray], facts: dict[str, Any]
) -> Sweep:
    created = facts.pop("created")
    return Sweep(
        name=sweep.name,
        signature=submission.signature,
        overrides=submission.overrides,
        members=tuple(member.record for member in submission.members),
        arrays=tuple(planned.array for planned in arrays),
        created=created,
        facts={**facts, "command": list(submission.command), "array_throttle": submission.throttle},
    )


def write_member(
    member: PlannedMember, draft: RunDir, sweep: SweepDir, record: Sweep, entry: JobEntry | None
) -> None:
    """Write the run directory of a sweep's member into the folder `draft`, with the intent to submit it; None
    for one that trains on this machine.
    """
    facts = {key: value for key, value in record.facts.items() if key not in _OF_THE_SWEEP}
    own = {
        "created": record.created,
        "sweep": sweep.name,
        "member": member.index,
        "jobs": [entry] if entry else [],
    }
    request = member.request(record.facts.get("command", ()))
    write_run(request, draft, sweep.member(member.index), {**facts, **own})
    # Commands may be the first to write there, with another umask than the group's.
    for folder in (draft.control, draft.events):
        folder.mkdir()


def record_jobs(
    sweep: SweepDir,
    array: SweepArray,
    attempts: Mapping[int, int],
    instead_of: str | None = None,
    but: Container[int] = (),
) -> None:
    """Write the intent to submit an array into its members' records; `attempts` are theirs by index.

    `instead_of` is the token of an intent that came to nothing and is dropped. The members in `but` have it.
    """
    for index in array.members:
        if index in but:
            continue
        run = sweep.member(index)
        record = read_record(run)
        entry = member_intent(array, index, attempts.get(index, _FIRST_ATTEMPT))
        kept = [job for job in jobs_of(record) if instead_of is None or job.get("token") != instead_of]
        # sweep.json, which is synced, has what matters.
        write_record(run, {**record, "jobs": [*kept, entry]}, is_synced=False)


def hand_over(ledger: Ledger, arrays: Sequence[PlannedArray]) -> SubmitOutcome:
    """Submit jobs that are claimed and recorded, and return what became of them.

    What was accepted is recorded whatever happens next. Raises RefusedError when Slurm refuses a job for what
    it is, LaunchError when it stays unknown whether Slurm has one.
    """
    outcome = SubmitOutcome()
    waiting = list(arrays)
    # The last array of each lane.
    newest: dict[int | None, tuple[str, ...]] = {}
    while waiting:
        planned, *others = waiting
        after = newest.get(planned.lane, planned.after)
        options = [f"--dependency=afterany:{':'.join(after)}"] if after else []
        try:
            job = sbatch.submit(ledger.script(planned.array), planned.array.token, options)
        except SlurmRefused as error:
            halves = ledger.halves(planned) if is_full(str(error)) else []
            if halves:
                waiting = [*halves, *others]
                continue
            outcome.refused += [waits.array for waits in waiting]
            ledger.release(outcome.refused)
            if is_full(str(error)) and isinstance(ledger, SweepLedger):
                outcome.limit = str(error)
                return outcome
            raise RefusedError(_refusal(ledger, outcome, str(error)), outcome.num_accepted) from error
        except LauncherError as error:
            ledger.release([waits.array for waits in others])
            raise LaunchError(f"{error}: {_unknown(ledger, outcome, planned.array)}") from error
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):
                unknown = _unknown(ledger, outcome, planned.array)
                sys.stderr.write(f"\ninterrupted while Slurm was asked: {unknown}\n")
            raise
        # A lost answer that was found in the queue: 12_[0-99].
        accepted = replace(planned.array, id=job.partition("_")[0])
        outcome.accepted.append(accepted)
        if planned.lane is not None:
            newest[planned.lane] = (job.partition("_")[0],)
        ledger.accept(accepted)
        waiting = others
    return outcome


def _refusal(ledger: Ledger, outcome: SubmitOutcome, why: str) -> str:
    if not isinstance(ledger, SweepLedger):
        others = ", ".join(str(array.id) for array in outcome.accepted)
        ends = f"`orchestra cancel {ledger.run.name}`"
        before = f"; job {others} was submitted before and may train, {ends} ends that" if others else ""
        return f"Slurm refuses the job: {why}{before}"
    accepted, name = outcome.num_accepted, ledger.sweep.name
    before = f"; {accepted} members were submitted before, see `orchestra status {name}`"
    return f"Slurm refuses the jobs: {why}{before if accepted else ''}"


def _unknown(ledger: Ledger, outcome: SubmitOutcome, array: SweepArray) -> str:
    accepted = outcome.num_accepted
    before = f"{accepted} members were submitted before. " if accepted else ""
    return f"{before}{ledger.kept(array)}"


def _discard(ledger: Ledger) -> None:
    """Remove a submission that Slurm took nothing of, unless somebody went on with one of its runs."""
    if isinstance(ledger, RunLedger):
        path, runs = ledger.run.path, [ledger.run]
    else:
        members = [member for member in ledger.record.members if member.adopted is None]
        path, runs = ledger.sweep.path, [ledger.record.run(ledger.sweep, member) for member in members]
    num_jobs = ledger.num_jobs if isinstance(ledger, RunLedger) else 1
    if all(number_of_jobs(run) == num_jobs and claimed_attempt(run) is None for run in runs):
        shutil.rmtree(path, ignore_errors=True)
