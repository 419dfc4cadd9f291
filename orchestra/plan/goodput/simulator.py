"""One run under failures, from event to event: an attempt, its end, the policy's decision, the next attempt.

Time passes between events in closed forms, so that the cost is per failure and not per device, step or
second. What is assumed: failures strike only nodes that train or start to; spares and waiting jobs have none;
a second failure while the first is being noticed changes nothing; steps of an attempt are alike, and on n of
N nodes N/n times as long; a save is committed a fixed time after the wait for it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestra.errors import EXIT_FAILED, EXIT_STOPPED
from orchestra.plan.goodput.scenario import DAY_S, Cause, Failure, Scenario, failures
from orchestra.recovery import history, policy
from orchestra.recovery.accounting import Account, Accounts
from orchestra.recovery.incidents import Incident, incidents
from orchestra.recovery.policy import Action, Decision, Resources, Rules
from orchestra.run.control import stop_requests
from orchestra.run.files import Record


@dataclass(frozen=True)
class PaceProgress:
    """Where an attempt stands: steps done, the newest committed and the newest copied one (None: none of its
    own), and seconds by what they went to.
    """

    step: int
    committed: int | None
    copied: int | None
    training_s: float
    saving_s: float


@dataclass(frozen=True)
class TrainingPace:
    """An attempt that trains on from step `begin`. `copy_every`: None without copies in memory."""

    begin: int
    step_s: float
    every_steps: int
    stall_s: float
    write_s: float = 0.0
    copy_every: int | None = None
    copy_s: float = 0.0

    def at(self, seconds: float) -> PaceProgress:
        """Return where it stands so many seconds after its first step began."""
        # A step with its share of what copies in memory cost.
        unit = self.step_s + (self.copy_s / self.copy_every if self.copy_every else 0.0)
        every = self.every_steps
        num_first = every - self.begin % every
        first_s = num_first * unit + self.stall_s
        done: float = num_first
        if seconds < num_first * unit:
            done = seconds / unit
        elif seconds >= first_s:
            num_whole, rest_s = divmod(seconds - first_s, every * unit + self.stall_s)
            done = num_first + num_whole * every + min(float(every), rest_s / unit)
        # A step that is over by all but rounding is over.
        num_steps = int(done + 1e-9)
        training_s = done * self.step_s
        return PaceProgress(
            step=self.begin + num_steps,
            committed=self._committed(seconds - first_s - self.write_s, num_first, unit),
            copied=self._copied(num_steps),
            training_s=training_s,
            saving_s=max(0.0, seconds - training_s),
        )

    def _committed(self, seconds: float, num_first: int, unit: float) -> int | None:
        if seconds < 0:
            return None
        later = int(seconds / (self.every_steps * unit + self.stall_s))
        return self.begin + num_first + later * self.every_steps

    def _copied(self, num_steps: int) -> int | None:
        """A copy is whole one step later."""
        if self.copy_every is None:
            return None
        newest = (self.begin + num_steps - 1) // self.copy_every * self.copy_every
        return newest if newest > self.begin else None


@dataclass
class _Stretch:
    """Steps that were trained at one pace and are not committed yet."""

    first: int
    last: int
    step_s: float


@dataclass
class TimeLedger:
    """The accounts of `orchestra.recovery.accounting`, filled as time passes, and the steps that count: a
    roll-back makes some void again.
    """

    step: int = 0
    committed: int = 0
    _seconds: dict[Account, float] = field(default_factory=lambda: dict.fromkeys(Account, 0.0))
    _open: list[_Stretch] = field(default_factory=list)

    def spend(self, seconds: float, account: Account) -> None:
        """Book seconds that trained nothing."""
        self._seconds[account] += seconds

    def train(self, last: int, step_s: float, seconds: float) -> None:
        """Book the steps up to `last`, which took `seconds` with what was begun of the next step."""
        whole_s = (last - self.step) * step_s
        self._seconds[Account.productive] += whole_s
        self._seconds[Account.lost] += max(0.0, seconds - whole_s)
        if last > self.step:
            self._open.append(_Stretch(self.step, last, step_s))
        self.step = last

    def commit(self, step: int) -> None:
        """Note a committed step: no roll-back goes further back."""
        self.committed = step
        self._open = [stretch for stretch in self._open if stretch.last > step]

    def go_back(self, step: int) -> None:
        """Make the steps after `step` void: what they took is lost."""
        while self._open and self._open[-1].last > step:
            newest = self._open[-1]
            void_s = (newest.last - max(step, newest.first)) * newest.step_s
            self._seconds[Account.productive] -= void_s
            self._seconds[Account.lost] += void_s
            if newest.first >= step:
                self._open.pop()
            else:
                newest.last = step
        self.step = step

    def accounts(self) -> Accounts:
        """Return the seconds by account."""
        return Accounts(**{f"{name.value}_s": seconds for name, seconds in self._seconds.items()})


class Nodes:
    """The hosts of one allocation after another. Whoever left one does not come back into it."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._chance = random.Random(f"nodes {seed}")
        self._numbers = itertools.count(1)
        self._away_until: list[float] = []
        self.hosts: tuple[str, ...] = ()
        self.spares: tuple[str, ...] = ()
        # In use though broken: nothing has shown it yet.
        self.broken: set[str] = set()

    def allocate(self) -> None:
        """Take the hosts of a new job: as many as wanted, and the spares."""
        scenario = self._scenario
        self.hosts = tuple(self._names(scenario.num_nodes))
        self.spares = tuple(self._names(scenario.spare_nodes))
        self.broken = set()

    def at(self, place: int, num_nodes: int = 1) -> tuple[str, ...]:
        """Return the hosts at the switch of this place; those of them that train."""
        first = place // num_nodes * num_nodes
        return self.hosts[first : first + num_nodes]

    def leave(self, hosts: Collection[str], time: float) -> None:
        """Send hosts that are broken away for their repair."""
        for _ in hosts:
            repairs = self._scenario.repairs
            is_slow = self._chance.random() < repairs.slow_share
            mean_s = repairs.slow_s if is_slow else repairs.usual_s
            self._away_until.append(time + self._chance.expovariate(1 / mean_s))
        self.broken.difference_update(hosts)

    def wait_s(self, time: float) -> float:
        """Return how long a job that is submitted now waits: for the scheduler, and for enough nodes."""
        scenario = self._scenario
        mean_s = scenario.queue_wait_s
        queue_s = self._chance.expovariate(1 / mean_s) if mean_s > 0 else 0.0
        if scenario.cluster_nodes is None:
            return queue_s
        # What is broken and was not found out comes back with the others.
        away = sorted(until for until in self._away_until if until > time + queue_s)
        self._away_until = away
        missing = scenario.num_nodes + scenario.spare_nodes - (scenario.cluster_nodes - len(away))
        return queue_s if missing <= 0 else max(queue_s, away[min(missing, len(away)) - 1] - time)

    def without(self, out: Collection[str]) -> tuple[str, ...]:
        """Return the hosts that train, less some of them; quick where these are few."""
        hosts = self.hosts
        for host in out:
            if host in hosts:
                place = hosts.index(host)
                hosts = hosts[:place] + hosts[place + 1 :]
        return hosts

    def go_on(self, out: Collection[str]) -> list[int]:
        """Go on without the hosts in `out`, each other one in its place and spares for those; return the
        places that were filled. Without enough spares the later ones move up.
        """
        self.spares = tuple(host for host in self.spares if host not in out)
        hosts, filled = list(self.hosts), []
        places = sorted(hosts.index(host) for host in out if host in self.hosts)
        gone = len(places)
        missing = self._scenario.num_nodes - (len(hosts) - gone)
        stepping_in, self.spares = self.spares[:missing], self.spares[missing:]
        for place, host in zip(places, stepping_in, strict=False):
            hosts[place] = host
            filled.append(place)
        for place in reversed(places[len(filled) :]):
            del hosts[place]
        self.hosts = (*hosts, *stepping_in[gone:])
        return filled

    def _names(self, count: int) -> list[str]:
        return [f"node{next(self._numbers)}" for _ in range(count)]


_KILLED = "killed by SIGKILL"


class SimulatedEvents:
    """The records of a run, as leader, agents and ranks write them, and the incidents that they mean.

    The reading is the real one, `orchestra.recovery.history`. Of a long run it gets what it looks at: this
    attempt, the one before it, and the one that made the newest checkpoint.
    """

    def __init__(self) -> None:
        self._saving: list[Record] = []
        self._before: list[Record] = []
        self._own: list[Record] = []

    def begin(self, attempt: int, time: float, hosts: Sequence[str], job: int) -> None:
        """Write that an attempt starts on these hosts."""
        self._before, self._own = self._own, []
        self._write(attempt, time, "attempt_started", node=0, host=hosts[0], nodes=len(hosts), job=str(job))

    def restored(self, time: float, step: int, *, from_memory: bool) -> None:
        """Write after which step the attempt continues."""
        self._add(time, "restored", step=step, source="memory" if from_memory else "checkpoint")

    def training(self, time: float) -> None:
        """Write that the first step begins."""
        self._add(time, "training_started", rank=0)

    def committed(self, time: float, step: int) -> None:
        """Write the newest checkpoint of the attempt."""
        self._add(time, "checkpoint_committed", step=step)
        self._saving = [self._own[0], self._own[-1]]

    def failed(self, time: float, cause: Cause, hosts: Sequence[str], step: int | None) -> Incident:
        """Write how the attempt failed, on which hosts, and in which step if it was in one."""
        if cause in (Cause.node, Cause.switch):
            for host in hosts:
                self._add(time, "node_lost", host=host, cause="its agent is silent")
        elif cause is Cause.hang:
            evidence = {} if step is None else {"step": step}
            self._add(time, "hang_detected", rank=0, host=hosts[0], phase="reduce", **evidence)
        else:
            self._add(time, "rank_failed", rank=0, host=hosts[0], cause=_KILLED, signal="SIGKILL", code=1)
        return self._concluded(time, EXIT_FAILED)

    def stopped(self, time: float, step: int, *, is_preempted: bool) -> Incident:
        """Write that the scheduler ends the job, for another one or at its time limit, after `step`."""
        reason = stop_requests.PREEMPTED if is_preempted else stop_requests.TIME_LIMIT
        self._add(time, "stop_requested", reason=reason, step=step)
        return self._concluded(time, EXIT_STOPPED)

    def decided(self, time: float, decision: Decision) -> None:
        """Write what follows."""
        what = {"decision": decision.action.name, "rule": decision.rule, "reason": decision.reason}
        self._add(time, "restarting", **what, exclude=list(decision.exclude), wait_s=decision.wait_s)

    def _concluded(self, time: float, code: int) -> Incident:
        self._add(time, "failed", node=0, code=code, cause="", message="")
        known = {record["attempt"] for record in (*self._before, *self._own)}
        saving = [record for record in self._saving if record["attempt"] not in known]
        return incidents(history.read([*saving, *self._before, *self._own]))[-1]

    def _add(self, time: float, event: str, **evidence: Any) -> None:
        self._write(self._own[0]["attempt"], time, event, **evidence)

    def _write(self, attempt: int, time: float, event: str, **evidence: Any) -> None:
        self._own.append({"time": time, "attempt": attempt, "event": event, **evidence})


# Incidents that the policy is shown. Its rules look at the last two, at those without progress between them
# (it gives up after twenty), and for the same step failing twice, which happens again soon or never.
_SHOWN_INCIDENTS = 64
# How soon a device that is broken, and in use all the same, strikes again.
_STRIKES_AGAIN_S = 30.0


@dataclass(frozen=True)
class SimulatedRun:
    """What became of a simulated run."""

    scenario: Scenario
    accounts: Accounts
    # Steps that count at the end.
    num_steps: int
    num_attempts: int
    failures: Counter[str]
    # What the policy decided, by action, and the rules that did.
    actions: Counter[str]
    rules: Counter[str]
    # Why it ended before its time; None where it did not.
    gave_up: str | None

    @property
    def num_failures(self) -> int:
        """Failures that ended an attempt."""
        return self.failures.total()

    @property
    def goodput(self) -> float:
        """Work that counts, as the time it takes on all nodes without a failure, over the wall time."""
        return self.num_steps * self.scenario.times.step_s / self.scenario.horizon_s

    @property
    def goodput_per_device(self) -> float:
        """The same over all nodes of the allocation: spares earn nothing while they wait."""
        nodes = self.scenario.num_nodes
        return self.goodput * nodes / (nodes + self.scenario.spare_nodes)


def simulate(scenario: Scenario, seed: int = 0, rules: Rules | None = None) -> SimulatedRun:
    """Return what becomes of a run by its horizon. The same for the same arguments."""
    return _Run(scenario, seed, rules or Rules()).result()


@dataclass
class _AttemptEnd:
    """What ends an attempt: a failure or the scheduler, and when."""

    time: float
    failure: Failure | None = None
    hosts: tuple[str, ...] = ()
    is_preempted: bool = False


@dataclass
class _AttemptStart:
    """How the next attempt begins."""

    step: int = 0
    from_memory: bool = False
    is_first: bool = True


@dataclass
class _Run:
    scenario: Scenario
    seed: int
    rules: Rules
    clock: float = 0.0
    attempt: int = 0
    job: int = 0
    job_began: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    decided: Counter[str] = field(default_factory=Counter)
    log: list[Incident] = field(default_factory=list)
    ledger: TimeLedger = field(default_factory=TimeLedger)
    records: SimulatedEvents = field(default_factory=SimulatedEvents)
    begin: _AttemptStart = field(default_factory=_AttemptStart)
    gave_up: str | None = None

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.nodes = Nodes(scenario, self.seed)
        self._stream: Iterator[Failure] = failures(
            scenario.num_nodes,
            scenario.devices_per_node,
            scenario.mtbf_device_hours,
            scenario.mix,
            self.seed,
        )
        self._next = next(self._stream)
        self._scheduler = random.Random(f"scheduler {self.seed}")

    def result(self) -> SimulatedRun:
        self._start_job()
        while self.clock < self.scenario.horizon_s and self.gave_up is None:
            ending = self._ending()
            self._train_until(ending)
            if self.clock >= self.scenario.horizon_s:
                break
            self._go_on(self._decide(ending))
        if self.gave_up is not None:
            self.ledger.spend(max(0.0, self.scenario.horizon_s - self.clock), Account.idle)
        return SimulatedRun(
            scenario=self.scenario,
            accounts=self.ledger.accounts(),
            num_steps=self.ledger.step,
            num_attempts=self.attempt,
            failures=self.failures,
            actions=self.actions,
            rules=self.decided,
            gave_up=self.gave_up,
        )

    # One attempt.

    def _start_job(self) -> None:
        self._spend(self.nodes.wait_s(self.clock), Account.queue)
        self.nodes.allocate()
        self.job, self.job_began = self.job + 1, self.clock
        rate = self.scenario.preemptions_per_day / DAY_S
        self._preempted_at = self.clock + self._scheduler.expovariate(rate) if rate else math.inf

    def _ending(self) -> _AttemptEnd:
        """Return what ends the attempt that starts now."""
        scenario = self.scenario
        while self._next.time <= self.clock or self._next.place >= len(self.nodes.hosts):
            self._next = next(self._stream)
        failure = self._next
        width = scenario.nodes_per_switch if failure.cause is Cause.switch else 1
        ending = _AttemptEnd(failure.time, failure, self.nodes.at(failure.place, width))
        in_use = [host for host in self.nodes.hosts if host in self.nodes.broken] if self.nodes.broken else []
        if in_use:
            again = self.clock + self._starting_s() + _STRIKES_AGAIN_S
            if again < ending.time:
                struck = Failure(again, 0, Cause.device)
                ending = _AttemptEnd(again, struck, tuple(in_use[:1]))
        limit = scenario.time_limit_s
        if limit is not None and self.job_began + limit < ending.time:
            ending = _AttemptEnd(max(self.clock, self.job_began + limit))
        if self._preempted_at < ending.time:
            ending = _AttemptEnd(max(self.clock, self._preempted_at), is_preempted=True)
        return ending

    def _starting_s(self) -> float:
        times = self.scenario.times
        if self.begin.is_first:
            return times.restart_s
        return times.restart_s + (times.restore_from_memory_s if self.begin.from_memory else times.restore_s)

    def _train_until(self, ending: _AttemptEnd) -> None:
        """Let the attempt run to its end or the horizon, book its time, and write its records."""
        scenario, times = self.scenario, self.scenario.times
        began, end = self.clock, min(ending.time, scenario.horizon_s)
        self.records.begin(self.attempt, began, self.nodes.hosts, self.job)
        self.attempt += 1
        self._spend(min(times.restart_s, end - began), Account.restart)
        restore_s = self._starting_s() - times.restart_s
        self._spend(min(restore_s, end - self.clock), Account.restore)
        self.reached = self.begin.step
        # What it began with is still held.
        self.copied = self.begin.step if self.begin.from_memory else None
        self.in_step = False
        if end - began <= self._starting_s():
            return
        if not self.begin.is_first:
            self.records.restored(self.clock, self.begin.step, from_memory=self.begin.from_memory)
        self.records.training(self.clock)
        pace = self._pace()
        progress = pace.at(end - self.clock)
        self.clock = end
        self.ledger.train(progress.step, pace.step_s, progress.training_s)
        self.ledger.spend(progress.saving_s, Account.checkpoint)
        self.reached, self.in_step = progress.step, True
        self.copied = self.copied if progress.copied is None else progress.copied
        if progress.committed is not None:
            self._commit(progress.committed)

    def _pace(self) -> TrainingPace:
        scenario, times = self.scenario, self.scenario.times
        return TrainingPace(
            begin=self.begin.step,
            step_s=times.step_s * scenario.num_nodes / len(self.nodes.hosts),
            every_steps=scenario.saves_every_steps,
            stall_s=times.stall_s,
            write_s=times.write_s,
            copy_every=scenario.memory_copy_every_steps,
            copy_s=times.copy_s,
        )

    def _commit(self, step: int) -> None:
        self.ledger.commit(step)
        self.records.committed(self.clock, step)

    # What follows.

    def _decide(self, ending: _AttemptEnd) -> Decision:
        """Let it be noticed and read, and let the policy decide; the same calls as the leading agent's."""
        if ending.failure is None:
            incident = self._stopped(is_preempted=ending.is_preempted)
            self.out, in_place = set[str](), False
        else:
            incident = self._failed(ending, ending.failure)
            self.out, in_place = self._hosts_out(ending, ending.failure.cause), True
        self.log = [*self.log[1 - _SHOWN_INCIDENTS :], incident]
        scenario = self.scenario
        resources = Resources(
            wanted_nodes=scenario.num_nodes,
            min_nodes=scenario.min_nodes,
            hosts=self.nodes.without(self.out),
            spares=self.nodes.spares,
            can_requeue=scenario.can_requeue,
            in_place=in_place,
        )
        decision = policy.decide(self.log, resources, self.rules)
        self.records.decided(self.clock, decision)
        self.log[-1] = replace(incident, excluded=decision.exclude)
        self.actions[decision.action.name] += 1
        self.decided[decision.rule] += 1
        return decision

    def _stopped(self, *, is_preempted: bool) -> Incident:
        times = self.scenario.times
        if self.in_step:
            self._spend(times.stall_s + times.write_s, Account.checkpoint)
            self._commit(self.reached)
        return self.records.stopped(self.clock, self.reached, is_preempted=is_preempted)

    def _failed(self, ending: _AttemptEnd, failure: Failure) -> Incident:
        cause = failure.cause
        self.failures[cause.name] += 1
        self._spend(self.scenario.times.notice_s(cause), Account.restart)
        if cause is Cause.device:
            self.nodes.broken.update(ending.hosts)
        step = self.reached + 1 if self.in_step else None
        return self.records.failed(self.clock, cause, ending.hosts, step)

    def _hosts_out(self, ending: _AttemptEnd, cause: Cause) -> set[str]:
        """Return the attempt's hosts that are lost or, by their own look at themselves, cannot train."""
        out = set(ending.hosts) if cause in (Cause.node, Cause.switch) else set()
        if self.scenario.preflight:
            out |= self.nodes.broken
        self.nodes.leave(out, self.clock)
        return out

    def _go_on(self, decision: Decision) -> None:
        """Carry out a decision: where the next attempt runs, and from which step."""
        if decision.action in (Action.give_up, Action.end):
            self._wait_for_a_person(decision)
            return
        self._spend(decision.wait_s, Account.restart)
        if decision.action is Action.requeue:
            self._go_back(self.ledger.committed)
            self._start_job()
            return
        self.nodes.leave(self.nodes.broken & set(decision.exclude), self.clock)
        num_before = len(self.nodes.hosts)
        filled = self.nodes.go_on(self.out | set(decision.exclude))
        copied = self.copied if len(self.nodes.hosts) == num_before else None
        if copied is not None and copied > self.ledger.committed and self._has_copies(filled):
            self._go_back(copied, from_memory=True)
        else:
            self._go_back(self.ledger.committed)

    def _has_copies(self, filled: list[int]) -> bool:
        """Each node's copies lie on itself and on the next one: with two neighbours gone they are gone."""
        num_nodes = len(self.nodes.hosts)
        return not any((place + 1) % num_nodes in filled for place in filled)

    def _wait_for_a_person(self, decision: Decision) -> None:
        attended_s = self.scenario.attended_after_s
        if attended_s is None:
            self.gave_up = decision.reason
            return
        self._spend(attended_s, Account.idle)
        self._go_back(self.ledger.committed)
        self._start_job()

    def _go_back(self, step: int, *, from_memory: bool = False) -> None:
        self.ledger.go_back(step)
        self.begin = _AttemptStart(step, from_memory, is_first=step == 0)

    def _spend(self, seconds: float, account: Account) -> None:
        """Let time pass, up to the horizon."""
        seconds = max(0.0, min(seconds, self.scenario.horizon_s - self.clock))
        self.clock += seconds
        self.ledger.spend(seconds, account)
