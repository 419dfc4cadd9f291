"""What a run's record says of its Slurm jobs: the intent before sbatch is called, the job's id after.

An intent holds a token that the job carries in its comment. Whatever is lost between the two, the job is
found again by it. Written by the commands that submit, and by the leading agent of a job that submits its run
again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from launchers.slurm.commands import asked_cluster
from orchestra.run.events import EventWriter
from orchestra.run.files import write_atomically
from orchestra.run.paths import RunDir, SweepArray
from orchestra.run.record import read_record
from orchestra.run.stop_requests import user_name

JobEntry = dict[str, Any]


def intent(
    run: RunDir,
    token: str,
    attempt: int,
    *,
    task: int | None = None,
    after: str | None = None,
    cluster: str | None = None,
) -> JobEntry:
    """Return what run.json says of a job before it is submitted; without `cluster` Slurm is asked for it.

    `attempt`: the one that the job is to begin. `task`: its number in the array that the run is a task of.
    `after`: the job that it follows.
    """
    return {
        "token": token,
        "id": None,
        "name": run.name,
        "user": user_name(),
        "submitted": time.time(),
        "attempt": attempt,
        "task": task,
        "after": after,
        "cluster": cluster or asked_cluster(),
    }


def member_intent(array: SweepArray, index: int, attempt: int) -> JobEntry:
    """Return what the run.json of a sweep's member says of the task that is to train it; the array's id is in
    sweep.json, under the same token.
    """
    return {
        "token": array.token,
        "id": None,
        "name": array.name,
        "user": array.user,
        "submitted": array.submitted,
        "attempt": attempt,
        "task": index - array.first,
        "after": None,
        "cluster": asked_cluster(),
    }


def jobs_of(record: Mapping[str, Any]) -> list[JobEntry]:
    """Return what a run's record says of its jobs, the newest last."""
    jobs = record.get("jobs")
    return [entry for entry in jobs if isinstance(entry, dict)] if isinstance(jobs, list) else []


def number_of_jobs(run: RunDir) -> int:
    """Return how many jobs were submitted for a run, intents included."""
    jobs = read_record(run).get("jobs")
    return len(jobs) if isinstance(jobs, list) else 0


def newest_entry(run: RunDir) -> JobEntry | None:
    """Return what run.json says of the job that was submitted last; None where none was."""
    jobs = read_record(run).get("jobs")
    return jobs[-1] if isinstance(jobs, list) and jobs and isinstance(jobs[-1], dict) else None


def add_intent(run: RunDir, entry: JobEntry) -> None:
    """Write an intent into run.json, on the disk before sbatch is called. Raises OSError."""
    _change_jobs(run, lambda jobs: [*jobs, entry])


def drop_job(run: RunDir, key: str, value: str) -> None:
    """Take the job whose `key` (`id` or `token`) is `value` off run.json, if that can be written."""
    with contextlib.suppress(OSError):
        _change_jobs(run, lambda jobs: [entry for entry in jobs if entry.get(key) != value])


def record_id(run: RunDir, token: str, job: str, attempt: int) -> None:
    """Write a job's id into run.json and the events. Where that fails the token finds the job."""

    def numbered(jobs: list[JobEntry]) -> list[JobEntry]:
        return [{**entry, "id": job} if entry.get("token") == token else entry for entry in jobs]

    try:
        _change_jobs(run, numbered)
        # A writer of its own: the job may be running by now.
        EventWriter(run, f"submit.{job}", attempt).write("submitted", job=job, token=token)
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"warning: {run.record}: job {job} could not be recorded: {error.strerror}\n")


def _change_jobs(run: RunDir, change: Callable[[list[JobEntry]], list[JobEntry]]) -> None:
    record = read_record(run)
    record["jobs"] = change(jobs_of(record))
    write_atomically(run.record, json.dumps(record, indent=2) + "\n")


def write_member_record(run: RunDir, record: Mapping[str, Any]) -> None:
    """Replace the record of a sweep's member as one act, without waiting for the disk: sweep.json has what
    matters.
    """
    draft = run.record.with_name(f".{run.record.name}.{secrets.token_hex(4)}")
    draft.write_text(json.dumps(record, indent=2) + "\n")
    draft.replace(run.record)
