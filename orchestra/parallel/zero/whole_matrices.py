"""Puts whole parameters together of the ranges that ranks own, for optimizers that need them.

Of each unit only the parameters that are asked for travel: every rank sends its parts of them as one message,
padded to the longest of the ranks'. Ψ(N−1)/N on the way in each step, of Ψ bytes on N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from orchestra.optim.plugged import WholeMatrix
from orchestra.parallel.marks import Traffic, marked
from orchestra.parallel.zero.buffers import Unit, UnitMember, Units
from orchestra.sizes.step_shares import Part


@dataclass(frozen=True)
class WholeMatrices:
    """Gathers parts of the parameters called `names` over the ranks that share the units. `expert_group`: the
    same for units of experts, None where one rank alone has them.
    """

    units: Units
    names: frozenset[str]
    group: dist.ProcessGroup
    expert_group: dist.ProcessGroup | None
    traffic: Traffic

    def __call__(self, pieces: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[WholeMatrix]:
        """Yield the whole of each piece of this rank. *Collective* over the group, to its end."""
        device = self.units.units[0].masters.device
        for unit in self.units.units:
            members = [member for member in unit.layout.members if member.name in self.names]
            if not members:
                continue
            parts = self._exchanged(unit, members, pieces, device)
            shapes = {item.name: item.parameter.shape for item in unit.trained}
            for member in members:
                if member.name in pieces:
                    parameter, _ = pieces[member.name]
                    whole = torch.cat(parts[member.name]).view(shapes[member.name])
                    yield WholeMatrix(parameter, whole, _part_of(unit, member, parameter))

    def _exchanged(
        self,
        unit: Unit,
        members: list[UnitMember],
        pieces: Mapping[str, tuple[Tensor, Tensor]],
        device: torch.device,
    ) -> dict[str, list[Tensor]]:
        """Return the parts of each member, by the ranks that have them."""
        layout = unit.layout
        ranges = [[layout.part_of(member, rank) for member in members] for rank in range(layout.num_ranges)]
        length = max(sum(stop - start for start, stop in of_rank) for of_rank in ranges)
        dtype = next((piece.dtype for _, piece in pieces.values()), torch.float32)
        own = torch.zeros(length, dtype=dtype, device=device)
        filled = 0
        for member in members:
            if member.name in pieces:
                flat = pieces[member.name][1].reshape(-1)
                own[filled : filled + flat.numel()] = flat
                filled += flat.numel()
        group = self.expert_group if unit.is_of_experts else self.group
        gathered = [own]
        if group is not None:
            gathered = [torch.empty_like(own) for _ in ranges]
            self.traffic.add_all_gather(own.nbytes * len(ranges), len(ranges))
            with marked(Part.communication):
                dist.all_gather(gathered, own, group=group)
        parts: dict[str, list[Tensor]] = {member.name: [] for member in members}
        for of_rank, received in zip(ranges, gathered, strict=True):
            begin = 0
            for member, (start, stop) in zip(members, of_rank, strict=True):
                parts[member.name].append(received[begin : begin + stop - start])
                begin += stop - start
        return parts


def _part_of(unit: Unit, member: UnitMember, parameter: Tensor) -> Callable[[Tensor], Tensor]:
    start, stop = unit.layout.part_of(member, unit.index)
    return lambda of_whole: of_whole.reshape(-1)[start:stop].view(parameter.shape)
