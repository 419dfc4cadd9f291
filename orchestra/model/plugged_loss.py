"""A loss of somebody else's (`train.loss`) in the place of cross-entropy: a function of logits and targets.

It goes over the logits in the same chunks, and its gradients are taken by autograd chunk by chunk in the
forward pass, so that the logits of a micro-batch never exist at once.

Shape letters: T tokens, E hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orchestra.errors import TrainingError
from orchestra.model.logits import EAGER, LogitsPasses, wide_type
from orchestra.model.loss import (
    IGNORED_TARGET,
    ChunkGradients,
    MakeProducts,
    PlainProducts,
    default_chunk,
    scaled_gradients,
)

# From logits [C, V] in fp32 and targets [C] (int64) to the loss of each token [C].
TokenLosses = Callable[[Tensor, Tensor], Tensor]


class PluggedLoss:
    """Takes the place of `cross_entropy_sum`, with `token_losses` in the place of the cross-entropy."""

    def __init__(self, token_losses: TokenLosses) -> None:
        self._token_losses = token_losses

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
        """Return `scale` times the summed losses, as `cross_entropy_sum` does."""
        rows = chunk or default_chunk(hidden_TE, len(target_T), len(weight_VE), passes)
        return _ChunkedLoss.apply(  # type: ignore[no-any-return, no-untyped-call]
            hidden_TE,
            weight_VE,
            target_T,
            scale,
            rows,
            products,
            self._token_losses,
            torch.is_grad_enabled(),
            token_losses,
        )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: Tensor,
        weight_VE: Tensor,
        target_T: Tensor,
        scale: float | Tensor,
        chunk: int,
        make_products: MakeProducts,
        token_losses: TokenLosses,
        has_backward: bool,
        token_losses_T: Tensor | None,
    ) -> Tensor:
        total = torch.zeros((), dtype=wide_type(hidden_TE), device=hidden_TE.device)
        products = make_products(hidden_TE, weight_VE, len(weight_VE), scale)
        grads = None
        # As in cross-entropy's: a Function hears of parameters' needs where gradients are switched off too.
        if has_backward and any(ctx.needs_input_grad[:2]):
            grads = ChunkGradients(products, hidden_TE, weight_VE, len(weight_VE), chunk)
        for start in range(0, len(hidden_TE), chunk):
            rows = slice(start, start + chunk)
            wide_CV = products.logits(rows).detach().to(total.dtype).requires_grad_(grads is not None)
            taken = target_T[rows] != IGNORED_TARGET
            with torch.set_grad_enabled(grads is not None):
                losses_C = token_losses(wide_CV, torch.where(taken, target_T[rows], 0))
                if losses_C.shape != taken.shape:
                    raise TrainingError(
                        f"train.loss returned the shape {list(losses_C.shape)} for logits of "
                        f"{list(wide_CV.shape)}; return one loss for each token, {list(taken.shape)}"
                    )
                # Of any precision: a sum in 16 bits would be rounded, or none.
                losses_C = torch.where(taken, losses_C.to(total.dtype), 0.0)
                summed = losses_C.sum()
            total += summed.detach() * scale
            if token_losses_T is not None:
                token_losses_T[rows] = losses_C.detach()
            if grads is not None:
                (grad_CV,) = torch.autograd.grad(summed, wide_CV)
                grads.add((grad_CV * products.gradient_factor).to(products.gradient_dtype), rows)
        if grads is not None:
            ctx.save_for_backward(grads.hidden_TE, grads.finished())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled_gradients(grads[0], *ctx.saved_tensors), *[None] * 7
