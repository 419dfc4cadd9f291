"""Attention over whole sequences and some of the heads: the ranks of a context-parallel group exchange places
for heads before it, and back after it (`parallelism.cp_method=ulysses`; Jacobs et al., 2023).

Each direction is one exchange: queries, keys and values travel together.

Shape letters: B batch, P places of this rank, S whole sequence, H heads, D head width, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestra.model.kernels import rotate
from orchestra.model.layers import Rotary, causal_attention
from orchestra.parallel.context.sequence_parts import by_rank, in_order
from orchestra.parallel.marks import marked
from orchestra.parallel.tensor.tensor_collectives import TensorGroup, group_named
from orchestra.sizes.step_shares import Part

_LIBRARY: Any = torch.library.Library("orchestra", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("exchange(Tensor parts, str group) -> Tensor")


def _exchange(parts: Tensor, group: str) -> Tensor:
    """Send parts[i] to rank i; return what came from each. *Collective*."""
    over = group_named(group)
    parts = parts.contiguous()
    arrived = torch.empty_like(parts)
    over.traffic.add_all_to_all(parts.nbytes, over.size)
    with marked(Part.communication):
        dist.all_to_all_single(arrived, parts, group=over.process_group)
    return arrived


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("exchange", _exchange, _device)
torch.library.register_fake(
    "orchestra::exchange", lambda parts, _: parts.new_empty(parts.shape), lib=_LIBRARY
)


def _exchanged(parts: Tensor, group: TensorGroup) -> Tensor:
    if torch.compiler.is_compiling():
        traced: Tensor = torch.ops.orchestra.exchange(parts, group.name)
        return traced
    return _exchange(parts, group.name)


def _split_heads(tensor: Tensor, degree: int) -> Tensor:
    batch, num, num_heads, width = tensor.shape
    return tensor.view(batch, num, degree, num_heads // degree, width)


def _to_heads(tensors: Sequence[Tensor], group: TensorGroup) -> tuple[Tensor, ...]:
    """Return [B, S, H/N, D] of tensors [B, P, H, D]: this rank's heads of whole sequences."""
    by_heads = [_split_heads(tensor, group.size).movedim(2, 0) for tensor in tensors]
    widths = [heads.shape[3] for heads in by_heads]
    arrived = _exchanged(torch.cat(by_heads, dim=3), group)
    return tuple(in_order(part) for part in torch.split(arrived, widths, dim=3))


def _to_places(tensors: Sequence[Tensor], group: TensorGroup) -> tuple[Tensor, ...]:
    """Return [B, P, H, D] of tensors [B, S, H/N, D]: this rank's places, all heads."""
    by_places = [by_rank(tensor, group.size) for tensor in tensors]
    widths = [places.shape[3] for places in by_places]
    message = by_places[0] if len(by_places) == 1 else torch.cat(by_places, dim=3)
    arrived = _exchanged(message, group)
    return tuple(part.movedim(0, 2).flatten(2, 3) for part in torch.split(arrived, widths, dim=3))


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _to_heads(tensors, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_to_places(grads, ctx.group)


class _ToPlaces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, tensor: Tensor) -> Tensor:
        ctx.group = group
        return _to_places([tensor], group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _to_heads(grads, ctx.group)[0]


@dataclass(frozen=True)
class ExchangedHeads:
    """Takes the place of `attend`. The group's size divides the heads, those of keys and values too."""

    group: TensorGroup

    def __call__(
        self,
        q_BPHD: Tensor,
        k_BPKD: Tensor,
        v_BPKD: Tensor,
        rotary: Rotary,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the attention [B, P, H, D] of this rank's places. *Collective*, in the backward pass too.

        `documents`: as for whole sequences.
        """
        if rotary is not None:
            q_BPHD, k_BPKD = rotate(q_BPHD, *rotary), rotate(k_BPKD, *rotary)
        q_BSHD, k_BSKD, v_BSKD = _ToHeads.apply(self.group, q_BPHD, k_BPKD, v_BPKD)  # type: ignore[no-untyped-call]
        attended = causal_attention(q_BSHD, k_BSKD, v_BSKD, documents)
        out: Tensor = _ToPlaces.apply(self.group, attended)  # type: ignore[no-untyped-call]
        return out
