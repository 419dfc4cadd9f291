"""Embedding and output matrix of which each rank has the rows of some words.

A word's row is on one rank only; the others add zeros. Rows behind the last word are padding that nothing
reads. The loss is in `loss`.

Shape letters: B batch, S sequence, E hidden size, V vocabulary, N ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestra.model.layers import Positions
from orchestra.parallel.tensor.collectives import TensorGroup, entering, gather_stacked, leaving
from orchestra.parallel.tensor.cuts import Cut


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
