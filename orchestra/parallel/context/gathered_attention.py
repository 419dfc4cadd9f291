"""Attention whose keys and values are gathered from the ranks of a context-parallel group, while each rank
has only its own queries (`parallelism.cp_method=all_gather`).

A layer's keys and values travel in two messages. The first one has the heads of all ranks, which are the
first half of the sequence: all that the queries of any head can see. This hides the first message behind the
rotation of the queries, and the second behind the attention of the head. Nothing can be fetched for the next
layer, whose keys are made of this layer's results. In the backward pass the second message comes while the
head's gradients are computed, and the sum of the gradients over the ranks runs while the queries' is rotated
back.

Between the two passes a rank keeps its own keys and values and gathers again: with the gathered ones, which
are of the whole sequence, the memory of activations would not be divided by the ranks. In blocks that are
recomputed the gathered ones are kept instead, from the second forward pass to the backward pass after it.

Under torch.compile both passes are operators that the compiler does not look into.

Shape letters: B batch, P places of this rank, S whole sequence, H query heads, K key-value heads, D head
width, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchestra.model.kernels import rotate
from orchestra.model.layers import Rotary
from orchestra.parallel.context.piece_attention import has_sums, piece_backward, piece_forward
from orchestra.parallel.context.sequence_parts import HeadAndTail, by_rank
from orchestra.parallel.tensor.tensor_collectives import (
    PendingGather,
    PendingScatter,
    TensorGroup,
    group_named,
)


@dataclass
class _Keys:
    """The keys and values of whole sequences `both` [2, B, S, K, D], of which halves may be on their way."""

    both: Tensor
    group: TensorGroup
    under_way: list[PendingGather | None] = field(default_factory=lambda: [None, None])

    @classmethod
    def gathered(cls, k_BPKD: Tensor, v_BPKD: Tensor, group: TensorGroup) -> _Keys:
        """Begin to gather those of all ranks. *Collective*."""
        batch, num, *rest = k_BPKD.shape
        keys = cls(k_BPKD.new_empty(2, batch, group.size * num, *rest), group)
        for half in range(2):
            message = torch.stack([_piece(k_BPKD, half), _piece(v_BPKD, half)])
            keys.under_way[half] = PendingGather(message.view(-1, rest[-1]), group)
        return keys

    def take(self, half: int) -> None:
        """Wait for a half, 0 or 1, and put it in its places."""
        pending, self.under_way[half] = self.under_way[half], None
        if pending is None:
            return
        degree, (_, batch, num, *rest) = self.group.size, self.both.shape
        pieces = self.both.view(2, batch, 2 * degree, num // (2 * degree), *rest)
        arrived = pending.wait().view(degree, 2, batch, *pieces.shape[3:])
        # Tails come in the reverse order of the ranks.
        ordered = arrived.flip(0) if half else arrived
        pieces[:, :, half * degree : (half + 1) * degree] = ordered.movedim(0, 2)


def _piece(tensor: Tensor, half: int) -> Tensor:
    """Return one of a rank's pieces of [B, P, …]."""
    size = tensor.shape[1] // 2
    return tensor[:, half * size : (half + 1) * size]


def _mask_of(mask: Tensor | None, half: int, end: int) -> Tensor | None:
    if mask is None:
        return None
    size = mask.shape[2] // 2
    return mask[:, :, half * size : (half + 1) * size, :end]


def _ends(num: int, group: TensorGroup) -> tuple[int, ...]:
    """Return how many keys the queries of each piece can see."""
    return tuple((number + 1) * (num // 2) for number in HeadAndTail(group.size, group.rank).pieces)


def _attend(
    q_BPHD: Tensor, keys: _Keys, mask: Tensor | None, group: TensorGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention [B, P, H, D] and the log-sum-exps of the two pieces."""
    outs, sums = [], []
    for half, end in enumerate(_ends(q_BPHD.shape[1], group)):
        keys.take(half)
        k_BEKD, v_BEKD = keys.both[:, :, :end]
        out, lse = piece_forward(_piece(q_BPHD, half), k_BEKD, v_BEKD, _mask_of(mask, half, end))
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, dim=1), sums[0], sums[1]


@dataclass(frozen=True)
class _ForwardPass:
    """What the backward pass starts from."""

    query: Tensor
    out: Tensor
    sums: tuple[Tensor, Tensor]
    mask: Tensor | None


def _gradients(grad: Tensor, kept: _ForwardPass, keys: _Keys, group: TensorGroup) -> tuple[Tensor, Tensor]:
    """Return the gradient of the queries, and those of the whole sequences' keys and values, one after the
    other by ranks, of this rank's queries alone.
    """
    grads_q = []
    summed = torch.zeros_like(keys.both)
    for half, end in enumerate(_ends(kept.query.shape[1], group)):
        keys.take(half)
        grad_of_piece, query, out = (_piece(each, half) for each in (grad, kept.query, kept.out))
        key, value = keys.both[:, :, :end]
        sums = (summed[0, :, :end], summed[1, :, :end])
        mask = _mask_of(kept.mask, half, end)
        grads_q.append(piece_backward(grad_of_piece, query, key, value, out, kept.sums[half], mask, sums))
    return torch.cat(grads_q, dim=1), by_rank(summed.flatten(0, 1), group.size)


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BPHD: Tensor,
        k_BPKD: Tensor,
        v_BPKD: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        group: TensorGroup,
        gathers_again: bool,
    ) -> Tensor:
        if cos is not None and sin is not None:
            k_BPKD = rotate(k_BPKD, cos, sin)
        keys = _Keys.gathered(k_BPKD, v_BPKD, group)
        if cos is not None and sin is not None:
            q_BPHD = rotate(q_BPHD, cos, sin)
        out, *sums = _attend(q_BPHD, keys, mask, group)
        ctx.group = group
        kept = (k_BPKD, v_BPKD) if gathers_again else (keys.both,)
        ctx.save_for_backward(q_BPHD, out, *sums, mask, cos, sin, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BPHD, out, head_sums, tail_sums, mask, cos, sin, key, *values = ctx.saved_tensors
        group: TensorGroup = ctx.group
        kept = _ForwardPass(q_BPHD, out, (head_sums, tail_sums), mask)
        # Held by nobody else: what was gathered is gone when the sums begin to travel.
        grad_q, parts = _gradients(
            grads[0], kept, _Keys.gathered(key, values[0], group) if values else _Keys(key, group), group
        )
        pending = PendingScatter(parts.view(-1, parts.shape[-1]), group)
        if cos is not None:
            grad_q = rotate(grad_q, cos, -sin)
        grad_k, grad_v = pending.wait().view(2, *q_BPHD.shape[:2], *parts.shape[-2:])
        if cos is not None:
            grad_k = rotate(grad_k, cos, -sin)
        return grad_q, grad_k, grad_v, *[None] * 5


# For the compiler: both passes with queries and keys that positions have turned.
_LIBRARY: Any = torch.library.Library("orchestra", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend_gathered(Tensor q, Tensor k, Tensor v, Tensor? mask, str group) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "attend_gathered_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor head_sums, "
    "Tensor tail_sums, Tensor? mask, str group) -> (Tensor, Tensor)"
)


def _operator(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    over = group_named(group)
    out, *sums = _attend(q, _Keys.gathered(k, v, over), mask, over)
    return out, sums[0].contiguous(), sums[1].contiguous()


def _operator_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    head_sums: Tensor,
    tail_sums: Tensor,
    mask: Tensor | None,
    group: str,
) -> tuple[Tensor, Tensor]:
    over = group_named(group)
    kept = _ForwardPass(q, out, (head_sums, tail_sums), mask)
    grad_q, parts = _gradients(grad, kept, _Keys.gathered(k, v, over), over)
    return grad_q, PendingScatter(parts.view(-1, parts.shape[-1]), over).wait().view(2, *k.shape)


def _fake(q: Tensor, _: Tensor, __: Tensor, mask: Tensor | None, ___: str) -> tuple[Tensor, Tensor, Tensor]:
    batch, num, num_heads = q.shape[:3]
    sums = (batch, num_heads, num // 2) if has_sums(q, mask) else (0,)
    dtype = torch.float32 if has_sums(q, mask) else q.dtype
    head_sums, tail_sums = (q.new_empty(sums, dtype=dtype) for _ in range(2))
    return q.new_empty(q.shape), head_sums, tail_sums


def _fake_backward(_: Tensor, q: Tensor, k: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(2, *k.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, mask, ctx.name = inputs
    ctx.save_for_backward(*tensors, *output, mask)


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.orchestra.attend_gathered_backward(grad, *ctx.saved_tensors, ctx.name)
    grad_q, (grad_k, grad_v) = found
    return grad_q, grad_k, grad_v, None, None


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("attend_gathered", _operator, _device)
    _LIBRARY.impl("attend_gathered_backward", _operator_backward, _device)
torch.library.register_fake("orchestra::attend_gathered", _fake, lib=_LIBRARY)
torch.library.register_fake("orchestra::attend_gathered_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd(
    "orchestra::attend_gathered", _differentiate, setup_context=_keep, lib=_LIBRARY
)


@dataclass(frozen=True)
class GatheredAttention:
    """Takes the place of `attend`. `gathers_again`: gathered keys and values are not kept."""

    group: TensorGroup
    gathers_again: bool = True

    def __call__(
        self,
        q_BPHD: Tensor,
        k_BPKD: Tensor,
        v_BPKD: Tensor,
        rotary: Rotary,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the attention [B, P, H, D] of this rank's places. *Collective*, in the backward pass too.

        `documents`: the mask of this rank's queries, or None.
        """
        if torch.compiler.is_compiling():
            if rotary is not None:
                q_BPHD, k_BPKD = rotate(q_BPHD, *rotary), rotate(k_BPKD, *rotary)
            traced: Tensor = torch.ops.orchestra.attend_gathered(
                q_BPHD, k_BPKD, v_BPKD, documents, self.group.name
            )[0]
            return traced
        cos, sin = (None, None) if rotary is None else rotary
        out: Tensor = _GatheredAttention.apply(  # type: ignore[no-untyped-call]
            q_BPHD, k_BPKD, v_BPKD, cos, sin, documents, self.group, self.gathers_again
        )
        return out
