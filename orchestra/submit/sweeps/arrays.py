"""Which members of a sweep go into which Slurm array, and each array's script. Pure: it asks and writes
nothing.

Members whose batch scripts are equal share an array. A template is such a script without what differs from
array to array: its tasks, its token and the index of its first member.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conf.schema import Config
from launchers.launch_errors import LauncherError, SlurmRefused
from launchers.slurm import sbatch
from launchers.slurm.batch_script import rendered
from launchers.slurm.commands import asked_cluster, is_full
from orchestra.errors import ConfigError, LaunchError
from orchestra.report.run_state import read_record
from orchestra.run.paths import RunDir, Sweep, SweepArray, SweepDir, to_json
from orchestra.submit.claims import write_claim, write_whole
from orchestra.submit.code_snapshot import take_snapshot
from orchestra.submit.job import NODE_MODULE, Share, array_job, new_token
from orchestra.submit.new_run import RunRequest, made_as_one, origin, write_run
from orchestra.submit.sweeps import lock
from orchestra.submit.sweeps.sweep_plan import PlannedMember, SweepPlan, taken

_TASKS = re.compile(r"^#SBATCH --array=.*$", re.MULTILINE)
_COMMENT = re.compile(r"^#SBATCH --comment=.*$", re.MULTILINE)
_NODES = re.compile(r"^#SBATCH --nodes=(\d+)$", re.MULTILINE)
# On the line of srun, and on that of what is done where it failed.
_FIRST = re.compile(rf"({re.escape(NODE_MODULE)}(?:\.\w+)? .*--first )\d+(?= |$)", re.MULTILINE)


class Templates:
    """Renders templates for one sweep, each kind of job once."""

    def __init__(self, sweep: SweepDir) -> None:
        self._sweep = sweep
        self._rendered: dict[str, str] = {}

    def of(self, config: Config, share: Share) -> str:
        """Return the template of the member with this configuration."""
        job = array_job(config, self._sweep, "", 0, "0", share)
        key = repr(job)
        if key not in self._rendered:
            self._rendered[key] = template_of(rendered(job))
        return self._rendered[key]


def template_of(script: str) -> str:
    """Return an array's script without its tasks, its token and its first member."""
    return _filled(script, "0", "", 0)


def with_code(template: str, sweep: SweepDir, code: Path) -> str:
    """Return a template whose jobs import the packages from another of the sweep's snapshots."""
    folder = re.escape(str(sweep.path))
    return re.sub(rf"{folder}/code(\.array-\d+)?(?![\w.-])", lambda _: str(code), template)


def _filled(script: str, tasks: str, token: str, first: int) -> str:
    script = _TASKS.sub(f"#SBATCH --array={tasks}", script, count=1)
    script = _COMMENT.sub(f"#SBATCH --comment={token}", script, count=1)
    return _FIRST.sub(rf"\g<1>{first}", script)


@dataclass(frozen=True)
class PlannedArray:
    """An array that is to be submitted, and what its script is made of."""

    array: SweepArray
    template: str
    # How many of its tasks may run at a time.
    throttle: int | None = None

    def script(self) -> str:
        """Return its batch script, word for word."""
        limit = "" if self.throttle is None else f"%{self.throttle}"
        tasks = f"{task_ranges(self.array.tasks)}{limit}"
        return _filled(self.template, tasks, self.array.token, self.array.first)

    def split(self, num_tasks: int, number: int) -> tuple[PlannedArray, PlannedArray]:
        """Return the array with its first tasks alone, and a new one of this number with the others."""
        tasks = self.array.tasks
        head = replace(self.array, tasks=tasks[:num_tasks])
        rest = replace(self.array, number=number, token=new_token(), tasks=tasks[num_tasks:])
        return replace(self, array=head), replace(self, array=rest)


@dataclass(frozen=True)
class Numbering:
    """What is the same for all arrays that one command submits."""

    name: str
    user: str
    # Unix seconds.
    now: float
    # Tasks that one array may hold.
    array_size: int
    # Jobs of the sweep that may run at a time.
    throttle: int | None = None


def planned_arrays(
    templates: Mapping[int, str], numbering: Numbering, numbers: Iterator[int]
) -> list[PlannedArray]:
    """Return the arrays that train members, given the template of each by the member's index.

    Equal templates go to one array; one that would be too large is split. `numbers` are the arrays' own.
    """
    groups: dict[str, list[int]] = {}
    for index in sorted(templates):
        groups.setdefault(templates[index], []).append(index)
    parts = [
        (template, part)
        for template, members in groups.items()
        for part in _parts(members, numbering.array_size)
    ]
    total = len(templates)
    return [
        PlannedArray(
            SweepArray(
                number=next(numbers),
                token=new_token(),
                first=members[0],
                tasks=tuple(index - members[0] for index in members),
                name=numbering.name,
                user=numbering.user,
                submitted=numbering.now,
            ),
            template,
            _share_of(numbering.throttle, len(members), total),
        )
        for template, members in parts
    ]


def _share_of(throttle: int | None, members: int, total: int) -> int | None:
    """Several arrays share what the sweep may run at a time, each at least one."""
    return None if throttle is None else max(1, throttle * members // total)


def _parts(members: Sequence[int], array_size: int) -> Iterator[list[int]]:
    """Cut members into pieces whose task numbers, counted from a piece's first member, stay below the
    size.
    """
    part: list[int] = []
    for index in members:
        if part and index - part[0] >= array_size:
            yield part
            part = []
        part.append(index)
    if part:
        yield part


def task_ranges(tasks: Sequence[int]) -> str:
    """Return ascending task numbers as sbatch takes them: 0-3,7 or 0-8:2."""
    words = []
    position = 0
    while position < len(tasks):
        end = _end_of_run(tasks, position)
        first, last = tasks[position], tasks[end]
        step = tasks[position + 1] - first if end > position else 1
        words.append(str(first) if end == position else f"{first}-{last}" + (f":{step}" if step > 1 else ""))
        position = end + 1
    return ",".join(words)


def _end_of_run(tasks: Sequence[int], begin: int) -> int:
    """Return the place of the last number that follows in equal steps; two with a gap are no run."""
    if begin + 1 >= len(tasks):
        return begin
    step = tasks[begin + 1] - tasks[begin]
    end = begin + 1
    while end + 1 < len(tasks) and tasks[end + 1] - tasks[end] == step:
        end += 1
    return end if step == 1 or end - begin > 1 else begin


def num_nodes(script: str) -> int | None:
    """Return the nodes that each of a script's jobs gets; None where it does not say."""
    found = _NODES.search(script)
    return None if found is None else int(found[1])


# Makes a sweep's directory: record, code, scripts and the members' run directories, all at once or not at
# all.
#
# It submits nothing. What it writes holds the intent to submit, by whose tokens the jobs are found again.


_FIRST_ATTEMPT = 0
# What sweep.json says beyond what its members' records do.
_OF_THE_SWEEP = ("array_throttle", "resumes")


def arrays_of(plan: SweepPlan, sweep: SweepDir, numbering: Numbering) -> list[PlannedArray]:
    """Return the arrays that train the members which the sweep does not adopt."""
    templates = Templates(sweep)
    wanted = {it.index: templates.of(it.config, it.share) for it in plan.members if it.adopted is None}
    return planned_arrays(wanted, numbering, itertools.count())


def make_sweep(
    plan: SweepPlan, planned: SweepDir, numbering: Numbering
) -> tuple[SweepDir, Sweep, list[PlannedArray]]:
    """Write the sweep's directory, and return it with its record and the arrays that are to be submitted.

    They are claimed for this process. It is `planned`, or with a made name that is taken the first free one
    of `planned`-2, -3 … Raises ConfigError when a configured name was taken meanwhile, or when nothing can be
    written there.
    """
    made: list[tuple[Sweep, list[PlannedArray]]] = []

    def write(draft: Path, place: Path) -> None:
        sweep = SweepDir(place)
        arrays = arrays_of(plan, sweep, replace(numbering, name=sweep.name))
        record = _record(plan, sweep, arrays, origin())
        _write(plan, SweepDir(draft), sweep, record, arrays)
        made.append((record, arrays))

    path = made_as_one(planned.path, write, may_rename=plan.configured_name is None)
    if path is None:
        raise ConfigError(taken(planned))
    return SweepDir(path), *made[-1]


def _record(plan: SweepPlan, sweep: SweepDir, arrays: Sequence[PlannedArray], facts: dict[str, Any]) -> Sweep:
    created = facts.pop("created")
    # No process of this machine leads it.
    facts.update(pid=None, pid_started=None)
    return Sweep(
        name=sweep.name,
        signature=plan.signature,
        overrides=plan.overrides,
        members=tuple(member.record for member in plan.members),
        arrays=tuple(it.array for it in arrays),
        created=created,
        facts={**facts, "command": list(plan.command), "array_throttle": plan.throttle},
    )


def _write(
    plan: SweepPlan, draft: SweepDir, sweep: SweepDir, record: Sweep, arrays: Sequence[PlannedArray]
) -> None:
    take_snapshot(draft.code)
    draft.job_logs.mkdir(parents=True)
    draft.control.mkdir()
    jobs = {index: it.array for it in arrays for index in it.array.members}
    for member in plan.members:
        if member.adopted is None:
            job = job_entry(jobs[member.index], member.index)
            write_member(member, draft.member(member.index), sweep, record, job)
    for it in arrays:
        draft.script(it.array.number).write_text(it.script())
        write_claim(draft.claim(it.array.number))
    draft.record.write_text(to_json(record))


def write_member(
    member: PlannedMember, draft: RunDir, sweep: SweepDir, record: Sweep, job: dict[str, Any]
) -> None:
    """Write a member's run directory into the folder `draft`, with the intent to submit it."""
    request = RunRequest(member.config, member.signature, member.overrides, record.facts.get("command", ()))
    own = {"sweep": sweep.name, "member": member.index, "jobs": [job]}
    facts = {key: value for key, value in record.facts.items() if key not in _OF_THE_SWEEP}
    facts["created"] = record.created
    write_run(request, draft, sweep.member(member.index), facts, lambda *_: own)


def job_entry(array: SweepArray, index: int, attempt: int = _FIRST_ATTEMPT) -> dict[str, Any]:
    """Return what a member's run.json says of the job that is to train it."""
    return {
        "token": array.token,
        # The array's, which sweep.json has under the token.
        "id": None,
        "name": array.name,
        "user": array.user,
        "submitted": array.submitted,
        "attempt": attempt,
        "task": index - array.first,
        "after": None,
        "cluster": asked_cluster(),
    }


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
        before = [it for it in record.get("jobs") or [] if isinstance(it, dict)]
        entry = job_entry(array, index, attempts.get(index, _FIRST_ATTEMPT))
        kept = [it for it in before if instead_of is None or it.get("token") != instead_of]
        write_quickly(run, {**record, "jobs": [*kept, entry]})


def write_quickly(run: RunDir, record: Mapping[str, Any]) -> None:
    """Replace a member's record as one act, without waiting for the disk: sweep.json has what matters."""
    draft = run.record.with_name(f".{run.record.name}.{secrets.token_hex(4)}")
    draft.write_text(json.dumps(record, indent=2) + "\n")
    draft.replace(run.record)


def remove(sweep: SweepDir) -> None:
    """Remove a sweep of which Slurm took nothing."""
    shutil.rmtree(sweep.path, ignore_errors=True)


# Submits a sweep's arrays, each once, and writes their ids down. The intents are on disk before it begins.
#
# An array that is too large for what a user may submit is cut in halves until a part fits. What Slurm does
# not take stays recorded, for a later `orchestra resume`.


@dataclass
class Outcome:
    """What became of a sweep's arrays: the accepted ones with their ids, and the others."""

    record: Sweep
    accepted: list[SweepArray] = field(default_factory=list)
    refused: list[SweepArray] = field(default_factory=list)
    # Slurm's words for the limit; None where all was accepted.
    limit: str | None = None

    @property
    def num_refused(self) -> int:
        return sum(len(array.tasks) for array in self.refused)


class RefusedError(ConfigError):
    """Slurm refuses the jobs themselves; `num_accepted` were taken before."""

    def __init__(self, words: str, num_accepted: int) -> None:
        super().__init__(words)
        self.num_accepted = num_accepted


def send(
    sweep: SweepDir, record: Sweep, arrays: Sequence[PlannedArray], attempts: Mapping[int, int] | None = None
) -> Outcome:
    """Submit arrays that are claimed and recorded, and return what became of them.

    `attempts` are those that members go on with, by index, where they are not the first. What was accepted is
    recorded whatever happens next. Raises RefusedError when Slurm refuses a job for what it is, LaunchError
    when it stays unknown whether Slurm has an array.
    """
    sender = _Sender(sweep, Outcome(record), attempts or {})
    waiting = list(arrays)
    while waiting:
        waiting = sender.after(waiting[0], waiting[1:])
    return sender.outcome


class _Sender:
    def __init__(self, sweep: SweepDir, outcome: Outcome, attempts: Mapping[int, int]) -> None:
        self.outcome = outcome
        self._sweep = sweep
        self._attempts = attempts

    def after(self, planned: PlannedArray, others: list[PlannedArray]) -> list[PlannedArray]:
        """Try an array; return those that are to be tried next, none where trying on makes no sense."""
        array = planned.array
        try:
            job = sbatch.submit(self._sweep.script(array.number), array.token)
        except SlurmRefused as error:
            if not is_full(str(error)):
                self._give_up([planned, *others])
                raise RefusedError(self._refusal(str(error)), self._num_accepted()) from error
            if len(array.tasks) > 1:
                return [*self._halves(planned), *others]
            self._give_up([planned, *others])
            self.outcome.limit = str(error)
            return []
        except LauncherError as error:
            self._give_up(others)
            raise LaunchError(self._unknown(array, str(error))) from error
        # A lost answer that was found in the queue: 12_[0-99].
        accepted = replace(array, id=job.partition("_")[0])
        self.outcome.accepted.append(accepted)
        self._record(accepted)
        return others

    def _halves(self, planned: PlannedArray) -> list[PlannedArray]:
        number = next(lock.numbers(self._sweep, self.outcome.record))
        head, rest = planned.split(len(planned.array.tasks) // 2, number)
        self._sweep.script(rest.array.number).write_text(rest.script())
        self._sweep.script(head.array.number).write_text(head.script())
        self._record(head.array, rest.array)
        record_jobs(self._sweep, rest.array, self._attempts, instead_of=planned.array.token)
        return [head, rest]

    def _record(self, *changed: SweepArray) -> None:
        """Write sweep.json with these arrays in the place of those with their numbers."""
        arrays = {array.number: array for array in (*self.outcome.record.arrays, *changed)}
        self.outcome.record = replace(self.outcome.record, arrays=tuple(arrays.values()))
        write_whole(self._sweep.record, to_json(self.outcome.record))

    def _give_up(self, planned: Sequence[PlannedArray]) -> None:
        self.outcome.refused += [it.array for it in planned]
        lock.release(self._sweep, [it.array.number for it in planned])

    def _num_accepted(self) -> int:
        return sum(len(array.tasks) for array in self.outcome.accepted)

    def _refusal(self, why: str) -> str:
        accepted, name = self._num_accepted(), self._sweep.name
        before = f"; {accepted} members were submitted before, see `orchestra status {name}`"
        return f"Slurm refuses the jobs: {why}{before if accepted else ''}"

    def _unknown(self, array: SweepArray, why: str) -> str:
        accepted, name = self._num_accepted(), self._sweep.name
        before = f"{accepted} members were submitted before; " if accepted else ""
        return (
            f"{why}: Slurm may have array {array.number} of {name} ({len(array.tasks)} members) or not. "
            f"{before}{self._sweep.path} is kept, with the array's token {array.token}: when Slurm answers, "
            f"`orchestra status {name}` finds what it has, and `orchestra resume {name}` submits the rest"
        )
