"""What a job asks Slurm about itself, its requeue, the signals that reach it, and its place in Slurm.

Used by the agents on the nodes of a job.

In an array always by the array's id and the task: the number of its last task is the array's own id, and
`scontrol requeue` of that would start all of its tasks again.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from launchers import LauncherError, SlurmRefused, SlurmSilent
from launchers.node_agent import StopRequests
from launchers.slurm.commands import output_of
from launchers.slurm.switches import SwitchPath, own_path

# Slurm kills 30 s after it has asked a job to end (KillWait): who asks then must not wait for long.
QUERY_TIMEOUT_S = 5.0
_REQUEUE_TIMEOUT_S = 10.0
# How long a controller that does not answer is asked to queue a job again, what ends it, and the pause before
# each time.
_REQUEUE_PATIENCE_S, _OWN_PATIENCE_S, _PAUSE_S = 120.0, 30.0, 2.0
_NAMES_TIMEOUT_S = 30.0
# Values may hold spaces, names do not.
_FIELD = re.compile(r"(?:^|\s)(\w+)=(.*?)(?=\s+[\w/:&]+=|\s*$)")
# A path may hold ` lr=3`, which looks like the next field.
_SCRIPT = re.compile(r"\sCommand=(.*?)\s+WorkDir=")
_ENDED_TASKS = re.compile(r"^srun: error: (\S+): tasks? (\d[\d,-]*): (.+)$", re.MULTILINE)
_NOTHING = ("None", "(null)", "N/A", "Unknown")


@dataclass(frozen=True)
class OwnJob:
    """A job as `scontrol show job` tells of it."""

    state: str
    # Such as TimeLimit where that ends it.
    reason: str = ""
    # How often it was started again, a start that is to come included.
    restarts: int = 0
    # Whether a job of more weight takes its nodes, which it still has for the grace time.
    is_preempted: bool = False
    comment: str = ""
    # The script that was submitted.
    script: str | None = None
    # The nodes that it has now, as Slurm writes them; empty: unknown or none.
    nodes: str = ""
    # Where its batch script runs, and srun.
    batch_host: str = ""
    # The nodes that it must not get, as Slurm writes them: those that it was submitted without, and those
    # that somebody, or Slurm itself, has added since.
    excluded: str = ""

    @property
    def is_ending(self) -> bool:
        """Whether Slurm has begun to end it, or it is over."""
        return self.state not in ("RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "SUSPENDED", "STOPPED")


def own_job(job: str) -> OwnJob:
    """Return what Slurm says of a job by its id (12, or 12_3). Raises LauncherError; SlurmRefused: gone."""
    words = ("scontrol", "--oneliner", "show", "job", job)
    described = parsed(output_of(words))
    if described is None:
        raise SlurmRefused(f"scontrol show job {job} printed nothing that describes a job")
    return described


def parsed(text: str) -> OwnJob | None:
    """Return the job in what scontrol printed; None where it printed something else."""
    lines = [line for line in text.splitlines() if "JobState=" in line]
    if not lines:
        return None
    fields = {name: value for name, value in _FIELD.findall(lines[0]) if value not in _NOTHING}
    restarts = fields.get("Restarts", "0")
    script = _SCRIPT.search(lines[0])
    return OwnJob(
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        is_preempted="PreemptTime" in fields,
        comment=fields.get("Comment", ""),
        script=fields.get("Command") if script is None or script[1] in _NOTHING else script[1],
        nodes=fields.get("NodeList", ""),
        batch_host=fields.get("BatchHost", ""),
        excluded=fields.get("ExcNodeList", ""),
    )


def names_of(nodes: str) -> list[str]:
    """Return the hosts in a list as Slurm writes it. Raises LauncherError."""
    words = ("scontrol", "show", "hostnames", nodes)
    return output_of(words, timeout_s=_NAMES_TIMEOUT_S).split()


@dataclass(frozen=True)
class EndedTask:
    """A task of a step that is over, as srun said: its number, its host, and how it ended."""

    number: int
    host: str
    how: str


def ended_tasks(said: str) -> list[EndedTask]:
    """Return the tasks of which srun says in its output that they ended badly. Raises LauncherError."""
    found = []
    for hosts, tasks, how in _ENDED_TASKS.findall(said):
        # Such as "node[2-4]: tasks 1-2,5": Slurm's lists of hosts and of numbers are in the same order.
        numbers = [number for part in tasks.split(",") for number in _range(part)]
        names = names_of(hosts) if len(numbers) > 1 else [hosts]
        found += [EndedTask(*each, how) for each in zip(numbers, names, strict=False)]
    return found


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def take_out(job: str, own: OwnJob, hosts: Collection[str]) -> tuple[str, ...]:
    """Take lost hosts out of a job as Slurm described it; return those that were. Its step goes on with what
    is left.

    Slurm ends what runs on them where it reaches them. The host of the batch script stays: Slurm lets a job
    go on without it, but not at our wish. Raises LauncherError, SlurmRefused where the cluster does not let
    jobs shrink.
    """
    has = names_of(own.nodes) if own.nodes else []
    gone = [host for host in has if host in hosts and host != own.batch_host]
    left = [host for host in has if host not in gone]
    if gone and left:
        output_of(("scontrol", "update", f"JobId={job}", f"NodeList={','.join(left)}"))
        return tuple(gone)
    return ()


def tasks_of_array(job: str) -> dict[str, str]:
    """Return the tasks of a job's array that wait or run, the job's own among them, by id (12_3), and their
    states. Raises LauncherError.
    """
    array = job.partition("_")[0]
    words = ("squeue", "--noheader", "--array", f"--jobs={array}", "--format=%i|%T")
    lines = output_of(words, timeout_s=QUERY_TIMEOUT_S).splitlines()
    return {label: state for label, _, state in (line.strip().partition("|") for line in lines)}


def own_job_surely(job: str) -> OwnJob | None:
    """Return what Slurm says of a job; one that does not answer is asked again, for half a minute. None where
    it says nothing: then this process may be killed before it returns.
    """
    deadline = time.monotonic() + _OWN_PATIENCE_S
    while True:
        try:
            return own_job(job)
        except SlurmSilent:
            if time.monotonic() > deadline:
                return None
        except LauncherError:
            return None
        time.sleep(_PAUSE_S)


def requeue_surely(job: str, restart: int) -> None:
    """Have Slurm queue a job again that has started `restart` times before; where it does not answer it is
    asked again, for two minutes.

    *Main thread only*. Raises SlurmRefused where the job may not be requeued, SlurmSilent where nothing says
    that it was.
    """
    deadline = time.monotonic() + _REQUEUE_PATIENCE_S
    while True:
        try:
            requeue(job)
            return
        except SlurmSilent:
            # Slurm ends the process that asks together with the job: only the job's own state tells.
            own = None
            with contextlib.suppress(LauncherError):
                own = own_job(job)
            if own is not None and (own.is_ending or own.restarts > restart):
                return
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)


def requeue(job: str, exclude: Collection[str] = ()) -> None:
    """Have Slurm end a job and queue it again, then without the hosts `exclude` if that can still be said;
    this very step may be killed before it returns.

    *Main thread only*: scontrol is started deaf to SIGTERM, which Slurm then sends to all processes of the
    step. Raises SlurmRefused where the job may not be requeued, SlurmSilent where that stays unknown.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        output_of(("scontrol", "requeue", job), timeout_s=_REQUEUE_TIMEOUT_S)
        if exclude:
            # Of a job that runs Slurm takes no such change.
            with contextlib.suppress(LauncherError):
                output_of(("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(exclude)}"))
    finally:
        signal.signal(signal.SIGTERM, before)


# Slurm sends USR2 (or another warning) before the time limit, TERM at a cancel, a preemption and the limit
# itself, some of them twice.
_OF_A_JOB = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class JobSignals(StopRequests):
    """While entered, what Slurm sends counts as one request to stop. *Main thread only*.

    One, since Slurm itself kills a task that takes too long: no second signal makes it urgent. Signals that
    were ignored before count too: shells and launchers may leave them so.
    """

    def __enter__(self) -> JobSignals:
        for number in _OF_A_JOB:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        """Ignore them from here on.

        srun ends the other tasks when one has failed, and a task that is about to end with its own code must
        not end with a signal's.
        """
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def count(self) -> int:
        """Return 1 once a signal has come, however many follow."""
        return min(1, super().count())


@dataclass(frozen=True)
class JobTask:
    """One task of a job's step, by the variables that Slurm sets: the only one of its node, number `node`."""

    # The id of the array and the member's number, where the job is one of an array: 12_3. Slurm's commands
    # take it; the job's own number may be the whole array's id.
    job: str
    # How often the job has been started before this time.
    restart: int
    node: int
    num_nodes: int
    # As Slurm calls this host.
    host: str
    # Where srun runs: the first node, by an address that the others reach.
    launch_address: str | None
    # Slurm's name of the cluster; None where Slurm did not say it.
    cluster: str | None = None
    # The switches above this node, the topmost first; empty where Slurm knows none.
    switches: SwitchPath = ()
    # When this start of the job got its nodes (Unix seconds); None where Slurm did not say it (before 22.05).
    job_began: float | None = None

    @property
    def array_task(self) -> int | None:
        """The number of the job in its array; None for a job of its own."""
        member = self.job.partition("_")[2]
        return int(member) if member else None


def job_task(environment: Mapping[str, str]) -> JobTask:
    """Return this task's place. Raises LauncherError outside a step, and with several tasks per node."""
    missing = [name for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS") if name not in environment]
    if missing:
        raise LauncherError(f"{', '.join(missing)} is not set: srun starts this inside a Slurm job")
    num_tasks, num_nodes = int(environment["SLURM_NTASKS"]), int(environment.get("SLURM_NNODES", "1"))
    if num_tasks != num_nodes:
        raise LauncherError(f"{num_tasks} tasks on {num_nodes} nodes, expected one task on each")
    array, member = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    began = environment.get("SLURM_JOB_START_TIME", "")
    return JobTask(
        job=f"{array}_{member}" if array and member else environment["SLURM_JOB_ID"],
        restart=int(environment.get("SLURM_RESTART_COUNT") or 0),
        # The steps' tasks are numbered node by node.
        node=int(environment["SLURM_PROCID"]),
        num_nodes=num_nodes,
        host=environment.get("SLURMD_NODENAME", ""),
        launch_address=environment.get("SLURM_LAUNCH_NODE_IPADDR"),
        cluster=environment.get("SLURM_CLUSTER_NAME") or None,
        switches=own_path(environment),
        job_began=float(began) if began.isdecimal() and int(began) else None,
    )
