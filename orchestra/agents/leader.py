"""What the leading agent does: gather the nodes, begin attempts, judge how they ended, say what comes next.

All that it needs stands in files, so that the next agent can lead where this one died. What is to follow a
failure is `orchestra.recovery.policy`'s to say.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launchers.launch_errors import LauncherError
from launchers.node_group import Member, Order
from launchers.spec import Ending
from orchestra.agents import choose_nodes
from orchestra.agents.attempt import config_of, ending_of, mark_lost
from orchestra.agents.attempt_record import AttemptRecord, write_started
from orchestra.agents.context import END, REFUSE, START, SURROUNDINGS_S, Station, attempt_of, host_of
from orchestra.agents.node_check.after_hang import Answers, cut_off
from orchestra.agents.node_check.before_attempt import Preflight
from orchestra.agents.node_copies import MEMORY, memory_of
from orchestra.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    LaunchError,
)
from orchestra.recovery import history
from orchestra.recovery.incidents import Incident, Verdict, incidents, node_verdict
from orchestra.recovery.policy import Action, Decision, Rules, decide
from orchestra.run import stop_requests
from orchestra.run.events import EventWriter, read_events
from orchestra.run.files import Record
from orchestra.run.stop_requests import StopRequest
from orchestra.submit.claims import rival_claim, take_next, upcoming_attempt
from orchestra.submit.launch import launch_spec

# How an attempt over several nodes ended: from the nodes' reports and the run's events to one verdict.
#
# The leader writes it down; what follows is not said here.


Reports = dict[int, dict[str, Any]]


def conclude(station: Station, order: Order) -> tuple[Verdict, list[int]]:
    """Judge an attempt whose nodes have all reported or are lost; return the verdict and the lost nodes, with
    those that no other node reaches.

    It is written down once: an agent that leads after another one died over it takes that one's word.
    """
    attempt = attempt_of(order)
    record = station.record(attempt)
    reports = station.crew.reports(order.number, order.nodes)
    missing = [node for node in order.nodes if node not in reports]
    alone = [node for node in cut_off(station, order) if node in reports]
    lost = [*missing, *alone]
    told = node_verdict(record.seen()) if newest_restart(record) is not None else None
    if told is not None:
        return told, lost
    _write_lost(station, order, record, reports, alone)
    ending, interruption = _merged(station, order, record, reports)
    verdict = record.conclude(
        ending,
        interruption,
        lambda it: station.surroundings.judged(it, attempt, record.events),
        decides=lambda it: _is_for_the_policy(station, record, it),
    )
    station.say(f"attempt {attempt} {verdict.state}: {verdict.message or verdict.cause}")
    return verdict, lost


def _is_for_the_policy(station: Station, record: AttemptRecord, verdict: Verdict) -> bool:
    """Tell whether what follows this verdict is the policy's to say: it does so within the next second."""
    is_stopped = station.signals.count() or requests_of(station, record.number)
    return verdict.state == "failed" and not is_stopped and not is_fenced(record)


def newest_restart(record: AttemptRecord) -> dict[str, Any] | None:
    """Return what was decided after this attempt; None while nothing was."""
    decided = record.seen().named("restarting")
    return decided[-1] if decided else None


def is_fenced(record: AttemptRecord) -> bool:
    """Tell whether a rank found that a newer attempt trains the run: then this crew has no part in it."""
    return bool(record.seen().named("fenced"))


def requests_of(station: Station, attempt: int) -> list[StopRequest]:
    """Return the requests to stop an attempt, none where the file system does not answer."""
    try:
        return stop_requests.read_requests(station.run, attempt)
    except OSError:
        return []


def as_stopped(verdict: Verdict, requests: list[StopRequest]) -> Verdict:
    """Return the verdict by which a run goes on that was warned, and failed over its last save."""
    reasons = {request.reason for request in requests}
    is_warned = stop_requests.TIME_LIMIT in reasons and stop_requests.CANCEL not in reasons
    return Verdict(EXIT_STOPPED, verdict.cause, verdict.message, step=verdict.step) if is_warned else verdict


def _write_lost(
    station: Station, order: Order, record: AttemptRecord, reports: Reports, alone: Sequence[int]
) -> None:
    """Write down who did not report or is not reached, and whose agent died."""
    silent = station.crew.silent(order.nodes)
    for node in order.nodes:
        report = reports.get(node)
        if report is None:
            cause = "its agent is silent" if node in silent else "it did not report its end"
            event = "node_lost"
        elif node in alone:
            cause, event = "no other node reaches it", "node_lost"
        elif report.get("cause") == "agent lost":
            cause = event = "agent_lost"
        else:
            continue
        with contextlib.suppress(OSError):
            record.events.write(event, node=node, host=host_of(order, node), cause=cause.replace("_", " "))


def _merged(
    station: Station, order: Order, record: AttemptRecord, reports: Reports
) -> tuple[Ending, str | None]:
    """Return the ending of all nodes together, and why the ranks were ended at once where they were."""
    endings = {node: ending_of(report) for node, report in reports.items()}
    finished = record.seen().finished_ranks
    per_node = int(station.config.cluster.gpus_per_node)
    codes = [ending.exit_code for ending in endings.values()]
    for index, node in enumerate(order.nodes):
        if node not in reports:
            is_done = finished >= set(range(index * per_node, (index + 1) * per_node))
            codes.append(EXIT_DONE if is_done else EXIT_FAILED)
    code = next((code for code in codes if code != EXIT_DONE), EXIT_DONE)
    failures = tuple(it for ending in endings.values() for it in ending.failures)
    survivors = tuple(it for ending in endings.values() for it in ending.survivors)
    stops = max((ending.stops for ending in endings.values()), default=0)
    interruptions = [str(it["interruption"]) for it in reports.values() if it.get("interruption")]
    return Ending(code, stops, failures, survivors), next(iter(interruptions), None)


# The time before a job's first attempt: how long its nodes are waited for, and what a warning means then.
#
# It begins nothing.


# From the start of the first node's task to the last one's: images are pulled, Python is loaded by many.
GATHER_TIMEOUT_S = 600.0
# How long spares, and with recovery.min_nodes the last of the others, are waited for.
_STRAGGLERS_S = 15.0
_MIN_NODES_WAIT_S = 60.0
# Starts of jobs in a row that may reach their time limit before an attempt begins.
_MOST_TOO_LATE = 3


class Gathering:
    """The wait for the nodes of one start of a job, as its leader sees it."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._began = time.monotonic()

    def is_over(self, members: Mapping[int, Member]) -> bool:
        """Tell whether as many have come as there will be. Raises LaunchError where they stay too few."""
        waited = time.monotonic() - self._began
        if len(members) == self._station.crew.num_nodes:
            return True
        wanted, least = self._station.config.cluster.nodes, self._station.config.recovery.min_nodes
        if len(members) >= wanted and waited > _STRAGGLERS_S:
            return True
        if least is not None and len(members) >= least and waited > _MIN_NODES_WAIT_S:
            return True
        if waited > GATHER_TIMEOUT_S:
            raise LaunchError(self.too_few(members))
        return False

    def too_few(self, members: Mapping[int, Member]) -> str:
        """Return who is missing, as an error's words."""
        num_nodes = self._station.crew.num_nodes
        missing = sorted(set(range(num_nodes)) - set(members))
        return (
            f"only {len(members)} of {num_nodes} nodes came within {GATHER_TIMEOUT_S:g} s or are fit; "
            f"missing: {', '.join(map(str, missing)) or 'none'}. Their logs tell what became of them, or "
            f"they do not share {self._station.run.path}"
        )


def called_off(station: Station) -> tuple[int, str]:
    """Let the run go on where an attempt that was warned now would; return the exit code, and in a few words
    what was done. *The leader only*, before the first order. Raises OSError.

    The time limit and a preemption say nothing against the run, whether its nodes had met or not.
    """
    first = station.signals.first or ""
    words = f"{first} came before the attempt began"
    if first == "SIGINT":
        return EXIT_INTERRUPTED, words
    attempt = upcoming_attempt(station.run)
    reason = stop_requests.signal_reason(first)
    if reason == stop_requests.TIME_LIMIT and _too_late(read_events(station.run)) >= _MOST_TOO_LATE:
        limit = station.config.cluster.time_limit
        said = f"{_MOST_TOO_LATE} starts in a row ended before an attempt began (cluster.time_limit={limit})"
        return EXIT_DO_NOT_RESTART, f"{words}: {said}"
    # What follows the attempt before: this one never was, and its number is free.
    name = f"crew.{station.crew.folder.name}"
    events = EventWriter(station.run, name, attempt - 1, before_start=True)
    try:
        said = station.surroundings.go_on(
            Verdict(EXIT_STOPPED, "StopRequested", words),
            attempt - 1,
            events,
            lambda: frozenset([reason, *(request.reason for request in requests_of(station, attempt))]),
        )
    finally:
        events.close()
    return EXIT_STOPPED, f"{words}: {said}" if said else words


def _too_late(events: Iterable[Record]) -> int:
    """Return how often since the last attempt began a start was called off because of the time limit."""
    count = 0
    for event in events:
        if event["event"] == "attempt_started":
            count = 0
        is_requeue = event["event"] == "requeued" and event.get("reason") == stop_requests.TIME_LIMIT
        count += is_requeue and event.get("before_start") is True
    return count


# How long nodes that live are waited for at an attempt's end: their ranks may still write a checkpoint.
_END_TIMEOUT_S = 120.0


class Leading:
    """One agent's turn as the leader. `look` is called every now and then while it leads and is idle."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._crew = station.crew
        self._preflight = Preflight(station)
        self._gathering = Gathering(station)
        self._answers = Answers(station)
        self._ended_since: float | None = None
        # What is to follow and when (this host's own clock): the policy may want to wait.
        self._next: tuple[float, Order] | None = None

    def look(self, order: Order | None) -> None:
        """Do what is due. Raises LaunchError and OSError."""
        if self._next is not None and order is not None and order.number >= self._next[1].number:
            # Another agent went on while this one stood still.
            self._next = None
        if self._next is not None:
            self._publish_when_due(*self._next)
        elif order is None:
            self._gather()
        elif order.action == START and self._is_over(order) and self._answers.are_in(order):
            self._conclude(order)

    # Beginning.

    def _gather(self) -> None:
        self._crew.allow(SURROUNDINGS_S)
        station = self._station
        members = self._crew.members()
        if station.signals.count():
            self._end_before_beginning()
            return
        if not self._gathering.is_over(members) or not self._preflight.is_over(members):
            return
        rival = station.surroundings.refusal()
        if rival is not None:
            self._refuse(0, rival)
            return
        hosts = self._preflight.first_nodes(members)
        if hosts is None:
            said = self._preflight.go_elsewhere(members)
            if said is None:
                raise LaunchError(self._preflight.unfit_words(members) or self._gathering.too_few(members))
            self._order_end(0, EXIT_FAILED, said)
            return
        self._start(0, hosts, members, wait_s=0.0)

    def _end_before_beginning(self) -> None:
        """End this start of the job: a warning came while its nodes were gathering."""
        rival = self._station.surroundings.refusal()
        if rival is not None:
            self._refuse(0, rival)
            return
        self._order_end(0, *called_off(self._station))

    def _start(
        self, number: int, nodes: Sequence[int], members: dict[int, Member], wait_s: float, **facts: Any
    ) -> None:
        """Prepare the order that starts an attempt, to be given in `wait_s` seconds."""
        order = Order(
            number,
            START,
            tuple(nodes),
            {str(node): members[node].incarnation for node in nodes},
            {"hosts": {str(node): members[node].host for node in nodes}, **facts},
        )
        self._next = (time.monotonic() + wait_s, order)
        self._publish_when_due(*self._next)

    def _publish_when_due(self, due: float, order: Order) -> None:
        station = self._station
        before = order.facts.get("after")
        if before is not None and self._is_stopped_between(order.number, int(before)):
            self._next = None
            return
        if time.monotonic() < due:
            return
        self._next = None
        members = self._crew.members()
        silent = self._crew.silent(order.nodes)
        if any(node not in members or node in silent for node in order.nodes):
            # Somebody left meanwhile: what is to follow is decided again.
            return
        crew = self._crew.folder.name
        if before is not None and (rival := rival_claim(station.run, int(before), crew)) is not None:
            self._refuse(order.number, f"attempt {rival} of {station.run.name} was begun by somebody else")
            return
        claimed = station.first_attempt if order.number == 0 else None
        attempt = take_next(station.run, crew) if claimed is None else claimed
        first = members[order.nodes[0]]
        meeting = {"attempt": attempt, "address": first.address, "port": first.facts["port"]}
        meeting["meeting"] = f"{crew}-{attempt}"
        order = Order(order.number, START, order.nodes, order.incarnations, {**order.facts, **meeting})
        if not self._publish(order):
            # Another agent leads, and has claimed an attempt of its own.
            station.run.claim(attempt).unlink(missing_ok=True)
            return
        self._write_started(order, attempt)
        self._forward_requests(before, attempt)

    def _write_started(self, order: Order, attempt: int) -> None:
        station = self._station
        record = station.record(attempt)
        config = config_of(station.config, order)
        hosts = [host_of(order, node) for node in order.nodes]
        spec = launch_spec(config, station.run, attempt)
        facts = {"crew": self._crew.folder.name, **station.surroundings.facts()}
        write_started(record, config, spec, hosts=hosts, **facts)
        if not (station.is_alone and order.number == 0):
            station.say(f"attempt {attempt} on {', '.join(hosts)}")
        if order.number == 0:
            self._preflight.tell(record.events, self._crew.members(), order.nodes)

    def _is_stopped_between(self, number: int, before: int) -> bool:
        """End the run here if a stop was asked for since attempt `before` ended; tell whether it was."""
        station, first = self._station, self._station.signals.first
        requests = self._asked(before)
        if first is None and not requests:
            return False
        is_urgent = first == "SIGINT" or any(request.at_once for request in requests)
        words = f"{first} received" if first is not None else str(requests[0])
        cause = "interrupted" if is_urgent else "StopRequested"
        verdict = Verdict(EXIT_INTERRUPTED if is_urgent else EXIT_STOPPED, cause, words)
        record = station.record(before)
        with contextlib.suppress(OSError):
            told = {"code": verdict.code, "cause": cause, "message": words}
            record.events.write("failed", node=record.node, **told)
        self._crew.allow(SURROUNDINGS_S)
        said = "" if is_urgent else station.surroundings.go_on(verdict, before, record.events)
        self._order_end(number, verdict.code, said or words)
        return True

    def _asked(self, attempt: int) -> list[StopRequest]:
        """Return the requests to stop an attempt; a signal that no rank was left to hear is one of them.

        As a request it is read by whatever decides whether the run goes on by itself.
        """
        station, first = self._station, self._station.signals.first
        requests = requests_of(station, attempt)
        if first is not None and not requests:
            with contextlib.suppress(OSError):
                reason = stop_requests.signal_reason(first)
                requests = [
                    stop_requests.write_request(station.run, attempt, reason, at_once=first == "SIGINT")
                ]
        return requests

    def _publish(self, order: Order) -> bool:
        self._ended_since = None
        return self._crew.publish(order)

    def _forward_requests(self, before: int | None, attempt: int) -> None:
        """Ask the new attempt to stop where the one before was asked in the moment that this one began."""
        for request in [] if before is None else requests_of(self._station, before):
            with contextlib.suppress(OSError):
                stop_requests.write_request(
                    self._station.run, attempt, request.reason, at_once=request.at_once
                )

    def _forward_cancel(self, before: int, attempt: int) -> None:
        """Let another job's attempt hear of a cancel that came while that job was submitted."""
        for request in requests_of(self._station, before):
            if request.reason == stop_requests.CANCEL:
                with contextlib.suppress(OSError):
                    stop_requests.write_request(
                        self._station.run, attempt, request.reason, at_once=request.at_once
                    )

    # Ending.

    def _is_over(self, order: Order) -> bool:
        """Tell whether all nodes have reported their part, or will not any more."""
        reports = self._crew.reports(order.number, order.nodes)
        missing = [node for node in order.nodes if node not in reports]
        if not missing:
            return True
        lost = mark_lost(self._station, order)
        if all(node in lost for node in missing):
            return True
        if not reports:
            self._ended_since = None
            return False
        now = time.monotonic()
        self._ended_since = self._ended_since or now
        # They may still write their last checkpoint.
        return now - self._ended_since > max(_END_TIMEOUT_S, self._station.config.recovery.stop_timeout_s)

    def _conclude(self, order: Order) -> None:
        """Judge the attempt, write that down, and prepare what follows."""
        station, attempt = self._station, attempt_of(order)
        self._crew.allow(SURROUNDINGS_S)
        verdict, lost = conclude(station, order)
        record = station.record(attempt)
        number = order.number + 1
        if is_fenced(record):
            self._refuse(number, f"a newer attempt of {station.run.name} was begun by somebody else")
            return
        if verdict.code == EXIT_DONE:
            self._order_end(number, EXIT_DONE, "finished", lost)
            return
        requests = self._asked(attempt)
        if verdict.code in (EXIT_STOPPED, EXIT_INTERRUPTED) or requests or station.signals.count():
            stopped = as_stopped(verdict, requests)
            said = station.surroundings.go_on(stopped, attempt, record.events)
            self._order_end(number, verdict.code, said or verdict.cause, lost)
        else:
            self._recover(order, verdict, record, lost)

    # Going on.

    def _recover(self, order: Order, verdict: Verdict, record: AttemptRecord, lost: list[int]) -> None:
        station = self._station
        members = {node: it for node, it in self._crew.members().items() if node not in lost}
        members = {node: it for node, it in members.items() if node not in self._crew.silent(members)}
        events = read_events(station.run)
        resources = choose_nodes.resources(order, members, station, events)
        log = incidents(history.read(events))
        decision = decide(log, resources, Rules.of(station.config.recovery))
        decision = choose_nodes.without_unfit(order, decision, members)
        waited_s = self._announce(record, verdict, decision, log)
        number = order.number + 1
        if decision.action in (Action.give_up, Action.end):
            if decision.code != verdict.code:
                _write_final(record, verdict, decision.code, decision.reason)
            self._order_end(number, decision.code or verdict.code, decision.reason, lost)
            return
        station.say(f"{decision.action.name}: {decision.reason}")
        listed = self._preflight.listed
        excluded = choose_nodes.excluded_hosts(events, station.surroundings.facts())
        nodes = choose_nodes.next_nodes(order, decision, members, station.config, listed, excluded)
        if decision.action is Action.requeue or nodes is None:
            self._requeue(number, decision, verdict, record, lost)
            return
        self._write_replaced(order, nodes, members, record)
        memory = self._memory(order, nodes, set(members))
        wait_s = max(0.0, decision.wait_s - waited_s)
        self._start(number, nodes, members, wait_s, after=record.number, **memory)

    def _announce(
        self, record: AttemptRecord, verdict: Verdict, decision: Decision, log: list[Incident]
    ) -> float:
        """Write down what follows; return how long it has been waited for by an agent that died meanwhile."""
        told = newest_restart(record)
        if told is not None and told.get("decision") == decision.action.name:
            return max(0.0, time.time() - float(told["time"]))
        with contextlib.suppress(OSError):
            record.events.write("restarting", **choose_nodes.evidence(decision), after=verdict.cause)
            self._station.surroundings.exclude(decision, log)
        return 0.0

    def _memory(self, order: Order, nodes: Sequence[int], living: set[int]) -> dict[str, Any]:
        """Return what the next order says of copies in memory, empty where it begins with the checkpoint."""
        reports = self._crew.reports(order.number, order.nodes)
        memory, reason = memory_of(self._station, reports, nodes, living)
        if reason is not None:
            self._station.say(f"it begins with the checkpoint: {reason}")
        return {} if memory is None else {MEMORY: memory}

    def _write_replaced(
        self, order: Order, nodes: Sequence[int], members: dict[int, Member], record: AttemptRecord
    ) -> None:
        gone = [node for node in order.nodes if node not in nodes]
        for old, new in zip(gone, (node for node in nodes if node not in order.nodes), strict=False):
            with contextlib.suppress(OSError):
                record.events.write(
                    "node_replaced", node=old, host=host_of(order, old), by=new, by_host=members[new].host
                )

    def _requeue(
        self, number: int, decision: Decision, verdict: Verdict, record: AttemptRecord, lost: list[int]
    ) -> None:
        station = self._station
        try:
            if not station.surroundings.can_requeue:
                raise LaunchError(f"no node is left for it ({decision.reason})")
            said = station.surroundings.requeue(decision, record.number, record.events)
            self._forward_cancel(record.number, record.number + 1)
        except (LauncherError, LaunchError, OSError) as error:
            said = f"it does not go on by itself: {error}"
            _write_final(record, verdict, verdict.code, said)
        self._order_end(number, verdict.code, said, lost)

    def _refuse(self, number: int, message: str) -> None:
        self._publish(Order(number, REFUSE, facts={"message": message}))

    def _order_end(self, number: int, code: int, said: str, lost: Sequence[int] = ()) -> None:
        self._station.say(said)
        self._publish(Order(number, END, facts={"code": code, "said": said, "lost": list(lost)}))


def _write_final(record: AttemptRecord, verdict: Verdict, code: int, message: str) -> None:
    """Write the verdict once more: with what is known of the attempts before it, it is another one."""
    facts = {"cause": verdict.cause, "message": message, "step": verdict.step}
    with contextlib.suppress(OSError):
        record.events.write("failed", node=record.node, code=code, **facts)
