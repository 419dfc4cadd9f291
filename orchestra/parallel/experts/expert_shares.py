"""Which experts of a layer each rank of a group has: neighbours, as evenly many as can be. Integers only, but
for an index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchestra.parallel.places import Cut


@dataclass(frozen=True)
class ExpertShares:
    """How `num_experts` are shared out over `num_ranks` ranks, of which each has room for `padded`."""

    num_experts: int
    num_ranks: int

    @property
    def padded(self) -> int:
        """Experts that there is room for on each rank: the last one is nobody's where a rank has one less."""
        return -(-self.num_experts // self.num_ranks)

    def cut(self, rank: int) -> Cut:
        """Return which experts a rank has."""
        begin, end = self._begin(rank), self._begin(rank + 1)
        return Cut(0, begin, end - begin, self.padded)

    def places(self, device: torch.device) -> Tensor:
        """Return each expert's place [X] (int64) in the room of all ranks, without a copy to the device."""
        expert_X = torch.arange(self.num_experts, device=device)
        # The last rank whose share begins no later: the inverse of `_begin`.
        rank_X = ((expert_X + 1) * self.num_ranks - 1) // self.num_experts
        return rank_X * self.padded + expert_X - rank_X * self.num_experts // self.num_ranks

    def _begin(self, rank: int) -> int:
        return rank * self.num_experts // self.num_ranks
