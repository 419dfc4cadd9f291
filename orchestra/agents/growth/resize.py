"""When an attempt gives way to one on more nodes, or on fewer: while it trains, and its ranks save first.

More, where the run trains on fewer than `cluster.nodes` and others have joined; fewer, where the job of some
of its nodes is about to end. The ranks are asked to stop as by `orchestra cancel`; what follows the leader
does (`orchestra.agents.leader`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from launchers import LauncherError
from launchers.node_group import GroupMember, Order
from orchestra.agents.attempt_record import AttemptRecord
from orchestra.agents.choose_nodes import LEAVES, excluded_hosts, gives_layout, resized
from orchestra.agents.context import AgentContext
from orchestra.agents.growth.wanted_nodes import WantedNodes
from orchestra.run.control import stop_requests
from orchestra.run.events import read_events
from orchestra.run.files import Record

# How often it is looked who has come; the records are read only where somebody has.
_LOOK_S = 2.0


class Resize:
    """Looks, on each node of one attempt, whether another number of nodes is to go on."""

    def __init__(self, context: AgentContext, order: Order, record: AttemptRecord) -> None:
        self._context = context
        self._order = order
        self._record = record
        self._looked_at = time.monotonic()
        self._has_asked = self._has_told = False
        self._listed = context.scheduler.excluded() if self._may_grow else {}
        # Unix seconds at which the run may be resized again.
        self._due = _last_change(read_events(context.run)) + (context.config.recovery.resize_every_s or 0.0)

    @property
    def _may_grow(self) -> bool:
        config = self._context.config
        is_small = len(self._order.nodes) < config.cluster.nodes
        return (
            is_small and config.recovery.resize_every_s is not None and not self._context.scheduler.is_helper
        )

    def look(self) -> None:
        """Do what is due. Called about ten times a second."""
        context = self._context
        if context.scheduler.is_helper and context.signals.count() and not self._has_told:
            # Before its ranks have stopped: the leader then knows who stays.
            self._has_told = True
            with contextlib.suppress(LauncherError, OSError):
                context.group.tell({LEAVES: True})
        now = time.monotonic()
        if self._has_asked or now - self._looked_at < _LOOK_S or context.node != self._order.nodes[0]:
            return
        self._looked_at = now
        if self._may_grow:
            self._grow()

    def _grow(self) -> None:
        context, order = self._context, self._order
        alive = living(context, order)
        there, wanted = len(order.nodes), context.config.cluster.nodes
        coming = [node for node in alive if node not in order.nodes]
        fewest = next(
            (count for count in range(1, wanted - there + 1) if gives_layout(context.config, there + count)),
            None,
        )
        if fewest is None:
            return
        if len(coming) < wanted - there:
            missing, delay_s = wanted - there - len(coming), max(0.0, self._due - time.time())
            hosts = tuple(member.host for member in alive.values())
            number = self._record.number
            context.scheduler.ask_for_nodes(
                WantedNodes(number, min(fewest, missing), missing, delay_s, hosts)
            )
        if len(coming) < fewest or time.time() < self._due:
            return
        excluded = excluded_hosts(read_events(context.run), context.scheduler.facts())
        nodes = resized(order, alive, context.config, self._listed, excluded)
        # An attempt that has not begun to train has nothing to go on from.
        if nodes is None or len(nodes) <= there or self._record.seen().training_started is None:
            return
        with contextlib.suppress(OSError):
            stop_requests.write_request(context.run, self._record.number, stop_requests.RESIZE)
            self._has_asked = True
            context.say(
                f"{len(nodes) - there} more node(s) have come: the ranks save, and {len(nodes)} go on"
            )


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
