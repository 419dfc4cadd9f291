"""Which step can be continued from the nodes' memory, and who has to fetch what for it. Pure.

Called by the leader of a job between two attempts, with what each living node says it holds. Only a whole
step of one attempt counts: a copy of every rank, all of the same layout, and on the run's line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.lineage import Lineage
from orchestra.run.events import is_whole
from orchestra.sizes.units import first_few


@dataclass(frozen=True, order=True)
class HeldCopy:
    """A complete copy of one rank's state after a step, on some node. `layout` is JSON with sorted keys."""

    step: int
    attempt: int
    rank: int
    layout: str


@dataclass(frozen=True, order=True)
class Fetch:
    """A copy that a node of the next attempt lacks, and the node that it gets it from."""

    rank: int
    source: int


@dataclass(frozen=True)
class FromMemory:
    """Continue after `step` from the copies that `attempt` made. `fetches` by node, where it lacks any."""

    step: int
    attempt: int
    fetches: Mapping[int, tuple[Fetch, ...]]


@dataclass(frozen=True)
class NotFromMemory:
    """Continue from the newest checkpoint, because of `reason`."""

    reason: str


def held_copies(records: object) -> list[HeldCopy]:
    """Return the copies that a node's record lists; what is no copy is passed over."""
    entries = records if isinstance(records, list) else []
    return [
        HeldCopy(entry["step"], entry["attempt"], entry["rank"], json.dumps(entry["layout"], sort_keys=True))
        for entry in entries
        if isinstance(entry, dict)
        and all(is_whole(entry.get(key)) for key in ("step", "attempt", "rank"))
        and isinstance(entry.get("layout"), dict)
    ]


@dataclass(frozen=True)
class NextNodes:
    """What the next attempt will be: its nodes by their numbers, in the order of their ranks."""

    nodes: Sequence[int]
    ranks_per_node: int
    # Degrees of the mesh by axis, as the copies name them; None: those of the copies themselves.
    layout: Mapping[str, Any] | None = None

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node


def plan(
    held: Mapping[int, Sequence[HeldCopy]],
    upcoming: NextNodes,
    lineage: Lineage,
    committed_step: int | None,
) -> FromMemory | NotFromMemory:
    """Return where the next attempt continues from: the newest step that the living nodes hold completely.

    `held` by node number, the lost nodes left out. `committed_step` is the newest committed checkpoint, which
    is preferred where it is as new.
    """
    groups = _groups(held, upcoming, lineage)
    complete = [key for key, found in groups.items() if len(found) == upcoming.world_size]
    if not complete:
        return NotFromMemory(_why_none(held, upcoming, groups))
    step, attempt, _ = max(complete)
    if committed_step is not None and committed_step >= step:
        return NotFromMemory(
            f"the checkpoint of step {committed_step} is as new as the copies of step {step}"
        )
    return FromMemory(step, attempt, dict(_fetches(groups[max(complete)], upcoming)))


def neighbour(nodes: Sequence[int], node: int, spares: Sequence[int] = ()) -> int | None:
    """Return the node that keeps the copies of `node`: the next of the attempt, of a single one a spare."""
    if len(nodes) > 1:
        return nodes[(nodes.index(node) + 1) % len(nodes)]
    return spares[0] if spares else None


# Nodes that hold a copy, by rank, for each step, attempt and layout.
_Group = dict[int, list[int]]
_Key = tuple[int, int, str]


def _groups(
    held: Mapping[int, Sequence[HeldCopy]], upcoming: NextNodes, lineage: Lineage
) -> dict[_Key, _Group]:
    wanted = None if upcoming.layout is None else json.dumps(dict(upcoming.layout), sort_keys=True)
    groups: dict[_Key, _Group] = {}
    for node in sorted(held):
        for copy in held[node]:
            is_wanted = wanted in (None, copy.layout) and _size_of(copy.layout) == upcoming.world_size
            is_counted = lineage.is_on_line(copy.step, copy.attempt)
            if is_wanted and is_counted and copy.rank < upcoming.world_size:
                group = groups.setdefault((copy.step, copy.attempt, copy.layout), {})
                group.setdefault(copy.rank, []).append(node)
    return groups


def _size_of(layout: str) -> int:
    """Return the world size of a layout; 0 where it says none."""
    degrees = json.loads(layout)
    size = 1
    for axis in ("dp", "tp", "pp", "cp"):
        degree = degrees.get(axis)
        size *= degree if is_whole(degree) else 0
    return size


def _fetches(group: _Group, upcoming: NextNodes) -> Iterable[tuple[int, tuple[Fetch, ...]]]:
    """Yield what each node lacks. Where several nodes have it, the one that has given least so far gives."""
    given: dict[int, int] = {}
    for index, node in enumerate(upcoming.nodes):
        first = index * upcoming.ranks_per_node
        lacking = []
        for rank in range(first, first + upcoming.ranks_per_node):
            if node not in group[rank]:
                source = min(group[rank], key=lambda other: (given.get(other, 0), other))
                given[source] = given.get(source, 0) + 1
                lacking.append(Fetch(rank, source))
        if lacking:
            yield node, tuple(lacking)


def _why_none(
    held: Mapping[int, Sequence[HeldCopy]], upcoming: NextNodes, groups: Mapping[_Key, _Group]
) -> str:
    if not any(held.values()):
        return "no living node holds a copy in memory"
    if not groups:
        return "the copies in memory are of another layout, or of steps before which the run went back"
    step, _, _ = newest = max(groups)
    missing = [rank for rank in range(upcoming.world_size) if rank not in groups[newest]]
    lost = first_few(missing, _MAX_LISTED)
    return f"no step is held of all ranks; of the newest, step {step}, those of ranks {lost} are lost"


# Ranks that a reason lists before it says how many more there are.
_MAX_LISTED = 5
