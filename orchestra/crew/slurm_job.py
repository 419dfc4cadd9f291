"""A Slurm job as the surroundings of a crew: what it asks of Slurm, and how a run goes on in another job."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from conf.schema import Config, Requeue
from launchers.errors import LauncherError, SlurmRefused
from launchers.slurm import own_job, scancel
from launchers.slurm.settings import asked_cluster, settings
from launchers.slurm.task import JobTask
from orchestra.crew.choice import excluded_hosts
from orchestra.crew.station import Reasons
from orchestra.errors import LaunchError
from orchestra.events import EventWriter, read_events
from orchestra.recovery.excluded import ExcludeList, entries_of, shared_folder
from orchestra.recovery.incidents import Incident
from orchestra.recovery.policy import Decision
from orchestra.report.verdict import Verdict
from orchestra.rundir import RunDir
from orchestra.submit.continuation import GoingOn
from orchestra.submit.guard import refusal
from orchestra.submit.left_out import elsewhere, words
from orchestra.submit.place import own_address
from orchestra.submit.resubmission import chain

# How long Slurm's ending of a job is asked for where it does not answer.
_RELEASE_TIMEOUT_S = 60.0
_RELEASE_PAUSE_S = 2.0
# After so long without an answer Slurm takes a node for dead, where it does not tell when.
_NOTICED_S = 60
_NOT_KNOWN = "Invalid job id"


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

    def go_on(
        self, verdict: Verdict, attempt: int, events: EventWriter, reasons: Reasons | None = None
    ) -> str:
        return self._going_on(attempt, events, reasons).go_on(verdict)

    def _going_on(self, attempt: int, events: EventWriter, reasons: Reasons | None = None) -> GoingOn:
        return GoingOn(self._run, self._config, self._task, attempt, events, reasons)

    def requeue(self, decision: Decision, attempt: int, events: EventWriter) -> str:
        """Submit the run's job again without the nodes that failed; this one starts nothing any more.

        A job of its own waits for no hold: one that Slurm requeues after a node failure is kept back for the
        life of its credential (121 s and more by default). Where there are too few other nodes it may get
        those that failed, and begins when Slurm has noticed who is dead. Raises LauncherError, LaunchError
        and OSError, also where Slurm accepts the job and lets it fail at once.
        """
        script = None
        with contextlib.suppress(LauncherError):
            script = own_job.own_job(self._task.job).script
        # Of those that were merely gone only the last ones, which Slurm may not have missed yet: a job that
        # leaves out too many of a small cluster's nodes can never run, and Slurm lets it fail.
        past = read_events(self._run)
        of_run = excluded_hosts(past, {})
        found = elsewhere(self._config, self._run, self._cluster, decision.exclude, sorted(of_run))
        delay_s = _noticed_s() if found.missed else 0
        try:
            job, exclude = self._chain(attempt, script, found.exclude, delay_s), found.exclude
        except SlurmRefused as refusal:
            # Slurm knows more of its nodes than their names: which have what the job asks for.
            if not found.exclude:
                raise LaunchError(f"Slurm does not take the next job: {refusal}") from refusal
            delay_s = _noticed_s() if decision.exclude else 0
            job, exclude = self._chain_with_all(attempt, script, delay_s), ()
        out = [host for host in decision.exclude if host in exclude]
        facts = {"job": job, "after": self._task.job, "exclude": out, "rule": decision.rule}
        # The leader before this one may have come so far.
        if not any(it["event"] == "requeued" and it.get("job") == job for it in past):
            with contextlib.suppress(OSError):
                events.write("requeued", how="chain", reason=decision.reason, **facts)
        late = f"; it begins in {delay_s} s, since it may get the nodes that failed"
        return f"job {job} goes on ({decision.reason}){late if delay_s else ''}"

    def _chain(self, attempt: int, script: str | None, exclude: tuple[str, ...], delay_s: int) -> str:
        return chain(self._run, self._task, attempt + 1, script, exclude, at_once=True, delay_s=delay_s)

    def _chain_with_all(self, attempt: int, script: str | None, delay_s: int) -> str:
        """Submit the job once more, without leaving out more hosts than its script says."""
        try:
            return self._chain(attempt, script, (), delay_s)
        except SlurmRefused as refusal:
            raise LaunchError(f"Slurm does not take the next job: {refusal}") from refusal

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
        """End this start of the job where a node of it is gone. Raises LauncherError after a minute.

        Where it was the first one, srun went with it, and nobody else would end the job. Else srun waits for
        the lost node's task until Slurm has noticed, minutes by default, and the job keeps its nodes.
        """
        if not lost:
            return
        deadline = time.monotonic() + _RELEASE_TIMEOUT_S
        while True:
            try:
                self._end_this_start()
                return
            except LauncherError as error:
                if _NOT_KNOWN in str(error):
                    return
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RELEASE_PAUSE_S)

    def _end_this_start(self) -> None:
        word = own_job.own_job(self._task.job)
        # Slurm may have put the job back into the queue: its first node came back without the batch script.
        # It is asked anew each time, since a question that got no answer may have been heard.
        if word.restarts <= self._task.restart and not word.is_ending:
            scancel.cancel([self._task.job], only_waiting=False)


def _noticed_s() -> int:
    """Return how long Slurm may take to notice that a node is dead, in seconds."""
    try:
        value = settings().get("SlurmdTimeout", "").split()
    except LauncherError:
        value = []
    # 0: it never says so by itself.
    return int(value[0]) if value and value[0].isdecimal() and int(value[0]) else _NOTICED_S
