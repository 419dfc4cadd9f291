"""Sums and gathers over the ranks of a tensor-parallel group, as plain calls and as autograd functions.

A full tensor [B, S, E] lies on every rank. Under sequence parallelism a rank has a part of it in the shape
[B, S/N, E]: the rank's run of the B·S tokens in their flat order, N ranks. So a part is one piece of memory,
and gathering is no more than concatenating pieces. What has this shape may be computed with token
by token (norms, residual sums) and in no other way.

The sum over ranks is taken in the dtype of the tensor and, where it is scattered, in the order of the ranks.
gloo's own reduce-scatter moves more bytes and took 2 to 4 times as long as the exchange that stands here.

Under torch.compile the functional collectives are traced instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from orchestra.parallel.marks import Traffic, marked
from orchestra.parallel.mesh import collective_named
from orchestra.sizes.step_shares import Part


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share a layer, and how this one lays out what lies between the products."""

    process_group: dist.ProcessGroup
    # torch's functional collectives take any string, and call the type of some of them a name.
    name: Any
    size: int
    rank: int
    # Whether norms and the residual stream are on this rank's part of the tokens only.
    is_sequence_parallel: bool = False
    # Whether the gathered input of a product is gathered again in the backward pass instead of being kept.
    gathers_again: bool = False
    # Counts what this rank sends; what is compiled is not counted.
    traffic: Traffic = field(default_factory=Traffic, compare=False)


# Operators know groups by their names only.
_GROUPS: dict[str, TensorGroup] = {}


def tensor_group(
    group: dist.ProcessGroup,
    traffic: Traffic,
    *,
    is_sequence_parallel: bool = False,
    gathers_again: bool = False,
) -> TensorGroup:
    """Return the tensor group over the ranks of a process group; `traffic` counts what they send."""
    name = group.group_name
    _GROUPS[name] = TensorGroup(
        group, name, group.size(), group.rank(), is_sequence_parallel, gathers_again, traffic
    )
    return _GROUPS[name]


def group_named(name: str) -> TensorGroup:
    """Return the tensor group that was last made of the process group of this name."""
    return _GROUPS[name]


def _part_shape(full: Tensor, group: TensorGroup) -> tuple[int, ...]:
    return (*full.shape[:-2], full.shape[-2] // group.size, full.shape[-1])


def _full_shape(part: Tensor, group: TensorGroup) -> tuple[int, ...]:
    return (*part.shape[:-2], part.shape[-2] * group.size, part.shape[-1])


class _Work:
    """A collective under way, the wait for which is marked in traces."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        with marked(Part.communication):
            self._work.wait()


def _started(collective: Callable[..., Any], *tensors: Tensor, group: dist.ProcessGroup) -> _Work:
    with marked(Part.communication):
        return _Work(collective(*tensors, group=group, async_op=True))


class PendingScatter:
    """A reduce-scatter under way; `wait` returns this rank's part of the sum."""

    def __init__(self, full: Tensor, group: TensorGroup) -> None:
        self._part_shape = _part_shape(full, group)
        self._group = group
        group.traffic.add_reduce_scatter(full.nbytes, group.size)
        flat = full.contiguous().view(-1)
        if full.is_cuda:
            self._arrived = flat.new_empty(flat.numel() // group.size)
            scatter = collective_named("reduce_scatter_single", "reduce_scatter_tensor")
        else:
            self._arrived = torch.empty_like(flat)
            scatter = dist.all_to_all_single
        self._work = _started(scatter, self._arrived, flat, group=group.process_group)

    def wait(self) -> Tensor:
        self._work.wait()
        if self._arrived.is_cuda:
            return self._arrived.view(self._part_shape)
        first, *others = self._arrived.view(self._group.size, -1).unbind(0)
        total = first + others[0] if others else first
        for other in others[1:]:
            total += other
        return total.view(self._part_shape)


class PendingGather:
    """An all-gather under way; `wait` returns the full tensor."""

    def __init__(self, part: Tensor, group: TensorGroup) -> None:
        self._full = part.new_empty(_full_shape(part, group))
        self._work = _gather_into(self._full.view(-1), part.contiguous().view(-1), group)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._full


def _gather_into(out: Tensor, flat: Tensor, group: TensorGroup) -> _Work:
    group.traffic.add_all_gather(out.nbytes, group.size)
    gather = collective_named("all_gather_single", "all_gather_into_tensor")
    return _started(gather, out, flat, group=group.process_group)


def start_sum(tensor: Tensor, group: TensorGroup) -> Any:
    """Begin to sum a contiguous tensor over the ranks in place; return what to wait for. *Collective*."""
    group.traffic.add_all_reduce(tensor.nbytes, group.size)
    return _started(dist.all_reduce, tensor, group=group.process_group)


def gather_parts(part: Tensor, group: TensorGroup) -> Tensor:
    """Return the full tensor of which each rank has a part. *Collective*."""
    return PendingGather(part, group).wait()


def gather_stacked(tensor: Tensor, group: TensorGroup) -> Any:
    """Begin to gather [N, …] of equal tensors; return them and what to wait for. *Collective*."""
    stacked = tensor.new_empty((group.size, *tensor.shape))
    return stacked, _gather_into(stacked.view(-1), tensor.contiguous().view(-1), group)


# Both sums are operators of torch's own kind, so that selective recomputation, which sees operators, can keep
# their results and need not communicate again. Both spend their input.
_LIBRARY: Any = torch.library.Library("orchestra", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("sum_(Tensor(a!) partial, str group) -> ()")
_LIBRARY.define("sum_scattered(Tensor(a!) partial, str group) -> Tensor")


def _sum_(partial: Tensor, group: str) -> None:
    start_sum(partial, _GROUPS[group]).wait()


def _sum_scattered(partial: Tensor, group: str) -> Tensor:
    part = PendingScatter(partial, _GROUPS[group]).wait()
    # Whoever keeps the product's result for the backward pass keeps no memory of it.
    partial.untyped_storage().resize_(0)
    return part


_KEY = "CompositeExplicitAutograd"
_LIBRARY.impl("sum_", _sum_, _KEY)
_LIBRARY.impl("sum_scattered", _sum_scattered, _KEY)
SUM_IN_PLACE = torch.ops.orchestra.sum_.default
SUM_SCATTERED = torch.ops.orchestra.sum_scattered.default


def _traced_sum(tensor: Tensor, group: TensorGroup) -> Tensor:
    return _arrived(functional.all_reduce(tensor, "sum", group.name))


def _traced_scatter(full: Tensor, group: TensorGroup) -> Tensor:
    part = functional.reduce_scatter_tensor(full.flatten(0, -2), "sum", 0, group.name)
    return _arrived(part).view(_part_shape(full, group))


def _traced_gather(part: Tensor, group: TensorGroup) -> Tensor:
    full = functional.all_gather_tensor(part.flatten(0, -2), 0, group.name)
    return _arrived(full).view(_full_shape(part, group))


def _arrived(pending: Tensor) -> Tensor:
    return functional.wait_tensor(pending)  # type: ignore[no-any-return, no-untyped-call]


class _Summed(torch.autograd.Function):
    """Forward: the sum over ranks, in the input's memory. Backward: nothing, every rank has the gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: TensorGroup) -> Tensor:
        if torch.compiler.is_compiling():
            return _traced_sum(partial, group)
        SUM_IN_PLACE(partial, group.name)
        ctx.mark_dirty(partial)
        return partial

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SummedParts(torch.autograd.Function):
    """Forward: this rank's part of the sum over ranks; spends the input. Backward: the gathered gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        if torch.compiler.is_compiling():
            return _traced_scatter(partial, group)
        part: Tensor = SUM_SCATTERED(partial, group.name)
        return part

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gather = _traced_gather if torch.compiler.is_compiling() else gather_parts
        return gather(grads[0], ctx.group), None


class _Entering(torch.autograd.Function):
    """Forward: the full input of products that are cut by rows. Backward: the sum of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        if not group.is_sequence_parallel:
            # Where a graph ends behind it a view would be made again from `x`, and its gradients not summed.
            return x.clone() if torch.compiler.is_compiling() else x.view_as(x)
        return _traced_gather(x, group) if torch.compiler.is_compiling() else gather_parts(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        group: TensorGroup = ctx.group
        if torch.compiler.is_compiling():
            traced = _traced_scatter if group.is_sequence_parallel else _traced_sum
            return traced(grads[0], group), None
        if group.is_sequence_parallel:
            return PendingScatter(grads[0], group).wait(), None
        total = grads[0].clone()
        start_sum(total, group).wait()
        return total, None


def entering(x: Tensor, group: TensorGroup) -> Tensor:
    """Return the full [B, S, E] of what lies between products; its gradients are summed. *Collective*."""
    return _Entering.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def leaving(partial: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum over ranks of [B, S, E], or this rank's part of it; spends `partial`. *Collective*."""
    function = _SummedParts if group.is_sequence_parallel else _Summed
    return function.apply(partial, group)  # type: ignore[no-any-return, no-untyped-call]
