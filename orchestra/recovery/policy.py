"""What is done after an attempt: a pure function of what became of all attempts and of the nodes at hand.

The rules stand in one list, and the first that has something to say decides; its name goes into the record.
In doubt a run is started again: a needless restart costs a minute, a needless end the night. What limits that
is progress (`without_progress`). Called by the leader of a job after each attempt, and by the planner's
simulation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from conf.schema import RecoveryConfig
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED
from orchestra.recovery.incidents import Incident, Kind, is_from_outside


class Action(Enum):
    """What follows an attempt."""

    # The same nodes again, in the same allocation.
    restart = "restart"
    # As many nodes, with a spare in the place of each that is left out.
    replace = "replace"
    # Fewer nodes, never fewer than recovery.min_nodes.
    shrink = "shrink"
    # More nodes, never more than cluster.nodes; no rule of this list decides so.
    grow = "grow"
    # Another start of a job, on other nodes or at another time.
    requeue = "requeue"
    # The run is done, or somebody asked for its end.
    end = "end"
    give_up = "give_up"


@dataclass(frozen=True)
class Resources:
    """What there is to start again with, when an attempt is over."""

    wanted_nodes: int
    # None: all that are wanted.
    min_nodes: int | None
    # Of the attempt's hosts those that are alive, and the ones that wait beside them. Excluded ones left out.
    hosts: tuple[str, ...]
    spares: tuple[str, ...] = ()
    can_requeue: bool = False
    # Whether this allocation lives on.
    in_place: bool = True

    @property
    def fewest_nodes(self) -> int:
        return self.wanted_nodes if self.min_nodes is None else self.min_nodes


@dataclass(frozen=True)
class Rules:
    """The part of `recovery` that the policy knows."""

    # Restarts in a row without progress; 0: never start again after a failure.
    max_restarts: int = 3
    backoff_s: float = 10.0
    # Whether a host that failed twice is left out.
    excludes: bool = True
    # Roll-backs in a row without progress.
    max_roll_backs: int = 3

    @classmethod
    def of(cls, config: RecoveryConfig) -> Rules:
        """Return the rules that a configuration asks for."""
        excludes = config.exclude_hours > 0
        return cls(config.max_restarts, config.backoff_s, excludes, config.roll_back.max_in_a_row)


@dataclass(frozen=True)
class Decision:
    """What is to be done, and why."""

    action: Action
    # What the run ends with where it ends here.
    code: int
    reason: str
    # The rule that decided.
    rule: str = ""
    # Hosts that the next attempt leaves out.
    exclude: tuple[str, ...] = ()
    # Those of them that go onto the cluster's list: they failed twice, or computed something wrong.
    listed: tuple[str, ...] = ()
    wait_s: float = 0.0
    # Whether it counts against recovery.max_restarts.
    charged: bool = False


@dataclass(frozen=True)
class RecoveryCase:
    """What a rule looks at."""

    # Since a person started the run last, oldest first.
    series: Sequence[Incident]
    # Of these the last ones, without progress between them.
    row: Sequence[Incident]
    resources: Resources
    rules: Rules

    @property
    def now(self) -> Incident:
        return self.row[-1]


# Progress is only what outlived a failure: a newly committed checkpoint, or copies in memory from which the
# next attempt began. Steps that were trained and lost again are none, however many: a run that saves every
# 1,000 steps and fails around step 500 would count as getting ahead each time that it comes a little further,
# and never save. Both marks only ever rise, so that a run has no more progress to make than it has steps.

# Fewer steps than that, restored from memory, are no progress: a run that fails three steps after each start
# would creep on for days.
FEWEST_STEPS_OF_PROGRESS = 10
_NOT_CHARGED = (
    *(Kind.stopped, Kind.preempted, Kind.time_limit, Kind.node_lost, Kind.lost),
    # Each waited for minutes already; the code is not to blame.
    Kind.storage,
)


def since_started_by_hand(incidents: Sequence[Incident]) -> Sequence[Incident]:
    """Return the incidents since a person started or resumed the run: who does that has seen the others."""
    begin = max((index for index, incident in enumerate(incidents) if incident.by_hand), default=0)
    return incidents[begin:]


def without_progress(series: Sequence[Incident]) -> Sequence[Incident]:
    """Return the last incidents of a series between which nothing was kept."""
    begin = 0
    # High-water marks: a roll-back below them, and the way back up, is no progress.
    committed = began = -1
    for index, it in enumerate(series):
        if it.committed > committed >= 0 or (began >= 0 and it.began >= began + FEWEST_STEPS_OF_PROGRESS):
            begin = index
        committed, began = max(committed, it.committed), max(began, it.began)
    return series[begin:]


def is_charged(incident: Incident) -> bool:
    """Tell whether an incident counts against recovery.max_restarts."""
    return incident.kind not in _NOT_CHARGED and not incident.excluded and not incident.unfit


# Each wait is this many times the one before it, up to ten minutes, and a fifth more or less: runs that a
# failing file system ended together do not come back together.
_BACKOFF_FACTOR = 3.0
_LONGEST_WAIT_S = 600.0
_JITTER = 0.2
# Failures of nodes in a row that are followed by a restart at once; later ones wait for an outage to end.
_NODE_FAILURES_AT_ONCE = 3
# Attempts in a row without progress that nobody is charged for: a node may come and go, but not for ever.
MOST_NOT_CHARGED = 20
# What may be the fault of the code or of a sample; of a hang, that is found out by its coming back.
_OF_CODE_OR_DATA = (Kind.rank_failed, Kind.hang)


Rule = Callable[[RecoveryCase], Decision | None]


def decide(incidents: Sequence[Incident], resources: Resources, rules: Rules) -> Decision:
    """Return what follows the newest of `incidents` (at least one, oldest first). A pure function."""
    series = since_started_by_hand(incidents)
    case = RecoveryCase(series, without_progress(series), resources, rules)
    for rule in RULES:
        decision = rule(case)
        if decision is not None:
            return replace(decision, rule=rule.__name__)
    raise AssertionError("the last rule always decides")


# The rules, in their order.


def finished(case: RecoveryCase) -> Decision | None:
    if case.now.kind is not Kind.finished:
        return None
    return Decision(Action.end, case.now.code, "the run is finished")


def asked_to_stop(case: RecoveryCase) -> Decision | None:
    if case.now.kind is not Kind.stopped:
        return None
    return Decision(Action.end, case.now.code, f"it was asked to stop ({case.now.cause})")


def refused(case: RecoveryCase) -> Decision | None:
    if case.now.kind is not Kind.refused:
        return None
    return Decision(Action.give_up, case.now.code, f"starting again would not help: {case.now.cause}")


def time_limit_too_short(case: RecoveryCase) -> Decision | None:
    """Two slices in a row that saved nothing. The first incident of a row may have saved, all later ones did
    not.
    """
    first, *later = case.row
    fruitless = later if first.committed > first.began else case.row
    if [incident.kind for incident in fruitless[-2:]] != [Kind.time_limit] * 2:
        return None
    reason = f"the time limit ended two attempts in a row that saved nothing after step {case.now.committed}"
    return Decision(Action.give_up, EXIT_DO_NOT_RESTART, reason)


def never_any_progress(case: RecoveryCase) -> Decision | None:
    # To be preempted is nobody's fault, however often.
    free = [each for each in case.row if not is_charged(each) and each.kind is not Kind.preempted]
    if len(free) < MOST_NOT_CHARGED:
        return None
    reason = f"{len(case.row)} attempts in a row kept no step beyond {case.now.committed}"
    return Decision(Action.give_up, EXIT_FAILED, reason)


def scheduler_took_the_nodes(case: RecoveryCase) -> Decision | None:
    if case.now.kind not in (Kind.preempted, Kind.time_limit):
        return None
    if case.resources.can_requeue:
        return Decision(Action.requeue, case.now.code, case.now.cause)
    return Decision(Action.end, case.now.code, f"{case.now.cause}, and the job is not to be requeued")


def restarts_are_off(case: RecoveryCase) -> Decision | None:
    if case.rules.max_restarts > 0:
        return None
    return Decision(Action.give_up, EXIT_FAILED, "recovery.max_restarts=0")


def rolled_back_too_often(case: RecoveryCase) -> Decision | None:
    """Losses that stay bad, whatever data is left out."""
    rules = case.rules
    rolled = [incident for incident in case.row if incident.kind is Kind.loss]
    if case.now.kind is not Kind.loss or len(rolled) <= min(rules.max_roll_backs, rules.max_restarts):
        return None
    times = "1 roll-back" if len(rolled) == 2 else f"{len(rolled) - 1} roll-backs in a row"
    reason = f"{case.now.cause} at step {case.now.step} after {times}, and no later step than ever was kept"
    limits = f"recovery.roll_back.max_in_a_row={rules.max_roll_backs}"
    if rules.max_restarts < rules.max_roll_backs:
        limits = f"recovery.max_restarts={rules.max_restarts}"
    return Decision(Action.give_up, EXIT_DO_NOT_RESTART, f"{reason} ({limits})")


def fails_before_first_step(case: RecoveryCase) -> Decision | None:
    """Two attempts that failed for the same cause before any step: the code or the configuration is wrong."""
    now = case.now
    if not now.before_first_step or not _is_suspect(now):
        return None
    twin = _twin(now, [incident for incident in case.row if incident.before_first_step])
    # Nodes that cannot reach each other hang there too, and that may pass.
    if twin is None or (now.kind is Kind.hang and now.num_nodes > 1):
        return None
    reason = f"attempts {twin.attempt} and {now.attempt} failed before their first step: {now.cause}"
    return Decision(Action.give_up, EXIT_DO_NOT_RESTART, f"{reason}; no node is blamed")


def fails_at_same_step(case: RecoveryCase) -> Decision | None:
    """The same cause at the same step twice: bad data or code, wherever it ran."""
    now = case.now
    if now.before_first_step or not now.step_is_exact or not _is_suspect(now):
        return None
    at_step = [
        incident
        for incident in case.series
        if incident.step == now.step and incident.step_is_exact and not incident.before_first_step
    ]
    twin = _twin(now, at_step)
    if twin is None:
        return None
    reason = f"attempts {twin.attempt} and {now.attempt} failed at step {now.step}: {now.cause}"
    return Decision(Action.give_up, EXIT_DO_NOT_RESTART, f"{reason}; bad data or code, no node is blamed")


def same_host_twice(case: RecoveryCase) -> Decision | None:
    """Two failures in a row that speak against one host: it is left out, and nobody is charged."""
    failures = [incident for incident in case.series if incident.is_failure]
    if not case.rules.excludes or len(failures) < 2:
        return None
    before, now = failures[-2:]
    hosts = tuple(host for host in now.blamed if host in before.blamed)
    if not hosts:
        return None
    reason = (
        f"{_listed(hosts)} failed in attempts {before.attempt} and {now.attempt}: {before.cause}, {now.cause}"
    )
    placed = _placed(case, (*hosts, *_gone(case)))
    # Not those that were merely gone: they are given again as soon as they answer.
    before_now = (incident for incident in case.series[:-1] if incident.kind is not Kind.node_lost)
    left_out = {host for incident in before_now for host in incident.excluded}
    # With nowhere else to go it is an ordinary failure; so it is where a job was given such a host again, for
    # want of others.
    if placed is None or (placed.action is Action.requeue and left_out.issuperset(hosts)):
        return None
    listed = () if now.rehearsed or before.rehearsed else hosts
    return replace(placed, reason=_joined(reason, placed.reason), listed=listed)


def broken_device(case: RecoveryCase) -> Decision | None:
    """A step that was computed twice, differently, and a third rank that says whose device is broken."""
    now = case.now
    if now.kind is not Kind.replay or not now.blamed or not case.rules.excludes:
        return None
    placed = _placed(case, now.blamed)
    if placed is None:
        return None
    listed = () if now.rehearsed else now.blamed
    words = f"{_listed(now.blamed)} computed step {now.step} differently from two others"
    return replace(placed, reason=_joined(words, _back(now), placed.reason), listed=listed)


def no_progress(case: RecoveryCase) -> Decision | None:
    charged = [incident for incident in case.row if is_charged(incident)]
    if not is_charged(case.now) or len(charged) <= case.rules.max_restarts:
        return None
    reason = f"{len(charged)} failures in a row, and no step beyond {case.now.committed} was kept"
    return Decision(
        Action.give_up, EXIT_FAILED, f"{reason} (recovery.max_restarts={case.rules.max_restarts})"
    )


def node_is_gone(case: RecoveryCase) -> Decision | None:
    """A host of the attempt does not answer any more: a spare, fewer nodes, another job, in this order."""
    gone = _gone(case)
    if len(case.resources.hosts) >= case.now.num_nodes and not gone:
        return None
    placed = _placed(case, gone)
    if placed is None:
        return _nowhere_to_go(case)
    missing = _listed(gone) or f"{case.now.num_nodes - len(case.resources.hosts)} node(s)"
    told = replace(placed, reason=_joined(f"{missing} gone ({case.now.cause})", placed.reason))
    return replace(told, charged=is_charged(case.now), wait_s=_wait_s(case))


def roll_back(case: RecoveryCase) -> Decision | None:
    """The attempt said where the run is to go on: nothing is waited for."""
    now = case.now
    if now.roll_back is None or now.kind not in (Kind.loss, Kind.replay):
        return None
    if case.resources.in_place:
        return Decision(Action.restart, now.code, _back(now), charged=is_charged(now))
    if case.resources.can_requeue:
        return Decision(Action.requeue, now.code, _back(now), charged=is_charged(now))
    return _nowhere_to_go(case)


def start_again(case: RecoveryCase) -> Decision | None:
    now = case.now
    wait_s, charged = _wait_s(case), is_charged(now)
    where = "" if now.step is None else f" at step {now.step}"
    reason = f"{now.cause}{where}"
    if case.resources.in_place:
        return Decision(Action.restart, now.code, reason, wait_s=wait_s, charged=charged)
    if case.resources.can_requeue:
        return Decision(Action.requeue, now.code, reason, wait_s=wait_s, charged=charged)
    return _nowhere_to_go(case)


RULES: tuple[Rule, ...] = (
    finished,
    asked_to_stop,
    refused,
    time_limit_too_short,
    never_any_progress,
    scheduler_took_the_nodes,
    restarts_are_off,
    rolled_back_too_often,
    fails_before_first_step,
    fails_at_same_step,
    same_host_twice,
    broken_device,
    no_progress,
    node_is_gone,
    roll_back,
    start_again,
)


# What the rules are made of.


def _is_suspect(incident: Incident) -> bool:
    is_outside = incident.of_device or is_from_outside(incident.cause)
    return incident.kind in _OF_CODE_OR_DATA and not is_outside


def _twin(now: Incident, others: Iterable[Incident]) -> Incident | None:
    """Return the newest earlier incident of the same kind and cause, and with no broken device."""
    same = [
        incident
        for incident in others
        if incident is not now
        and not incident.of_device
        and (incident.kind, incident.cause) == (now.kind, now.cause)
    ]
    return same[-1] if same else None


def _gone(case: RecoveryCase) -> tuple[str, ...]:
    """Return the hosts that were blamed for being away, and still are."""
    if case.now.kind not in (Kind.node_lost, Kind.agent_lost):
        return ()
    return tuple(host for host in case.now.blamed if host not in case.resources.hosts)


def _placed(case: RecoveryCase, out: tuple[str, ...]) -> Decision | None:
    """Return where the run goes on without the hosts in `out`; None where it cannot."""
    resources, now = case.resources, case.now
    out = tuple(dict.fromkeys(out))
    members = [host for host in resources.hosts if host not in out]
    spares = [host for host in resources.spares if host not in out]
    num_nodes = min(resources.wanted_nodes, len(members) + len(spares))
    if resources.in_place and num_nodes >= resources.fewest_nodes:
        if num_nodes > len(members):
            used = _listed(spares[: num_nodes - len(members)])
            return Decision(Action.replace, now.code, f"{used} steps in", exclude=out)
        if num_nodes < min(now.num_nodes, resources.wanted_nodes):
            return Decision(Action.shrink, now.code, f"goes on with {num_nodes} nodes at most", exclude=out)
        return Decision(Action.restart, now.code, "", exclude=out)
    if resources.can_requeue:
        return Decision(Action.requeue, now.code, "requeued without it" if out else "requeued", exclude=out)
    return None


def _back(incident: Incident) -> str:
    return "" if incident.roll_back is None else incident.roll_back.words


def _nowhere_to_go(case: RecoveryCase) -> Decision:
    there = case.resources
    left = len(there.hosts) + len(there.spares) if there.in_place else 0
    reason = (
        f"{case.now.cause}: {left} of at least {there.fewest_nodes} nodes are left, and no job is to follow"
    )
    return Decision(Action.give_up, EXIT_FAILED, reason)


def _wait_s(case: RecoveryCase) -> float:
    """Return how long to wait: nothing at first, then ever longer. The same for the same incident."""
    charged = is_charged(case.now)
    failures = [
        incident for incident in case.row if incident.is_failure and (is_charged(incident) or not charged)
    ]
    num_waits = len(failures) - (1 if charged else _NODE_FAILURES_AT_ONCE)
    if num_waits < 1:
        return 0.0
    wait_s = min(_LONGEST_WAIT_S, case.rules.backoff_s * _BACKOFF_FACTOR ** (num_waits - 1))
    chance = random.Random(f"{case.now.attempt} {case.now.time}")
    return round(wait_s * chance.uniform(1 - _JITTER, 1 + _JITTER), 1)


def _listed(hosts: Iterable[str]) -> str:
    return ", ".join(hosts)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
