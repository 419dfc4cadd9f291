"""The collectives of ZeRO on flat buffers, in place: sum of all, sum of each one's range, gathering, maximum.

gloo's reduce-scatter is an all-reduce in disguise, and its all-gather copies through a buffer of its own; on
it both are made of direct messages between the ranks here, from and into the memory where the data lies: half
the bytes of the one and about half the time of the other (measured, 2 and 4 ranks, 16 MiB). With NCCL they
are NCCL's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from orchestra.parallel.marks import Traffic, marked
from orchestra.parallel.mesh import Mesh, collective_named
from orchestra.parallel.zero.buffers import SpareMemory, Unit
from orchestra.sizes.step_shares import Part

# Direct messages of gathers and of sums must not be taken for each other where both are under way.
_GATHER_TAG, _SUM_TAG = 11, 12
# What is put together in one message: the library's own memory for it is as large as that.
PIECE_BYTES = 64 * 2**20


class Pending(Protocol):
    """A collective under way."""

    def finish(self) -> None:
        """Wait for it and put its result where it belongs; on a GPU the stream waits and not the host."""


@dataclass
class _Works:
    """Works of torch, with what has to stay alive until they are done."""

    works: list[dist.Work]
    kept: list[Tensor] = field(default_factory=list)

    def finish(self) -> None:
        with marked(Part.communication):
            for work in self.works:
                work.wait()


@dataclass
class _Rounded(_Works):
    """A collective on a copy in another data type, which `finish` brings back."""

    target: Tensor = field(kw_only=True)
    source: Tensor = field(kw_only=True)

    def finish(self) -> None:
        super().finish()
        self.target.copy_(self.source)


@dataclass
class _SumOfMessages(_Works):
    """The other ranks' versions of a range, to be added to this rank's own."""

    target: Tensor = field(kw_only=True)
    received: list[Tensor] = field(kw_only=True)
    # The memory of the messages, and where it goes to be used again.
    memory: Tensor = field(kw_only=True)
    spare: SpareMemory = field(kw_only=True)

    def finish(self) -> None:
        super().finish()
        # 16-bit numbers are summed in fp32 and rounded once, however many ranks there are.
        total = self.target.float() if self.target.dtype.itemsize < 4 else self.target
        for message in self.received:
            total.add_(message)
        if total is not self.target:
            self.target.copy_(total)
        self.spare.give(self.memory)


class Collectives:
    """The collectives of one group. *Collective*: all its ranks call the same methods in the same order.

    Gathers and sums may overtake each other. `wire` is the data type in which numbers travel that are to be
    summed; messages between the ranks of a gloo group are summed in fp32 whatever it is. `is_direct=False`
    uses the library's collectives on CPU too.
    """

    def __init__(
        self, group: dist.ProcessGroup, wire: torch.dtype, traffic: Traffic, *, is_direct: bool = True
    ) -> None:
        self._group = group
        self._may_be_direct = is_direct
        self._wire = wire
        self._traffic = traffic
        self.size = dist.get_world_size(group)
        self.index = dist.get_rank(group)
        self._spare = SpareMemory(wire)

    def sum_whole(self, flat: Tensor) -> Pending:
        """Sum `flat` over the ranks, in place."""
        wired = flat.to(self._wire)
        self._traffic.add_all_reduce(wired.nbytes, self.size)
        with marked(Part.communication):
            work = dist.all_reduce(wired, group=self._group, async_op=True)
        assert work is not None
        if wired is flat:
            return _Works([work])
        return _Rounded([work], target=flat, source=wired)

    def sum_range(self, flat: Tensor) -> Pending:
        """Sum `flat` over the ranks into its range `index`, in place; the rest of it stays as it was, and
        must stay so until it is finished.
        """
        wired = flat.to(self._wire)
        self._traffic.add_reduce_scatter(wired.nbytes, self.size)
        target = flat.chunk(self.size)[self.index]
        parts = wired.chunk(self.size)
        if self._is_direct(flat):
            num_messages, length = self.size - 1, target.numel()
            memory = self._spare.take(num_messages * length, flat.device)
            received = list(memory[: num_messages * length].split(length))  # type: ignore[no-untyped-call]
            return _SumOfMessages(
                self._exchange(list(parts), received, _SUM_TAG),
                [wired],
                target=target,
                received=received,
                memory=memory,
                spare=self._spare,
            )
        reduce_scatter = collective_named("reduce_scatter_single", "reduce_scatter_tensor")
        with marked(Part.communication):
            work = reduce_scatter(parts[self.index], wired, group=self._group, async_op=True)
        assert work is not None
        if wired is flat:
            return _Works([work])
        return _Rounded([work], [wired], target=target, source=parts[self.index])

    def gather(self, flat: Tensor) -> Pending:
        """Fill each range of `flat` from the rank that owns it; this rank's own is there already."""
        self._traffic.add_all_gather(flat.nbytes, self.size)
        parts = flat.chunk(self.size)
        own = parts[self.index]
        if self._is_direct(flat):
            others = [parts[peer] for peer in self._others()]
            return _Works(self._exchange([own] * self.size, others, _GATHER_TAG))
        all_gather = collective_named("all_gather_single", "all_gather_into_tensor")
        with marked(Part.communication):
            work = all_gather(flat, own, group=self._group, async_op=True)
        assert work is not None
        return _Works([work])

    def take_largest(self, flat: Tensor) -> None:
        """Take the largest of the ranks' numbers for each of `flat`, in place, and wait for them."""
        self._traffic.add_all_reduce(flat.nbytes, self.size)
        with marked(Part.communication):
            dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self._group)

    def put_together(self, flat: Tensor) -> None:
        """Put together `flat` (uint8), of which each rank has some bytes, and zeros in the place of all
        others: in place, PIECE_BYTES at a time, and wait for them. Sums of bytes lose no bit.
        """
        self._traffic.add_all_reduce(flat.nbytes, self.size)
        with marked(Part.communication):
            for piece in flat.split(PIECE_BYTES):  # type: ignore[no-untyped-call]
                dist.all_reduce(piece, group=self._group)

    def _is_direct(self, flat: Tensor) -> bool:
        return self._may_be_direct and not flat.is_cuda

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.index]

    def _exchange(self, outgoing: list[Tensor], incoming: list[Tensor], tag: int) -> list[dist.Work]:
        """Send outgoing[peer] to each peer; receive from each other rank, in rank order."""
        works: list[dist.Work | None] = []
        with marked(Part.communication):
            for peer, target in zip(self._others(), incoming, strict=True):
                works.append(dist.irecv(target, group=self._group, group_src=peer, tag=tag))
            for step in range(1, self.size):
                # Each rank begins with another neighbour, so that nobody is the first target of all.
                peer = (self.index + step) % self.size
                works.append(dist.isend(outgoing[peer], group=self._group, group_dst=peer, tag=tag))
        return [work for work in works if work is not None]


@dataclass(frozen=True)
class UnitRanks:
    """The ranks that have a unit's parameters: those over which it is sharded, and those that have the same
    range of it; either is None where that is this rank alone.
    """

    shard: Collectives | None
    replicate: Collectives | None


@dataclass(frozen=True)
class DataRanks:
    """The ranks that have the parameters of experts, and those that have all others."""

    experts: UnitRanks
    others: UnitRanks

    def of(self, unit: Unit) -> UnitRanks:
        """Return the ranks that have a unit's parameters."""
        return self.experts if unit.is_of_experts else self.others


def data_ranks(mesh: Mesh, wire: torch.dtype) -> DataRanks:
    """Return the collectives of this rank's groups. `wire`: as of `Collectives`."""

    def over(group: dist.ProcessGroup | None) -> Collectives | None:
        return None if group is None else Collectives(group, wire, mesh.traffic, is_direct=not mesh.is_gpu)

    others = UnitRanks(over(mesh.shard_group), over(mesh.replicate_group))
    if mesh.ep_group is None:
        return DataRanks(others, others)
    experts = UnitRanks(over(mesh.expert_shard_group), over(mesh.expert_replicate_group))
    return DataRanks(experts, others)
