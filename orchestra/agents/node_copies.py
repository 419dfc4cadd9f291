"""Copies of the ranks' state in the nodes' memory, as the agents handle them: kept, sent on, and begun from.

Each node's copies go to the next one of the attempt, those of a node that trains alone to a spare.
`launchers.memory_store.node_store` moves them, `orchestra.recovery.copies` says which step they make up.
Without `recovery.memory_copy_every_steps` nothing here does anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launchers.launch_errors import LauncherError
from launchers.memory_store.node_store import CopyPart, NodeCopies
from launchers.node_group import Member, Order
from orchestra.agents.choose_nodes import is_fit
from orchestra.agents.context import START, AgentContext, attempt_number
from orchestra.agents.node_check.own_check import copies_name
from orchestra.recovery.copies import FromMemory, NextAttempt, begins, held_copies, neighbour, plan
from orchestra.recovery.history import newest_checkpoint
from orchestra.run.events import read_events

# What an order says of a step that is to be begun from, and an agent of where its copies are.
MEMORY = "memory"
COPIES = "copies"


def open_copies(context: AgentContext) -> NodeCopies | None:
    """Return this node's copies; None where none are asked for or there is no room for them."""
    if context.config.recovery.memory_copy_every_steps is None:
        return None
    scheduler, secret = context.scheduler, context.group.folder / "copies.secret"
    try:
        return NodeCopies(copies_name(context.run), scheduler.host, scheduler.own_address(), secret)
    except LauncherError as error:
        context.say(f"no copies in memory: {error}")
        return None


def begin(context: AgentContext, order: Order) -> tuple[dict[str, str], tuple[str, ...]]:
    """Be ready for an attempt's copies; return what the ranks' environment and arguments have to say.

    Brings the copies here that its ranks begin from. Where one cannot be had they agree on the checkpoint.
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
    part = CopyPart(attempt_number(order), own, address, kept)
    if len(order.nodes) == 1:
        # A spare's agent may die without a word: no attempt of its own ends with it.
        part = dataclasses.replace(part, elsewhere=_another(context, order))
    copies.begin(part)
    return copies.environment, () if memory is None else ("--from-memory", str(memory["step"]))


def keep(context: AgentContext, order: Order) -> None:
    """Be ready to keep the copies of an attempt that this node has no ranks in. *Spares*."""
    if context.copies is not None and order.action == START:
        context.copies.begin(CopyPart(attempt_number(order), range(0)))


def _spares(context: AgentContext, order: Order, members: Mapping[int, Member]) -> list[int]:
    """Return the nodes beside an attempt that may keep copies, those that speak first."""
    beside = _beside(order, members)
    silent = set(context.group.silent(beside))
    return sorted(beside, key=lambda node: (node in silent, node))


def _beside(order: Order, members: Mapping[int, Member]) -> list[int]:
    fit = (node for node, it in sorted(members.items()) if COPIES in it.facts and is_fit(it))
    return [node for node in fit if node not in order.nodes]


def _another(context: AgentContext, order: Order) -> Callable[[], Mapping[str, Any] | None]:
    """Return what names one spare's address after another, as each of them says it now."""
    tried = itertools.count()

    def named() -> Mapping[str, Any] | None:
        members = context.group.members()
        beside = _beside(order, members)
        return _address(members, beside[next(tried) % len(beside)]) if beside else None

    return named


def _ranks(index: int, count: int) -> range:
    return range(index * count, (index + 1) * count)


def _address(members: Mapping[int, Member], node: int) -> Mapping[str, Any] | None:
    member = members.get(node)
    return None if member is None else member.facts.get(COPIES)


def _of_spares(context: AgentContext, nodes: set[int]) -> dict[int, object]:
    """Return what nodes hold that had no ranks in the attempt, by asking each; the silent hold nothing."""
    order = context.group.newest_order()
    if context.copies is None or order is None or len(order.nodes) > 1:
        return {}
    found: dict[int, object] = {}
    members = context.group.members()
    for node in sorted(nodes):
        address = _address(members, node)
        with contextlib.suppress(LauncherError, TypeError):
            if node == context.node:
                found[node] = context.copies.held()
            elif address is not None:
                found[node] = context.copies.held_at(address)
    return found


def memory_of(
    context: AgentContext, reports: Mapping[int, Mapping[str, Any]], nodes: Sequence[int], living: set[int]
) -> tuple[dict[str, Any] | None, str | None]:
    """Return what the next order says of the step to begin from, or why it begins with the checkpoint.

    `reports` are the nodes' words on the end of the attempt before. Both are None where no copies are made.
    """
    if context.config.recovery.memory_copy_every_steps is None:
        return None, None
    said = {node: it.get(COPIES) for node, it in reports.items()} | _of_spares(context, living - set(reports))
    held = {node: held_copies(said[node]) for node in said if node in living}
    events = read_events(context.run)
    upcoming = NextAttempt(nodes, int(context.config.cluster.gpus_per_node))
    found = plan(held, upcoming, begins(events), newest_checkpoint(events))
    if not isinstance(found, FromMemory):
        return None, found.reason
    fetches = {str(node): [[it.rank, it.source] for it in them] for node, them in found.fetches.items()}
    return {"step": found.step, "attempt": found.attempt, "fetches": fetches}, None
