"""A further Slurm job for a run that exists: recorded as an intent, submitted, its number recorded.

For a run that goes on by itself and for `orchestra resume` alike. Nothing is trained and waited for here.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from launchers.errors import LauncherError, SlurmRefused
from launchers.slurm import sbatch
from launchers.slurm.settings import asked_cluster
from launchers.slurm.task import JobTask
from orchestra.control import user_name
from orchestra.errors import LaunchError
from orchestra.events import EventWriter
from orchestra.report.state import read_record
from orchestra.rundir import RunDir
from orchestra.submit.claims import write_whole
from orchestra.submit.job import new_token


def chain(run: RunDir, task: JobTask, attempt: int, script: str | None) -> str:
    """Submit a run's job again, to start when this one is over; return the new job's id, in
    an array with the task's number. *Node 0 only*.

    `script` is the one that this job was submitted with (None: the run's own); of an array this task alone is
    submitted. Raises LauncherError where Slurm refuses or stays silent, OSError where the intent cannot be
    recorded.
    """
    token, member = new_token(), task.array_task
    options = [f"--comment={token}", f"--dependency=afterany:{task.job}"]
    if member is not None:
        options.append(f"--array={member}")
    place = run.batch_script if script is None else Path(script)
    entry = intent(run, token, attempt, task=member, after=task.job, cluster=task.cluster)
    job = submit_job(run, place, entry, options)
    return job if member is None else f"{job}_{member}"


def intent(
    run: RunDir,
    token: str,
    attempt: int,
    *,
    task: int | None = None,
    after: str | None = None,
    cluster: str | None = None,
) -> dict[str, Any]:
    """Return what run.json says of a job before it is submitted; without `cluster` Slurm is asked for it."""
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


def submit_job(run: RunDir, script: Path, entry: dict[str, Any], options: list[str] | None = None) -> str:
    """Record the intent, submit the script once, record the job's id and return it.

    Raises SlurmRefused, the intent taken back; LaunchError when it stays unknown whether Slurm has the job:
    the intent then keeps its token. OSError when the intent cannot be recorded, and nothing was submitted.
    """
    token = str(entry["token"])
    _change_jobs(run, lambda jobs: [*jobs, entry])
    try:
        job = sbatch.submit(script, token, options or [])
    except SlurmRefused:
        with contextlib.suppress(OSError):
            _change_jobs(run, lambda jobs: [it for it in jobs if it.get("token") != token])
        raise
    except LauncherError as error:
        raise LaunchError(
            f"{error}: Slurm may have the job or not; its token {token} is recorded in {run.record}: "
            f"`orchestra status {run.name}` finds the job when Slurm answers; do not submit it again before"
        ) from error
    _record_id(run, token, job, int(entry["attempt"]))
    return job


def _record_id(run: RunDir, token: str, job: str, attempt: int) -> None:
    """Write the job's id into run.json and the events. Where that fails the token finds the job."""

    def numbered(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**it, "id": job} if it.get("token") == token else it for it in jobs]

    try:
        _change_jobs(run, numbered)
        # A writer of its own: the job may be running by now.
        EventWriter(run, f"submit.{job}", attempt).write("submitted", job=job, token=token)
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"warning: {run.record}: job {job} could not be recorded: {error.strerror}\n")


def _change_jobs(run: RunDir, change: Any) -> None:
    record = read_record(run)
    jobs = record.get("jobs")
    record["jobs"] = change([it for it in jobs if isinstance(it, dict)] if isinstance(jobs, list) else [])
    write_whole(run.record, json.dumps(record, indent=2) + "\n")
