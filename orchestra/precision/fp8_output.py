"""The products with the output matrix in fp8, which `orchestra.model.loss` makes chunk by chunk.

    logits = hidden · Wᵀ       both in e4m3
    dhidden = dlogits · W      dlogits in e5m2, W in e4m3
    dW = dlogitsᵀ · hidden     dlogits in e5m2, hidden in e4m3

Hidden states and matrix are scaled as `fp8` says, the matrix by its attached copies where it has them. The
gradient of a logit is a probability, less 1 at the target: at most the loss' own factor. So its scale is
known before it is computed, is one for all of it under both scalings, and whoever computes it rounds it in
the same pass.

Shape letters: T tokens, E hidden size, V words of this rank, C tokens of one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from conf.schema import Scaling
from orchestra.model.initial import is_fake
from orchestra.precision.fp8 import (
    BACKWARD,
    FORWARD,
    Rounded,
    attached,
    rounded,
    rounded_in_parts,
    scaled_product,
    turn_,
)
from orchestra.sizes.memory.loss_memory import FP8_WORDS


class Fp8OutputProducts:
    """Takes the place of `orchestra.model.loss.PlainProducts`; `is_compiled`: by compiled code where it is
    fp8 that is transposed.
    """

    def __init__(
        self,
        scaling: Scaling,
        hidden_TE: Tensor,
        weight: Tensor,
        num_words: int,
        factor: float | Tensor,
        *,
        is_compiled: bool = False,
    ) -> None:
        self._scaling, self._is_compiled = scaling, is_compiled
        self.gradient_factor: float | Tensor = torch.finfo(BACKWARD).max
        self.gradient_dtype = BACKWARD
        share = factor if isinstance(factor, Tensor) else torch.full((), factor, device=hidden_TE.device)
        self._gradient_scale = share.float() / self.gradient_factor
        self._hidden_TE = hidden_TE
        self._rounded_hidden = rounded(hidden_TE, FORWARD, scaling)
        self._weight_VE = weight[:num_words]
        copies, is_whole = attached([weight]), num_words == len(weight)
        # Rows of padding are zeros, whose size counts in no scale.
        self._by_words = (
            _some(Rounded(*copies[:2]), slice(num_words))
            if copies
            else rounded_in_parts(self._weight_VE, scaling)
        )
        self._by_inputs = Rounded(*copies[2:]) if copies[2:] and is_whole else None

    def logits(self, rows: slice, out: Tensor | None = None) -> Tensor:
        """Return the logits [C, V] of some tokens, in the dtype of the hidden states."""
        return scaled_product(self._hidden_of(rows), self._by_words, self._hidden_TE.dtype, out)

    def take_gradient(
        self, grad_CV: Tensor, rows: slice, hidden_CE: Tensor, sum_VE: Tensor, *, adds: bool
    ) -> None:
        """Write the gradient of those tokens' hidden states, and write or add that of the matrix."""
        if self._by_inputs is None:
            self._by_inputs = self._matrix_by_inputs()
        scaled_product(self._gradient(grad_CV), self._by_inputs, hidden_CE.dtype, hidden_CE)
        by_words = self._gradient(self._turned(grad_CV))
        hidden = self._hidden_by_inputs(rows)
        # Results of scales by row are of 16 bits: torch's kernels have no others on every GPU.
        dtype = torch.float32 if self._scaling is Scaling.tensor else self._hidden_TE.dtype
        if not adds and sum_VE.dtype in (dtype, self._hidden_TE.dtype):
            scaled_product(by_words, hidden, sum_VE.dtype, sum_VE)
            return
        for begin in range(0, len(sum_VE), FP8_WORDS):
            words = slice(begin, begin + FP8_WORDS)
            part = scaled_product(_some(by_words, words), hidden, dtype)
            sum_VE[words].add_(part) if adds else sum_VE[words].copy_(part)
            del part  # before the next one is made

    def _hidden_of(self, rows: slice) -> Rounded:
        return _some(self._rounded_hidden, rows)

    def _hidden_by_inputs(self, rows: slice) -> Rounded:
        if self._scaling is Scaling.tensor:
            hidden = self._hidden_of(rows)
            return Rounded(self._turned(hidden.values), hidden.scale)
        return rounded(self._hidden_TE[rows].t().contiguous(), FORWARD, self._scaling)

    def _matrix_by_inputs(self) -> Rounded:
        if self._scaling is Scaling.tensor:
            return Rounded(self._turned(self._by_words.values), self._by_words.scale)
        return rounded_in_parts(self._weight_VE.t(), self._scaling)

    def _turned(self, values: Tensor) -> Tensor:
        if not self._is_compiled or is_fake(values):
            return values.t().contiguous()
        made = values.new_empty(values.shape[1], values.shape[0])
        turn_(values, made)
        return made

    def _gradient(self, values: Tensor) -> Rounded:
        scale = self._gradient_scale
        if self._scaling is Scaling.row:
            scale = scale.expand(len(values), 1).contiguous()
        return Rounded(values, scale)


def _some(matrix: Rounded, rows: slice) -> Rounded:
    """Return some rows of a matrix."""
    return Rounded(matrix.values[rows], matrix.scale[rows] if matrix.scale.dim() else matrix.scale)
