"""The ways for bytes between ranks: one broadcast for all, one for a set of ranks, or straight to each.

It knows tensors of bytes and which ranks are to have them, nothing of what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from checkpointing.planning.read_plan import Transfer, busiest_sets

# Messages between the same two ranks differ in their tag (gloo; NCCL keeps their order by itself).
_NUM_TAGS = 1 << 16


class Routes:
    """The ways that a list of transfers takes. All ranks make it alike and post in the same order."""

    def __init__(self, transfers: Iterable[Transfer], group: dist.ProcessGroup | None) -> None:
        """Make the process groups that are worth it. *Collective*. No `group`: there is no traffic."""
        self._group = group
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if group is None:
            return
        self._rank = dist.get_rank(group)
        self._everyone = tuple(range(dist.get_world_size(group)))
        for members in busiest_sets(transfers, len(self._everyone)):
            made = dist.new_group([dist.get_global_rank(group, rank) for rank in members])
            if self._rank in members:
                self._groups[members] = made

    def post(self, transfer: Transfer, memory: Tensor) -> Sequence[dist.Work]:
        """Start to bring `memory` (contiguous uint8) from the reader to all members; only members call it."""
        if len(transfer.members) == 1:
            return ()
        assert self._group is not None
        if transfer.members == self._everyone:
            return _works(dist.broadcast(memory, group=self._group, group_src=transfer.reader, async_op=True))
        if transfer.members in self._groups:
            source = transfer.members.index(transfer.reader)
            group = self._groups[transfer.members]
            return _works(dist.broadcast(memory, group=group, group_src=source, async_op=True))
        return self._post_one_by_one(transfer, memory)

    def _post_one_by_one(self, transfer: Transfer, memory: Tensor) -> Sequence[dist.Work]:
        tag = transfer.begin % _NUM_TAGS
        if transfer.reader != self._rank:
            return _works(dist.irecv(memory, group=self._group, group_src=transfer.reader, tag=tag))
        receivers = [rank for rank in transfer.members if rank != self._rank]
        works = [dist.isend(memory, group=self._group, group_dst=rank, tag=tag) for rank in receivers]
        return _works(*works)

    def close(self) -> None:
        """Give up the process groups that were made, when all ranks are through."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups = {}


def _works(*works: dist.Work | None) -> Sequence[dist.Work]:
    return [work for work in works if work is not None]
