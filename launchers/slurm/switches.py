"""Where nodes hang in the network, by what Slurm tells of it, and nodes ordered so that neighbours are near.

A node's own place stands in its tasks' SLURM_TOPOLOGY_ADDR, `spine.leaf1.node1` with the pattern
`switch.switch.node`, or `block1.node1` with `block.node`. The tree plugin has it in every version in use, the
block plugin since it came (23.11); without a plugin the address is the node's name. The whole network is what
`scontrol show topology` prints: lines of SwitchName, or of BlockName and, since 24.11, AggregatedBlock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launchers.slurm.commands import output_of

# The switches above a node, the topmost first; empty where Slurm knows none.
SwitchPath = tuple[str, ...]

_QUERY_TIMEOUT_S = 5.0
_FIELD = re.compile(r"(\w+)=(\S*)")
_PART_OF_LIST = re.compile(r"((?:[^,\[\]]|\[[^\]]*\])+)")


def own_path(environment: Mapping[str, str]) -> SwitchPath:
    """Return the switches above the node whose task has this environment."""
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    # A node's name may hold dots.
    parts = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(pattern) - 1)
    if pattern[-1] != "node" or len(parts) != len(pattern):
        return ()
    return tuple(part for part in parts[:-1] if part)


def ordered(
    nodes: Sequence[int], paths: Mapping[int, SwitchPath], blocks: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return nodes so that each block of consecutive ones lies under as few switches as is easily found.

    `blocks`: sizes in nodes of the groups that should lie together, the largest first, each a multiple of the
    next. Whole blocks of one leaf come first, those of several last. Where all nodes are under one leaf, or
    nothing is known, the order is the given one.
    """
    if len({paths.get(node, ()) for node in nodes}) < 2:
        return tuple(nodes)
    return tuple(_ordered(list(nodes), paths, [size for size in blocks if 1 < size < len(nodes)]))


def distance(one: SwitchPath, other: SwitchPath) -> int:
    """Return how many levels above its leaf a node meets another one: 0 under the same leaf."""
    common = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        common += 1
    return max(len(one), len(other)) - common


def _ordered(nodes: list[int], paths: Mapping[int, SwitchPath], blocks: Sequence[int]) -> list[int]:
    if not blocks:
        return sorted(nodes, key=lambda node: [_natural(name) for name in paths.get(node, ())])
    whole, rest = _cut(nodes, paths, blocks[0], 0)
    return [node for block in [*whole, rest] for node in _ordered(block, paths, blocks[1:])]


def _cut(
    nodes: list[int], paths: Mapping[int, SwitchPath], size: int, depth: int
) -> tuple[list[list[int]], list[int]]:
    """Return blocks of the nodes under one switch, and the nodes that are left over: too few for another."""
    below: dict[SwitchPath, list[int]] = {}
    for node in nodes:
        below.setdefault(paths.get(node, ())[depth : depth + 1], []).append(node)
    if set(below) == {()}:
        end = len(nodes) // size * size
        return [nodes[at : at + size] for at in range(0, end, size)], nodes[end:]
    whole, pieces = [], []
    for name in sorted(below, key=lambda name: [_natural(part) for part in name]):
        # Nodes that hang here directly are a leaf of their own.
        below_it = depth + 1 if name else len(paths.get(below[name][0], ()))
        found, left = _cut(below[name], paths, size, below_it)
        whole += found
        pieces += [left] if left else []
    joined, left = _joined(pieces, size)
    return [*whole, *joined], left


def _joined(pieces: list[list[int]], size: int) -> tuple[list[list[int]], list[int]]:
    """Make blocks of what several switches left over: the largest piece, and what fills it up best."""
    pieces, blocks = list(pieces), []
    while sum(map(len, pieces)) >= size:
        block: list[int] = []
        while gap := size - len(block):
            fitting = [piece for piece in pieces if len(piece) <= gap]
            piece = max(fitting, key=len) if fitting else min(pieces, key=len)
            place = next(at for at, other in enumerate(pieces) if other is piece)
            block += piece[:gap]
            pieces[place : place + 1] = [piece[gap:]] if piece[gap:] else []
        blocks.append(block)
    return blocks, [node for piece in pieces for node in piece]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which leaf2 comes before leaf10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True)
class Fabric:
    """The network of a cluster as Slurm knows it: how many nodes each leaf switch, or each block, has."""

    leaf_sizes: Mapping[str, int]
    # Blocks are what --segment is about, switches what --switches is about.
    is_block: bool

    @property
    def words(self) -> str:
        """What a person reads: `4 leaf switches of 16 nodes`."""
        sizes, what = self.leaf_sizes.values(), "block" if self.is_block else "leaf switch"
        plural = "" if len(sizes) == 1 else "s" if self.is_block else "es"
        few, most = min(sizes), max(sizes)
        return f"{len(sizes)} {what}{plural} of {few if few == most else f'{few} to {most}'} nodes"

    def least(self, num_nodes: int) -> int:
        """Return under how many leaves so many nodes lie at least; all of them where they do not suffice."""
        number = 0
        for size in sorted(self.leaf_sizes.values(), reverse=True):
            if num_nodes <= 0:
                break
            num_nodes, number = num_nodes - size, number + 1
        return number


def fabric() -> Fabric | None:
    """Ask Slurm for the cluster's network; None where it knows none. Raises LauncherError."""
    return parsed_fabric(output_of(("scontrol", "show", "topology"), timeout_s=_QUERY_TIMEOUT_S))


def parsed_fabric(text: str) -> Fabric | None:
    """Return the network in what scontrol printed; None where that describes none."""
    records = [dict(_FIELD.findall(line)) for line in text.splitlines()]
    leaves = {
        record["SwitchName"]: num_hosts(record.get("Nodes", ""))
        for record in records
        if "SwitchName" in record and not record.get("Switches")
    }
    if leaves:
        return Fabric(leaves, is_block=False)
    blocks = {
        record["BlockName"]: num_hosts(record.get("Nodes", "")) for record in records if "BlockName" in record
    }
    return Fabric(blocks, is_block=True) if blocks else None


def num_hosts(nodes: str) -> int:
    """Return how many hosts a list has that Slurm wrote: 4 of node[1-3],login."""
    total = 0
    for part in _PART_OF_LIST.findall(nodes):
        count = 1
        for ranges in re.findall(r"\[([^\]]*)\]", part):
            ends = [one.partition("-") for one in ranges.split(",")]
            count *= sum(int(last or first) - int(first) + 1 for first, _, last in ends)
        total += count
    return total
