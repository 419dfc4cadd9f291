"""Makes a run ready for a Slurm job and submits it, once. It trains nothing and waits for nothing.

The order is the contract: script, then run directory with code and the intent to submit, then sbatch, then
the job's id. Whatever is lost in between, the job is found again by its token.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from launchers.launch_errors import LauncherError, SlurmRefused
from launchers.slurm import batch_script, sbatch
from launchers.slurm.commands import asked_cluster
from orchestra.errors import ConfigError, LaunchError
from orchestra.report.run_state import read_record
from orchestra.run.events import EventWriter
from orchestra.run.paths import RunDir
from orchestra.run.stop_requests import claimed_attempt, user_name
from orchestra.submit.claims import write_claim, write_whole
from orchestra.submit.code_snapshot import take_snapshot
from orchestra.submit.job import Share, batch_job, new_token
from orchestra.submit.new_run import RunRequest, frozen_config, prepare

_FIRST_ATTEMPT = 0
_FIRST_JOB = 0


@dataclass(frozen=True)
class PlannedJob:
    """What is about to be submitted: the script for the run directory that was planned, and its token."""

    request: RunRequest
    run: RunDir
    token: str
    share: Share

    def script(self, run: RunDir | None = None) -> str:
        """Return the batch script, word for word; for another directory where the planned one was taken."""
        place = run or self.run
        return batch_script.rendered(
            batch_job(frozen_config(self.request, place), place, self.token, self.share)
        )


def planned_job(request: RunRequest, run: RunDir, share: Share) -> PlannedJob:
    """Return the job of a run. Starts and writes nothing."""
    return PlannedJob(request, run, new_token(), share)


@dataclass(frozen=True)
class Submitted:
    """A run and the job that trains it."""

    run: RunDir
    job: str


def submit(plan: PlannedJob) -> Submitted:
    """Write the run directory and submit its job.

    Raises ConfigError when the directory cannot be made or Slurm refuses the job, and leaves nothing then;
    LaunchError when it stays unknown whether Slurm has the job: the run's record then keeps the token.
    """
    run = prepare(plan.request, plan.run, lambda draft, place: _added(plan, draft, place))
    if run != plan.run:
        plan = replace(plan, run=run)
    try:
        job = sbatch.submit(run.batch_script, plan.token)
    except SlurmRefused as error:
        _discard(run, plan.token)
        raise ConfigError(f"Slurm refuses the job: {error}") from error
    except LauncherError as error:
        raise LaunchError(f"{error}: {_unknown(run, plan.token)}") from error
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"\ninterrupted while Slurm was asked: {_unknown(run, plan.token)}\n")
        raise
    finally:
        run.turn(_FIRST_JOB, 0).unlink(missing_ok=True)
    _record_job(run, plan.token, job)
    return Submitted(run, job)


def _unknown(run: RunDir, token: str) -> str:
    return (
        f"Slurm may have the job or not. {run.path} is kept, with the job's token {token}: `orchestra status "
        f"{run.name}` finds the job when Slurm answers; do not submit it again before"
    )


def _discard(run: RunDir, token: str) -> None:
    """Remove a run whose job was refused, unless somebody went on with it meanwhile."""
    jobs = read_record(run).get("jobs")
    is_ours = isinstance(jobs, list) and [it.get("token") for it in jobs if isinstance(it, dict)] == [token]
    if is_ours and claimed_attempt(run) is None:
        shutil.rmtree(run.path, ignore_errors=True)


def _added(plan: PlannedJob, draft: RunDir, run: RunDir) -> dict[str, Any]:
    """Write the code and the script into the draft; return the intent to submit, for run.json."""
    take_snapshot(draft.code)
    draft.job_logs.mkdir(parents=True)
    draft.batch_script.write_text(plan.script(run))
    draft.control.mkdir()
    # Whoever resumes the run meanwhile finds that it is being submitted.
    write_claim(draft.turn(_FIRST_JOB, 0))
    intent = {
        "token": plan.token,
        "id": None,
        "name": run.name,
        "user": user_name(),
        "submitted": time.time(),
        "attempt": _FIRST_ATTEMPT,
        "task": None,
        "after": None,
        "cluster": asked_cluster(),
    }
    # No process of this machine leads it.
    return {"pid": None, "pid_started": None, "jobs": [intent]}


def _record_job(run: RunDir, token: str, job: str) -> None:
    """Write the job's id into run.json and the events. Where that fails the token finds the job."""
    record = read_record(run)
    for entry in record.get("jobs", []):
        if entry.get("token") == token:
            entry["id"] = job
    try:
        write_whole(run.record, json.dumps(record, indent=2) + "\n")
        # A writer of its own: the job may be running by now.
        EventWriter(run, f"submit.{job}", _FIRST_ATTEMPT).write("submitted", job=job, token=token)
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"warning: {run.record}: job {job} could not be recorded: {error.strerror}\n")
