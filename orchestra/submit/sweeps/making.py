"""Makes a sweep's directory: record, code, scripts and the members' run directories, all at once or not at
all.

It submits nothing. What it writes holds the intent to submit, by whose tokens the jobs are found again.
"""

from __future__ import annotations

import itertools
import json
import secrets
import shutil
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launchers.slurm.settings import asked_cluster
from orchestra.errors import ConfigError
from orchestra.report.state import read_record
from orchestra.rundir import RunDir
from orchestra.submit.claims import write_claim
from orchestra.submit.prepare import RunRequest, made_as_one, origin, write_run
from orchestra.submit.snapshot import take_snapshot
from orchestra.submit.sweeps.arrays import Numbering, PlannedArray, Templates, planned_arrays
from orchestra.submit.sweeps.plan import PlannedMember, SweepPlan, taken
from orchestra.sweepdir import Sweep, SweepArray, SweepDir, to_json

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
