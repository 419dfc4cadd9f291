"""Products of experts in fp8: of rows sorted by expert with the stacked weights of all experts of a layer.

On a Hopper GPU each is one kernel (`torch._scaled_grouped_mm`). It takes e4m3 numbers only, with a scale for
each row along which a product sums: so here gradients are in e4m3 too, and scales are by rows whatever
precision.fp8_scaling is, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3). Elsewhere the same numbers go
through one product for each expert. As in `fp8` a weight may have its rounded copies attached, and is rounded
at each use where it has none.

    y = x · wᵀ          of each row with the weight of its expert
    dx = dy · w
    dw = dyᵀ · x        of each expert, summed along its rows, which are rounded anew by columns

Along that last sum each expert's rows begin at a multiple of 16, as fp8 products want it: zeros fill up what
lies between. How many there are at most is known without asking the device.

Shape letters: M rows, X experts, I inputs, O outputs, C columns of a matrix, P places for rows,
N blocks of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.schema import Scaling
from orchestra.model.operators import changing
from orchestra.model.weight_gradients import known_by, tickets_of, weight_gradient
from orchestra.precision.fp8 import (
    FORWARD,
    Rounded,
    attached,
    rounded,
    rounded_by,
    rounded_in_parts,
    scale_of,
    scaled_product,
)

# Of the kernel's results.
_RESULT = torch.bfloat16
# Rows that belong to one expert together, where products sum along rows.
_BLOCK = 16
# Of a rounded weight.
_NUM_COPIES = 4
_DIMS_OF_STACK = 3
# Hopper alone: torch 2.13 has none for Ada's 8.9 or Blackwell's 10.0.
_KERNEL_CAPABILITY = (9, 0)


def has_grouped_kernel(device: torch.device) -> bool:
    """Whether torch multiplies the rows of all experts in fp8 by one kernel on a device."""
    return (
        device.type == "cuda"
        and hasattr(torch, "_scaled_grouped_mm")
        and torch.cuda.get_device_capability(device) == _KERNEL_CAPABILITY
    )


class _Places(NamedTuple):
    """Where rows go when each expert's begin at a multiple of 16: for each place the row [P], whether it
    stays empty [P, 1], and its expert [P]; and where each expert's places end (int32 [X]).
    """

    row: Tensor
    is_empty: Tensor
    expert: Tensor
    ends: Tensor


def _places(counts_X: Tensor, num_rows: int) -> _Places:
    num_experts = len(counts_X)
    # An expert without rows gets empty places: the kernel's result of no places at all is nobody's promise.
    room_X = ((counts_X + _BLOCK - 1) // _BLOCK).clamp(min=1) * _BLOCK
    ends_X, before_X = room_X.cumsum(0), counts_X.cumsum(0) - counts_X
    num_places = -(-num_rows // _BLOCK) * _BLOCK + num_experts * _BLOCK
    place_P = torch.arange(num_places, device=counts_X.device)
    # Places after the last expert's belong to it, and are empty.
    expert_P = torch.searchsorted(ends_X, place_P, right=True).clamp(max=num_experts - 1)
    nth_P = place_P - (ends_X - room_X)[expert_P]
    is_empty_P = nth_P >= counts_X[expert_P]
    row_P = (before_X[expert_P] + nth_P).masked_fill(is_empty_P, 0)
    return _Places(row_P, is_empty_P[:, None], expert_P, ends_X.to(torch.int32))


def _by_rows(matrix_MC: Tensor) -> Rounded:
    return rounded(matrix_MC, FORWARD, Scaling.row)


def _by_columns(matrix_MC: Tensor, places: _Places) -> Rounded:
    """Return a matrix in fp8 transposed, [C, P], with a scale for each expert and column [X, C, 1]."""
    num_experts, num_columns = len(places.ends), matrix_MC.shape[1]
    # Without a row the empty places still need one to stand for them.
    some_MC = matrix_MC if len(matrix_MC) else matrix_MC.new_zeros(1, num_columns)
    placed_PC = some_MC[places.row].masked_fill(places.is_empty, 0.0)
    # In blocks that are one expert's: few numbers have to find its own.
    blocks = placed_PC.view(-1, _BLOCK, num_columns)
    expert_N = places.expert[::_BLOCK]
    of_blocks = blocks.abs().amax(1).float()
    largest_XC = of_blocks.new_zeros(num_experts, num_columns)
    largest_XC = largest_XC.scatter_reduce(0, expert_N[:, None].expand_as(of_blocks), of_blocks, "amax")
    scale_XC = scale_of(largest_XC, FORWARD)
    values = rounded_by(scale_XC[expert_N][:, None], blocks, FORWARD)
    return Rounded(values.view(-1, num_columns).t().contiguous(), scale_XC[..., None])


@functools.cache
def _compiled(rounding: Callable[..., Rounded]) -> Callable[..., Rounded]:
    """One graph for any number of rows: with expert parallelism each micro-batch has another one."""
    compiled: Callable[..., Rounded] = torch.compile(rounding, dynamic=True)
    return compiled


def _in_one_pass(rounding: Callable[..., Rounded], *, is_compiled: bool) -> Callable[..., Rounded]:
    """Return a function that rounds, compiled by itself unless what it is in is compiled anyway."""
    if not is_compiled or torch.compiler.is_compiling():
        return rounding
    compiled = _compiled(rounding)
    # What has a gradient would take another graph than what is one.
    return lambda matrix, *others: compiled(matrix.detach(), *others)


@torch.library.custom_op("orchestra::grouped_fp8_products", mutates_args=())
def _one_by_one(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, ends_X: Tensor, keeps_digits: bool
) -> Tensor:
    """Return what the kernel would: [M, O] of [M, I] and [X, O, I], or [X, O, I] of [O, P] and [I, P]. Waits
    for the device.
    """
    is_of_rows = right.dim() == _DIMS_OF_STACK
    shape = (len(left), right.shape[1]) if is_of_rows else (len(ends_X), len(left), len(right))
    out = left.new_empty(shape, dtype=_RESULT)
    begin = 0
    for expert, end in enumerate(ends_X.tolist()):
        own = slice(begin, end)
        if is_of_rows and begin < end:
            # A copy: a view of the scales begins at any multiple of 4 bytes, and nobody promises of a GPU's
            # kernels that they read scales one by one.
            rows = Rounded(left[own], left_scale[own].clone())
            weight = Rounded(right[expert], right_scale[expert])
            out[own] = scaled_product(rows, weight, _RESULT, keeps_digits=keeps_digits)
        elif not is_of_rows:
            grad = Rounded(left[:, own].contiguous(), left_scale[expert])
            x = Rounded(right[:, own].contiguous(), right_scale[expert])
            out[expert] = scaled_product(grad, x, _RESULT, keeps_digits=keeps_digits)
        begin = end
    return out


@_one_by_one.register_fake
def _(left: Tensor, _: Tensor, right: Tensor, __: Tensor, ends_X: Tensor, ___: bool) -> Tensor:
    """What comes of it, as a compiler sees it."""
    shape = (
        (len(left), right.shape[1]) if right.dim() == _DIMS_OF_STACK else (len(ends_X), len(left), len(right))
    )
    return left.new_empty(shape, dtype=_RESULT)


# What recomputation may keep the results of, where there is no kernel.
GROUPED_FP8_PRODUCTS = torch.ops.orchestra.grouped_fp8_products.default


def _grouped_product(
    left: Rounded, right: Rounded, ends_X: Tensor, *, has_kernel: bool, keeps_digits: bool = False
) -> Tensor:
    if not len(left.values):
        return left.values.new_empty(0, right.values.shape[1], dtype=_RESULT)
    product: Tensor
    if has_kernel:
        of_rows = right.values.dim() == _DIMS_OF_STACK
        product = torch._scaled_grouped_mm(
            left.values,
            right.values.mT,
            left.scale.flatten(),
            right.scale.squeeze(-1) if of_rows else right.scale.flatten(),
            offs=ends_X,
            out_dtype=_RESULT,
            use_fast_accum=not keeps_digits,
        )
    else:
        product = _one_by_one(left.values, left.scale, right.values, right.scale, ends_X, keeps_digits)
    return product


# As in `fp8`: what compiled code gives is what a gradient is made of.
@changing("give_grouped_fp8_product")
def _give_grouped_product(
    ticket: Tensor,
    grad: Tensor,
    grad_scale: Tensor,
    rows: Tensor,
    rows_scale: Tensor,
    ends_X: Tensor,
    has_kernel: bool,
) -> None:
    factors = Rounded(grad, grad_scale), Rounded(rows, rows_scale)
    known_by(int(ticket)).add_made(lambda: _gradient_product(*factors, ends_X, has_kernel=has_kernel))


_gradient_product = functools.partial(_grouped_product, keeps_digits=True)


def _give_gradient_of(
    ticket: Tensor | None, grad: Rounded, rows: Rounded, ends_X: Tensor, *, has_kernel: bool
) -> Tensor | None:
    """Return the gradient of stacked weights for autograd, or None where the ticket's owner takes it, perhaps
    later.
    """
    if ticket is None:
        return _gradient_product(grad, rows, ends_X, has_kernel=has_kernel)
    if torch.compiler.is_compiling():
        _give_grouped_product(ticket, *grad, *rows, ends_X, has_kernel)
    else:
        made = functools.partial(_gradient_product, grad, rows, ends_X, has_kernel=has_kernel)
        weight_gradient(ticket).add_made(made)
    return None


class _GroupedProducts(torch.autograd.Function):
    """Products of rows [M, I] with some stacked weights [X, O, I].

    After the weights come their tickets, or nothing, and the weights' rounded copies, or nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_MI: Tensor,
        counts_X: Tensor,
        has_kernel: bool,
        is_compiled: bool,
        num_products: int,
        num_tickets: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.has_kernel, ctx.is_compiled = has_kernel, is_compiled
        ctx.num_products, ctx.num_tickets = num_products, num_tickets
        ctx.num_parameters = len(parameters)
        weights, tickets = parameters[:num_products], parameters[num_products:][:num_tickets]
        copies = parameters[num_products + num_tickets :]
        # Of each weight values and scale by rows, values and scale of the transposed one.
        of_each = [copies[begin : begin + _NUM_COPIES] for begin in range(0, len(copies), _NUM_COPIES)]
        ctx.has_copies = bool(of_each)
        round_stack = _in_one_pass(rounded_stack, is_compiled=is_compiled)
        by_rows = [Rounded(*of_one[:2]) for of_one in of_each] or list(map(round_stack, weights))
        kept = [part for of_one in of_each for part in of_one[2:]] or weights
        ctx.save_for_backward(rows_MI, counts_X, *tickets, *kept)
        rows, ends_X = _in_one_pass(_by_rows, is_compiled=is_compiled)(rows_MI), _ends(counts_X)
        return tuple(_grouped_product(rows, weight, ends_X, has_kernel=has_kernel) for weight in by_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_MI, counts_X, *others = ctx.saved_tensors
        tickets = others[: ctx.num_tickets] or [None] * ctx.num_products
        kept = others[ctx.num_tickets :]
        ends_X, places = _ends(counts_X), _places(counts_X, len(rows_MI))
        by_rows, by_columns, round_stack = (
            _in_one_pass(rounding, is_compiled=ctx.is_compiled)
            for rounding in (_by_rows, _by_columns, rounded_stack)
        )
        rows = by_columns(rows_MI, places)
        grad_rows: Tensor | None = None
        grad_weights: list[Tensor | None] = []
        # The last one's first: the memory that they go to is filled from the model's end.
        for number, (grad_MO, ticket) in reversed(list(enumerate(zip(grads, tickets, strict=True)))):
            if ctx.has_copies:
                weight = Rounded(*kept[2 * number : 2 * number + 2])
            else:
                weight = round_stack(kept[number].transpose(1, 2))
            part = _gradient_product(by_rows(grad_MO), weight, ends_X, has_kernel=ctx.has_kernel)
            grad_rows = part if grad_rows is None else grad_rows.add_(part)
            grad = by_columns(grad_MO, places)
            gradient = _give_gradient_of(ticket, grad, rows, places.ends, has_kernel=ctx.has_kernel)
            grad_weights.append(gradient)
        no_more = [None] * (ctx.num_parameters - ctx.num_products)
        return grad_rows, *[None] * 5, *grad_weights[::-1], *no_more


def rounded_stack(weight_XOI: Tensor) -> Rounded:
    """Return stacked weights in fp8, with a scale for each row of each [X, O, 1]."""
    flat = weight_XOI.flatten(0, 1)
    # What is compiled needs no memory besides.
    is_compiling = torch.compiler.is_compiling()
    found = rounded(flat, FORWARD, Scaling.row) if is_compiling else rounded_in_parts(flat, Scaling.row)
    return Rounded(found.values.view(weight_XOI.shape), found.scale.view(*weight_XOI.shape[:2], 1))


def _ends(counts_X: Tensor) -> Tensor:
    return counts_X.cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class Fp8GroupedProducts:
    """Takes the products of a layer's experts; `has_kernel` as `has_grouped_kernel` says of the device.

    `is_compiled`: what rounds is compiled code, which moves a sixth of the bytes, also where experts are in
    no compiled block, as between exchanges.
    """

    has_kernel: bool
    is_compiled: bool = False

    def __call__(self, rows_MI: Tensor, counts_X: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return for each stacked weight [X, O, I] the products [M, O] of rows sorted by expert, of which
        each expert has so many as `counts_X` (int64) says; the rows are rounded once.

        Rows after those of the last expert belong to none; their results mean nothing.
        """
        tickets = tickets_of(weights)
        found: tuple[Tensor, ...] = _GroupedProducts.apply(  # type: ignore[no-untyped-call]
            rows_MI,
            counts_X,
            self.has_kernel,
            self.is_compiled,
            len(weights),
            len(tickets),
            *weights,
            *tickets,
            *attached(list(weights)),
        )
        return found
