"""What Slurm knows of jobs, in one question for all: the queue first, then accounting where there is any.

A question that fails is no answer: the state is then `UNKNOWN`, and nothing may be done because of it. Job
ids are used again after years or after a reset, so a job is known by its token, or by id, name and user.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from launchers.errors import LauncherError
from launchers.slurm.commands import output_of

UNKNOWN = "UNKNOWN"
# Slurm answered, and has no such job any more (or never had).
GONE = "GONE"
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
RUNNING = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
)

# The comment last: it may hold anything.
_QUEUE_FORMAT = "%i|%T|%u|%r|%N|%S|%j|%k"
_ACCOUNTING_FORMAT = "JobID,State,User,ExitCode,NodeList,JobName"
# Clocks of a login node and of the accounting may differ by so much.
_CLOCK_SLACK_S = 600


@dataclass(frozen=True)
class SubmittedJob:
    """A job as its submitter recorded it; `job` is None when sbatch's answer was lost.

    The token's part up to a colon is the same in all jobs of the submitter's kind.
    """

    token: str
    job: str | None
    name: str
    user: str
    # Unix seconds.
    submitted: float


@dataclass(frozen=True)
class JobState:
    """Slurm's word for a job: its state in capitals, why it waits, where it runs, when it is to start."""

    job: str | None
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    # As Slurm writes it: the code, a colon, the signal.
    exit_code: str = ""

    @property
    def is_over(self) -> bool:
        """Whether Slurm says that the job will not run any more; never for want of an answer."""
        return self.state not in (UNKNOWN, *WAITING, *RUNNING)


def job_states(jobs: Sequence[SubmittedJob], past: Collection[str]) -> tuple[dict[str, JobState], list[str]]:
    """Return what Slurm says of each job, by token, and why Slurm could not be asked if it could not.

    One call of squeue for all of them, and at most one of sacct, for those of the tokens in `past` that are
    no longer in the queue. Without accounting those are `GONE`.
    """
    if not jobs:
        return {}, []
    try:
        queue = _queue({job.user for job in jobs})
    except LauncherError as error:
        return {job.token: JobState(job.job, UNKNOWN) for job in jobs}, [str(error)]
    found = {job.token: state for job in jobs if (state := _match(job, queue)) is not None}
    missing = [job for job in jobs if job.token not in found]
    ended = _past([job for job in missing if job.token in past])
    return {**{job.token: JobState(job.job, GONE) for job in missing}, **ended, **found}, []


def find_by_token(token: str) -> str | None:
    """Return the id of this user's job whose comment holds `token`; None when Slurm has none.

    Raises LauncherError when it cannot be asked.
    """
    job = SubmittedJob(token, None, "", getpass.getuser(), 0.0)
    state = _match(job, _queue({job.user}))
    return None if state is None else state.job


@dataclass(frozen=True)
class _Line:
    name: str
    user: str
    comment: str
    state: JobState


def _queue(users: Iterable[str]) -> list[_Line]:
    words = ("squeue", "--noheader", "--states=all", f"--users={','.join(sorted(users))}")
    lines = output_of((*words, f"--format={_QUEUE_FORMAT}")).splitlines()
    found = []
    for line in lines:
        parts = line.split("|", 7)
        if len(parts) == 8:
            job, state, user, reason, nodes, start, name, comment = parts
            found.append(_Line(name, user, comment, JobState(job, state, reason, nodes, start)))
    return found


def _match(job: SubmittedJob, queue: Iterable[_Line]) -> JobState | None:
    for line in queue:
        if job.token in line.comment.split():
            return line.state
        same = (line.state.job, line.name, line.user) == (job.job, job.name, job.user)
        # A site's plugin may have replaced the comment; another token is another submission.
        if same and f"{job.token.partition(':')[0]}:" not in line.comment:
            return line.state
    return None


def _past(jobs: Sequence[SubmittedJob]) -> Mapping[str, JobState]:
    """Ask the accounting for jobs that left the queue; many clusters have none, and then nothing is known."""
    known = {job.job: job for job in jobs if job.job is not None}
    if not known:
        return {}
    since = min(job.submitted for job in known.values()) - _CLOCK_SLACK_S
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(max(0.0, since)))
    words = ("sacct", "--noheader", "--parsable2", "--allocations", f"--starttime={start}")
    try:
        text = output_of((*words, f"--jobs={','.join(known)}", f"--format={_ACCOUNTING_FORMAT}"))
    except LauncherError:
        return {}
    found: dict[str, JobState] = {}
    for line in text.splitlines():
        parts = line.split("|", 5)
        if len(parts) != 6 or parts[0] not in known:
            continue
        job, state, user, exit_code, nodes, name = parts
        wanted = known[job]
        if (user, name) == (wanted.user, wanted.name):
            # As in "CANCELLED by 1000".
            found[wanted.token] = JobState(job, state.split()[0], nodes=nodes, exit_code=exit_code)
    return found
