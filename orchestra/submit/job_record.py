"""The Slurm jobs of a run: what its record says of them, and a further one that the job itself submits.

The intent is recorded before sbatch is called, the job's id after. An intent holds a token that the job
carries in its comment. Whatever is lost between the two, the job is found again by it. Written by the
commands that submit, and by the leading agent of a job that submits its run again, or on its first node after
all agents have ended.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launchers import LauncherError, SlurmRefused
from launchers.slurm import sbatch, this_job
from launchers.slurm.commands import asked_cluster
from launchers.slurm.queue import find_by_token
from launchers.slurm.this_job import JobTask
from orchestra.errors import LaunchError
from orchestra.run.control.stop_requests import user_name
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir, SweepArray
from orchestra.run.record import change_record, jobs_of, newest_job, read_record, whole_record
from orchestra.submit.job import new_token

JobEntry = dict[str, Any]

# How long a job that may have been submitted is looked for where Slurm does not answer.
_LOOK_AGAIN_S = (0.0, 2.0, 5.0, 10.0)
# Slurm's word for a job that no nodes can be found for.
_NO_NODES = "BadConstraints"


@dataclass(frozen=True)
class Move:
    """Why a run goes on in another job: what the event `requeued` says of it, for whoever has to write that
    because the leader that submitted the job did not live to.
    """

    # After which attempt, and which start of the job before.
    attempt: int
    job_start: int
    # The event's evidence: reason, rule, exclude.
    facts: Mapping[str, Any]
    # Whether that start ended before its attempt began.
    is_before_start: bool = False

    def record(self) -> dict[str, Any]:
        """Return what run.json says of it."""
        return asdict(self)

    @classmethod
    def of(cls, entry: JobEntry) -> Move | None:
        """Return what an entry says of it; None where it says nothing, or is damaged."""
        move = entry.get("move")
        try:
            return cls(**move) if isinstance(move, dict) and isinstance(move["facts"], dict) else None
        except (KeyError, TypeError):
            return None


def intent(
    name: str,
    token: str,
    attempt: int,
    *,
    submitted: float | None = None,
    task: int | None = None,
    after: str | None = None,
    cluster: str | None = None,
    move: Move | None = None,
) -> JobEntry:
    """Return what run.json says of a job before it is submitted (default: now); without `cluster` Slurm is
    asked for it.

    `attempt`: the one that the job is to begin. `task`: its number in the array that the run is a task of.
    `after`: the job that it follows; `move`: why it does.
    """
    return {
        "token": token,
        "id": None,
        "name": name,
        "user": user_name(),
        "submitted": time.time() if submitted is None else submitted,
        "attempt": attempt,
        "task": task,
        "after": after,
        "cluster": cluster or asked_cluster(),
        **({} if move is None else {"move": move.record()}),
    }


def member_intent(array: SweepArray, index: int, attempt: int) -> JobEntry:
    """Return what the run.json of a sweep's member says of the task that is to train it; the array's id is in
    sweep.json, under the same token.
    """
    task = None if array.packed else index - array.first
    own = intent(array.name, array.token, attempt, submitted=array.submitted, task=task)
    # Which task has it, its places tell.
    packed = {"pack": array.number} if array.packed else {}
    return {**own, "user": array.user, **packed}


def number_of_jobs(run: RunDir) -> int:
    """Return how many jobs were submitted for a run, intents included."""
    return len(jobs_of(read_record(run)))


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
    change_record(run, lambda record: {**record, "jobs": change(jobs_of(record))})


def chain(
    run: RunDir,
    task: JobTask,
    attempt: int,
    script: str | None,
    exclude: tuple[str, ...] = (),
    *,
    at_once: bool = False,
    delay_s: int = 0,
    behind: Sequence[str] = (),
    num_nodes: str | None = None,
    move: Move | None = None,
) -> str:
    """Submit a run's job again, to start when this one is over; return the new job's id, in an array with the
    task's number. *The leading node only*.

    `exclude`: hosts that it must not get. With `at_once` it does not wait for this one's end, which Slurm
    sees late where a node is lost; with `delay_s` it starts no sooner than in so many seconds. `behind` are
    other jobs whose end it waits for; `num_nodes` takes the place of what the script says; `move` says why
    the run goes on there. `script` is the one that this job was submitted with (None: the run's own); of an
    array this task alone is submitted. A job that a leader submitted before this one and did not live to tell
    of is taken over.

    Raises LauncherError where Slurm refuses, lets the job fail at once or stays silent, LaunchError where it
    stays unknown whether Slurm has it, OSError where the record cannot be read or the intent not be written.
    """
    member = task.array_task
    job = _submitted_before(run, task)
    if job is None:
        token = new_token()
        options = [f"--comment={token}"]
        before = tuple(behind) if at_once else (task.job, *behind)
        if before:
            options.append(f"--dependency=afterany:{':'.join(before)}")
        place = run.batch_script if script is None else Path(script)
        options += sbatch.begin_of_next(place, delay_s)
        if exclude:
            options.append(f"--exclude={','.join(exclude)}")
        if num_nodes is not None:
            options.append(f"--nodes={num_nodes}")
        if member is not None:
            options.append(f"--array={member}")
        entry = intent(run.name, token, attempt, task=member, after=task.job, cluster=task.cluster, move=move)
        job = _submit_job(run, place, entry, options)
        sbatch.release(place, job)
    label = job if member is None else f"{job}_{member}"
    _refuse_what_failed(run, job, label)
    return label


def moved_to(run: RunDir, task: JobTask) -> str | None:
    """Return the job, as Slurm writes it, that an agent of this start of a job has submitted to go on in its
    place; None where there is none, or nobody can tell. *The leader only*. Raises OSError.
    """
    entry = newest_job(whole_record(run))
    move = None if entry is None else Move.of(entry)
    if entry is None or move is None or move.job_start != task.restart:
        return None
    # Where Slurm is silent it is asked again when the job is to be submitted.
    with contextlib.suppress(LaunchError):
        job = _submitted_before(run, task)
        return None if job is None else _label(job, entry)
    return None


def tell_of_moves(run: RunDir) -> None:
    """Write down in which jobs a run went on, where the leaders that submitted them did not live to. *The
    leader only*. Raises OSError.
    """
    told = {event.get("job") for event in read_events(run, ("requeued",)) if event["event"] == "requeued"}
    for entry in jobs_of(read_record(run)):
        move, job = Move.of(entry), entry.get("id")
        if move is None or not isinstance(job, str) or (label := _label(job, entry)) in told:
            continue
        context = {"before_start": True} if move.is_before_start else {}
        with contextlib.closing(EventWriter(run, f"moved.{label}", move.attempt, **context)) as events:
            events.write("requeued", job=label, how="chain", after=entry.get("after"), **move.facts)


def _label(job: str, entry: JobEntry) -> str:
    """Return a job as Slurm writes it: that of an array has the run's number in it."""
    member = entry.get("task")
    return f"{job}_{member}" if isinstance(member, int) else job


def _submitted_before(run: RunDir, task: JobTask) -> str | None:
    """Return the job that was submitted already to follow this one; None where there is none.

    A leader that dies while it submits leaves the intent, and Slurm has the job or not. Raises LaunchError
    where Slurm does not say, and OSError where the record cannot be read.
    """
    entry = newest_job(whole_record(run))
    if entry is None or entry.get("after") != task.job or not isinstance(entry.get("token"), str):
        return None
    if isinstance(entry.get("id"), str):
        return str(entry["id"])
    problem: LauncherError | None = None
    for pause_s in _LOOK_AGAIN_S:
        time.sleep(pause_s)
        try:
            job = find_by_token(entry["token"])
        except LauncherError as error:
            problem = error
            continue
        if job is not None:
            attempt = entry.get("attempt")
            record_id(run, entry["token"], job, attempt if isinstance(attempt, int) else 0)
        return job
    raise LaunchError(
        f"{problem}: a job may have been submitted already; its token {entry['token']} is recorded in "
        f"{run.record}: `orchestra status {run.name}` finds the job when Slurm answers"
    ) from problem


def _refuse_what_failed(run: RunDir, job: str, label: str) -> None:
    """Take a job off the run's record that Slurm accepted and let fail at once. Raises SlurmRefused then.

    It looks once: a job that Slurm tries to place later fails later.
    """
    try:
        word = this_job.own_job(label)
    except LauncherError:
        return
    if word.state != "FAILED" or word.reason != _NO_NODES:
        return
    # As the newest one it would keep this job from training the run again where Slurm requeues it.
    drop_job(run, "id", job)
    raise SlurmRefused(
        f"Slurm let job {label} fail at once ({_NO_NODES}): too few nodes are left that it may use"
    )


def _submit_job(run: RunDir, script: Path, entry: JobEntry, options: list[str]) -> str:
    """Record the intent, submit the script once, record the job's id and return it.

    Raises SlurmRefused, the intent taken back; LaunchError when it stays unknown whether Slurm has the job:
    the intent then keeps its token. OSError when the intent cannot be recorded, and nothing was submitted.
    """
    token = str(entry["token"])
    add_intent(run, entry)
    try:
        job = sbatch.submit(script, token, options)
    except SlurmRefused:
        drop_job(run, "token", token)
        raise
    except LauncherError as error:
        raise LaunchError(
            f"{error}: Slurm may have the job or not; its token {token} is recorded in {run.record}: "
            f"`orchestra status {run.name}` finds the job when Slurm answers; do not submit it again before"
        ) from error
    record_id(run, token, job, int(entry["attempt"]))
    return job
