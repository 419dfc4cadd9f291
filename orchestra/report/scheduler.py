"""Slurm's word on runs, after their own records: who waits, who is being started, who was ended silently.

What a run wrote itself comes first; then the queue; then the accounting. Where Slurm cannot be asked nothing
changes. It asks Slurm once for all runs, and only those that it may know more about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launchers.slurm.states import GONE, RUNNING, UNKNOWN, WAITING, JobState, SubmittedJob, job_states
from orchestra.events import is_number
from orchestra.report.state import RunState, read_record
from orchestra.rundir import RunDir

# Own records that leave open what became of the job.
_OPEN = ("not started", "running", "unknown", "died")
# A verdict that stands; yet the same job may wait to be started again.
_MAY_WAIT_AGAIN = ("stopped", "failed", "interrupted")


def newest_job(run: RunDir) -> SubmittedJob | None:
    """Return the job that was submitted last for a run; None for a run that never was."""
    jobs = read_record(run).get("jobs")
    entry = jobs[-1] if isinstance(jobs, list) and jobs and isinstance(jobs[-1], dict) else {}
    token, job, name, user = (entry.get(key) for key in ("token", "id", "name", "user"))
    submitted = entry.get("submitted")
    texts = isinstance(token, str) and isinstance(name, str) and isinstance(user, str)
    if not texts or not is_number(submitted) or not (job is None or isinstance(job, str)):
        return None
    return SubmittedJob(str(token), job, str(name), str(user), float(submitted))


def with_scheduler(runs: Sequence[RunDir], states: Sequence[RunState]) -> tuple[list[RunState], list[str]]:
    """Return the states with Slurm's word where it says more, and why it could not be asked if it could not.

    `states` are those of `runs`, from their own records.
    """
    jobs = {
        index: job
        for index, state in enumerate(states)
        if state.state in (*_OPEN, *_MAY_WAIT_AGAIN) and (job := newest_job(runs[index])) is not None
    }
    wanted = {job.token for index, job in jobs.items() if states[index].state in _OPEN}
    words, problems = job_states(list(jobs.values()), past=wanted)
    told = list(states)
    for index, job in jobs.items():
        told[index] = _told(states[index], job, words[job.token])
    return told, problems


def _told(own: RunState, job: SubmittedJob, word: JobState) -> RunState:
    state = replace(own, job=word.job, job_state=word.state)
    if word.state in WAITING:
        return replace(state, state="queued", cause=word.reason or None, eta_s=None)
    if own.state not in _OPEN or word.state == UNKNOWN:
        return state
    if word.state in RUNNING:
        return replace(state, state="starting" if own.state == "not started" else "running")
    return replace(state, state=_end(own, job, word), cause=_cause(job, word), eta_s=None)


def _end(own: RunState, job: SubmittedJob, word: JobState) -> str:
    if own.state != "not started":
        return "died"
    if job.job is None and word.state == GONE:
        return "not submitted"
    return "cancelled" if word.state == "CANCELLED" else "died"


def _cause(job: SubmittedJob, word: JobState) -> str:
    if word.state == GONE:
        named = "a job with its token" if job.job is None else f"job {job.job} any more"
        return f"Slurm does not have {named}, and the run left no verdict"
    return f"Slurm says {word.state} of job {word.job}, and the run left no verdict"
