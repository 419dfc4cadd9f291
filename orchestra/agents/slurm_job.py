"""What the agents ask of Slurm, and how a run goes on in another job.

`SlurmJob` is one start of a job, as one of its tasks sees it; its requests are made by the leader only. A run
goes on for two reasons. Its attempt was stopped by the time limit or by a job of higher priority: what is to
be done then is a pure function (`continuation`), and doing it is a second step, after the verdict is written,
since Slurm may kill the agent the moment that it is asked (`RunContinuation`). Or nodes failed, and the
policy decided to requeue (`SlurmJob.requeue`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from conf.schema import Config, Requeue
from launchers import LauncherError, SlurmRefused, SlurmSilent
from launchers.host_network import interface_of
from launchers.slurm import sbatch, this_job
from launchers.slurm.commands import asked_cluster, settings
from launchers.slurm.this_job import JobTask, OwnJob
from orchestra.agents.choose_nodes import excluded_hosts, fewest_nodes, of_next_attempt
from orchestra.agents.context import Reasons, Scheduler
from orchestra.agents.growth.helper_job import group_name
from orchestra.agents.growth.more_nodes import MoreNodes
from orchestra.agents.growth.wanted_nodes import WantedNodes
from orchestra.agents.rival_jobs import refusal
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_INTERRUPTED, EXIT_STOPPED, LaunchError
from orchestra.recovery.excluded_hosts import ExcludeList, entries_of, shared_folder
from orchestra.recovery.incidents import Incident, Verdict
from orchestra.recovery.policy import Decision
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.record import newest_job, read_record
from orchestra.run.run_lineage import newest_checkpoint
from orchestra.submit.hosts_to_avoid import hosts_of_next_job, hosts_without, words
from orchestra.submit.job_record import Move, chain, moved_to, record_id, tell_of_moves
from orchestra.submit.launch import own_address

# The reason in `scontrol show job` where the limit ended a job.
_ENDED_BY_LIMIT = "TimeLimit"
# How long Slurm's ending of a job is asked for where it does not answer.
_RELEASE_TIMEOUT_S = 60.0
_RELEASE_PAUSE_S = 2.0
# After so long without an answer Slurm takes a node for dead, where it does not tell when.
_NOTICED_S = 60
_NOT_KNOWN = "Invalid job id"


class GoOnBy(Enum):
    """What is done so that a run goes on."""

    end = "end"
    give_up = "give_up"
    # Slurm starts the job again by itself.
    leave = "leave"
    requeue = "requeue"
    chain = "chain"


@dataclass(frozen=True)
class StopFacts:
    """What is known of an attempt that stopped on request."""

    policy: Requeue
    # Of the requests to stop it.
    reasons: frozenset[str]
    # What Slurm says of the job; None where it could not be asked.
    job: OwnJob | None
    # How often the job had been started before this start.
    restart: int
    # Whether it saved nothing, and the attempt before, which ended by the limit too, did not either.
    is_stalled: bool = False


@dataclass(frozen=True)
class Continuation:
    """What is to be done, and because of what: `time_limit`, `preempted`, or why the run does not go on."""

    how: GoOnBy
    reason: str


def continuation(stop: StopFacts) -> Continuation:
    """Return what is to be done after a stop. A pure function.

    Whoever cancels a run means it, and so does whoever sends a signal to one of its processes.
    """
    if stop_requests.CANCEL in stop.reasons:
        return Continuation(GoOnBy.end, "it was cancelled")
    job = stop.job
    if job is not None and job.restarts > stop.restart:
        reason = stop_requests.TIME_LIMIT if stop_requests.TIME_LIMIT in stop.reasons else "requeued in Slurm"
        return Continuation(GoOnBy.leave, reason)
    ended_by = _reason(stop)
    if ended_by is None:
        return Continuation(GoOnBy.end, _why_not(stop))
    if stop.policy is Requeue.never:
        return Continuation(GoOnBy.end, f"cluster.requeue=never ({ended_by})")
    if stop.is_stalled and ended_by == stop_requests.TIME_LIMIT:
        return Continuation(GoOnBy.give_up, "no progress")
    return Continuation(GoOnBy.chain if stop.policy is Requeue.chain else GoOnBy.requeue, ended_by)


def _reason(stop: StopFacts) -> str | None:
    """Return what ended the attempt if the run is to go on after that, else None."""
    job = stop.job
    if job is not None and job.is_preempted:
        return stop_requests.PREEMPTED
    if job is not None and job.is_ending:
        # By the limit, or because somebody cancelled the job.
        return stop_requests.TIME_LIMIT if job.reason == _ENDED_BY_LIMIT else None
    return stop_requests.TIME_LIMIT if stop_requests.TIME_LIMIT in stop.reasons else None


def _why_not(stop: StopFacts) -> str:
    if stop.job is None:
        return f"{_named(stop.reasons)}, and Slurm could not be asked what that means"
    if stop.job.is_ending:
        return f"Slurm ends the job ({stop.job.state})"
    return _named(stop.reasons)


def _named(reasons: Iterable[str]) -> str:
    return ", ".join(sorted(reasons)) or "it was asked to stop"


def is_stalled(events: Iterable[Record], attempt: int) -> bool:
    """Tell whether an attempt saved nothing, and the one before it, which went on because of the limit, did
    not either. One alone may have had a slow start.
    """
    events = list(events)
    starts = sorted({event["attempt"] for event in events if event["event"] == "attempt_started"})
    older, before = [-1, -1, *(number for number in starts if number < attempt)][-2:]
    # A start that was called off before its attempt began says nothing of the one before it.
    of_attempt = [event for event in events if event["attempt"] == before and not event.get("before_start")]
    went_on = any(
        event["event"] == "requeued" and event.get("reason") == stop_requests.TIME_LIMIT
        for event in of_attempt
    )
    return went_on and len({_committed(events, number) for number in (older, before, attempt)}) == 1


def _committed(events: Iterable[Record], attempt: int) -> int | None:
    """Return the newest checkpoint at the end of an attempt."""
    return newest_checkpoint([event for event in events if event["attempt"] <= attempt])


@dataclass
class RunContinuation:
    """Lets a run go on after an attempt that was stopped. *The leader only*."""

    _run: RunDir
    _config: Config
    _task: JobTask
    _attempt: int
    _events: EventWriter
    # Why it stopped, where that is not what the requests to stop the attempt say.
    _asked_reasons: Reasons | None = None
    # The job that goes on in the place of this one.
    _next_job: str | None = None

    def final_verdict(self, verdict: Verdict) -> Verdict:
        """Return the verdict, or in its place "no progress" where starting again would not help."""
        if verdict.code != EXIT_STOPPED or not is_stalled(read_events(self._run), self._attempt):
            return verdict
        if continuation(self._stop(stalled=True)).how is not GoOnBy.give_up:
            return verdict
        limit = self._config.cluster.time_limit
        return Verdict(
            EXIT_DO_NOT_RESTART,
            "no progress",
            f"the time limit ended two attempts in a row that saved nothing after step {verdict.step or 0}: "
            f"what comes before the next step, and the save after it, takes longer than a job has "
            f"(cluster.time_limit={limit}); resume it with a longer one: `orchestra resume {self._run.name} "
            f"cluster.time_limit=…`",
            step=verdict.step,
        )

    def go_on(self, verdict: Verdict, *, is_first_lost: bool = False) -> str:
        """Do what lets the run go on, and return in a few words what was done. `is_first_lost`: the node of
        the batch script was, and Slurm requeues the job because it came back.
        """
        if verdict.code not in (EXIT_STOPPED, EXIT_INTERRUPTED):
            return ""
        plan = continuation(self._stop(stalled=False))
        if verdict.code == EXIT_INTERRUPTED and plan.how is not GoOnBy.leave:
            return ""
        if plan.how is GoOnBy.end:
            return f"it does not go on by itself: {plan.reason}"
        if plan.how is GoOnBy.leave and not is_first_lost:
            return self._left_to_slurm(plan.reason)
        try:
            if plan.how is GoOnBy.leave:
                return self._instead_of_requeue()
            done = self._requeued(plan.reason) if plan.how is GoOnBy.requeue else self._chained(plan.reason)
            return self._cancelled_meanwhile() or done
        except (LauncherError, LaunchError, OSError) as error:
            return self._left_stopped(verdict, str(error))

    def _left_to_slurm(self, reason: str) -> str:
        self._write_requeued("requeue", reason)
        return f"Slurm starts the job again ({reason})"

    def _instead_of_requeue(self) -> str:
        """Let a job of its own go on: one that Slurm requeues is kept back for the life of its credential."""
        try:
            done = self._chained("its first node was lost and came back", at_once=True)
        except SlurmRefused:
            return self._left_to_slurm("its first node was lost and came back")
        with contextlib.suppress(LauncherError):
            # Else it finds the run trained, and ends.
            sbatch.cancel([self._task.job], only_waiting=False)
        return self._cancelled_meanwhile() or done

    def _stop(self, *, stalled: bool) -> StopFacts:
        policy, restart, reasons = self._config.cluster.requeue, self._task.restart, self._reasons()
        if reasons & {stop_requests.CANCEL, stop_requests.TIME_LIMIT}:
            return StopFacts(policy, reasons, self._own_job(), restart, stalled)
        # Only Slurm knows whether a signal means a preemption, after which it queues a job that still runs.
        return StopFacts(policy, reasons, this_job.own_job_surely(self._task.job), restart, stalled)

    def _reasons(self) -> frozenset[str]:
        if self._asked_reasons is not None:
            return self._asked_reasons()
        try:
            requests = stop_requests.read_requests(self._run, self._attempt)
        except OSError:
            return frozenset()
        return frozenset(request.reason for request in requests)

    def _own_job(self) -> OwnJob | None:
        try:
            return this_job.own_job(self._task.job)
        except LauncherError:
            return None

    def _requeued(self, reason: str) -> str:
        # Written first: this process may be ended while it asks.
        self._write_requeued("requeue", reason)
        try:
            this_job.requeue_surely(self._task.job, self._task.restart)
        except SlurmRefused as refusal:
            return f"Slurm does not requeue this job ({refusal}); {self._chained(reason)}"
        return f"requeued ({reason})"

    def _chained(self, reason: str, *, at_once: bool = False) -> str:
        own = self._own_job()
        script = None if own is None else own.script
        without = hosts_without(self._config, self._run, self._task.cluster) or _as_configured(
            self._config, own
        )
        facts = {"reason": reason}
        self._next_job = chain(
            self._run,
            self._task,
            self._attempt + 1,
            script,
            without,
            at_once=at_once,
            num_nodes=nodes_of_next_job(self._config, self._run),
            move=Move(self._attempt, self._task.restart, facts, self._events.is_before_start),
        )
        self._write_requeued("chain", reason, self._next_job)
        return f"job {self._next_job} goes on ({reason})"

    def _cancelled_meanwhile(self) -> str:
        """Cancel the job that is to go on if somebody cancelled the run in this very moment; say so."""
        if stop_requests.CANCEL not in self._stop(stalled=False).reasons:
            return ""
        newest = newest_job(read_record(self._run))
        token = None if newest is None else newest.get("token")
        job = self._next_job or self._task.job
        sbatch.cancel([job], only_waiting=False)
        self._events.write("cancelled", job=job, token=token, user=stop_requests.user_name())
        return f"it was cancelled, and job {job} with it"

    def _write_requeued(self, how: str, reason: str, job: str | None = None) -> None:
        with contextlib.suppress(OSError):
            facts = {"after": self._task.job} if job else {}
            self._events.write("requeued", job=job or self._task.job, how=how, reason=reason, **facts)

    def _left_stopped(self, verdict: Verdict, problem: str) -> str:
        """Write the verdict once more: no job goes on."""
        message = f"{verdict.message}; it does not go on by itself: {problem}"
        with contextlib.suppress(OSError):
            facts = {"cause": verdict.cause, "message": message, "step": verdict.step}
            self._events.write("failed", node=0, code=verdict.code, **facts)
        sys.stderr.write(f"error: {self._run.name} does not go on by itself: {problem}\n")
        return f"it does not go on by itself: {problem}"


class SlurmJob(Scheduler):
    """One start of a Slurm job, as one of its tasks sees it."""

    def __init__(self, run: RunDir, config: Config, task: JobTask) -> None:
        self._run = run
        self._config = config
        self._task = task
        self._more_nodes = MoreNodes(run, config, task, group_name(task.job, task.restart))
        self._letting_go = threading.Lock()
        self._to_let_go: set[str] = set()
        self._shrinks: threading.Thread | None = None
        # Then Slurm requeues the job when that node comes back without the batch script.
        self._is_first_lost = False

    @property
    def host(self) -> str:
        return self._task.host or socket.gethostname()

    @property
    def can_requeue(self) -> bool:
        return self._config.cluster.requeue is not Requeue.never

    def facts(self) -> dict[str, Any]:
        return {"job": self._task.job, "job_start": self._task.restart, "cluster": self._task.cluster}

    def place(self) -> dict[str, Any]:
        interface = interface_of(self.own_address())
        return {"switches": list(self._task.switches), "interface": interface}

    def own_address(self) -> str:
        # Another node may come.
        task = dataclasses.replace(
            self._task, num_nodes=max(self._task.num_nodes, self._config.cluster.nodes)
        )
        return own_address(self._config.cluster.network, task)

    def refusal(self) -> str | None:
        return refusal(self._run, self._task)

    def final_verdict(self, verdict: Verdict, attempt: int, events: EventWriter) -> Verdict:
        return RunContinuation(self._run, self._config, self._task, attempt, events).final_verdict(verdict)

    def go_on(
        self, verdict: Verdict, attempt: int, events: EventWriter, reasons: Reasons | None = None
    ) -> str:
        continuation = RunContinuation(self._run, self._config, self._task, attempt, events, reasons)
        return continuation.go_on(verdict, is_first_lost=self._is_first_lost)

    def requeue(self, decision: Decision, attempt: int, events: EventWriter) -> str:
        """Submit the run's job again without the nodes that failed; this one starts nothing any more.

        A job of its own waits for no hold: one that Slurm requeues after a node failure is kept back for the
        life of its credential (121 s and more by default). Where there are too few other nodes it may get
        those that failed, and begins when Slurm has noticed who is dead. Raises LauncherError, LaunchError
        and OSError, also where Slurm accepts the job and lets it fail at once.
        """
        # Of those that were merely gone only the last ones, which Slurm may not have missed yet: a job that
        # leaves out too many of a small cluster's nodes can never run, and Slurm lets it fail.
        past = read_events(self._run)
        of_run = excluded_hosts(past, {}, self._config.recovery.exclude_hours)
        other = hosts_of_next_job(
            self._config,
            self._run,
            self._cluster,
            decision.exclude,
            sorted(of_run),
            fewest=_fewest_of_job(self._config, self._run),
        )
        exclude, delay_s = other.exclude, _noticed_s() if other.missed else 0
        num_nodes = nodes_of_next_job(self._config, self._run, is_short=other.is_short)
        move = Move(attempt, self._task.restart, _facts_of(decision, exclude), events.is_before_start)
        try:
            try:
                job = self._chain(move, exclude, delay_s, num_nodes)
            except SlurmRefused:
                # Slurm alone knows which of its nodes have what the job asks for: once more without leaving
                # out more of them than its script says.
                if not exclude:
                    raise
                exclude, delay_s = (), _noticed_s() if decision.exclude else 0
                move = dataclasses.replace(move, facts=_facts_of(decision, exclude))
                job = self._chain(move, exclude, delay_s, num_nodes)
        except SlurmRefused as refusal:
            raise LaunchError(f"Slurm refused the next job: {refusal}") from refusal
        # The leader before this one may have written it already.
        if not any(event["event"] == "requeued" and event.get("job") == job for event in past):
            with contextlib.suppress(OSError):
                events.write("requeued", how="chain", job=job, after=self._task.job, **move.facts)
        late = f"; it begins in {delay_s} s, since it may get the nodes that failed"
        return f"job {job} goes on ({decision.reason}){late if delay_s else ''}"

    def _chain(self, move: Move, exclude: tuple[str, ...], delay_s: int, num_nodes: str | None) -> str:
        own = None
        with contextlib.suppress(LauncherError):
            own = this_job.own_job(self._task.job)
        return chain(
            self._run,
            self._task,
            move.attempt + 1,
            None if own is None else own.script,
            exclude or _as_configured(self._config, own),
            at_once=True,
            delay_s=delay_s,
            num_nodes=num_nodes,
            move=move,
        )

    def moved_to(self) -> str | None:
        try:
            job = moved_to(self._run, self._task)
        except OSError:
            return None
        if job is None:
            return None
        with contextlib.suppress(LauncherError, OSError):
            self.complete_history()
        return f"job {job} goes on, which an agent submitted that led before"

    def complete_history(self) -> None:
        newest = newest_job(read_record(self._run))
        if newest is not None and newest.get("id") is None and Move.of(newest) is not None:
            token, attempt = str(newest.get("token")), newest.get("attempt")
            if token in this_job.own_job(self._task.job).comment.split():
                # Whoever submitted this job never had an answer.
                number = attempt if isinstance(attempt, int) else 0
                record_id(self._run, token, self._task.job.partition("_")[0], number)
        tell_of_moves(self._run)

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

    def let_go(self, hosts: Collection[str]) -> None:
        """Take lost hosts out of the job. One of them that boots again before Slurm has noticed that it was
        gone would otherwise let srun give the whole step up, and wait half a minute for the dead one.
        """
        with self._letting_go:
            self._to_let_go.update(hosts)
            if self._shrinks is None or not self._shrinks.is_alive():
                # One at a time: each says which nodes are left.
                self._shrinks = threading.Thread(target=self._shrink, name="lets-go", daemon=True)
                self._shrinks.start()

    def _shrink(self) -> None:
        num_refusals = 0
        while True:
            with self._letting_go:
                hosts = frozenset(self._to_let_go)
                if not hosts or num_refusals > 1:
                    self._to_let_go.clear()
                    self._shrinks = None
                    return
            try:
                own = this_job.own_job(self._task.job)
                self._is_first_lost = self._is_first_lost or own.batch_host in hosts
                if gone := this_job.take_out(self._task.job, own, hosts):
                    _say(f"given back to Slurm: {', '.join(gone)}")
            except SlurmSilent:
                time.sleep(_RELEASE_PAUSE_S)
                continue
            except LauncherError as refusal:
                # Slurm may have taken one itself in this moment.
                num_refusals += 1
                _say(f"{', '.join(sorted(hosts))} not given back to Slurm: {refusal}")
                continue
            with self._letting_go:
                self._to_let_go -= hosts

    def ask_for_nodes(self, wanted: WantedNodes) -> None:
        self._more_nodes.ask(wanted)

    def withdraw(self, *, for_good: bool) -> None:
        self._more_nodes.withdraw(for_good=for_good)

    def release(self, lost: Sequence[int]) -> None:
        """End this start of the job where a node of it is gone. Raises LauncherError after a minute.

        Where it was the first one, srun went with it, and nobody else would end the job. Else srun waits for
        the lost node's task until Slurm has noticed, minutes by default, and the job keeps its nodes.
        """
        # Nodes of a helping job hold nothing of this one's.
        if all(node >= self._task.num_nodes for node in lost):
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
        own = this_job.own_job(self._task.job)
        # Slurm may have put the job back into the queue: its first node came back without the batch script.
        # It is asked anew each time, since a question that got no answer may have been heard.
        if own.restarts <= self._task.restart and not own.is_ending:
            sbatch.cancel([self._task.job], only_waiting=False)


def _as_configured(config: Config, own: OwnJob | None) -> tuple[str, ...]:
    """Return what a next job is told to leave out that nobody need be kept from, so that its script does not
    keep it from hosts that were on the list when that was written. Empty where the script says no more.
    """
    try:
        said = set() if own is None or not own.excluded else set(this_job.names_of(own.excluded))
    except LauncherError:
        return ()
    # An empty name in the place of the script's: nobody at all.
    return (tuple(config.cluster.exclude) or ("",)) if said - set(config.cluster.exclude) else ()


def _facts_of(decision: Decision, exclude: Collection[str]) -> dict[str, Any]:
    """Return the evidence of the event of a move; `exclude`: whom the next job does not get."""
    out = [host for host in decision.exclude if host in exclude]
    return {"reason": decision.reason, "exclude": out, "rule": decision.rule}


def nodes_of_next_job(config: Config, run: RunDir, *, is_short: bool = False) -> str | None:
    """Return how many nodes a run's next job is to ask for, as sbatch writes it; None where its script asks
    for enough, and for no more than there are.

    Of a job that may begin with few (cluster.min_nodes) too few might not share out the batch of a ramp that
    the run went back into. One that asks for all would wait for a node that is gone, though the run can go on
    with fewer (recovery.min_nodes), where the cluster `is_short` of others. Raises OSError.
    """
    own = config.cluster
    # Spares train too where they are needed.
    fewest, most = _fewest_of_job(config, run), own.nodes + own.spare_nodes
    by_script = most if own.min_nodes is None else own.min_nodes + own.spare_nodes
    if fewest == by_script or (fewest < by_script and not (is_short and own.min_nodes is None)):
        return None
    return str(most) if fewest == most else f"{fewest}-{most}"


def _fewest_of_job(config: Config, run: RunDir) -> int:
    """Return with how many nodes, spares among them, a run's next job can train it. Raises OSError."""
    own = config.cluster
    if own.min_nodes is None and config.recovery.min_nodes is None:
        return own.nodes + own.spare_nodes
    fewest = fewest_nodes(of_next_attempt(config, run))
    return fewest if own.min_nodes is None else max(fewest, own.min_nodes + own.spare_nodes)


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def _noticed_s() -> int:
    """Return how long Slurm may take to notice that a node is dead, in seconds."""
    try:
        value = settings().get("SlurmdTimeout", "").split()
    except LauncherError:
        value = []
    # 0: it never says so by itself.
    return int(value[0]) if value and value[0].isdecimal() and int(value[0]) else _NOTICED_S
