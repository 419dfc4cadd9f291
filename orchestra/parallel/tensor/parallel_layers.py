"""The two products of a layer that is cut over ranks: by rows of the weights, then by columns.

Between them every rank computes on its own heads or its own part of the inner width. In the backward pass the
sum of the input's gradient over the ranks runs while the gradients of the weights are computed.

Shape letters: B batch, S sequence, E hidden size, T tokens (B·S).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestra.model.layers import Positions, Products
from orchestra.parallel.tensor.cuts import Cut
from orchestra.parallel.tensor.tensor_collectives import (
    PendingGather,
    PendingScatter,
    TensorGroup,
    entering,
    gather_parts,
    gather_stacked,
    leaving,
    start_sum,
)


class _RowsProducts(torch.autograd.Function):
    """Products of one full input with weights of which this rank has rows, and biases or none."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: TensorGroup, num_products: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:num_products], parameters[num_products:]
        full = gather_parts(x, group) if group.is_sequence_parallel else x
        ctx.group, ctx.has_biases = group, bool(biases)
        ctx.save_for_backward(x if group.gathers_again else full, *weights)
        return tuple(map(F.linear, [full] * num_products, weights, biases or [None] * num_products))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, *weights = ctx.saved_tensors
        group: TensorGroup = ctx.group
        gathers = group.is_sequence_parallel and group.gathers_again
        gathering = PendingGather(kept, group) if gathers else None
        flat = [grad.flatten(0, -2) for grad in grads]
        grad_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        pending = PendingScatter(grad_x, group) if group.is_sequence_parallel else start_sum(grad_x, group)
        x_TE = (gathering.wait() if gathering is not None else kept).flatten(0, -2)
        grad_weights = [grad.t() @ x_TE for grad in flat]
        grad_biases = [grad.sum(0) for grad in flat] if ctx.has_biases else []
        arrived = pending.wait()
        total = arrived if isinstance(pending, PendingScatter) else grad_x
        return total, None, None, *grad_weights, *grad_biases


@dataclass(frozen=True)
class RowsProducts:
    """Takes the place of `products_of` where the linear layers have some rows of their weights only."""

    group: TensorGroup
    # Takes the products of the full input in another precision; sums and products then follow each other.
    inner: Products | None = None

    def __call__(self, x_BSE: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Return this rank's outputs [B, S, …] for an input [B, S, E] or this rank's part of one.
        *Collective* in the backward pass, and under sequence parallelism in the forward pass.
        """
        if self.inner is not None:
            return self.inner(entering(x_BSE, self.group), *linears)
        if torch.compiler.is_compiling():
            full = entering(x_BSE, self.group)
            return tuple(F.linear(full, linear.weight, linear.bias) for linear in linears)
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        products: tuple[Tensor, ...] = _RowsProducts.apply(  # type: ignore[no-untyped-call]
            x_BSE, self.group, len(weights), *weights, *biases
        )
        return products


class ColumnsProduct(nn.Module):
    """Takes the place of a linear layer that has some columns of its weight only, and the whole bias."""

    def __init__(self, linear: nn.Linear, group: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.group = group
        # The product of this rank's columns; another precision puts its own in this place.
        self.product: Callable[[Tensor, Tensor], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over ranks [B, S, E] or this rank's part of it. *Collective*."""
        # Two nodes and not one function: a recomputation that only needs the product's input ends before it.
        # Summing one part of the tokens while the next is multiplied was not faster with gloo.
        total = leaving(self.product(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias


# Embedding and output matrix of which each rank has the rows of some words.
#
# A word's row is on one rank only; the others add zeros. Rows after the last word are padding that nothing
# reads. The loss is in `loss`.
#
# Shape letters: B batch, S sequence, E hidden size, V vocabulary, N ranks.


class CutEmbedding(nn.Module):
    """Takes the place of the token embedding: looks up the words of this rank and sums over ranks."""

    def __init__(self, embedding: nn.Embedding, words: Cut, group: TensorGroup) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.words, self.group = words, group

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the embedded tokens [B, S, E], or this rank's part of them. *Collective*."""
        row = tokens_BS - self.words.begin
        is_elsewhere = (row < 0) | (row >= self.words.size)
        found: Tensor = F.embedding(row.masked_fill(is_elsewhere, 0), self.weight)
        return leaving(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.group)


class CutPositions(nn.Module):
    """Takes the place of learned positions under sequence parallelism: those of this rank's tokens."""

    def __init__(self, positions: Positions, group: TensorGroup) -> None:
        super().__init__()
        self.weight = positions.weight
        self.group = group

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the rows [B, S/N, E] that belong to this rank's run of the B·S tokens."""
        batch, sequence = tokens_BS.shape
        part = batch * sequence // self.group.size
        begin = self.group.rank * part
        index = torch.arange(begin, begin + part, device=tokens_BS.device) % sequence
        rows: Tensor = F.embedding(index.view(batch, -1), self.weight)
        return rows


class _Joined(torch.autograd.Function):
    """Forward: the logits of all words, put together from all ranks. Backward: those of this rank's words."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, vocab_size: int, group: TensorGroup) -> Tensor:
        ctx.group, ctx.padded = group, logits.shape[-1]
        stacked, work = gather_stacked(logits, group)
        work.wait()
        logits = stacked.movedim(0, -2).flatten(-2)
        return logits[..., :vocab_size].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        missing = ctx.padded * ctx.group.size - grads[0].shape[-1]
        begin = ctx.group.rank * ctx.padded
        mine = F.pad(grads[0], (0, missing))[..., begin : begin + ctx.padded]
        return mine.contiguous(), None, None


class CutHead(nn.Module):
    """Takes the place of the output matrix where somebody wants logits; training does not, see `loss`."""

    def __init__(self, linear: nn.Linear, vocab_size: int, group: TensorGroup) -> None:
        super().__init__()
        self.weight = linear.weight
        self.vocab_size, self.group = vocab_size, group

    def forward(self, hidden_BSE: Tensor) -> Tensor:
        """Return the logits [B, S, V] on every rank. *Collective*."""
        logits = F.linear(entering(hidden_BSE, self.group), self.weight)
        return _Joined.apply(logits, self.vocab_size, self.group)  # type: ignore[no-any-return, no-untyped-call]
