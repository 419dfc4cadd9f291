"""Products in fp8: e4m3 numbers forward, e5m2 gradients, scaled by the largest number of the moment.

Every product scales both of its factors anew (dynamic scaling: no history, no state), by one factor for a
tensor or by one for each row along which it sums. Results are in the input's 16-bit type. The weights are
kept in it too and rounded again in the backward pass: they need no memory of their own, and what gathers
parameters on demand may release them in between.

    y = x · wᵀ          x, w in e4m3
    dx = dy · w         dy in e5m2, w in e4m3
    dw = dyᵀ · x        dy in e5m2, x in e4m3

With one scale for a tensor x is kept for the backward pass as it was rounded, in one byte; with a scale for
each row it is kept in 16 bits, since another dim is summed over there. `torch._scaled_mm` wants the second
factor by columns, and on a GPU sizes that 16 divides.

Shape letters: T tokens, E inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import Scaling
from orchestra.model.weight_gradients import give_gradient, tickets_of

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# NVIDIA's Ada; Hopper is 9.0.
LEAST_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Rounded:
    """A matrix in fp8 by rows, and the factor of its numbers: one, or one for each row [R, 1]."""

    values: Tensor
    scale: Tensor


def rounded(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> Rounded:
    """Return a matrix [R, C] of 16 or 32 bits in fp8; all zeros stay zeros."""
    size = matrix.abs()
    largest = size.amax() if scaling is Scaling.tensor else size.amax(dim=1, keepdim=True)
    limit = torch.finfo(dtype).max
    # A bound far below any number that matters, whose inverse is still finite.
    scale = largest.float().clamp(min=1e-30) / limit
    # What is beyond the limit by a rounding would become NaN.
    values = (matrix.float() / scale).clamp(-limit, limit).to(dtype)
    return Rounded(values, scale)


def _product(left: Rounded, right: Rounded, out: torch.dtype) -> Tensor:
    """Return left · rightᵀ for matrices [M, K] and [N, K] that lie by rows."""
    product: Tensor = torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.scale,
        scale_b=right.scale.t() if right.scale.dim() else right.scale,
        out_dtype=out,
        # Sums of gradients need all digits: there Hopper's fast sums are left out.
        use_fast_accum=left.values.dtype is FORWARD,
    )
    return product


def _turned(matrix: Rounded) -> Rounded:
    """Return the transposed matrix by rows, where one scale is for all of it."""
    return Rounded(matrix.values.t().contiguous(), matrix.scale)


class _RoundedProducts(torch.autograd.Function):
    """Products of one input [T, E] with weights [O, E], each rounded as the module's docstring says."""

    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, scaling: Scaling, num_products: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.scaling, ctx.dtype, ctx.num_products = scaling, x_TE.dtype, num_products
        # After the weights come their tickets, or nothing.
        weights = parameters[:num_products]
        ctx.num_tickets = len(parameters) - num_products
        x = rounded(x_TE, FORWARD, scaling)
        if scaling is Scaling.tensor:
            ctx.save_for_backward(x.values, x.scale, *parameters)
        else:
            ctx.save_for_backward(x_TE, *parameters)
        return tuple(_product(x, rounded(weight, FORWARD, scaling), x_TE.dtype) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaling: Scaling = ctx.scaling
        if scaling is Scaling.tensor:
            values, scale, *parameters = ctx.saved_tensors
            by_columns = _turned(Rounded(values, scale))
        else:
            x_TE, *parameters = ctx.saved_tensors
            by_columns = rounded(x_TE.t().contiguous(), FORWARD, scaling)
        weights = parameters[: ctx.num_products]
        tickets = parameters[ctx.num_products :] or [None] * ctx.num_products
        grad_x: Tensor | None = None
        grad_weights = []
        for grad_TO, weight_OE, ticket in zip(grads, weights, tickets, strict=True):
            grad = rounded(grad_TO, BACKWARD, scaling)
            weight = rounded(weight_OE.t().contiguous(), FORWARD, scaling)
            part = _product(grad, weight, ctx.dtype)
            grad_x = part if grad_x is None else grad_x.add_(part)
            if scaling is Scaling.tensor:
                turned = _turned(grad)
            else:
                turned = rounded(grad_TO.t().contiguous(), BACKWARD, scaling)
            grad_weights.append(give_gradient(ticket, _product(turned, by_columns, weight_OE.dtype)))
        return grad_x, None, None, *grad_weights, *[None] * ctx.num_tickets


@dataclass(frozen=True)
class Fp8Products:
    """Takes the place of `model.layers.products_of`, and by `linear` that of `F.linear`."""

    scaling: Scaling

    def __call__(self, x_BSE: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Return linear(x) for each linear layer; the input is rounded once."""
        outs = self._of(x_BSE, [linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        return tuple(out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x · weightᵀ + bias for an input [..., E] and a weight [O, E]."""
        (out,) = self._of(x, [weight])
        return out if bias is None else out + bias

    def _of(self, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        outs = _RoundedProducts.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2), self.scaling, len(weights), *weights, *tickets_of(weights)
        )
        return tuple(out.view(*x.shape[:-1], -1) for out in outs)
