"""Products in fp8: e4m3 numbers forward, e5m2 gradients, scaled by the largest number of the moment.

Every product scales both of its factors anew (dynamic scaling: no history, no state), by one factor for a
tensor or by one for each row along which it sums. Under delayed scaling inputs and gradients take the scales
that `scale_history` has for them, and leave their largest numbers there. Results are in the input's 16-bit
type. A weight may have its rounded copies attached, which `rounded_weights` keeps up to date: then products
use those. Or it has its numbers in fp8 alone, as they were gathered from the ranks, which are transposed in
the backward pass. Other weights are rounded in each pass and need no memory of their own, so that what
gathers parameters on demand may release them in between.

    y = x · wᵀ          x, w in e4m3
    dx = dy · w         dy in e5m2, w in e4m3
    dw = dyᵀ · x        dy in e5m2, x in e4m3

With one scale for a tensor x is kept for the backward pass as it was rounded, in one byte; with a scale for
each row it is kept in 16 bits, since another dim is summed over there. `torch._scaled_mm` wants the second
factor by columns, and on a GPU sizes that 16 divides.

Shape letters: T tokens, E inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from conf.schema import Scaling
from orchestra.model.initial import is_fake
from orchestra.model.operators import changing
from orchestra.model.weight_gradients import known_by, tickets_of, weight_gradient
from orchestra.sizes.memory.layer_memory import FP8_ELEMENTS

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# Different matrices of one model, and chunks of logits.
_MOST_SIZES = 64
# NVIDIA's Ada; Hopper is 9.0.
LEAST_CAPABILITY = (8, 9)


class Rounded(NamedTuple):
    """A matrix in fp8 by rows, and the factor of its numbers: one, or one for each row [R, 1]."""

    values: Tensor
    scale: Tensor


def rounded(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> Rounded:
    """Return a matrix [R, C] of 16 or 32 bits, or several by rows, in fp8; all zeros stay zeros."""
    size = matrix.abs()
    largest = size.amax() if scaling is Scaling.tensor else size.amax(dim=-1, keepdim=True)
    scale = scale_of(largest, dtype)
    return Rounded(rounded_by(scale, matrix, dtype), scale)


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor, in fp32, with which the largest number takes the whole range."""
    # A bound far below any number that matters, whose inverse is still finite.
    return largest.float().clamp(min=1e-30) / torch.finfo(dtype).max


def rounded_by(scale: Tensor, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp8 numbers of a matrix for a scale; what is too large for it becomes the largest number."""
    limit = torch.finfo(dtype).max
    # What is beyond the limit, by a rounding too, would become infinite or NaN.
    return (matrix.float() / scale).clamp(-limit, limit).to(dtype)


def rounded_in_parts(matrix: Tensor, scaling: Scaling, values: Tensor | None = None) -> Rounded:
    """Return, or write into `values`, what `rounded` returns of a weight, with fp32 copies of some rows at a
    time: for what is large and not compiled.
    """
    if values is None:
        values = torch.empty(matrix.shape, dtype=FORWARD, device=matrix.device)
    is_row = scaling is Scaling.row
    dims = 1 if is_row else (0, 1)
    # Without a copy of the absolute numbers.
    largest = torch.maximum(matrix.amax(dims, keepdim=is_row), -matrix.amin(dims, keepdim=is_row))
    scale = scale_of(largest, FORWARD)
    num_rows = max(1, FP8_ELEMENTS // matrix.shape[1])
    for begin in range(0, len(matrix), num_rows):
        rows = slice(begin, begin + num_rows)
        values[rows].copy_(rounded_by(scale[rows] if is_row else scale, matrix[rows], FORWARD))
    return Rounded(values, scale)


def round_by(numbers: Tensor, scale: Tensor, values: Tensor) -> None:
    """Write the fp8 numbers of 16-bit ones into `values`, by a scale that is known; to be compiled."""
    values.copy_(rounded_by(scale, numbers, FORWARD))


def round_by_(numbers: Tensor, scale: Tensor, values: Tensor) -> None:
    """Do what `round_by` does, with fp32 copies of some of the flat numbers at a time."""
    for begin in range(0, len(numbers), FP8_ELEMENTS):
        some = slice(begin, begin + FP8_ELEMENTS)
        round_by(numbers[some], scale, values[some])


def turned(matrix: Rounded) -> Rounded:
    """Return the transposed matrix by rows, where one scale is for all of it."""
    return Rounded(matrix.values.t().contiguous(), matrix.scale)


def turn_(values: Tensor, turned_values: Tensor) -> None:
    """Write the transposed matrix, by code that is compiled by itself for its sizes."""
    # As bytes, which all types of fp8 share one graph by. What is compiled for any sizes reached a third of
    # an H100's bandwidth.
    with torch._dynamo.config.patch(recompile_limit=_MOST_SIZES):
        _compiled_turn()(values.view(torch.uint8), turned_values.view(torch.uint8))


@functools.cache
def _compiled_turn() -> Callable[[Tensor, Tensor], None]:
    return torch.compile(_turn, dynamic=False)


def _turn(values: Tensor, turned_values: Tensor) -> None:
    turned_values.copy_(values.t())


@changing("made_apart")
def _made_apart(values: Tensor, after: Tensor | None = None) -> None:
    """Change nothing: what the compiler makes of `values` after this is no part of the pass that makes them.

    Without it a pass that sums along rows, as a norm's backward does, writes the transposed numbers too, each
    far from the next: four times as long on an H100. `after`, a gradient, keeps it in the backward pass, so
    that the transposed numbers are not made and kept by the forward pass.
    """


# Compiled code takes tensors as the attributes of a weight, and would compile anew for objects: values and
# scale by rows, values and scale of the transposed weight by rows.
_ATTRIBUTES = ("fp8_values", "fp8_scale", "fp8_turned_values", "fp8_turned_scale")
_NUM_BY_ROWS = 2
_DIMS_OF_MATRIX = 2


def scaling_of(weight: Tensor, scaling: Scaling) -> Scaling:
    """Return how a weight is scaled where matrices are scaled so: the stacked ones of experts by rows."""
    return scaling if weight.dim() == _DIMS_OF_MATRIX else Scaling.row


def attach_rounded(weight: Tensor, scaling: Scaling) -> list[Tensor]:
    """Make and return the memory of the rounded copies of a weight, or of stacked ones [X, O, E];
    `round_weight_` fills it.
    """
    *stack, outputs, inputs = weight.shape
    is_row = scaling is Scaling.row
    tensors = [
        torch.zeros(*stack, outputs, inputs, dtype=FORWARD, device=weight.device),
        torch.zeros((*stack, outputs, 1) if is_row else (), device=weight.device),
        torch.zeros(*stack, inputs, outputs, dtype=FORWARD, device=weight.device),
        torch.zeros((*stack, inputs, 1) if is_row else (), device=weight.device),
    ]
    for name, tensor in zip(_ATTRIBUTES, tensors, strict=True):
        setattr(weight, name, tensor)
    return tensors


def attach_numbers(weight: Tensor, values: Tensor, scale: Tensor) -> None:
    """Let products use these numbers of a weight, and their one scale, which somebody else fills in."""
    for name, tensor in zip(_ATTRIBUTES[:_NUM_BY_ROWS], (values, scale), strict=True):
        setattr(weight, name, tensor)


def round_weight_(weight: Tensor, scaling: Scaling) -> None:
    """Round a weight [O, E], or stacked ones by rows, into its attached copies."""
    values, scale, turned_values, turned_scale = attached([weight])
    if scaling is Scaling.tensor:
        scale.copy_(rounded_in_parts(weight, scaling, values).scale)
        turned_values.copy_(values.t())
        turned_scale.copy_(scale)
        return
    for matrix, by_rows, of_rows in ((weight, values, scale), (weight.mT, turned_values, turned_scale)):
        # Rows are alike, whichever matrix of a stack they are of.
        found = rounded_in_parts(matrix.flatten(0, -2), scaling, by_rows.flatten(0, -2))
        of_rows.copy_(found.scale.view_as(of_rows))


def round_rows_and_columns_(
    weight: Tensor, values: Tensor, scale: Tensor, turned_values: Tensor, turned_scale: Tensor
) -> None:
    """Do what `round_weight_` does with a scale for each row, in a form to be compiled."""
    by_rows, by_columns = (rounded(matrix, FORWARD, Scaling.row) for matrix in (weight, weight.mT))
    for target, part in zip(
        (values, scale, turned_values, turned_scale), (*by_rows, *by_columns), strict=True
    ):
        target.copy_(part)


def round_by_largest_(
    weights: Sequence[Tensor], largest: Sequence[Tensor], copies: Sequence[Sequence[Tensor]]
) -> None:
    """Do what `round_weight_` does of weights with one scale each, whose largest numbers and attached copies
    are given, in a form to be compiled.
    """
    for weight, number, (values, scale, turned_values, turned_scale) in zip(
        weights, largest, copies, strict=True
    ):
        factor = scale_of(number, FORWARD)
        made = rounded_by(factor, weight, FORWARD)
        for target, part in zip(
            (scale, turned_scale, values, turned_values), (factor, factor, made, made.t()), strict=True
        ):
            target.copy_(part)


# The scale of the next rounding and the largest number since the step began: of a product's input, at the
# first weight that it is multiplied with, and of the gradient of each weight's result.
_HISTORY = ("fp8_input_scale", "fp8_input_found", "fp8_gradient_scale", "fp8_gradient_found")


def attach_history(weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, torch.dtype]]:
    """Make the scales of one input's products with some weights, by their names; return scale, largest number
    and dtype of all that is rounded for them, by name.
    """
    made = {}

    def make(name: str, weight: Tensor, attributes: Sequence[str], dtype: torch.dtype) -> None:
        # Tensors of their own and no views: the compiler would take views of one memory for one tensor.
        pair = torch.ones((), device=weight.device), torch.zeros((), device=weight.device)
        for attribute, tensor in zip(attributes, pair, strict=True):
            setattr(weight, attribute, tensor)
        made[name] = (*pair, dtype)

    for number, (name, weight) in enumerate(weights.items()):
        if not number:
            make(f"{name}.input", weight, _HISTORY[:2], FORWARD)
        make(f"{name}.gradient", weight, _HISTORY[2:], BACKWARD)
    return made


def _history_of(weights: list[Tensor]) -> list[Tensor]:
    """Return scale and largest number of the input, and then of each weight's gradient; none: no history."""
    if getattr(weights[0], _HISTORY[0], None) is None:
        return []
    return [getattr(weights[0], name) for name in _HISTORY[:2]] + [
        getattr(weight, name) for weight in weights for name in _HISTORY[2:]
    ]


def _noted(
    matrix: Tensor, dtype: torch.dtype, scaling: Scaling, history: Sequence[Tensor], is_known: bool
) -> Rounded:
    """Return a matrix rounded by the history's scale, if that is known, whose largest number it notes."""
    if not history:
        return rounded(matrix, dtype, scaling)
    scale, found = history
    # In this order the compiler finds the largest number in the pass that rounds.
    values = rounded_by(scale, matrix, dtype) if is_known else None
    largest = matrix.abs().amax().float()
    found.copy_(torch.maximum(found, largest))
    if values is None:
        scale = scale_of(largest, dtype)
        values = rounded_by(scale, matrix, dtype)
    return Rounded(values, scale)


def attached(weights: list[Tensor]) -> list[Tensor]:
    """Return the attached copies, by weight: four each, or values and scale by rows; all weights of one
    input have as many, or none.
    """
    names = [name for name in _ATTRIBUTES if getattr(weights[0], name, None) is not None]
    return [getattr(weight, name) for weight in weights for name in names]


def scaled_product(
    left: Rounded,
    right: Rounded,
    dtype: torch.dtype,
    out: Tensor | None = None,
    *,
    keeps_digits: bool | None = None,
) -> Tensor:
    """Return left · rightᵀ for matrices [M, K] and [N, K] that lie by rows, in `out` if that is given.

    `keeps_digits`: it is a sum of gradients; None: what their type says.
    """
    if out is not None and is_fake(out):
        # torch does not know this form without memory, and would really compute it.
        return out
    product: Tensor = torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.scale,
        scale_b=right.scale.t() if right.scale.dim() else right.scale,
        out_dtype=dtype,
        out=out,
        # Sums of gradients need all digits: there Hopper's fast sums are left out.
        use_fast_accum=left.values.dtype is FORWARD if keeps_digits is None else not keeps_digits,
    )
    return product


# Compiled code can't hold what makes a gradient later, but what it is made of.
@changing("give_scaled_product")
def _give_scaled_product(
    ticket: Tensor, grad: Tensor, grad_scale: Tensor, x: Tensor, x_scale: Tensor, dtype: torch.dtype
) -> None:
    factors = Rounded(grad, grad_scale), Rounded(x, x_scale)
    known_by(int(ticket)).add_made(lambda: scaled_product(*factors, dtype))


def _give_gradient_of(
    ticket: Tensor | None, grad_OT: Rounded, x_IT: Rounded, dtype: torch.dtype
) -> Tensor | None:
    """Return a weight's gradient for autograd, or None where the ticket's owner takes it, perhaps later."""
    if ticket is None:
        return scaled_product(grad_OT, x_IT, dtype)
    if torch.compiler.is_compiling():
        _give_scaled_product(ticket, *grad_OT, *x_IT, dtype)
    else:
        weight_gradient(ticket).add_made(lambda: scaled_product(grad_OT, x_IT, dtype))
    return None


class _RoundedProducts(torch.autograd.Function):
    """Products of one input [T, E] with weights [O, E], each rounded as the module's docstring says.

    After the weights come their tickets, or nothing, the weights' rounded copies, or nothing, and their
    history, or nothing; `is_known` says whether that has scales.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        scaling: Scaling,
        num_products: int,
        num_tickets: int,
        num_copies: int,
        is_known: bool,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.scaling, ctx.dtype, ctx.num_parameters = scaling, x_TE.dtype, len(parameters)
        ctx.num_products, ctx.num_tickets = num_products, num_tickets
        weights = parameters[:num_products]
        others = parameters[num_products + num_tickets :]
        copies, history = others[:num_copies], others[num_copies:]
        ctx.is_known, ctx.num_histories = is_known, len(history[2:])
        ctx.weight_dtype, ctx.num_copies = weights[0].dtype, num_copies // num_products
        x = _noted(x_TE, FORWARD, scaling, history[:2], is_known)
        kept_x = (x.values, x.scale) if scaling is Scaling.tensor else (x_TE,)
        tickets = parameters[num_products : num_products + num_tickets]
        if copies:
            of_each = [copies[number :: ctx.num_copies] for number in range(ctx.num_copies)]
            # By columns, or where there are none by rows.
            ctx.save_for_backward(*kept_x, *history[2:], *tickets, *of_each[-2], *of_each[-1])
            by_rows = [Rounded(values, scale) for values, scale in zip(*of_each[:2], strict=True)]
        else:
            ctx.save_for_backward(*kept_x, *history[2:], *tickets, *weights)
            by_rows = [rounded(weight, FORWARD, scaling) for weight in weights]
        return tuple(scaled_product(x, weight, x_TE.dtype) for weight in by_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaling: Scaling = ctx.scaling
        # What sums along rows may not write the transposed numbers: not the norm before several products,
        # part of which is computed again here, nor that after a single one, which makes its gradient.
        is_apart = scaling is Scaling.tensor and torch.compiler.is_compiling()
        if scaling is Scaling.tensor:
            values, scale, *others = ctx.saved_tensors
            if is_apart and ctx.num_products > 1:
                _made_apart(values, grads[0])
            by_columns = turned(Rounded(values, scale))
        else:
            x_TE, *others = ctx.saved_tensors
            by_columns = rounded(x_TE.t().contiguous(), FORWARD, scaling)
        history, others = others[: ctx.num_histories], others[ctx.num_histories :]
        tickets = others[: ctx.num_tickets] or [None] * ctx.num_products
        weights = others[ctx.num_tickets :]
        grad_x: Tensor | None = None
        grad_weights = []
        for number, (grad_TO, ticket) in enumerate(zip(grads, tickets, strict=True)):
            of_grad = history[2 * number : 2 * number + 2]
            grad = _noted(grad_TO, BACKWARD, scaling, of_grad, ctx.is_known)
            if is_apart and ctx.num_products == 1:
                _made_apart(grad.values)
            if ctx.num_copies:
                weight = Rounded(weights[number], weights[ctx.num_products + number])
                weight = turned(weight) if ctx.num_copies == _NUM_BY_ROWS else weight
            else:
                weight = rounded(weights[number].t().contiguous(), FORWARD, scaling)
            part = scaled_product(grad, weight, ctx.dtype)
            grad_x = part if grad_x is None else grad_x.add_(part)
            if scaling is Scaling.tensor:
                grad = turned(grad)
            else:
                grad = rounded(grad_TO.t().contiguous(), BACKWARD, scaling)
            grad_weights.append(_give_gradient_of(ticket, grad, by_columns, ctx.weight_dtype))
        no_more = [None] * (ctx.num_parameters - ctx.num_products)
        return grad_x, None, None, None, None, None, *grad_weights, *no_more


class History(Protocol):
    """Scales of what is rounded, which weights have attached; none is of use before `is_known`."""

    is_known: bool


@dataclass(frozen=True)
class Fp8Products:
    """Takes the place of `model.layers.products_of`, and by `linear` that of `F.linear`."""

    scaling: Scaling
    history: History | None = None

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
        tickets, copies, history = tickets_of(weights), attached(weights), _history_of(weights)
        numbers = len(weights), len(tickets), len(copies)
        is_known = self.history is not None and self.history.is_known
        outs = _RoundedProducts.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2), self.scaling, *numbers, is_known, *weights, *tickets, *copies, *history
        )
        return tuple(out.view(*x.shape[:-1], -1) for out in outs)
