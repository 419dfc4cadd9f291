"""A Slurm job as the surroundings of a crew: what it asks of Slurm, and how a run goes on in another job."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from conf.schema import Config, Requeue
from launchers.errors import LauncherError
from launchers.slurm import own_job, scancel
from launchers.slurm.settings import asked_cluster
from launchers.slurm.task import JobTask
from orchestra.crew.choice import excluded_hosts
from orchestra.events import EventWriter, read_events
from orchestra.recovery.excluded import ExcludeList, entries_of, shared_folder
from orchestra.recovery.incidents import Incident
from orchestra.recovery.policy import Decision
from orchestra.report.verdict import Verdict
from orchestra.rundir import RunDir
from orchestra.submit.continuation import GoingOn
from orchestra.submit.guard import refusal
from orchestra.submit.left_out import hosts_without, words
from orchestra.submit.place import own_address
from orchestra.submit.resubmission import chain


class SlurmJob:
    """One start of a Slurm job, as one of its tasks sees it."""

    def __init__(self, run: RunDir, config: Config, task: JobTask) -> None:
        self._run = run
        self._config = config
        self._task = task

    @property
    def host(self) -> str:
        return self._task.host or socket.gethostname()

    @property
    def can_requeue(self) -> bool:
        return self._config.cluster.requeue is not Requeue.never

    def facts(self) -> dict[str, Any]:
        return {"job": self._task.job, "job_start": self._task.restart, "cluster": self._task.cluster}

    def own_address(self) -> str:
        return own_address(self._config.cluster.network, self._task)

    def refusal(self) -> str | None:
        return refusal(self._run, self._task)

    def judged(self, verdict: Verdict, attempt: int, events: EventWriter) -> Verdict:
        return self._going_on(attempt, events).judged(verdict)

    def go_on(self, verdict: Verdict, attempt: int, events: EventWriter) -> str:
        return self._going_on(attempt, events).go_on(verdict)

    def _going_on(self, attempt: int, events: EventWriter) -> GoingOn:
        return GoingOn(self._run, self._config, self._task, attempt, events)

    def requeue(self, decision: Decision, attempt: int, events: EventWriter) -> str:
        """Submit the run's job again without the nodes that failed; this one starts nothing any more.

        A job of its own waits for no hold: one that Slurm requeues after a node failure is kept back for the
        life of its credential (121 s and more by default).
        """
        script = None
        with contextlib.suppress(LauncherError):
            script = own_job.own_job(self._task.job).script
        # Of those that were merely gone only the last ones, which Slurm may not have missed yet: a job that
        # leaves out too many of a small cluster's nodes can never run, and Slurm lets it fail.
        of_run = excluded_hosts(read_events(self._run), {})
        listed = hosts_without(self._config, self._run, self._cluster)
        without = [*self._config.cluster.exclude, *decision.exclude, *sorted(of_run), *listed]
        exclude = tuple(dict.fromkeys(without))
        job = chain(self._run, self._task, attempt + 1, script, exclude, at_once=True)
        with contextlib.suppress(OSError):
            facts = {"exclude": list(decision.exclude), "rule": decision.rule}
            events.write(
                "requeued", job=job, how="chain", reason=decision.reason, after=self._task.job, **facts
            )
        return f"job {job} goes on ({decision.reason})"

    def excluded(self) -> dict[str, str]:
        if self._config.recovery.exclude_hours <= 0:
            return {}
        return {entry.host: words(entry) for entry in self._list.entries(time.time())}

    def exclude(self, decision: Decision, log: Sequence[Incident]) -> None:
        hours = self._config.recovery.exclude_hours
        for entry in entries_of(decision, log, self._run, time.time(), hours):
            self._list.add(entry)

    @property
    def _list(self) -> ExcludeList:
        return ExcludeList(shared_folder(self._run.path.parent), self._cluster)

    @property
    def _cluster(self) -> str | None:
        return self._task.cluster or asked_cluster()

    def release(self, lost: Sequence[int]) -> None:
        """End this start of the job where a node of it is gone. Raises LauncherError.

        Where it was the first one, srun went with it, and nobody else would end the job. Else srun waits for
        the lost node's task until Slurm has noticed, minutes by default, and the job keeps its nodes.
        """
        if not lost:
            return
        # Slurm may have put the job back into the queue: its first node came back without the batch script.
        if own_job.own_job(self._task.job).restarts <= self._task.restart:
            scancel.cancel([self._task.job], only_waiting=False)
