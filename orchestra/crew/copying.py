"""Copies of the ranks' state in the nodes' memory, as the agents handle them: kept, sent on, and begun from.

`launchers.node_copies` moves them, `orchestra.recovery.copies` says which step they make up. Without
`recovery.memory_copy_every_steps` nothing here does anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from launchers.crew import Member, Order
from launchers.errors import LauncherError
from launchers.node_copies import CopyPart, NodeCopies
from orchestra.crew.station import Station, attempt_of
from orchestra.events import read_events
from orchestra.recovery.copies import FromMemory, NextAttempt, begins, held_copies, neighbour, plan
from orchestra.report.checkpoints import newest_checkpoint

# What an order says of a step that is to be begun from, and an agent of where its copies are.
MEMORY = "memory"
COPIES = "copies"


def open_copies(station: Station) -> NodeCopies | None:
    """Return this node's copies; None where none are asked for or there is no room for them."""
    if station.config.recovery.memory_copy_every_steps is None:
        return None
    path_hash = hashlib.sha256(str(station.run.path).encode()).hexdigest()[:8]
    surroundings, secret = station.surroundings, station.crew.folder / "copies.secret"
    try:
        return NodeCopies(
            f"{station.run.name}-{path_hash}", surroundings.host, surroundings.own_address(), secret
        )
    except LauncherError as error:
        station.say(f"no copies in memory: {error}")
        return None


def begin(station: Station, order: Order) -> tuple[dict[str, str], tuple[str, ...]]:
    """Be ready for an attempt's copies; return what the ranks' environment and arguments have to say.

    Brings the copies here that its ranks begin from. Where one cannot be had they agree on the checkpoint.
    """
    if (copies := station.copies) is None:
        return {}, ()
    members = station.crew.members()
    index, count = order.nodes.index(station.node), int(station.config.cluster.gpus_per_node)
    own, before = _ranks(index, count), (index - 1) % len(order.nodes)
    memory = order.facts.get(MEMORY)
    if memory is not None:
        wanted = dict(memory["fetches"].get(str(station.node), ()))
        sources = {rank: _address(members, node) for rank, node in wanted.items()}
        try:
            copies.fetch(own, memory["step"], memory["attempt"], {k: v for k, v in sources.items() if v})
        except LauncherError as error:
            station.say(str(error))
    following = neighbour(order.nodes, station.node)
    address = None if following is None else _address(members, following)
    kept = _ranks(before, count) if len(order.nodes) > 1 else range(0)
    copies.begin(CopyPart(attempt_of(order), own, address, kept))
    return copies.environment, () if memory is None else ("--from-memory", str(memory["step"]))


def _ranks(index: int, count: int) -> range:
    return range(index * count, (index + 1) * count)


def _address(members: Mapping[int, Member], node: int) -> Mapping[str, Any] | None:
    member = members.get(node)
    return None if member is None else member.facts.get(COPIES)


def memory_of(
    station: Station, reports: Mapping[int, Mapping[str, Any]], nodes: Sequence[int], living: set[int]
) -> tuple[dict[str, Any] | None, str | None]:
    """Return what the next order says of the step to begin from, or why it begins with the checkpoint.

    `reports` are the nodes' words on the end of the attempt before. Both are None where no copies are made.
    """
    if station.config.recovery.memory_copy_every_steps is None:
        return None, None
    held = {node: held_copies(it.get(COPIES)) for node, it in reports.items() if node in living}
    events = read_events(station.run)
    upcoming = NextAttempt(nodes, int(station.config.cluster.gpus_per_node))
    found = plan(held, upcoming, begins(events), newest_checkpoint(events))
    if not isinstance(found, FromMemory):
        return None, found.reason
    fetches = {str(node): [[it.rank, it.source] for it in them] for node, them in found.fetches.items()}
    return {"step": found.step, "attempt": found.attempt, "fetches": fetches}, None
