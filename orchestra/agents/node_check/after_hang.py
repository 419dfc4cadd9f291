"""After a hang: measures again which nodes reach each other.

A node whose packets are lost in one direction, or that is cut off from the ranks' network alone, makes no
progress, as all others: positions blame no rank, and its agent lives. So all agents, spares too, measure the
way to their neighbour again (`RingMeasurement`); the leader waits for that (`RingAnswers`), and takes a node
for lost that reaches no other and that no other reaches (`cut_off`). Where that is its own, it steps down:
it would not reach Slurm either, and the job that its node holds would outlive the run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from launchers.node_group import GroupMember, Order
from orchestra.agents import choose_nodes
from orchestra.agents.context import START, AgentContext
from orchestra.run.events import read_events

# What an agent that steps down says: the order after which it did, and all nodes that it found cut off.
CUT_OFF = "cut_off"
# Several times what a neighbour is waited for that does not answer.
_TIMEOUT_S = 15.0


class RingMeasurement:
    """*Every agent*: measures once after an attempt that hung, whether it took part or not."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._asked = -1

    def look(self, order: Order | None) -> bool:
        """Begin to measure where the attempt hung; return whether the leader waits for this agent's answer.

        Called while this agent has nothing to do.
        """
        node_check = self._context.node_check
        if node_check is None or order is None or not _hung(self._context, order):
            return False
        if order.number != self._asked:
            self._asked = order.number
            node_check.measure_ring(order=order.number)
        return True


class RingAnswers:
    """*The leader*: waits for what the others have measured."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._waiting: tuple[int, float] | None = None

    def are_in(self, order: Order) -> bool:
        """Tell whether all have published what they reach, or are not waited for longer."""
        if not _hung(self._context, order):
            return True
        now = time.monotonic()
        if self._waiting is None or self._waiting[0] != order.number:
            self._waiting = order.number, now
        members = _living(self._context)
        return not _unanswered(self._context, order, members) or now - self._waiting[1] > _TIMEOUT_S


def cut_off(context: AgentContext, order: Order) -> list[int]:
    """Return the nodes of an attempt that hung which no other reaches and which reach none.

    Empty where the run could not go on without them: the network may come back. Where an agent stepped down
    for that, what it found holds.
    """
    if not _hung(context, order):
        return []
    found = [member.facts.get(CUT_OFF) for member in context.group.members().values()]
    said = [each["nodes"] for each in found if isinstance(each, dict) and each.get("order") == order.number]
    if said:
        return sorted({node for nodes in said for node in nodes if node in order.nodes})
    members = _living(context)
    alone = [
        node for node in without_links(members, order.number, context.group.num_nodes) if node in order.nodes
    ]
    hours = context.config.recovery.exclude_hours
    bad = choose_nodes.excluded_hosts(read_events(context.run), context.scheduler.facts(), hours)
    left = [
        node
        for node, member in members.items()
        if node not in alone and choose_nodes.is_fit(member) and member.host not in bad
    ]
    config = choose_nodes.of_next_attempt(context.config, context.run)
    is_enough = len(left) >= config.cluster.nodes or choose_nodes.shrunk(left, config) is not None
    return alone if is_enough or context.scheduler.can_requeue else []


def word_of(order: Order, alone: Sequence[int]) -> dict[str, Any]:
    """Return what an agent says of itself that steps down after an order, `alone` the nodes cut off."""
    return {CUT_OFF: {"order": order.number, "nodes": list(alone)}}


def without_links(members: Mapping[int, GroupMember], number: int, num_nodes: int) -> list[int]:
    """Return the nodes whose two links in the ring carried nothing after order `number`, while another link
    did: where none does, the network is away, and no node is to blame. Pure.
    """
    links: dict[int, list[bool]] = defaultdict(list)
    for node, member in members.items():
        ring, following = member.facts.get("ring"), _following(node, member, num_nodes)
        # A neighbour that is gone does not answer: that says nothing about the node that asked.
        if isinstance(ring, dict) and ring.get("order") == number and following in members:
            for end in (node, following):
                links[end].append("error" not in ring)
    if not any(any(carried) for carried in links.values()):
        return []
    return sorted(node for node, carried in links.items() if len(carried) == 2 and not any(carried))


def _following(node: int, member: GroupMember, num_nodes: int) -> int:
    """Return the node to which a node measured the way, or would: where others came later there are gaps."""
    ring = member.facts.get("ring")
    to = ring.get("to") if isinstance(ring, dict) else None
    return to if isinstance(to, int) else (node + 1) % num_nodes


def _hung(context: AgentContext, order: Order) -> bool:
    # Of two nodes either may be the one that is cut off.
    if order.action != START or context.group.num_nodes < 3:
        return False
    return (context.group.broken(order.number) or {}).get("cause") == "hang"


def _unanswered(context: AgentContext, order: Order, members: Mapping[int, GroupMember]) -> bool:
    """Tell whether a living node has yet to publish whether it reaches the next one, which lives too."""
    ends = {node for node, member in members.items() if "ring_port" in member.facts}
    asked = [node for node in ends if _following(node, members[node], context.group.num_nodes) in ends]
    return any((members[node].facts.get("ring") or {}).get("order") != order.number for node in asked)


def _living(context: AgentContext) -> dict[int, GroupMember]:
    members = context.group.members()
    silent = context.group.silent(members)
    return {node: member for node, member in members.items() if node not in silent}
