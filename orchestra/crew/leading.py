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
from launchers.spec import Ending
from orchestra import control
from orchestra.crew import choice
from orchestra.crew.copying import MEMORY, memory_of
from orchestra.crew.part import config_of, ending_of, mark_lost
from orchestra.crew.preflight import Preflight
from orchestra.crew.station import END, REFUSE, START, Station, attempt_of, host_of
from orchestra.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    LaunchError,
)
from orchestra.events import read_events
from orchestra.recovery.incidents import incidents
from orchestra.recovery.policy import Action, Decision, Rules, decide
from orchestra.report.verdict import Verdict, finished_ranks
from orchestra.submit.claims import take_next
from orchestra.submit.launch import launch_spec
from orchestra.submit.recording import AttemptRecord, write_started

# From the start of the first node's task to the last one's: images are pulled, Python is loaded by many.
GATHER_TIMEOUT_S = 600.0
# How long spares, and with recovery.min_nodes the last of the others, are waited for.
_STRAGGLERS_S = 15.0
_MIN_NODES_WAIT_S = 60.0
# How long nodes that live are waited for at an attempt's end: their ranks may still write a checkpoint.
_END_TIMEOUT_S = 120.0
_HURRIED_END_TIMEOUT_S = 15.0


class Leading:
    """One agent's turn as the leader. `look` is called every now and then while it leads and is idle."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._crew = station.crew
        self._preflight = Preflight(station)
        self._began = time.monotonic()
        self._ended_since: float | None = None
        # What is to follow and when (this host's own clock): the policy may want to wait.
        self._next: tuple[float, Order] | None = None

    def look(self, order: Order | None) -> None:
        """Do what is due. Raises LaunchError and OSError."""
        if self._next is not None:
            self._publish_when_due(*self._next)
        elif order is None:
            self._gather()
        elif order.action == START and self._is_over(order):
            self._conclude(order)

    # Beginning.

    def _gather(self) -> None:
        station = self._station
        members = self._crew.members()
        if station.signals.count():
            self._order_end(0, EXIT_STOPPED, f"{station.signals.first} came before the attempt began")
            return
        if not self._are_enough(members) or not self._preflight.is_over(members):
            return
        rival = station.surroundings.refusal()
        if rival is not None:
            self._publish(Order(0, REFUSE, facts={"message": rival}))
            return
        hosts = self._preflight.first_nodes(members)
        if hosts is None:
            said = self._preflight.go_elsewhere(members)
            if said is None:
                raise LaunchError(self._preflight.unfit_words(members) or self._too_few(members))
            self._order_end(0, EXIT_FAILED, said)
            return
        self._start(0, hosts, members, wait_s=0.0)

    def _are_enough(self, members: dict[int, Member]) -> bool:
        waited = time.monotonic() - self._began
        if len(members) == self._crew.num_nodes:
            return True
        wanted, least = self._station.config.cluster.nodes, self._station.config.recovery.min_nodes
        if len(members) >= wanted and waited > _STRAGGLERS_S:
            return True
        if least is not None and len(members) >= least and waited > _MIN_NODES_WAIT_S:
            return True
        if waited > GATHER_TIMEOUT_S:
            raise LaunchError(self._too_few(members))
        return False

    def _too_few(self, members: dict[int, Member]) -> str:
        missing = sorted(set(range(self._crew.num_nodes)) - set(members))
        return (
            f"only {len(members)} of {self._crew.num_nodes} nodes came within {GATHER_TIMEOUT_S:g} s or are "
            f"fit; missing: {', '.join(map(str, missing)) or 'none'}. Their logs tell what became of them, "
            f"or they do not share {self._station.run.path}"
        )

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
        if station.signals.count():
            self._next = None
            self._order_end(order.number, EXIT_STOPPED, f"{station.signals.first} came between two attempts")
            return
        if time.monotonic() < due:
            return
        self._next = None
        claimed = station.first_attempt if order.number == 0 else None
        attempt = take_next(station.run) if claimed is None else claimed
        first = self._crew.members().get(order.nodes[0])
        if first is None:
            raise LaunchError(f"{host_of(order, order.nodes[0])} left before the attempt began")
        meeting = {"attempt": attempt, "address": first.address, "port": first.facts["port"]}
        meeting["meeting"] = f"{self._crew.folder.name}-{attempt}"
        order = Order(order.number, START, order.nodes, order.incarnations, {**order.facts, **meeting})
        record = station.record(attempt)
        if not self._publish(order):
            # Another agent leads, and has claimed an attempt of its own.
            station.run.claim(attempt).unlink(missing_ok=True)
            return
        config = config_of(station.config, order)
        spec = launch_spec(config, station.run, attempt)
        started = {"hosts": [host_of(order, node) for node in order.nodes], **station.surroundings.facts()}
        write_started(record, config, spec, **started)
        if not (station.is_alone and order.number == 0):
            station.say(f"attempt {attempt} on {', '.join(started['hosts'])}")
        self._forward_requests(attempt)
        if order.number == 0:
            self._preflight.tell(record.events, self._crew.members(), order.nodes)

    def _publish(self, order: Order) -> bool:
        self._ended_since = None
        return self._crew.publish(order)

    def _forward_requests(self, attempt: int) -> None:
        """Ask the new attempt to stop where the one before was asked in the moment that it ended."""
        with contextlib.suppress(OSError):
            earlier = control.read_requests(self._station.run, attempt - 1) if attempt else []
            late = [request for request in earlier if request.time >= self._station.began]
            for request in late:
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
        limit = _HURRIED_END_TIMEOUT_S if self._station.signals.count() else _END_TIMEOUT_S
        return now - self._ended_since > limit

    def _conclude(self, order: Order) -> None:
        """Judge the attempt, write that down, and prepare what follows."""
        station, attempt = self._station, attempt_of(order)
        record = station.record(attempt)
        reports = self._crew.reports(order.number, order.nodes)
        lost = self._write_lost(order, record, reports)
        ending, interruption = self._merged(order, record, reports, lost)
        verdict = record.conclude(
            ending, interruption, lambda it: station.surroundings.judged(it, attempt, record.events)
        )
        station.say(f"attempt {attempt} {verdict.state}: {verdict.message or verdict.cause}")
        number = order.number + 1
        if verdict.code == EXIT_DONE:
            self._order_end(number, EXIT_DONE, "finished", lost)
        elif verdict.code in (EXIT_STOPPED, EXIT_INTERRUPTED) or self._is_asked(attempt):
            said = station.surroundings.go_on(verdict, attempt, record.events)
            self._order_end(number, verdict.code, said or verdict.cause, lost)
        else:
            self._recover(order, verdict, record, lost)

    def _write_lost(
        self, order: Order, record: AttemptRecord, reports: dict[int, dict[str, Any]]
    ) -> list[int]:
        """Write down who did not report, and return these nodes."""
        silent = self._crew.silent(order.nodes)
        lost = [node for node in order.nodes if node not in reports]
        for node in lost:
            cause = "its agent is silent" if node in silent else "it did not report its end"
            with contextlib.suppress(OSError):
                record.events.write("node_lost", node=node, host=host_of(order, node), cause=cause)
        for node, report in reports.items():
            if report.get("cause") == "agent lost":
                with contextlib.suppress(OSError):
                    record.events.write(
                        "agent_lost", node=node, host=host_of(order, node), cause="agent lost"
                    )
        return lost

    def _merged(
        self,
        order: Order,
        record: AttemptRecord,
        reports: dict[int, dict[str, Any]],
        lost: list[int],
    ) -> tuple[Ending, str | None]:
        endings = {node: ending_of(report) for node, report in reports.items()}
        finished = finished_ranks(record.seen())
        per_node = int(self._station.config.cluster.gpus_per_node)
        codes = [ending.exit_code for ending in endings.values()]
        for node in lost:
            first = order.nodes.index(node) * per_node
            is_done = finished >= set(range(first, first + per_node))
            codes.append(EXIT_DONE if is_done else EXIT_FAILED)
        code = next((code for code in codes if code != EXIT_DONE), EXIT_DONE)
        failures = tuple(it for ending in endings.values() for it in ending.failures)
        survivors = tuple(it for ending in endings.values() for it in ending.survivors)
        stops = max((ending.stops for ending in endings.values()), default=0)
        interruptions = [str(it["interruption"]) for it in reports.values() if it.get("interruption")]
        return Ending(code, stops, failures, survivors), next(iter(interruptions), None)

    def _is_asked(self, attempt: int) -> bool:
        """Tell whether somebody wants the run to stop: a failure in that moment starts nothing again."""
        if self._station.signals.count():
            return True
        try:
            return bool(control.read_requests(self._station.run, attempt))
        except OSError:
            return False

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
        with contextlib.suppress(OSError):
            record.events.write("restarting", **choice.evidence(decision), after=verdict.cause)
            station.surroundings.exclude(decision, log)
        number = order.number + 1
        if decision.action in (Action.give_up, Action.end):
            if decision.code != verdict.code:
                _write_final(record, verdict, decision)
            self._order_end(number, decision.code or verdict.code, decision.reason, lost)
            return
        station.say(f"{decision.action.name}: {decision.reason}")
        listed = self._preflight.listed
        nodes = choice.next_nodes(order, decision, members, station.config, listed)
        if decision.action is Action.requeue or nodes is None:
            self._requeue(number, decision, verdict, record, lost)
            return
        self._write_replaced(order, nodes, members, record)
        memory = self._memory(order, nodes, set(members))
        self._start(number, nodes, members, decision.wait_s, **memory)

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
        if not station.surroundings.can_requeue:
            self._order_end(number, verdict.code, f"no node is left for it: {decision.reason}", lost)
            return
        try:
            said = station.surroundings.requeue(decision, record.number, record.events)
        except (LauncherError, LaunchError, OSError) as error:
            said = f"it does not go on by itself: {error}"
        self._order_end(number, verdict.code, said, lost)

    def _order_end(self, number: int, code: int, said: str, lost: Sequence[int] = ()) -> None:
        self._station.say(said)
        self._publish(Order(number, END, facts={"code": code, "said": said, "lost": list(lost)}))


def _write_final(record: AttemptRecord, verdict: Verdict, decision: Decision) -> None:
    """Write the verdict once more: with what is known of the attempts before it, it is another one."""
    facts = {"cause": verdict.cause, "message": decision.reason, "step": verdict.step}
    with contextlib.suppress(OSError):
        record.events.write("failed", node=record.node, code=decision.code, **facts)
