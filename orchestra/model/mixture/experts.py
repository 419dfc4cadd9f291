"""The experts of one layer: SwiGLUs whose weights are stacked, each computing on rows of its own.

Rows come sorted by expert. In 16 bits on a GPU each product over all experts is one kernel
(`torch.nn.functional.grouped_mm`). Elsewhere one expert follows the other, in one operator that neither
compilers nor recomputation look into: what is between its products stays in the cache, and the gradients of
its weights go straight to where they are kept.

Shape letters: M rows, E hidden size, X experts, F inner width of an expert.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig
from orchestra.model.initial import is_fake, takes_gpu_kernels
from orchestra.model.kernels import swiglu
from orchestra.model.operators import changing
from orchestra.model.weight_gradients import (
    WeightGradient,
    add_product_,
    give_gradient,
    known_by,
    tickets_of,
    weight_gradient,
)

# What torch's kernel takes everywhere that it runs.
_KERNEL_DTYPE = torch.bfloat16
# 16 bytes: its rows and columns begin at multiples of it.
_KERNEL_ELEMENTS = 8
# Where a gradient goes, and whether it adds to what is there.
_Memory = tuple[Tensor, bool]
# Given rows [M, I] sorted by expert, how many each expert has, and stacked weights [X, O, I], returns the
# products [M, O] of each.
GroupedProducts = Callable[..., tuple[Tensor, ...]]


class Experts(nn.Module):
    """down(silu(gate(x)) · up(x)) of each expert on its rows."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        num, hidden = model.num_experts, model.hidden_size
        width = model.moe_intermediate_size or model.intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(num, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(num, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num, hidden, width))
        # Another precision puts its own in this place.
        self.products: GroupedProducts | None = None

    def forward(self, rows_ME: Tensor, counts_X: Tensor) -> Tensor:
        """Return [M, E] for rows sorted by expert, of which each has so many as `counts_X` (int64) says.

        Rows after those of the last expert belong to none; their results mean nothing.
        """
        if self.products is not None:
            gate_MF, up_MF = self.products(rows_ME, counts_X, self.gate_proj, self.up_proj)
            (made_ME,) = self.products(swiglu(gate_MF, up_MF), counts_X, self.down_proj)
            return made_ME
        weights = (self.gate_proj, self.up_proj, self.down_proj)
        # Without a row the kernel may leave the weights without a gradient.
        if self._has_kernel and len(rows_ME):
            return _by_kernel(rows_ME, counts_X, *weights)
        tickets = tickets_of(weights) if torch.is_grad_enabled() else []
        return _OneByOne.apply(rows_ME, counts_X, *weights, *tickets)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def num_products(self) -> int:
        """How many operators a forward pass takes the products by."""
        return 3 if self._has_kernel or self.products is not None else 1

    @property
    def _has_kernel(self) -> bool:
        is_even = all(size % _KERNEL_ELEMENTS == 0 for size in self.gate_proj.shape[1:])
        return takes_gpu_kernels(self.gate_proj) and self.gate_proj.dtype is _KERNEL_DTYPE and is_even


def _by_kernel(
    rows_ME: Tensor, counts_X: Tensor, gate_XFE: Tensor, up_XFE: Tensor, down_XEF: Tensor
) -> Tensor:
    ends_X = counts_X.cumsum(0).to(torch.int32)
    gate_MF, up_MF = _stacked_products(rows_ME, ends_X, gate_XFE, up_XFE)
    (out_ME,) = _stacked_products(swiglu(gate_MF, up_MF), ends_X, down_XEF)
    return out_ME


def _stacked_products(rows_MI: Tensor, ends_X: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return the products [M, O] of rows with stacked weights [X, O, I], all experts in one kernel each."""
    tickets = tickets_of(weights) if torch.is_grad_enabled() else []
    if not tickets:
        return tuple(F.grouped_mm(rows_MI, weight.transpose(1, 2), offs=ends_X) for weight in weights)
    made: tuple[Tensor, ...] = _StackedProducts.apply(rows_MI, ends_X, len(weights), *weights, *tickets)  # type: ignore[no-untyped-call]
    return made


class _StackedProducts(torch.autograd.Function):
    """The same where the weights' gradients go to who takes them, perhaps later."""

    @staticmethod
    def forward(
        ctx: Any, rows_MI: Tensor, ends_X: Tensor, num_products: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.num_products = num_products
        ctx.save_for_backward(rows_MI, ends_X, *parameters)
        weights = parameters[:num_products]
        return tuple(F.grouped_mm(rows_MI, weight.transpose(1, 2), offs=ends_X) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_MI, ends_X, *parameters = ctx.saved_tensors
        weights, tickets = parameters[: ctx.num_products], parameters[ctx.num_products :]
        grad_rows: Tensor | None = None
        # The last one's first: the memory that they go to is filled from the model's end.
        for grad, weight, ticket in reversed(list(zip(grads, weights, tickets, strict=True))):
            grad_MO = grad.contiguous()
            part = F.grouped_mm(grad_MO, weight, offs=ends_X)
            grad_rows = part if grad_rows is None else grad_rows.add_(part)
            if torch.compiler.is_compiling():
                _give_stacked_product(ticket, grad_MO, rows_MI, ends_X)
            else:
                made = functools.partial(_stacked_gradient, grad_MO, rows_MI, ends_X)
                weight_gradient(ticket).add_made(made)
        return grad_rows, None, None, *[None] * len(parameters)


def _stacked_gradient(grad_MO: Tensor, rows_MI: Tensor, ends_X: Tensor) -> Tensor:
    made: Tensor = F.grouped_mm(grad_MO.t(), rows_MI, offs=ends_X)
    return made


@changing("give_stacked_product")
def _give_stacked_product(ticket: Tensor, grad_MO: Tensor, rows_MI: Tensor, ends_X: Tensor) -> None:
    known_by(int(ticket)).add_made(lambda: _stacked_gradient(grad_MO, rows_MI, ends_X))


class _OneByOne(torch.autograd.Function):
    """All experts, one after the other; keeps the rows, gate and up, and computes silu again."""

    @staticmethod
    def forward(ctx: Any, rows_ME: Tensor, counts_X: Tensor, *parameters: Tensor) -> Tensor:
        made: tuple[Tensor, Tensor, Tensor] = _experts(rows_ME, counts_X, *parameters[:3])
        out_ME, gate_MF, up_MF = made
        ctx.save_for_backward(rows_ME, gate_MF, up_MF, counts_X, *parameters)
        return out_ME

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        kept, weights, tickets = saved[:4], saved[4:7], saved[7:]
        is_compiled = torch.compiler.is_compiling()
        takers = [] if is_compiled else [weight_gradient(ticket) for ticket in tickets]
        if takers:
            pass_of = _with_takers if all(taker.takes_now for taker in takers) else _weights_later
            grad_rows = pass_of(grads[0], kept, weights, takers)
            return grad_rows, None, *[None] * (3 + len(tickets))
        grad_rows, *of_weights = _experts_gradients(grads[0], *kept, *weights)
        given = [
            give_gradient(ticket, gradient)
            for ticket, gradient in zip(tickets or (None,) * 3, of_weights, strict=True)
        ]
        return grad_rows, None, *given, *[None] * len(tickets)


def _with_takers(
    grad_ME: Tensor, kept: Sequence[Tensor], weights: Sequence[Tensor], takers: Sequence[WeightGradient]
) -> Tensor:
    """Return the gradient of the rows; those of the weights go to who takes them."""
    memory = [taker.begin() for taker in takers]
    grad_rows = _backward(grad_ME, kept, weights, memory)
    # The memory that they go to is filled from the model's end.
    for taker in reversed(takers):
        taker.end()
    return grad_rows


def _weights_later(
    grad_ME: Tensor, kept: Sequence[Tensor], weights: Sequence[Tensor], takers: Sequence[WeightGradient]
) -> Tensor:
    """Return the gradient of the rows, and let those of the weights be taken when there is time for them."""
    rows_ME, gate_MF, up_MF, counts_X = kept
    inner_grads = torch.empty_like(gate_MF), torch.empty_like(up_MF)
    grad_rows = _backward(grad_ME, kept, weights, (), inner_grads)
    counts = _numbers(counts_X, len(rows_ME))

    def of_down() -> Tensor:
        return _gradient_one_by_one(grad_ME, F.silu(gate_MF).mul_(up_MF), counts)

    of_gate, of_up = (
        functools.partial(_gradient_one_by_one, grad_MF, rows_ME, counts) for grad_MF in inner_grads
    )
    makers: tuple[Callable[[], Tensor], ...] = (of_gate, of_up, of_down)
    for taker, make in reversed(list(zip(takers, makers, strict=True))):
        taker.add_made(make)
    return grad_rows


def _gradient_one_by_one(grad_MO: Tensor, x_MI: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the gradient [X, O, I] of stacked weights."""
    made = grad_MO.new_zeros(len(counts), grad_MO.shape[1], x_MI.shape[1])
    for expert, own in _ranges(counts):
        torch.mm(grad_MO[own].t(), x_MI[own], out=made[expert])
    return made


def _numbers(counts_X: Tensor, num_rows: int) -> list[int]:
    """Return the counts; without values, in a dry run, even ones."""
    if not is_fake(counts_X):
        counts: list[int] = counts_X.tolist()
        return counts
    each, more = divmod(num_rows, len(counts_X))
    return [each + (expert < more) for expert in range(len(counts_X))]


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with where they are."""
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(begin, begin + count)
        begin += count


@torch.library.custom_op("orchestra::experts", mutates_args=())
def _experts(
    rows_ME: Tensor, counts_X: Tensor, gate_XFE: Tensor, up_XFE: Tensor, down_XEF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and what gate and up made."""
    out_ME = torch.empty_like(rows_ME)
    gate_MF = rows_ME.new_empty(len(rows_ME), gate_XFE.shape[1])
    up_MF = torch.empty_like(gate_MF)
    for expert, own in _ranges(_numbers(counts_X, len(rows_ME))):
        gate, up = gate_MF[own], up_MF[own]
        torch.mm(rows_ME[own], gate_XFE[expert].t(), out=gate)
        torch.mm(rows_ME[own], up_XFE[expert].t(), out=up)
        torch.mm(F.silu(gate).mul_(up), down_XEF[expert].t(), out=out_ME[own])
    return out_ME, gate_MF, up_MF


@_experts.register_fake
def _(rows_ME: Tensor, _: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What comes of it, as a compiler sees it."""
    inner = rows_ME.new_empty(rows_ME.shape[0], weights[0].shape[1])
    return torch.empty_like(rows_ME), inner, torch.empty_like(inner)


# What recomputation may keep the results of.
EXPERTS = torch.ops.orchestra.experts.default


def _backward(
    grad_ME: Tensor,
    kept: Sequence[Tensor],
    weights: Sequence[Tensor],
    memory: Sequence[_Memory],
    inner_grads: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the gradient of the rows; those of the weights go into `memory`, or where it is empty those of
    what gate and up made into `inner_grads`. `kept`: the rows, what gate and up made, and the counts.
    """
    rows_ME, gate_MF, up_MF, counts_X = kept
    gate_XFE, up_XFE, down_XEF = weights
    grad_rows = torch.empty_like(rows_ME)
    counts = _numbers(counts_X, len(rows_ME))
    # Without values all are alike, and one of the fullest stands for them.
    ranges = itertools.islice(_ranges(counts), 1) if is_fake(counts_X) else _ranges(counts)
    for expert, own in ranges:
        grad, rows, gate, up = grad_ME[own], rows_ME[own], gate_MF[own], up_MF[own]
        inner_grad = grad @ down_XEF[expert]
        silu = F.silu(gate)
        for into, adds in memory[2:]:
            add_product_(into[expert], grad.t(), silu * up, adds=adds)
        gate_grad = inner_grad * up
        torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
        up_grad = silu.mul_(inner_grad)
        for (into, adds), of_weight in zip(memory[:2], (gate_grad, up_grad), strict=False):
            add_product_(into[expert], of_weight.t(), rows, adds=adds)
        for whole, part in zip(inner_grads or (), (gate_grad, up_grad), strict=False):
            whole[own] = part
        torch.mm(gate_grad, gate_XFE[expert], out=grad_rows[own])
        grad_rows[own].addmm_(up_grad, up_XFE[expert])
    for expert, count in enumerate(counts):
        for into, adds in memory:
            if not count and not adds:
                into[expert].zero_()
    return grad_rows


@torch.library.custom_op("orchestra::experts_gradients", mutates_args=())
def _experts_gradients(
    grad_ME: Tensor,
    rows_ME: Tensor,
    gate_MF: Tensor,
    up_MF: Tensor,
    counts_X: Tensor,
    gate_XFE: Tensor,
    up_XFE: Tensor,
    down_XEF: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = (gate_XFE, up_XFE, down_XEF)
    gate_grad, up_grad, down_grad = (torch.empty_like(weight) for weight in weights)
    memory = [(gate_grad, False), (up_grad, False), (down_grad, False)]
    grad_rows = _backward(grad_ME, (rows_ME, gate_MF, up_MF, counts_X), weights, memory)
    return grad_rows, gate_grad, up_grad, down_grad


@_experts_gradients.register_fake
def _(_: Tensor, rows_ME: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """What comes of it, as a compiler sees it."""
    return (torch.empty_like(rows_ME), *(torch.empty_like(weight) for weight in others[-3:]))
