"""What the leading agent does: gather the nodes, begin attempts, judge how they ended, say what comes next.

All that it needs stands in files, so that the next agent can lead where this one died. What is to follow a
failure is `orchestra.recovery.policy`'s to say.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from launchers.crew import Member, Order
from launchers.errors import LauncherError
from orchestra import control
from orchestra.control import StopRequest
from orchestra.crew import choice
from orchestra.crew.copying import MEMORY, memory_of
from orchestra.crew.gathering import Gathering, called_off
from orchestra.crew.judging import as_stopped, conclude, is_fenced, newest_restart, requests_of
from orchestra.crew.part import config_of, mark_lost
from orchestra.crew.preflight import Preflight
from orchestra.crew.reach import Answers
from orchestra.crew.station import END, REFUSE, START, SURROUNDINGS_S, Station, attempt_of, host_of
from orchestra.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    LaunchError,
)
from orchestra.events import read_events
from orchestra.recovery.incidents import Incident, incidents
from orchestra.recovery.policy import Action, Decision, Rules, decide
from orchestra.report.verdict import Verdict
from orchestra.submit.claims import rival_claim, take_next
from orchestra.submit.launch import launch_spec
from orchestra.submit.recording import AttemptRecord, write_started

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
                reason = control.signal_reason(first)
                requests = [control.write_request(station.run, attempt, reason, at_once=first == "SIGINT")]
        return requests

    def _publish(self, order: Order) -> bool:
        self._ended_since = None
        return self._crew.publish(order)

    def _forward_requests(self, before: int | None, attempt: int) -> None:
        """Ask the new attempt to stop where the one before was asked in the moment that this one began."""
        for request in [] if before is None else requests_of(self._station, before):
            with contextlib.suppress(OSError):
                control.write_request(self._station.run, attempt, request.reason, at_once=request.at_once)

    def _forward_cancel(self, before: int, attempt: int) -> None:
        """Let another job's attempt hear of a cancel that came while that job was submitted."""
        for request in requests_of(self._station, before):
            if request.reason == control.CANCEL:
                with contextlib.suppress(OSError):
                    control.write_request(self._station.run, attempt, request.reason, at_once=request.at_once)

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
        resources = choice.resources(order, members, station, events)
        log = incidents(events)
        decision = decide(log, resources, Rules.of(station.config.recovery))
        decision = choice.without_unfit(order, decision, members)
        waited_s = self._announce(record, verdict, decision, log)
        number = order.number + 1
        if decision.action in (Action.give_up, Action.end):
            if decision.code != verdict.code:
                _write_final(record, verdict, decision.code, decision.reason)
            self._order_end(number, decision.code or verdict.code, decision.reason, lost)
            return
        station.say(f"{decision.action.name}: {decision.reason}")
        listed = self._preflight.listed
        excluded = choice.excluded_hosts(events, station.surroundings.facts())
        nodes = choice.next_nodes(order, decision, members, station.config, listed, excluded)
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
            record.events.write("restarting", **choice.evidence(decision), after=verdict.cause)
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
