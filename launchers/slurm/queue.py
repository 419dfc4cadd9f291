"""What Slurm knows of jobs, in one question for all: the queue first, then accounting where there is any.

A question that fails is no answer: the state is then `UNKNOWN`, and nothing may be done because of it. Job
ids are used again after years or after a reset, so a job is known by its token, or by id, name and user.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from launchers import LauncherError
from launchers.slurm.commands import asked_cluster, output_of

# Job ids as Slurm writes them: 123, 123_4 for a task of an array, 123_[5-9%2] for several.
_LABEL = re.compile(r"(?P<job>\d+)(_(?P<task>\d+)|_\[(?P<tasks>[^\]%]*)(%\d+)?\]?)?")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def job_and_tasks(label: str) -> tuple[str, tuple[int, ...] | None]:
    """Return the id of a job or of an array, and which tasks of the array are meant (None: no array's).

    Tasks after dots, where Slurm cut a long list, are left out.
    """
    match = _LABEL.match(label)
    if match is None:
        return label, None
    if match["task"] is not None:
        return match["job"], (int(match["task"]),)
    if match["tasks"] is None:
        return match["job"], None
    ranges = [range_ for part in match["tasks"].split(",") if (range_ := _RANGE.fullmatch(part))]
    return match["job"], tuple(task for range_ in ranges for task in _tasks(range_))


def _tasks(match: re.Match[str]) -> Iterable[int]:
    first, last, step = match.groups()
    return range(int(first), int(last or first) + 1, int(step or 1))


def joined(labels: Iterable[str]) -> list[str]:
    """Return the same jobs in as few words as Slurm takes: 12_1, 12_2, 12_4, 13 are 12_[1-2,4] and 13."""
    tasks_of: dict[str, list[int] | None] = {}
    for label in labels:
        job, tasks = job_and_tasks(label)
        if tasks is None:
            tasks_of[job] = None
        elif (known := tasks_of.setdefault(job, [])) is not None:
            known += tasks
    return [job if tasks is None else f"{job}_[{_ranges(tasks)}]" for job, tasks in tasks_of.items()]


def _ranges(tasks: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for task in sorted(set(tasks)):
        if spans and spans[-1][1] == task - 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


UNKNOWN = "UNKNOWN"
# Slurm answered, and has no such job any more (or never had).
GONE = "GONE"
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
RUNNING = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
)
# Who asks again and again (`logs -f`, waiting) asks no more often.
PAUSE_S = 10.0

# Its array has jobs that run, and all that they can take at a time.
PACKED = "PackedPlace"
# The comment last: it may hold anything.
_QUEUE_FORMAT = "%i|%T|%u|%r|%N|%S|%j|%k"
_ACCOUNTING_FORMAT = "JobID,State,User,ExitCode,NodeList,Submit,JobName,Comment"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
# Clocks of a login node and of the accounting may differ by so much.
_CLOCK_SLACK_S = 600
# A person waits for the answer, and without one the records speak; squeue itself would try for 20 s and more.
_QUEUE_TIMEOUT_S = 8.0
# Linux takes 131,072 bytes in one word of a command line.
_LONGEST_WORD = 100_000


@dataclass(frozen=True)
class SubmittedJob:
    """A job as its submitter recorded it; `job` is None when sbatch's answer was lost.

    The token's part up to a colon is the same in all jobs of the submitter's kind. All tasks of an array have
    its token, and `job` is the array's id.
    """

    token: str
    job: str | None
    name: str
    user: str
    # Unix seconds.
    submitted: float
    task: int | None = None
    # Slurm's name of its cluster; None where the submitter did not know it.
    cluster: str | None = None
    # Others are trained by the same job. Without `task`: any of the array's tasks is to take it.
    is_shared: bool = False
    # It was trained there and has left, whatever the job does now.
    has_left: bool = False
    # Jobs of the same run, of which one is to train it: whichever starts first.
    alternatives: tuple[SubmittedJob, ...] = ()

    @property
    def label(self) -> str | None:
        """The id as Slurm writes it: 123, or 123_4 for a task of an array; None while it is not known."""
        return self.job if self.job is None or self.task is None else f"{self.job}_{self.task}"


@dataclass(frozen=True)
class JobState:
    """Slurm's word for a job: its state in capitals, why it waits, where it runs, when it is to start."""

    job: str | None
    state: str
    reason: str = ""
    nodes: str = ""
    # Local time as Slurm writes it, expected or actual; "N/A" where it has none.
    start: str = ""
    # As Slurm writes it: the code, a colon, the signal. Only the accounting tells.
    exit_code: str = ""
    # The number of the user who cancelled it, where the accounting tells.
    cancelled_by: str = ""
    # The cluster that was asked, where the job belongs to another one: the state is `UNKNOWN` then.
    asked: str = ""

    @property
    def is_over(self) -> bool:
        """Whether Slurm says that the job will not run any more; never for want of an answer."""
        return self.state not in (UNKNOWN, *WAITING, *RUNNING)


# By job: the states, and why Slurm could not be asked if it could not.
Answer = tuple[dict[SubmittedJob, JobState], list[str]]


class Questions:
    """Asks Slurm at most once in `pause_s`; in between its last answer stands.

    Nothing is known meanwhile of a job that was submitted after that answer.
    """

    def __init__(self, pause_s: float = PAUSE_S) -> None:
        self._pause_s = pause_s
        self._users: set[str] = set()
        self._asked: float | None = None
        self._asked_at = 0.0
        self._queue: _Queue | None = None
        self._problems: list[str] = []
        self._ended: dict[SubmittedJob, JobState] = {}

    def is_due(self) -> bool:
        """Whether the next question will be asked, rather than answered from the last time."""
        return self._asked is None or time.monotonic() - self._asked >= self._pause_s

    def states(self, jobs: Sequence[SubmittedJob], past: Collection[SubmittedJob]) -> Answer:
        """Return what Slurm says of each job, and why Slurm could not be asked if it could not.

        One call of squeue for all of them, and at most one of sacct, for those in `past` that are over or no
        longer in the queue. Without accounting the latter are `GONE`.
        """
        if not jobs:
            return {}, []
        users = {job.user for job in jobs}
        is_new = self.is_due() or not users <= self._users
        if is_new:
            self._ask(users)
        if self._queue is None:
            return {job: JobState(job.label, UNKNOWN) for job in jobs}, self._problems
        elsewhere = _elsewhere(jobs, frozenset(past), self._queue)
        here = [job for job in jobs if job not in elsewhere]
        queued = {job: state for job in here if (state := self._queue.find(job)) is not None}
        unclear = [
            job
            for job in past
            if job not in elsewhere and not job.has_left and (job not in queued or queued[job].is_over)
        ]
        if is_new:
            self._ended = _past(unclear)
        # What was submitted since the queue was listed is not gone.
        unlisted = {
            job: JobState(job.label, GONE if job.submitted <= self._asked_at else UNKNOWN) for job in jobs
        }
        # Why it ended as it did only the queue says.
        ended = {
            job: replace(state, reason=queued[job].reason if job in queued else "")
            for job in unclear
            if (state := self._ended.get(job)) is not None
        }
        return {**unlisted, **queued, **ended, **elsewhere}, []

    def _ask(self, users: set[str]) -> None:
        self._users, self._asked, self._asked_at = users, time.monotonic(), time.time()
        try:
            self._queue, self._problems = _Queue(_queue_lines(users)), []
        except LauncherError as error:
            self._queue, self._problems = None, [str(error)]


def is_same_cluster(one: str | None, other: str | None) -> bool:
    """Tell whether two names mean one cluster; Slurm itself does not mind capitals."""
    return one is not None and other is not None and one.lower() == other.lower()


def _elsewhere(
    jobs: Sequence[SubmittedJob], past: Collection[SubmittedJob], queue: _Queue
) -> dict[SubmittedJob, JobState]:
    """Return the jobs that may be another cluster's: of those this queue says nothing.

    The cluster's name is asked for only where the queue leaves that open: a token is in one queue alone, and
    of a job that is not in `past` nobody wants to know more.
    """
    open_ = [
        job
        for job in jobs
        if job.cluster is not None
        and not queue.has_token(job)
        and (job in past or queue.find(job) is not None)
    ]
    name = asked_cluster() if open_ else None
    return {
        job: JobState(job.label, UNKNOWN, asked=name or "")
        for job in open_
        if not is_same_cluster(job.cluster, name)
    }


def find_by_token(token: str) -> str | None:
    """Return the id of this user's job whose comment holds `token`; None when Slurm has none.

    Of an array it is the array's id. Raises LauncherError when it cannot be asked.
    """
    lines = _queue_lines({_own_name()})
    return next((line.job for line in lines if token in line.comment.split()), None)


def _own_name() -> str:
    """Return this process's user as Slurm calls it; LOGNAME and USER may name somebody else (`su -m`)."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


@dataclass(frozen=True)
class _Line:
    # The array's id for tasks of one.
    job: str
    tasks: tuple[int, ...] | None
    name: str
    user: str
    comment: str
    state: JobState


def _queue_lines(users: Iterable[str]) -> list[_Line]:
    words = ("squeue", "--noheader", "--states=all", "--array", f"--users={','.join(sorted(users))}")
    lines = []
    for text in output_of((*words, f"--format={_QUEUE_FORMAT}"), timeout_s=_QUEUE_TIMEOUT_S).splitlines():
        parts = text.split("|", 7)
        if len(parts) == 8:
            label, state, user, reason, nodes, start, name, comment = parts
            job, tasks = job_and_tasks(label)
            lines.append(_Line(job, tasks, name, user, comment, JobState(label, state, reason, nodes, start)))
    return lines


class _Queue:
    """The lines of one answer, by what jobs are known by."""

    def __init__(self, lines: Iterable[_Line]) -> None:
        self._by_token: dict[tuple[str, int | None], _Line] = {}
        self._by_id: dict[tuple[str, int | None], _Line] = {}
        self._of_token: dict[str, list[_Line]] = {}
        for line in lines:
            for word in line.comment.split():
                self._of_token.setdefault(word, []).append(line)
            for task in (None,) if line.tasks is None else line.tasks:
                for word in line.comment.split():
                    self._by_token.setdefault((word, task), line)
                self._by_id[line.job, task] = line

    def find(self, job: SubmittedJob) -> JobState | None:
        if job.has_left:
            return JobState(job.label, "COMPLETED")
        if job.is_shared and job.task is None:
            return self._any_task(job)
        line = self._find(job, job.task)
        if line is None and job.task is not None:
            # Tasks that were cancelled before they began are one line, which no longer says which they were.
            line = self._find(job, None)
            line = line if line is not None and line.state.is_over else None
        if line is None:
            return None
        label = line.job if job.task is None else f"{line.job}_{job.task}"
        return replace(line.state, job=label)

    def _any_task(self, job: SubmittedJob) -> JobState | None:
        """Return what a member waits for that any task of its array may take."""
        words = [line.state for line in self._of_token.get(job.token, ()) if job.job in (None, line.job)]
        waiting = next((word for word in words if word.state in WAITING), None)
        running = next((word for word in words if word.state in RUNNING), None)
        if running is not None:
            return replace(running, job=job.job, state="PENDING", reason=PACKED, start="")
        word = waiting or next(iter(words), None)
        return None if word is None else replace(word, job=job.job)

    def has_token(self, job: SubmittedJob) -> bool:
        """Whether a line has the job's token, which no other cluster's queue has."""
        if job.is_shared:
            return job.token in self._of_token
        return any(self._with_token(job, task) is not None for task in (job.task, None))

    def _with_token(self, job: SubmittedJob, task: int | None) -> _Line | None:
        line = self._by_token.get((job.token, task))
        # Somebody may have submitted the script by hand: that job has the token too, and another number.
        return line if line is not None and job.job in (None, line.job) else None

    def _find(self, job: SubmittedJob, task: int | None) -> _Line | None:
        with_token = self._with_token(job, task)
        if with_token is not None or job.job is None:
            return with_token
        line = self._by_id.get((job.job, task))
        if line is None or (line.name, line.user) != (job.name, job.user):
            return None
        if job.token in line.comment.split():
            return line
        # A site's plugin may have replaced the comment; another token is another submission.
        return None if f"{job.token.partition(':')[0]}:" in line.comment else line


def _past(jobs: Sequence[SubmittedJob]) -> dict[SubmittedJob, JobState]:
    """Ask the accounting for jobs that are over; many clusters have none, and then nothing is known.

    Those that it calls waiting or running are passed over: the queue is newer.
    """
    known = {(job.job, job.task): job for job in jobs if job.job is not None}
    if not known:
        return {}
    try:
        text = output_of(_accounting_question(list(known.values())))
    except LauncherError:
        return {}
    states: dict[SubmittedJob, JobState] = {}
    for line in text.splitlines():
        parts = line.split("|", 7)
        if len(parts) != 8:
            continue
        label, state_by, user, exit_code, nodes, submitted, name, comment = parts
        # As in "CANCELLED by 1000".
        state, _, by = state_by.partition(" by ")
        number, tasks = job_and_tasks(label)
        for task in (None,) if tasks is None else tasks:
            job = known.get((number, task))
            if job is not None and (user, name) == (job.user, job.name) and _fits(job, submitted, comment):
                word = JobState(job.label, state, nodes=nodes, exit_code=exit_code, cancelled_by=by)
                if word.is_over:
                    states[job] = word
    return states


def _accounting_question(jobs: Sequence[SubmittedJob]) -> tuple[str, ...]:
    since = min(job.submitted for job in jobs) - _CLOCK_SLACK_S
    start = time.strftime(_TIME_FORMAT, time.localtime(max(0.0, since)))
    words = ("sacct", "--noheader", "--parsable2", "--allocations", f"--starttime={start}")
    # By array, not by task.
    which = f"--jobs={','.join(dict.fromkeys(str(job.job) for job in jobs))}"
    if len(which) > _LONGEST_WORD:
        which = f"--user={','.join(sorted({job.user for job in jobs}))}"
    return (*words, which, f"--format={_ACCOUNTING_FORMAT}")


def _fits(job: SubmittedJob, submitted: str, comment: str) -> bool:
    """Whether the accounting's job can be this one: an id that was used before belongs to an older job."""
    if f"{job.token.partition(':')[0]}:" in comment and job.token not in comment.split():
        return False
    try:
        return time.mktime(time.strptime(submitted, _TIME_FORMAT)) >= job.submitted - _CLOCK_SLACK_S
    except (ValueError, OverflowError):
        return True
