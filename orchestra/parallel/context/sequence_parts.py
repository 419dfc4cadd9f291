"""Which places of each sequence a rank of a context-parallel group has, and how parts make up whole ones.

A sequence is cut in 2·N pieces for N ranks, and rank r has the pieces r and 2·N − 1 − r, its head and its
tail: of the keys that their queries see the two together have equally many on every rank, so that causal
attention is as much work for each. The heads of all ranks are the first half of a sequence, in the order of
the ranks, and their tails the second, in reverse.

Shape letters: B batch, S whole sequence, P places of this rank (S/N), N ranks, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orchestra.model.documents import document_mask, documents_for, on_device
from orchestra.model.kernels import lookup
from orchestra.model.layers import Positions
from orchestra.parallel.tensor.vocabulary import CutPositions


@dataclass(frozen=True)
class HeadAndTail:
    """The two pieces of each sequence that rank `index` of `degree` has; takes the place of
    `WholeSequences`.
    """

    degree: int
    index: int
    # Whether a rank's attention has all queries of some heads, and not its own ones of all heads.
    has_whole_attention: bool = False

    @property
    def pieces(self) -> tuple[int, int]:
        """The numbers of this rank's pieces."""
        return self.index, 2 * self.degree - 1 - self.index

    def cut(self, whole_BS: Tensor) -> Tensor:
        """Return this rank's places [B, P] of whole sequences."""
        size = whole_BS.shape[1] // (2 * self.degree)
        return torch.cat([whole_BS[:, number * size : (number + 1) * size] for number in self.pieces], dim=1)

    def places(self, num: int, device: torch.device) -> Tensor:
        """Return the places in the whole sequence of this rank's `num` ones."""
        size = num // 2
        within = torch.arange(size, device=device)
        return torch.cat([number * size + within for number in self.pieces])

    def documents(self, bounds: Tensor, whole_BS: Tensor, dtype: torch.dtype, head_dim: int | None) -> Tensor:
        """Return what this rank's attention takes: `documents_for` of whole sequences, or the mask
        [B, 1, P, S] of its own queries.
        """
        if self.has_whole_attention:
            return documents_for(bounds, whole_BS, dtype, head_dim)
        device = whole_BS.device
        place_P = self.places(whole_BS.shape[1] // self.degree, device)
        return document_mask(on_device(bounds, device), whole_BS, dtype, place_P)


def in_order(parts: Tensor) -> Tensor:
    """Return [B, S, …] from the parts [N, B, P, …] of N ranks."""
    degree, batch, num, *rest = parts.shape
    half = num // 2
    whole = parts.new_empty(batch, 2 * degree, half, *rest)
    whole[:, :degree] = parts[:, :, :half].transpose(0, 1)
    whole[:, degree:] = parts[:, :, half:].flip(0).transpose(0, 1)
    return whole.flatten(1, 2)


def by_rank(whole: Tensor, degree: int) -> Tensor:
    """Return the parts [N, B, P, …] that N ranks have of [B, S, …]: what `in_order` undoes."""
    batch, sequence, *rest = whole.shape
    half = sequence // (2 * degree)
    pieces = whole.view(batch, 2 * degree, half, *rest)
    parts = whole.new_empty(degree, batch, 2 * half, *rest)
    parts[:, :, :half] = pieces[:, :degree].transpose(0, 1)
    parts[:, :, half:] = pieces[:, degree:].flip(1).transpose(0, 1)
    return parts


class PositionsOfPart(nn.Module):
    """Takes the place of learned positions, or of those that sequence parallelism has put there."""

    def __init__(self, positions: Positions | CutPositions, part: HeadAndTail) -> None:
        super().__init__()
        self.weight = positions.weight
        self.part = part
        self.group = positions.group if isinstance(positions, CutPositions) else None

    def forward(self, own_BP: Tensor) -> Tensor:
        """Return the rows [P, E] of this rank's places, or [B, P/N, E] of its run of the B·P tokens."""
        batch, num = own_BP.shape
        place_P = self.part.places(num, own_BP.device)
        if self.group is None:
            return lookup(place_P, self.weight)
        run = batch * num // self.group.size
        begin = self.group.rank * run
        return lookup(place_P.repeat(batch)[begin : begin + run].view(batch, -1), self.weight)
