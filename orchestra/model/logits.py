"""The passes over a chunk of logits: what the loss needs of each token, and then the gradient in their place.

Eager, a chunk of 16 bits is widened to fp32 once, and each operator passes over it. Compiled, one pass reads
the logits and gives three numbers for each token, and a second one reads them again and writes their gradient
over them, or in fp8 beside them: what torch.compile fuses is never written. Both are for a vocabulary that
one rank has and for one that is cut over ranks, which put their numbers together in between.

Shape letters: V vocabulary (words of this rank), C tokens of one chunk, P parts of a row, W words of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from orchestra.model.initial import is_fake


@dataclass(frozen=True)
class Statistics:
    """Of each token, in fp32 at least, [C]: the largest logit, the sum of exp(logit − largest), and the logit
    at the token's index.

    `kept` is what the gradient is made of, in the logits' memory or in memory of its own.
    """

    largest: Tensor
    sums: Tensor
    at_index: Tensor
    kept: Tensor


class EagerPasses:
    """Operators of torch one by one: the exponentials are taken once and kept in fp32."""

    is_compiled = False

    def statistics(self, logits_CV: Tensor, index_C: Tensor) -> Statistics:
        """Read a chunk of logits; those of 32 bits or more are overwritten."""
        wide_CV = logits_CV.to(wide_type(logits_CV))
        at_index = wide_CV.gather(1, index_C.unsqueeze(1)).squeeze(1)
        largest = wide_CV.amax(dim=1)
        kept = wide_CV.sub_(largest.unsqueeze(1)).exp_()
        return Statistics(largest, kept.sum(dim=1), at_index, kept)

    def gradient(
        self, of: Statistics, index_C: Tensor, share_C: Tensor, at_target_C: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return share · exp(logit − largest), less `at_target` at each token's index, [C, V] in `dtype`."""
        gradient, column = of.kept.mul_(share_C.unsqueeze(1)), index_C.unsqueeze(1)
        # Not scatter_add_, which has no deterministic form on a GPU.
        gradient.scatter_(1, column, gradient.gather(1, column) - at_target_C.unsqueeze(1))
        return gradient.to(dtype)


class CompiledPasses:
    """Two fused passes: the logits are read twice, and their gradient is written once."""

    is_compiled = True

    # One graph each for whole chunks; a shorter last one adds one for any number of tokens. Made when first
    # used: a dry run, which uses none, does without loading the compiler.
    @cached_property
    def _statistics(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        return torch.compile(_statistics)

    @cached_property
    def _gradient_(self) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]:
        return torch.compile(_gradient_)

    def statistics(self, logits_CV: Tensor, index_C: Tensor) -> Statistics:
        """Read a chunk of logits."""
        if is_fake(logits_CV):
            nothing = logits_CV.new_empty(len(logits_CV), dtype=wide_type(logits_CV))
            return Statistics(nothing, nothing, nothing, logits_CV)
        return Statistics(*self._statistics(logits_CV, index_C), logits_CV)

    def gradient(
        self, of: Statistics, index_C: Tensor, share_C: Tensor, at_target_C: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return what `EagerPasses.gradient` does: in the logits' memory if that has the dtype."""
        gradient = of.kept if of.kept.dtype is dtype else torch.empty_like(of.kept, dtype=dtype)
        if not is_fake(of.kept):
            self._gradient_(of.kept, of.largest, index_C, share_C, at_target_C, gradient)
        return gradient


# Numbers of a row's part: the widest that the compiler reduces without a loop, and steps of 32 bytes.
_LEAST_PART, _MOST_PART, _PART_STEP = 128, 1024, 16

LogitsPasses = EagerPasses | CompiledPasses
EAGER = EagerPasses()


def wide_type(logits: Tensor) -> torch.dtype:
    """Return the dtype that a loss is computed in: fp32, or the logits' own where that is wider."""
    return torch.promote_types(logits.dtype, torch.float32)


def _statistics(logits_CV: Tensor, index_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = wide_type(logits_CV)
    # A part of a row stays in registers between its largest number and its sum; a row would be read twice.
    parts_CPW = logits_CV.view(len(logits_CV), -1, _part_width(logits_CV.shape[1])).to(wide)
    # Where all words of a part are left out (−∞), its sum is 0 and not NaN.
    largest_CP = parts_CPW.amax(dim=2).clamp(min=torch.finfo(wide).min)
    sums_CP = (parts_CPW - largest_CP.unsqueeze(2)).exp().sum(dim=2)
    largest = largest_CP.amax(dim=1)
    sums = (sums_CP * (largest_CP - largest.unsqueeze(1)).exp()).sum(dim=1)
    return largest, sums, logits_CV.gather(1, index_C.unsqueeze(1)).squeeze(1).to(wide)


def _part_width(num_words: int) -> int:
    """Return the width of the equal parts in which a row's numbers are read: of what divides the row the
    widest that a block of threads holds, in steps that are loaded at once; the row's where all are narrow.
    """
    fitting = [width for width in range(_LEAST_PART, _MOST_PART + 1, _PART_STEP) if num_words % width == 0]
    return max(fitting, default=num_words)


def _gradient_(
    logits_CV: Tensor,
    largest_C: Tensor,
    index_C: Tensor,
    share_C: Tensor,
    at_target_C: Tensor,
    gradient_CV: Tensor,
) -> None:
    exponentials = (logits_CV.to(wide_type(logits_CV)) - largest_C.unsqueeze(1)).exp()
    # Compared and not scattered: a second kernel would read and write all of it again.
    is_index = torch.arange(logits_CV.shape[1], device=logits_CV.device) == index_C.unsqueeze(1)
    at_target = torch.where(is_index, at_target_C.unsqueeze(1), 0.0)
    gradient_CV.copy_(exponentials * share_C.unsqueeze(1) - at_target)
