"""One run under failures, from event to event: an attempt, its end, the policy's decision, the next attempt.

Time passes between events in closed forms, so that the cost is per failure and not per device, step or
second. What is assumed: failures strike only nodes that train or start to; spares and waiting jobs have none;
a second failure while the first is being noticed changes nothing; steps of an attempt are alike, and on n of
N nodes N/n times as long.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from orchestra.plan.failures.causes import Cause, Failure, failures
from orchestra.plan.failures.course import Course
from orchestra.plan.failures.ledger import Ledger
from orchestra.plan.failures.nodes import Nodes
from orchestra.plan.failures.records import Records
from orchestra.plan.failures.scenario import DAY_S, Scenario
from orchestra.recovery import policy
from orchestra.recovery.accounting import Account, Accounts
from orchestra.recovery.incidents import Incident
from orchestra.recovery.policy import Action, Decision, Resources, Rules

# Incidents that the policy is shown. Its rules look at the last two, at those without progress between them
# (it gives up behind twenty), and for the same step failing twice, which happens again soon or never.
_SHOWN_INCIDENTS = 64
# How soon a device that is broken, and in use all the same, strikes again.
_STRIKES_AGAIN_S = 30.0


@dataclass(frozen=True)
class Result:
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


def simulate(scenario: Scenario, seed: int = 0, rules: Rules | None = None) -> Result:
    """Return what becomes of a run by its horizon. The same for the same arguments."""
    run = _Run(scenario, seed, rules or Rules())
    return run.result()


@dataclass
class _Ending:
    """What ends an attempt: a failure or the scheduler, and when."""

    time: float
    failure: Failure | None = None
    hosts: tuple[str, ...] = ()
    is_preempted: bool = False


@dataclass
class _Begin:
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
    ledger: Ledger = field(default_factory=Ledger)
    records: Records = field(default_factory=Records)
    begin: _Begin = field(default_factory=_Begin)
    gave_up: str | None = None

    def __post_init__(self) -> None:
        it = self.scenario
        self.nodes = Nodes(it, self.seed)
        self._stream: Iterator[Failure] = failures(
            it.num_nodes, it.devices_per_node, it.mtbf_device_hours, it.mix, self.seed
        )
        self._next = next(self._stream)
        self._scheduler = random.Random(f"scheduler {self.seed}")

    def result(self) -> Result:
        self._start_job()
        while self.clock < self.scenario.horizon_s and self.gave_up is None:
            ending = self._ending()
            self._train_until(ending)
            if self.clock >= self.scenario.horizon_s:
                break
            self._go_on(self._decide(ending))
        if self.gave_up is not None:
            self.ledger.spend(max(0.0, self.scenario.horizon_s - self.clock), Account.idle)
        return Result(
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

    def _ending(self) -> _Ending:
        """Return what ends the attempt that starts now."""
        scenario = self.scenario
        while self._next.time <= self.clock or self._next.place >= len(self.nodes.hosts):
            self._next = next(self._stream)
        failure = self._next
        width = scenario.nodes_per_switch if failure.cause is Cause.switch else 1
        ending = _Ending(failure.time, failure, self.nodes.at(failure.place, width))
        in_use = [host for host in self.nodes.hosts if host in self.nodes.broken] if self.nodes.broken else []
        if in_use:
            again = self.clock + self._starting_s() + _STRIKES_AGAIN_S
            if again < ending.time:
                struck = Failure(again, 0, Cause.device)
                ending = _Ending(again, struck, tuple(in_use[:1]))
        limit = scenario.time_limit_s
        if limit is not None and self.job_began + limit < ending.time:
            ending = _Ending(max(self.clock, self.job_began + limit))
        if self._preempted_at < ending.time:
            ending = _Ending(max(self.clock, self._preempted_at), is_preempted=True)
        return ending

    def _starting_s(self) -> float:
        times = self.scenario.times
        if self.begin.is_first:
            return times.restart_s
        return times.restart_s + (times.restore_from_memory_s if self.begin.from_memory else times.restore_s)

    def _train_until(self, ending: _Ending) -> None:
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
        course = self._course()
        stand = course.at(end - self.clock)
        self.clock = end
        self.ledger.train(stand.step, course.step_s, stand.training_s)
        self.ledger.spend(stand.saving_s, Account.checkpoint)
        self.reached, self.in_step = stand.step, True
        self.copied = self.copied if stand.copied is None else stand.copied
        if stand.committed is not None:
            self._commit(stand.committed)

    def _course(self) -> Course:
        scenario, times = self.scenario, self.scenario.times
        return Course(
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

    def _decide(self, ending: _Ending) -> Decision:
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

    def _failed(self, ending: _Ending, failure: Failure) -> Incident:
        times, cause = self.scenario.times, failure.cause
        self.failures[cause.name] += 1
        notice_s = {Cause.hang: times.notice_hang_s, Cause.node: times.notice_node_s}
        notice_s[Cause.switch] = times.notice_node_s
        self._spend(notice_s.get(cause, times.notice_exit_s), Account.restart)
        if cause is Cause.device:
            self.nodes.broken.update(ending.hosts)
        step = self.reached + 1 if self.in_step else None
        return self.records.failed(self.clock, cause, ending.hosts, step)

    def _hosts_out(self, ending: _Ending, cause: Cause) -> set[str]:
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
        self.begin = _Begin(step, from_memory, is_first=step == 0)

    def _spend(self, seconds: float, account: Account) -> None:
        """Let time pass, up to the horizon."""
        seconds = max(0.0, min(seconds, self.scenario.horizon_s - self.clock))
        self.clock += seconds
        self.ledger.spend(seconds, account)
