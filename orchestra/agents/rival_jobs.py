"""Keeps a job from training a run that another job trains or is to train: `refusal`, asked by the leader.

Two attempts at the same time would remove each other's checkpoints. Only the run's newest job may train it,
even when that is over: an older one may be started again by an administrator after somebody cancelled the
run. Jobs of other clusters may share the folder, and a run may be trained in the foreground.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers import LauncherError, SlurmRefused
from launchers.slurm.queue import GONE, RUNNING, WAITING, find_by_token, is_same_cluster
from launchers.slurm.this_job import JobTask, OwnJob, own_job
from orchestra.recovery.history import Attempt, attempt_of, last_attempt
from orchestra.recovery.incidents import node_verdict
from orchestra.report.run_state import array_ids, attempt_files, last_growth, name_of
from orchestra.run.control.stop_requests import claimed_attempt
from orchestra.run.events import read_events
from orchestra.run.paths import RunDir, SweepDir
from orchestra.run.record import newest_job, read_record

# How long the files of an attempt must be still where nobody can say whether it is alive.
QUIET_S = 60.0
# Files that were still for so long before are not watched: a job that Slurm has forgotten ended long ago.
_LONG_STILL_S = 600.0
_POLL_S = 2.0
# From the end that Slurm began to the last process: KillWait, 30 s by default, and some.
_COMPLETING_S = 60.0
_NOT_KNOWN = "Invalid job id"


@dataclass(frozen=True)
class _Rival:
    """Somebody else who may train the run; `is_alive` is None where only the files can tell."""

    what: str
    is_alive: bool | None
    # Whether files that have been still for long are enough.
    may_be_long_gone: bool = False


def refusal(run: RunDir, task: JobTask, quiet_s: float = QUIET_S) -> str | None:
    """Return why this job must not train the run now; None where it may. *The leader only*.

    Waits, up to `quiet_s`, only where neither the records nor Slurm can tell whether somebody else trains.
    """
    rivals = list(_rivals(run, task))
    alive = next((rival for rival in rivals if rival.is_alive), None)
    if alive is not None:
        return _refused(run, task, alive.what)
    unclear = [
        rival
        for rival in rivals
        if rival.is_alive is None
        and not (rival.may_be_long_gone and time.time() - last_growth(run) > _LONG_STILL_S)
    ]
    if unclear and _grows(run, quiet_s):
        return _refused(run, task, f"{unclear[0].what}, and the run's files grow")
    return None


def _refused(run: RunDir, task: JobTask, what: str) -> str:
    name = name_of(run)
    return (
        f"job {task.job} (start {task.restart}) does not train {name}: {what}. Two jobs must not train one "
        f"run; `orchestra cancel {name}` stops the other one, `scancel {task.job}` keeps this one from being "
        f"started again"
    )


def _rivals(run: RunDir, task: JobTask) -> Iterator[_Rival]:
    newest = newest_job(read_record(run))
    if newest is not None:
        yield from _newest_job(run, newest, task)
    events = read_events(run)
    attempt = last_attempt(events)
    if attempt is not None:
        yield from _leader(attempt_of(events, attempt), task)
    claimed = claimed_attempt(run)
    if claimed is not None and claimed > (-1 if attempt is None else attempt):
        # Of a process that is about to begin, or one that ended between its claim and its first event.
        yield _Rival(f"attempt {claimed} was claimed by another process", None)


def _newest_job(run: RunDir, entry: dict[str, Any], task: JobTask) -> Iterator[_Rival]:
    """Yield the newest job where this is another one."""
    job, cluster = _label(run, entry), entry.get("cluster")
    is_elsewhere = _is_elsewhere(cluster, task)
    if job == task.job and not is_elsewhere:
        return
    if job in (None, task.job) and _has_token(task.job, entry):
        return
    if job is None and not is_elsewhere:
        job = _by_token(entry)
    if job is None:
        # Its submitter may never have had an answer, or may be about to write it down.
        yield _Rival("a job whose number is not known was submitted for it later", None)
    else:
        where = f" on cluster {cluster}" if is_elsewhere else ""
        yield _Rival(f"job {job}{where} was submitted for it later, and it alone may train it", True)


def _is_elsewhere(cluster: object, task: JobTask) -> bool:
    """Whether a job belongs to another cluster than this one; not where one of them is not known."""
    return (
        isinstance(cluster, str) and task.cluster is not None and not is_same_cluster(cluster, task.cluster)
    )


def _label(run: RunDir, entry: dict[str, Any]) -> str | None:
    """Return the newest job as Slurm writes it; None while its submitter has not recorded its number."""
    job, member = entry.get("id"), entry.get("task")
    if job is None and isinstance(member, int):
        job = array_ids(SweepDir(run.path.parent)).get(str(entry.get("token")))
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


def _leader(attempt: Attempt, task: JobTask) -> Iterator[_Rival]:
    """Yield who leads the last attempt, unless it has ended or was an earlier start of this very job."""
    start, number = attempt.start, attempt.number
    job, cluster = start.get("job"), start.get("cluster")
    is_elsewhere = _is_elsewhere(cluster, task)
    if node_verdict(attempt) is not None or (job == task.job and not is_elsewhere):
        return
    if not isinstance(job, str):
        who = f"process {start.get('pid', '?')} on {start.get('host', '?')}"
        yield _Rival(f"{who} leads attempt {number}, which has not ended", None)
    elif is_elsewhere:
        yield _Rival(f"job {job} on cluster {cluster} leads attempt {number}, which has not ended", None)
    else:
        yield _of_this_cluster(job, number)


def _of_this_cluster(job: str, attempt: int) -> _Rival:
    settled = _settled_job(job)
    if settled is None or settled.state == "COMPLETING":
        return _Rival(f"job {job} leads attempt {attempt}, which has not ended", None)
    if settled.state == GONE:
        # Slurm forgets jobs minutes after their end; or it is another Slurm.
        what = f"Slurm does not know job {job}, which leads attempt {attempt}"
        return _Rival(what, None, may_be_long_gone=True)
    is_alive = settled.state in RUNNING or settled.state in WAITING
    return _Rival(f"job {job} trains it, attempt {attempt}", is_alive)


def _settled_job(job: str) -> OwnJob | None:
    """Return what Slurm says of a job, waiting for the end of one that is being ended; None where it does not
    answer.
    """
    deadline = time.monotonic() + _COMPLETING_S
    while True:
        try:
            now = own_job(job)
        except SlurmRefused as error:
            return OwnJob(GONE) if _NOT_KNOWN in str(error) else None
        except LauncherError:
            return None
        if now.state != "COMPLETING" or time.monotonic() >= deadline:
            return now
        time.sleep(_POLL_S)


def _grows(run: RunDir, quiet_s: float) -> bool:
    """Watch the files that an attempt writes; tell whether one of them grew or was written anew."""
    before = _states(run)
    deadline = time.monotonic() + quiet_s
    while time.monotonic() < deadline:
        time.sleep(min(_POLL_S, quiet_s))
        if _states(run) != before:
            return True
    return False


def _states(run: RunDir) -> dict[Path, tuple[int, int]]:
    states = {}
    for file in attempt_files(run):
        with contextlib.suppress(OSError):
            found = file.stat()
            states[file] = (found.st_size, found.st_mtime_ns)
    return states
