"""What a vocabulary that is cut over ranks changes: embedding, output matrix and loss.

A word's row is on one rank only; the others add zeros. Rows after the last word are padding that nothing
reads. Logits are gathered where somebody asks for them, and never by the loss, which goes by chunks of
tokens.

As in `orchestra.model.loss`, the gradients are computed in the forward pass while a chunk's logits are at
hand. Each rank takes the largest of its own logits and the sum of their exponentials; these two and the
target's logit, three numbers for each token, are gathered, and every rank puts them together in the same
order. While they travel the next chunk's logits are computed, and while the hidden states' gradient of a
chunk is summed over the ranks the next chunk goes on.

Shape letters: B batch, S sequence, E hidden size, T tokens (B·S), V words of this rank (of all in `CutHead`),
C tokens of one chunk, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestra.model.kernels import lookup
from orchestra.model.layers import Positions
from orchestra.model.logits import EAGER, LogitsPasses, Statistics, wide_type
from orchestra.model.loss import (
    IGNORED_TARGET,
    ChunkGradients,
    MakeProducts,
    OutputProducts,
    PlainProducts,
    default_chunk,
    scaled_gradients,
)
from orchestra.parallel.places import Cut
from orchestra.parallel.tensor.tensor_collectives import (
    PendingScatter,
    TensorGroup,
    entering,
    gather_parts,
    gather_stacked,
    leaving,
    start_sum,
)


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
        found = lookup(row.masked_fill(is_elsewhere, 0), self.weight)
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
        return lookup(index.view(batch, -1), self.weight)


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
    """Takes the place of the output matrix where somebody wants logits; training does not"""

    def __init__(self, linear: nn.Linear, vocab_size: int, group: TensorGroup) -> None:
        super().__init__()
        self.weight = linear.weight
        self.vocab_size, self.group = vocab_size, group

    def forward(self, hidden_BSE: Tensor) -> Tensor:
        """Return the logits [B, S, V] on every rank. *Collective*."""
        logits = F.linear(entering(hidden_BSE, self.group), self.weight)
        return _Joined.apply(logits, self.vocab_size, self.group)  # type: ignore[no-any-return, no-untyped-call]


class _Chunk:
    """One chunk between its logits and its gradient: what it waits for, and what it then makes of it."""

    def __init__(
        self, logits_CV: Tensor, target_C: Tensor, words: Cut, group: TensorGroup, passes: LogitsPasses
    ) -> None:
        self._is_taken = target_C != IGNORED_TARGET
        row = torch.where(self._is_taken, target_C, -1) - words.begin
        self._is_mine = (row >= 0) & (row < words.size)
        self._index = torch.where(self._is_mine, row, 0)
        self._passes = passes
        self._found = passes.statistics(logits_CV, self._index) if words.size else _nothing(logits_CV)
        target_logit = torch.where(self._is_mine, self._found.at_index, 0.0)
        self._gathered, self._work = gather_stacked(
            torch.stack([self._found.largest, self._found.sums, target_logit]), group
        )

    def finish(self, products: OutputProducts) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, the same bits on all ranks, and the gradient of the logits as the
        products want it.
        """
        self._work.wait()
        largest_NC, sums_NC, targets_NC = self._gathered.unbind(1)
        largest = largest_NC.amax(dim=0)
        normalizer = (sums_NC * (largest_NC - largest).exp()).sum(dim=0)
        # Masked and not multiplied: what is left out counts as zero, however bad its logits are.
        losses = (normalizer.log() + largest - targets_NC.sum(dim=0)) * self._is_taken
        found = self._found
        if not found.kept.shape[1]:
            return losses, found.kept
        factor = self._is_taken.to(normalizer.dtype) * products.gradient_factor
        share = factor * (found.largest - largest).exp() / normalizer
        at_target, dtype = factor * self._is_mine, products.gradient_dtype
        return losses, self._passes.gradient(found, self._index, share, at_target, dtype)


def _nothing(logits_CV: Tensor) -> Statistics:
    """Return what a rank without words adds."""
    zeros = logits_CV.new_zeros(len(logits_CV), dtype=wide_type(logits_CV))
    return Statistics(zeros - torch.inf, zeros, zeros, logits_CV)


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: Tensor,
        weight_VE: Tensor,
        target_T: Tensor,
        scale: float | Tensor,
        chunk: int,
        words: Cut,
        group: TensorGroup,
        passes: LogitsPasses,
        make_products: MakeProducts,
        has_backward: bool,
        token_losses_T: Tensor | None,
    ) -> Tensor:
        full_TE = gather_parts(hidden_TE, group) if group.is_sequence_parallel else hidden_TE
        products = make_products(full_TE, weight_VE, words.size, scale)
        total = torch.zeros((), dtype=wide_type(hidden_TE), device=hidden_TE.device)
        needs_gradients = has_backward and any(ctx.needs_input_grad[:2])
        grads = ChunkGradients(products, full_TE, weight_VE, words.size, chunk) if needs_gradients else None
        ctx.pending = []

        def finish(begun: _Chunk, rows: slice) -> None:
            losses_C, grad_logits = begun.finish(products)
            total.add_(losses_C.sum() * scale)
            if token_losses_T is not None:
                token_losses_T[rows] = losses_C
            if grads is not None:
                grads.add(grad_logits, rows)
                if not group.is_sequence_parallel:
                    ctx.pending.append(start_sum(grads.hidden_TE[rows], group))

        # Two chunks are under way at a time, each with memory of its own.
        before: tuple[_Chunk, slice] | None = None
        for start in range(0, len(full_TE), chunk):
            rows = slice(start, start + chunk)
            begun = _Chunk(products.logits(rows), target_T[rows], words, group, passes)
            if before is not None:
                finish(*before)
            before = begun, rows
        if before is not None:
            finish(*before)
        if grads is not None:
            if group.is_sequence_parallel:
                ctx.pending.append(PendingScatter(grads.hidden_TE, group))
            ctx.save_for_backward(grads.hidden_TE, grads.finished())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        for pending in ctx.pending:
            arrived = pending.wait()
            if isinstance(pending, PendingScatter):
                grad_hidden = arrived
        return *scaled_gradients(grad, grad_hidden, grad_weight), *[None] * 9


@dataclass(frozen=True)
class CutLoss:
    """Takes the place of `cross_entropy_sum` where this rank has the rows of some words."""

    words: Cut
    group: TensorGroup

    def __call__(
        self,
        hidden_TE: Tensor,
        weight_VE: Tensor,
        target_T: Tensor,
        *,
        scale: float | Tensor = 1.0,
        chunk: int | None = None,
        passes: LogitsPasses = EAGER,
        products: MakeProducts = PlainProducts,
        token_losses: Tensor | None = None,
    ) -> Tensor:
        """Return `scale` times the summed cross-entropy in nats, equal on all ranks. *Collective*.

        hidden: all tokens, or this rank's part of them under sequence parallelism. target: all T tokens.
        """
        rows = chunk or default_chunk(hidden_TE, len(target_T), self.words.padded, passes)
        return _CutCrossEntropy.apply(  # type: ignore[no-any-return, no-untyped-call]
            hidden_TE,
            weight_VE,
            target_T,
            scale,
            rows,
            self.words,
            self.group,
            passes,
            products,
            torch.is_grad_enabled(),
            token_losses,
        )
