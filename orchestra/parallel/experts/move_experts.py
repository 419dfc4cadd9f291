"""Experts on their way to other ranks: what an expert's part of a parameter consists of, wherever ZeRO has
put it, and the exchange that brings it to its new place.

An expert's elements lie one after the other in its parameter, and the parameter in a unit that is cut into
ranges; some slots further on they may be another rank's. Every rank computes by itself who has what, and only
what moves is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from orchestra.parallel.experts.expert_shares import ExpertShares
from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.zero.buffers import UnitLayout, UnitMember
from orchestra.sizes.step_shares import Part

# Elements that a rank sends in one exchange: 64 MiB of masters and two moments in fp32.
ROUND_ELEMENTS = 64 * 2**20 // 12


@dataclass(frozen=True)
class Holder:
    """Who has a part: the share of the experts, and the range of their parameters."""

    share: int
    range: int


@dataclass(frozen=True)
class MovedPiece:
    """Elements of one expert, `size` of them: from `begin` on in the parameter of the one that has them, and
    from `end` on in that of the one that is to have them.
    """

    source: Holder
    target: Holder
    begin: int
    end: int
    size: int


def moved_experts(old: ExpertShares, new: ExpertShares) -> list[int]:
    """Return the experts that change their places."""
    places = zip(old.places, new.places, strict=True)
    return [expert for expert, (before, after) in enumerate(places) if before != after]


def rounds_of_pieces(
    layout: UnitLayout, member: UnitMember, old: ExpertShares, new: ExpertShares
) -> Iterator[list[MovedPiece]]:
    """Yield the pieces of one parameter that move, on all ranks in the same order: as many elements at a time
    that no rank sends or receives more than ROUND_ELEMENTS. A round has the same elements of all experts that
    move, so that none writes what a later one has still to send.
    """
    experts = moved_experts(old, new)
    if not experts:
        return
    leaving = Counter(old.places[expert] // old.padded for expert in experts)
    length = member.size // old.padded
    width = max(1, ROUND_ELEMENTS // max(leaving.values()))
    for first in range(0, length, width):
        yield list(_moved_pieces(layout, member, old, new, range(first, min(first + width, length))))


def _moved_pieces(
    layout: UnitLayout, member: UnitMember, old: ExpertShares, new: ExpertShares, elements: range
) -> Iterator[MovedPiece]:
    """Yield the pieces of some elements of each expert that moves."""
    length, ranges = member.size // old.padded, layout.range_size
    for expert in moved_experts(old, new):
        (source, before), (target, after) = (
            divmod(shares.places[expert], shares.padded) for shares in (old, new)
        )
        begin, end = (slot * length + elements.start for slot in (before, after))
        last = before * length + elements.stop
        while begin < last:
            # Both ends are cut where another range begins.
            (of_source, at), (of_target, to) = (
                divmod(member.begin + position, ranges) for position in (begin, end)
            )
            size = min(last - begin, ranges - at, ranges - to)
            yield MovedPiece(Holder(source, of_source), Holder(target, of_target), begin, end, size)
            begin, end = begin + size, end + size


class ExpertExchange:
    """This rank's end of the exchange among all ranks that have the same layers, and parts alike of each."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        layout = mesh.layout
        holders: dict[Holder, list[int]] = {}
        for number, rank in enumerate(layout.neighbours(mesh.rank, ["dp", "cp"])):
            place = layout.coordinates(rank)
            holder = Holder(layout.ep_index(place), layout.expert_shard_index(place))
            holders.setdefault(holder, []).append(number)
            if rank == mesh.rank:
                self._own = holder
                replica = len(holders[holder]) - 1
        # By their numbers in the group. Ranks that have the same get it from as many that have the same.
        self._ranks = {holder: numbers[replica] for holder, numbers in holders.items()}
        self._size = sum(map(len, holders.values()))

    def exchange(self, pieces: Iterable[MovedPiece], tensors: Sequence[Tensor], start: int) -> int:
        """Bring pieces of one parameter where they belong, in each tensor of its state; return the bytes
        that this rank has sent to others. *Collective*.

        `tensors`: what this rank has of the master and of what is shaped like it, from the element `start`
        on. Their types may differ.
        """
        flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        sizes = [tensor.element_size() for tensor in tensors if tensor.numel()]
        leaving: list[list[Tensor]] = [[] for _ in range(self._size)]
        coming: list[list[Tensor]] = [[] for _ in range(self._size)]

        def parts(begin: int, size: int) -> list[Tensor]:
            begin -= start
            return [
                whole[begin * width : (begin + size) * width]
                for whole, width in zip(flat, sizes, strict=True)
            ]

        for piece in pieces:
            if piece.source == self._own:
                leaving[self._ranks[piece.target]] += parts(piece.begin, piece.size)
            if piece.target == self._own:
                coming[self._ranks[piece.source]] += parts(piece.end, piece.size)
        sent, received = ([sum(map(len, of_rank)) for of_rank in each] for each in (leaving, coming))
        memory = torch.empty(sum(sent), dtype=torch.uint8, device=self._mesh.device)
        _copy_all(_cut(memory, leaving), leaving)
        arrived = torch.empty(sum(received), dtype=torch.uint8, device=self._mesh.device)
        with marked(Part.communication):
            dist.all_to_all_single(arrived, memory, received, sent, group=self._mesh.data_group)
        _copy_all(coming, _cut(arrived, coming))
        num_bytes = sum(sent) - sent[self._ranks[self._own]]
        self._mesh.traffic.add_exchanged(num_bytes)
        return num_bytes


def _cut(memory: Tensor, like: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return parts of the memory as long as those of each rank, one after the other."""
    parts = iter(torch.split(memory, [len(part) for of_rank in like for part in of_rank]))
    return [[next(parts) for _ in of_rank] for of_rank in like]


def _copy_all(targets: Sequence[Sequence[Tensor]], sources: Sequence[Sequence[Tensor]]) -> None:
    for of_rank, given in zip(targets, sources, strict=True):
        for target, source in zip(of_rank, given, strict=True):
            target.copy_(source)
