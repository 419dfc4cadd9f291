"""Copies of the ranks' state in the nodes' memory: the agents keep them, send them on, and begin from them.

Each node's copies go to the next one of the attempt, those of a node that trains alone to a spare.
`launchers.memory_store.exchange` moves them, `orchestra.recovery.copies` says which step they make up.
Without `recovery.memory_copy_every_steps` nothing here does anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launchers import LauncherError
from launchers.memory_store.exchange import NodeCopies, NodeCopyPlan
from launchers.node_group import GroupMember, Order
from orchestra.agents.choose_nodes import is_fit
from orchestra.agents.context import AgentContext, attempt_number
from orchestra.agents.node_check.own_check import copies_name
from orchestra.recovery.copies import FromMemory, NextNodes, held_copies, neighbour, plan
from orchestra.run.events import read_events
from orchestra.run.run_lineage import lineage_of, newest_checkpoint

# Keys: in an order, the step to begin from; in what an agent publishes and reports, where its copies are.
MEMORY = "memory"
COPIES = "copies"


def open_copies(context: AgentContext) -> NodeCopies | None:
    """Return this node's copies; None where none are asked for or there is no room for them."""
    if context.config.recovery.memory_copy_every_steps is None:
        return None
    scheduler = context.scheduler
    try:
        secret = context.group.secret()
        return NodeCopies(copies_name(context.run), scheduler.host, scheduler.own_address(), secret)
    except (LauncherError, OSError) as error:
        context.say(f"no copies in memory: {error}")
        return None


def prepare_copies(context: AgentContext, order: Order) -> tuple[dict[str, str], tuple[str, ...]]:
    """Be ready for an attempt's copies; return what is added to the ranks' environment and arguments.

    Brings the copies here that its ranks begin from. Where one is missing the ranks agree on the checkpoint.
    """
    if (copies := context.copies) is None:
        return {}, ()
    members = context.group.members()
    index, count = order.nodes.index(context.node), int(context.config.cluster.gpus_per_node)
    own, before = _ranks(index, count), (index - 1) % len(order.nodes)
    memory = order.facts.get(MEMORY)
    if memory is not None:
        wanted = dict(memory["fetches"].get(str(context.node), ()))
        sources = {rank: _address(members, node) for rank, node in wanted.items()}
        try:
            copies.fetch(own, memory["step"], memory["attempt"], {k: v for k, v in sources.items() if v})
        except LauncherError as error:
            context.say(str(error))
    following = neighbour(order.nodes, context.node, _spares(context, order, members))
    address = None if following is None else _address(members, following)
    kept = _ranks(before, count) if len(order.nodes) > 1 else range(0)
    part = NodeCopyPlan(attempt_number(order), own, address, kept)
    if len(order.nodes) == 1:
        # A spare's agent may die without a word: no attempt of its own ends with it.
        part = dataclasses.replace(part, elsewhere=_another(context, order))
    copies.begin(part)
    return copies.environment, () if memory is None else ("--from-memory", str(memory["step"]))


def _spares(context: AgentContext, order: Order, members: Mapping[int, GroupMember]) -> list[int]:
    """Return the nodes beside an attempt that may keep copies, those whose agents are heard first."""
    beside = _beside(order, members)
    silent = set(context.group.silent(beside))
    return sorted(beside, key=lambda node: (node in silent, node))


def _beside(order: Order, members: Mapping[int, GroupMember]) -> list[int]:
    fit = (node for node, member in sorted(members.items()) if COPIES in member.facts and is_fit(member))
    return [node for node in fit if node not in order.nodes]


def _another(context: AgentContext, order: Order) -> Callable[[], Mapping[str, Any] | None]:
    """Return a function that returns one spare's address after another, as each publishes it now."""
    tried = itertools.count()

    def next_address() -> Mapping[str, Any] | None:
        members = context.group.members()
        beside = _beside(order, members)
        return _address(members, beside[next(tried) % len(beside)]) if beside else None

    return next_address


def _ranks(index: int, count: int) -> range:
    return range(index * count, (index + 1) * count)


def _address(members: Mapping[int, GroupMember], node: int) -> Mapping[str, Any] | None:
    member = members.get(node)
    return None if member is None else member.facts.get(COPIES)


def _of_spares(context: AgentContext, nodes: set[int]) -> dict[int, object]:
    """Ask the nodes that had no ranks in the attempt what they hold; a silent one holds nothing."""
    order = context.group.newest_order()
    if context.copies is None or order is None or len(order.nodes) > 1:
        return {}
    held: dict[int, object] = {}
    members = context.group.members()
    for node in sorted(nodes):
        address = _address(members, node)
        with contextlib.suppress(LauncherError, TypeError):
            if node == context.node:
                held[node] = context.copies.held()
            elif address is not None:
                held[node] = context.copies.held_at(address)
    return held


def memory_of(
    context: AgentContext, reports: Mapping[int, Mapping[str, Any]], nodes: Sequence[int], living: set[int]
) -> tuple[dict[str, Any] | None, str | None]:
    """Return what the next order says of the step to begin from, or why it begins with the checkpoint.

    `reports`: what the nodes reported at the end of the attempt before. Both are None where no copies are
    made. *The leader only*.
    """
    if context.config.recovery.memory_copy_every_steps is None:
        return None, None
    published = {node: report.get(COPIES) for node, report in reports.items()} | _of_spares(
        context, living - set(reports)
    )
    held = {node: held_copies(published[node]) for node in published if node in living}
    events = read_events(context.run)
    upcoming = NextNodes(nodes, int(context.config.cluster.gpus_per_node))
    beginning = plan(held, upcoming, lineage_of(events), newest_checkpoint(events))
    if not isinstance(beginning, FromMemory):
        return None, beginning.reason
    fetches = {
        str(node): [[fetch.rank, fetch.source] for fetch in wanted]
        for node, wanted in beginning.fetches.items()
    }
    return {"step": beginning.step, "attempt": beginning.attempt, "fetches": fetches}, None
