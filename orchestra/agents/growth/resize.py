"""When an attempt gives way to one on more nodes, or on fewer: while it trains, and its ranks save first.

More, where the run trains on fewer than `cluster.nodes` and others have joined; fewer, where the job of some
of its nodes is about to end. The ranks are asked to stop as by `orchestra cancel`; what follows the leader
does (`orchestra.agents.leader`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterable, Mapping

from launchers import LauncherError
from launchers.node_group import GroupMember, Order
from orchestra.agents.attempt_record import AttemptRecord
from orchestra.agents.choose_nodes import (
    LEAVES,
    excluded_hosts,
    gives_layout,
    is_fit,
    of_next_attempt,
    resized,
)
from orchestra.agents.context import AgentContext
from orchestra.agents.growth.held_nodes import HeldNodes
from orchestra.agents.growth.wanted_nodes import WantedNodes
from orchestra.run.control import stop_requests
from orchestra.run.events import read_events
from orchestra.run.files import Record

# How often it is looked who has come; the records are read only where somebody has, and to see how far a ramp
# of the batch is.
_LOOK_S, _RAMP_S = 2.0, 60.0


class Resize:
    """Looks, on each node of one attempt, whether another number of nodes is to go on."""

    def __init__(self, context: AgentContext, order: Order, record: AttemptRecord) -> None:
        self._context = context
        self._order = order
        self._record = record
        self._looked_at = time.monotonic()
        self._has_asked = self._has_told = False
        self._listed: Mapping[str, str] = {}
        self._excluded: Collection[str] = ()
        self._held: HeldNodes | None = None
        # Unix seconds at which the run may be resized again.
        self._due = math.inf
        self._of_next, self._of_next_until = context.config, -math.inf
        config = context.config
        is_small = len(order.nodes) < config.cluster.nodes
        # A job's own nodes have lower numbers than those that help it.
        is_first = context.node == min(order.nodes) and not context.scheduler.is_helper
        self._may_grow = is_small and is_first and config.recovery.resize_every_s is not None
        if self._may_grow:
            with contextlib.suppress(OSError):
                events = read_events(context.run)
                self._listed = context.scheduler.excluded()
                self._excluded = excluded_hosts(
                    events, context.scheduler.facts(), config.recovery.exclude_hours
                )
                self._due = _last_change(events) + (config.recovery.resize_every_s or 0.0)
                starts = (event for event in reversed(events) if event["event"] == "attempt_started")
                start = next((event for event in starts if event["attempt"] == record.number), None)
                # A node that is silent for the moment came before all the same.
                there = {**context.group.members(), **living(context, order)}
                self._held = HeldNodes(record.events, there, start)

    def look(self) -> None:
        """Do what is due. Called about ten times a second."""
        context = self._context
        if context.scheduler.is_helper and context.signals.count() and not self._has_told:
            # Before its ranks have stopped: the leader then knows who stays.
            self._has_told = True
            with contextlib.suppress(LauncherError, OSError):
                context.group.tell({LEAVES: True})
        now = time.monotonic()
        if self._may_grow and not self._has_asked and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            # A file system that fails now may answer the next time.
            with contextlib.suppress(OSError):
                self._grow()

    def _grow(self) -> None:
        context, order = self._context, self._order
        if (now := time.monotonic()) >= self._of_next_until:
            self._of_next_until = now + _RAMP_S
            self._of_next = of_next_attempt(context.config, context.run)
        alive, config = living(context, order), self._of_next
        if self._held is not None:
            self._held.look(alive)
        there, wanted = len(order.nodes), config.cluster.nodes
        num_coming = sum(node not in order.nodes and self._is_of_use(alive[node]) for node in alive)
        counts = range(1, wanted - there + 1)
        fewest = next((count for count in counts if gives_layout(config, there + count)), None)
        if fewest is None:
            return
        if (missing := wanted - there - num_coming) > 0:
            hosts = tuple(member.host for member in alive.values())
            delay_s = max(0.0, self._due - time.time()) if self._due < math.inf else 0.0
            number = self._record.number
            context.scheduler.ask_for_nodes(
                WantedNodes(number, min(fewest, missing), missing, delay_s, hosts)
            )
        if num_coming < fewest or time.time() < self._due:
            return
        nodes = resized(order, alive, config, self._listed, self._excluded)
        # An attempt that has not begun to train has nothing to go on from.
        if nodes is None or len(nodes) <= there or self._record.seen().training_started is None:
            return
        stop_requests.write_request(context.run, self._record.number, stop_requests.RESIZE)
        self._has_asked = True
        context.say(f"{len(nodes) - there} more node(s) have come: the ranks save, and {len(nodes)} go on")

    def _is_of_use(self, member: GroupMember) -> bool:
        is_there = is_fit(member) and not member.facts.get(LEAVES)
        return is_there and member.host not in self._excluded


def living(context: AgentContext, order: Order) -> dict[int, GroupMember]:
    """Return the agents that are there and not silent; those of the order among them."""
    members = context.group.members()
    silent = context.group.silent([*order.nodes, *members])
    return {node: member for node, member in members.items() if node not in silent}


def _last_change(events: Iterable[Record]) -> float:
    """Return when the run began to train on as many nodes as now (Unix seconds); 0 before any attempt."""
    since, before = 0.0, None
    for event in events:
        if event["event"] == "attempt_started":
            now = (event.get("nodes"), event.get("job"))
            since = since if now == before else float(event["time"])
            before = now
    return since
