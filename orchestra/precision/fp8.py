"""Products in fp8: e4m3 numbers forward, e5m2 gradients, scaled by the largest number of the moment.

Every product scales both of its factors anew (dynamic scaling: no history, no state), by one factor for a
tensor or by one for each row along which it sums. Results are in the input's 16-bit type. A weight may have
its rounded copies attached, which `rounded_weights` keeps up to date: then products use those. Other weights
are rounded in each pass and need no memory of their own, so that what gathers parameters on demand may
release them in between.

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


def _turned(matrix: Rounded) -> Rounded:
    """Return the transposed matrix by rows, where one scale is for all of it."""
    return Rounded(matrix.values.t().contiguous(), matrix.scale)


# Compiled code takes tensors as the attributes of a weight, and would compile anew for objects: values and
# scale by rows, values and scale of the transposed weight by rows.
_ATTRIBUTES = ("fp8_values", "fp8_scale", "fp8_turned_values", "fp8_turned_scale")


def attach_rounded(weight: Tensor, scaling: Scaling) -> list[Tensor]:
    """Make and return the memory of a weight's rounded copies; `round_weight_` fills it."""
    outputs, inputs = weight.shape
    is_row = scaling is Scaling.row
    tensors = [
        torch.zeros(outputs, inputs, dtype=FORWARD, device=weight.device),
        torch.zeros((outputs, 1) if is_row else (), device=weight.device),
        torch.zeros(inputs, outputs, dtype=FORWARD, device=weight.device),
        torch.zeros((inputs, 1) if is_row else (), device=weight.device),
    ]
    for name, tensor in zip(_ATTRIBUTES, tensors, strict=True):
        setattr(weight, name, tensor)
    return tensors


def round_weight_(weight: Tensor, scaling: Scaling) -> None:
    """Round a weight [O, E] into its attached copies."""
    values = rounded(weight, FORWARD, scaling)
    if scaling is Scaling.tensor:
        turned = Rounded(values.values.t(), values.scale)
    else:
        turned = rounded(weight.t().contiguous(), FORWARD, scaling)
    parts = (values.values, values.scale, turned.values, turned.scale)
    for name, part in zip(_ATTRIBUTES, parts, strict=True):
        getattr(weight, name).copy_(part)


def _attached(weights: list[Tensor]) -> list[Tensor]:
    """Return the attached copies, by weight; all weights of one input have them, or none has."""
    if getattr(weights[0], _ATTRIBUTES[0], None) is None:
        return []
    return [getattr(weight, name) for weight in weights for name in _ATTRIBUTES]


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


class _RoundedProducts(torch.autograd.Function):
    """Products of one input [T, E] with weights [O, E], each rounded as the module's docstring says.

    After the weights come their tickets, or nothing, and then the weights' rounded copies, or nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, scaling: Scaling, num_products: int, num_tickets: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.scaling, ctx.dtype, ctx.num_parameters = scaling, x_TE.dtype, len(parameters)
        ctx.num_products, ctx.num_tickets = num_products, num_tickets
        weights = parameters[:num_products]
        copies = parameters[num_products + num_tickets :]
        ctx.weight_dtype, ctx.has_copies = weights[0].dtype, bool(copies)
        x = rounded(x_TE, FORWARD, scaling)
        kept_x = (x.values, x.scale) if scaling is Scaling.tensor else (x_TE,)
        tickets = parameters[num_products : num_products + num_tickets]
        if copies:
            ctx.save_for_backward(*kept_x, *tickets, *copies[2::4], *copies[3::4])
            by_rows = [
                Rounded(values, scale) for values, scale in zip(copies[::4], copies[1::4], strict=True)
            ]
        else:
            ctx.save_for_backward(*kept_x, *tickets, *weights)
            by_rows = [rounded(weight, FORWARD, scaling) for weight in weights]
        return tuple(_product(x, weight, x_TE.dtype) for weight in by_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaling: Scaling = ctx.scaling
        if scaling is Scaling.tensor:
            values, scale, *others = ctx.saved_tensors
            by_columns = _turned(Rounded(values, scale))
        else:
            x_TE, *others = ctx.saved_tensors
            by_columns = rounded(x_TE.t().contiguous(), FORWARD, scaling)
        tickets = others[: ctx.num_tickets] or [None] * ctx.num_products
        weights = others[ctx.num_tickets :]
        grad_x: Tensor | None = None
        grad_weights = []
        for number, (grad_TO, ticket) in enumerate(zip(grads, tickets, strict=True)):
            grad = rounded(grad_TO, BACKWARD, scaling)
            if ctx.has_copies:
                weight = Rounded(weights[number], weights[ctx.num_products + number])
            else:
                weight = rounded(weights[number].t().contiguous(), FORWARD, scaling)
            part = _product(grad, weight, ctx.dtype)
            grad_x = part if grad_x is None else grad_x.add_(part)
            if scaling is Scaling.tensor:
                turned = _turned(grad)
            else:
                turned = rounded(grad_TO.t().contiguous(), BACKWARD, scaling)
            grad_weights.append(give_gradient(ticket, _product(turned, by_columns, ctx.weight_dtype)))
        no_more = [None] * (ctx.num_parameters - ctx.num_products)
        return grad_x, None, None, None, *grad_weights, *no_more


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
        tickets, copies = tickets_of(weights), _attached(weights)
        outs = _RoundedProducts.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2), self.scaling, len(weights), len(tickets), *weights, *tickets, *copies
        )
        return tuple(out.view(*x.shape[:-1], -1) for out in outs)
