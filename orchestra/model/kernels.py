"""The few operators that are written by hand: each saves passes over memory that composed operators would
make.

Every one is an autograd function with the plain formula in its docstring, and is tested against that formula
in float64. Under torch.compile the plain formulas are used instead, since the compiler fuses them itself, but
for products whose weights' gradients have a place to go to (`weight_gradients`).

Shape letters: B batch, S sequence, H heads, D head width, E hidden size, T tokens (B·S), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from orchestra.model.operators import changing
from orchestra.model.weight_gradients import give_products, ticket_of, tickets_of, weight_gradient


class _RMSNorm(torch.autograd.Function):
    """y = w · x · rsqrt(mean(x²) + eps); keeps x and one number a row instead of four tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        inverse: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        inverse.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, weight, inverse = ctx.saved_tensors
        wide_grad = grad.to(inverse.dtype)
        wide_weight, size = weight.to(inverse.dtype), x.shape[-1]
        # With r = inverse: dw = Σ g·x·r;  dx = g·w·r − x · r³ · mean(g·w·x). The sums are matrix-vector
        # products.
        product = (wide_grad * x).flatten(0, -2)
        grad_weight = inverse.flatten() @ product
        mean = (product @ wide_weight).view_as(inverse).div_(size)
        grad_x = (wide_grad * wide_weight).mul_(inverse).addcmul_(x, mean * inverse**3, value=-1.0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return w · x · rsqrt(mean(x²) + eps) over the last dim; statistics in fp32 for 16-bit inputs."""
    if torch.compiler.is_compiling() or x.is_cuda:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    """y = silu(gate) · up; keeps gate and up only, and computes silu again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        grad_gate = grad * up
        # In its own memory: a fresh tensor of this size costs as much as the arithmetic.
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return, no-untyped-call]


def _rotated(x_BSHD: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    half = x_BSHD.shape[-1] // 2
    # One product over whole heads, then the other halves: inner loops of D and not of D/2 elements.
    out = x_BSHD * cos
    out[..., :half].addcmul_(x_BSHD[..., half:], sin, value=-sign)
    out[..., half:].addcmul_(x_BSHD[..., :half], sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    """(x₁, x₂) ↦ (x₁·cos − x₂·sin, x₂·cos + x₁·sin); its backward is the rotation by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x_BSHD, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None


def rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head by cos [S, 1, D], both halves alike, and sin [S, 1, D/2]."""
    if torch.compiler.is_compiling():
        first, second = x_BSHD.chunk(2, dim=-1)
        cos_half = cos[..., : cos.shape[-1] // 2]
        rotated = (first * cos_half - second * sin, second * cos_half + first * sin)
        return torch.cat(rotated, dim=-1)
    return _Rotate.apply(x_BSHD, cos, sin)  # type: ignore[no-any-return, no-untyped-call]


def weights_tickets_biases(
    parameters: Sequence[Tensor], num_products: int
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Tell apart what a function over some products gets: their weights, tickets or none, biases or none."""
    weights, others = parameters[:num_products], parameters[num_products:]
    num_tickets = num_products if others and not others[0].is_floating_point() else 0
    return weights, others[:num_tickets], others[num_tickets:]


# The compiler would copy the sum before it calls the product that adds to it.
@changing("add_product_to")
def _add_product_to(sum_TE: Tensor, grad_TO: Tensor, weight_OE: Tensor) -> None:
    sum_TE.addmm_(grad_TO, weight_OE)


class _Products(torch.autograd.Function):
    """Several products of one input, whose gradients accumulate inside the products (beta = 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_products: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, tickets, biases = weights_tickets_biases(parameters, num_products)
        ctx.num_products, ctx.num_tickets, ctx.num_biases = num_products, len(tickets), len(biases)
        ctx.save_for_backward(x, *weights, *tickets)
        return tuple(map(F.linear, [x] * num_products, weights, biases or (None,) * num_products))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        weights = others[: ctx.num_products]
        tickets = others[ctx.num_products :] or (None,) * ctx.num_products
        x_TE = x.flatten(0, -2)
        flat = [grad.flatten(0, -2) for grad in grads]
        grad_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            if grad_x.is_cuda and torch.compiler.is_compiling():
                _add_product_to(grad_x, grad, weight)
            else:
                grad_x.addmm_(grad, weight)
        grad_weights = give_products(tickets, flat, x_TE)
        grad_biases = [grad.sum(0) for grad in flat] if ctx.num_biases else []
        return grad_x.view_as(x), None, *grad_weights, *[None] * ctx.num_tickets, *grad_biases


def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """Return x @ wᵀ + b for each weight [O, E]; one tensor holds the input's gradient instead of a sum over
    several.

    `biases`: one for each weight, or none.
    """
    has_backward = torch.is_grad_enabled()
    tickets = tickets_of(weights) if has_backward else []
    if not tickets and (torch.compiler.is_compiling() or len(weights) == 1 or not has_backward):
        return tuple(map(F.linear, [x] * len(weights), weights, biases or (None,) * len(weights)))
    return _Products.apply(x, len(weights), *weights, *tickets, *biases)  # type: ignore[no-any-return, no-untyped-call]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ wᵀ for a weight [O, E]."""
    (out,) = products(x, [weight])
    return out


class _Lookup(torch.autograd.Function):
    """Rows of a table, whose gradient its `WeightGradient` takes."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, table_VE: Tensor, ticket: Tensor) -> Tensor:
        ctx.save_for_backward(row, ticket)
        return F.embedding(row, table_VE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        row, ticket = ctx.saved_tensors
        weight_gradient(ticket).add_rows(row.flatten(), grads[0].flatten(0, -2))
        return None, None, None


def lookup(row: Tensor, table_VE: Tensor) -> Tensor:
    """Return the rows of a table [V, E] at indices of any shape (int64)."""
    ticket = ticket_of(table_VE)
    if ticket is None:
        return F.embedding(row, table_VE)
    return _Lookup.apply(row, table_VE, ticket)  # type: ignore[no-any-return, no-untyped-call]


class _FirstRows(torch.autograd.Function):
    """The first rows of a table, whose gradient its `WeightGradient` takes."""

    @staticmethod
    def forward(ctx: Any, table_VE: Tensor, number: int, ticket: Tensor) -> Tensor:
        ctx.save_for_backward(ticket)
        return table_VE[:number]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        weight_gradient(*ctx.saved_tensors).add(grads[0])
        return None, None, None


def first_rows(table_VE: Tensor, number: int) -> Tensor:
    """Return the first rows of a table [V, E]."""
    ticket = ticket_of(table_VE)
    if ticket is None:
        return table_VE[:number]
    return _FirstRows.apply(table_VE, number, ticket)  # type: ignore[no-any-return, no-untyped-call]
