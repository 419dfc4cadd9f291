"""Keeps a job from training a run that another job trains or is to train. It writes nothing.

The run's newest job has the right to it. An older one may be started again by an administrator, or a run be
trained in the foreground: two attempts at the same time would remove each other's checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.errors import LauncherError, SlurmRefused
from launchers.slurm.own_job import OwnJob, own_job
from launchers.slurm.states import RUNNING, WAITING, find_by_token
from launchers.slurm.task import JobTask
from orchestra.events import read_events
from orchestra.jsonl import Record
from orchestra.report.state import read_record
from orchestra.report.verdict import last_attempt, node_verdict, of_attempt
from orchestra.rundir import RunDir
from orchestra.submit.claims import claimed_attempt

# How long the files of an attempt must be still where nobody can say whether it is alive.
QUIET_S = 60.0
_POLL_S = 2.0
# From the end that Slurm began to the last process: KillWait, 30 s by default, and some.
_COMPLETING_S = 60.0
_NOT_KNOWN = "Invalid job id"


@dataclass(frozen=True)
class _Rival:
    """Who else may train the run; `is_alive` is None where nobody can say."""

    what: str
    is_alive: bool | None


def refusal(run: RunDir, task: JobTask, quiet_s: float = QUIET_S) -> str | None:
    """Return why this job must not train the run now; None where it may. *Node 0 only*.

    Waits, up to `quiet_s`, only where neither the records nor Slurm can tell whether somebody else trains.
    """
    rivals = list(_rivals(run, task))
    alive = next((rival for rival in rivals if rival.is_alive), None)
    if alive is not None:
        return _refused(run, task, alive.what)
    unclear = next((rival for rival in rivals if rival.is_alive is None), None)
    if unclear is not None and _grows(run, quiet_s):
        return _refused(run, task, f"{unclear.what}, and the run's files grow")
    return None


def _refused(run: RunDir, task: JobTask, what: str) -> str:
    return (
        f"job {task.job} (start {task.restart}) does not train {run.name}: {what}. Two jobs must not train "
        f"one run; `orchestra cancel {run.name}` stops the other one, `scancel {task.job}` keeps this one "
        f"from being started again"
    )


def _rivals(run: RunDir, task: JobTask) -> Iterator[_Rival]:
    newest = newest_entry(run)
    if newest is not None:
        yield from _newest_job(newest, task)
    events = read_events(run)
    attempt = last_attempt(events)
    if attempt is not None:
        yield from _leader(of_attempt(events, attempt), attempt, task)
    claimed = claimed_attempt(run)
    if claimed is not None and claimed > (-1 if attempt is None else attempt):
        # Of a process that is about to begin, or one that ended between its claim and its first word.
        yield _Rival(f"attempt {claimed} was claimed by another process", None)


def newest_entry(run: RunDir) -> dict[str, Any] | None:
    """Return what run.json says of the job that was submitted last; None where none was."""
    jobs = read_record(run).get("jobs")
    return jobs[-1] if isinstance(jobs, list) and jobs and isinstance(jobs[-1], dict) else None


def _newest_job(entry: dict[str, Any], task: JobTask) -> Iterator[_Rival]:
    """Yield the newest job where this is another one."""
    job = _label(entry)
    if job == task.job:
        return
    if job is None:
        if _has_token(task.job, entry):
            return
        job = _by_token(entry)
    if job == task.job:
        return
    word = "whose number is not known" if job is None else job
    yield _Rival(f"job {word} was submitted for it later, and is queued or running", _is_alive(job))


def _label(entry: dict[str, Any]) -> str | None:
    """Return the newest job as Slurm writes it; None while its submitter has not recorded its number."""
    job, member = entry.get("id"), entry.get("task")
    if not isinstance(job, str):
        return None
    return f"{job}_{member}" if isinstance(member, int) else job


def _has_token(job: str, entry: dict[str, Any]) -> bool:
    """Whether a job is the one of an entry: it may start before its number is recorded."""
    member = job.partition("_")[2]
    if member != ("" if entry.get("task") is None else str(entry["task"])):
        return False
    try:
        return str(entry.get("token")) in own_job(job).comment.split()
    except LauncherError:
        return False


def _by_token(entry: dict[str, Any]) -> str | None:
    try:
        job = find_by_token(str(entry.get("token")))
    except LauncherError:
        return None
    return job if job is None or entry.get("task") is None else f"{job}_{entry['task']}"


def _leader(events: list[Record], attempt: int, task: JobTask) -> Iterator[_Rival]:
    """Yield who leads the last attempt, unless it has ended or was an earlier start of this very job."""
    start = next(event for event in events if event["event"] == "attempt_started")
    job = start.get("job")
    if node_verdict(events) is not None or job == task.job:
        return
    if isinstance(job, str):
        yield _Rival(f"job {job} trains it, attempt {attempt}", _is_alive(job))
    else:
        who = f"process {start.get('pid', '?')} on {start.get('host', '?')}"
        yield _Rival(f"{who} leads attempt {attempt}, which has not ended", None)


def _is_alive(job: str | None) -> bool | None:
    """Whether Slurm has a job queued or running; None where that cannot be told."""
    if job is None:
        return None
    deadline = time.monotonic() + _COMPLETING_S
    while (word := _word(job)) is not None and word.state == "COMPLETING" and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if word is None or word.state == "COMPLETING":
        return None
    return word.state in RUNNING or word.state in WAITING


def _word(job: str) -> OwnJob | None:
    try:
        return own_job(job)
    except SlurmRefused as error:
        return OwnJob("GONE") if _NOT_KNOWN in str(error) else None
    except LauncherError:
        return None


def _grows(run: RunDir, quiet_s: float) -> bool:
    """Watch the files that an attempt writes; tell whether one of them grew."""
    before = _sizes(run)
    deadline = time.monotonic() + quiet_s
    while time.monotonic() < deadline:
        time.sleep(min(_POLL_S, quiet_s))
        if _sizes(run) != before:
            return True
    return False


def _sizes(run: RunDir) -> dict[Path, int]:
    files = [run.metrics, *run.events.glob("*.jsonl"), *run.logs.glob("attempt-*/*.log")]
    return {file: _size(file) for file in files}


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
