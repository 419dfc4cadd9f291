"""Latent attention over the ranks of a context-parallel group: what all heads' keys and values are made of is
gathered, a few numbers a token in one message, and each rank makes whole keys and values of it for its own
queries.

Shape letters: B batch, P places of this rank, S whole sequence, L numbers of a token, H heads, D width of
queries and keys, V width of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestra.model.layers import Rotary
from orchestra.parallel.context.piece_attention import masked
from orchestra.parallel.context.sequence_parts import HeadAndTail, by_rank, in_order
from orchestra.parallel.tensor.tensor_collectives import PendingGather, PendingScatter, TensorGroup
from orchestra.parallel.uncompiled import leave_uncompiled


class _GatheredPlaces(torch.autograd.Function):
    """Forward: whole sequences. Backward: the sum over ranks of this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, own_BPL: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        gathered = PendingGather(own_BPL.flatten(0, 1), group).wait()
        return in_order(gathered.view(group.size, *own_BPL.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        group: TensorGroup = ctx.group
        parts = by_rank(grads[0], group.size)
        return PendingScatter(parts.flatten(0, 2), group).wait().view(parts.shape[1:]), None


@dataclass(frozen=True)
class GatheredLatents:
    """Takes the place of `LatentAttention.whole_keys`. *Collective*, in the backward pass too."""

    group: TensorGroup

    def __post_init__(self) -> None:
        leave_uncompiled(GatheredLatents)

    def __call__(self, own_BPL: Tensor) -> Tensor:
        """Return [B, S, L] of whole sequences."""
        whole: Tensor = _GatheredPlaces.apply(own_BPL, self.group)  # type: ignore[no-untyped-call]
        return whole


@dataclass(frozen=True)
class OwnQueriesAttention:
    """Takes the place of `attend`: this rank's queries over keys and values of whole sequences."""

    part: HeadAndTail

    def __call__(
        self,
        q_BPHD: Tensor,
        k_BSHD: Tensor,
        v_BSHV: Tensor,
        _: Rotary,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return [B, P, H, V]. `documents`: the mask of this rank's queries, or None."""
        half = q_BPHD.shape[1] // 2
        outs = []
        for at, number in enumerate(self.part.pieces):
            end = (number + 1) * half
            query = q_BPHD[:, at * half : (at + 1) * half]
            mask = None if documents is None else documents[:, :, at * half : (at + 1) * half, :end]
            outs.append(masked(query, k_BSHD[:, :end], v_BSHV[:, :end], mask))
        return torch.cat(outs, dim=1)
