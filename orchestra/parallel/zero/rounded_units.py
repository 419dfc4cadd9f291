"""ZeRO-3 with products in fp8: matrices travel as the numbers that the products take, one byte each.

Each rank rounds its own range, by the scale of the whole matrix: the bits are those of a matrix that is
rounded where it has arrived. The largest numbers of all matrices come from all ranks in one message a step.
The bytes lie where the unit's parameters would, in the first half of the buffer. What else is in such a unit
(norms, biases, a router) is small: every rank keeps it whole, and that of all units is put together once a
step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestra.parallel.zero.buffers import Unit
from orchestra.parallel.zero.zero_collectives import Collectives, Pending
from orchestra.precision.fp8 import FORWARD, attach_numbers, round_by, round_by_, scale_of


@dataclass(frozen=True)
class _Matrix:
    """This rank's part of a matrix, flat: 16-bit numbers, where the rounded ones leave from, their scale."""

    owned: Tensor
    outgoing: Tensor
    scale: Tensor


class RoundedUnits:
    """The units, of all on this rank, that have any of the `weights`. *Collective* over the shard group.

    Units by their number in `units`. `is_compiled`: by compiled code, which needs no memory besides.
    """

    def __init__(
        self, units: Sequence[Unit], weights: Collection[Tensor], shard: Collectives, *, is_compiled: bool
    ) -> None:
        self._shard = shard
        self._round_ = torch.compile(round_by) if is_compiled else round_by_
        self._is_stale = True
        # Memory that counts no versions, see `Gatherer`.
        self._wires: dict[int, Tensor] = {}
        self._matrices: dict[int, list[_Matrix]] = {}
        others: list[tuple[Unit, int]] = []
        rounded = {id(weight) for weight in weights}
        for number, unit in enumerate(units):
            if not any(id(item.parameter) in rounded for item in unit.trained):
                continue
            wire = self._wires[number] = _bytes_of(unit.whole.data, unit.layout.size)
            begin, end = unit.layout.range_of(unit.index)
            owned, outgoing = unit.owned_views(unit.owned), unit.owned_views(wire[begin:end].view(FORWARD))
            values = unit.whole_views(_bytes_of(unit.whole, unit.layout.size).view(FORWARD))
            self._matrices[number] = []
            for at, item in enumerate(unit.trained):
                if id(item.parameter) in rounded:
                    scale = torch.zeros((), device=wire.device)
                    attach_numbers(item.parameter, values[at], scale)
                    matrix = _Matrix(owned[at].view(-1), outgoing[at].view(-1), scale)
                    self._matrices[number].append(matrix)
                else:
                    others.append((unit, at))
        self._others = _KeptWhole(others, shard)

    def __contains__(self, number: int) -> bool:
        """Whether a unit's matrices travel rounded."""
        return number in self._wires

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept beside the owned ranges and the buffers."""
        return self._others.num_bytes

    def forget(self) -> None:
        """Let scales, and what is kept whole, be found anew before the next gather: parameters change."""
        self._is_stale = True

    @torch.no_grad()
    def gather(self, number: int) -> Pending:
        """Start to bring a unit's numbers to all ranks."""
        if self._is_stale:
            self._is_stale = False
            self._find_scales()
            self._others.gather()
        for matrix in self._matrices[number]:
            if matrix.owned.numel():
                self._round_(matrix.owned, matrix.scale, matrix.outgoing)
        return self._shard.gather(self._wires[number])

    def _find_scales(self) -> None:
        matrices = [matrix for of_unit in self._matrices.values() for matrix in of_unit]
        nothing = matrices[0].owned.new_zeros(1)
        parts = [matrix.owned if matrix.owned.numel() else nothing for matrix in matrices]
        # The norm of this kind is the largest size: no number is rounded.
        largest = torch.stack([size.float() for size in torch._foreach_norm(parts, math.inf)])
        # Of what is no number ranks would find different maxima.
        largest = torch.nan_to_num(largest, nan=math.inf, posinf=math.inf)
        self._shard.take_largest(largest)
        scales = list(scale_of(largest, FORWARD).unbind())
        torch._foreach_copy_([matrix.scale for matrix in matrices], scales)


class _KeptWhole:
    """Parameters that every rank keeps whole, members of some units: they get memory of their own here.

    Layers are alike, and what is small in each often lies in the range of one and the same rank: parts of
    equal length from all ranks would be mostly empty. So each rank fills in what it has.
    """

    def __init__(self, members: Sequence[tuple[Unit, int]], shard: Collectives) -> None:
        self._shard = shard
        self._memory = torch.zeros(0)
        self._own: list[tuple[Tensor, Tensor]] = []
        if not members:
            return
        sizes = [unit.layout.members[at].size for unit, at in members]
        self._memory = members[0][0].whole.new_zeros(sum(sizes))
        kept = self._memory.split(sizes)  # type: ignore[no-untyped-call]
        for (unit, at), memory in zip(members, kept, strict=True):
            start, stop = unit.layout.part_of(unit.layout.members[at], unit.index)
            if start < stop:
                self._own.append((memory[start:stop], unit.owned_views(unit.owned)[at].view(-1)))
            parameter = unit.trained[at].parameter
            parameter.data = memory.view(parameter.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters."""
        return self._memory.nbytes

    def gather(self) -> None:
        """Bring all of them to all ranks."""
        if self._memory.numel():
            self._memory.zero_()
            _copy_all(self._own)
            self._shard.put_together(self._memory.view(torch.uint8))


def _bytes_of(whole: Tensor, size: int) -> Tensor:
    return whole.view(torch.uint8)[:size]


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy second tensors into first ones."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
