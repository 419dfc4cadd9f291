"""Gradients in flat buckets: accumulated over micro-batches, summed over the data-parallel ranks while the
backward pass still runs.

A bucket is one flat tensor in the policy's gradient dtype; its parameters lie in it in the reverse of their
order in the model, which is about the order in which the backward pass finishes them. As soon as the last
parameter of a bucket has its gradient of the last micro-batch, the bucket's all-reduce starts. Buckets start
in a fixed order on every rank, whatever order autograd finishes in, so the collectives always match.

The sum is not divided: the loss is normalised by the global number of tokens before the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from orchestra.optim.adamw import Trained


class Gradients(Protocol):
    """What the training step asks of whoever keeps the gradients."""

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """Announce the backward pass of a micro-batch: the first overwrites, later ones add, the last
        reduces.
        """

    def finish(self) -> Sequence[Tensor]:
        """Set every master's gradient, summed over the ranks; return tensors that hold each gradient once."""

    def release(self) -> None:
        """Let go of the masters' gradients, after the optimizer has used them."""


class PlainGradients:
    """Autograd's own accumulation: for one rank whose gradients have the masters' dtype."""

    def __init__(self, trained: Sequence[Trained]) -> None:
        self._masters = [item.master for item in trained]

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """Nothing to prepare: `release` has left no gradient behind."""

    def finish(self) -> Sequence[Tensor]:
        return [master.grad for master in self._masters if master.grad is not None]

    def release(self) -> None:
        for master in self._masters:
            master.grad = None


@dataclass
class _Bucket:
    """One flat tensor, where each member's gradient lies in it, and how many gradients are still to come."""

    flat: Tensor
    members: list[Trained]
    num_missing: int = 0

    def views(self) -> Iterator[tuple[Trained, Tensor]]:
        parts = torch.split(self.flat, [item.parameter.numel() for item in self.members])
        for item, part in zip(self.members, parts, strict=True):
            yield item, part.view_as(item.parameter)


class GradientBuckets:
    """Takes each gradient as autograd finishes it, moves it into its bucket and reduces full buckets.

    *Collective* over `group`; with group None nothing is communicated and only the accumulation in the
    gradient dtype is left.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        dtype: torch.dtype,
        bucket_bytes: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._group = group
        self._works: list[dist.Work] = []
        self._next_to_reduce = 0
        self._is_first = self._is_last = True
        self._buckets = [
            _Bucket(_flat(members, dtype), members)
            for members in _in_buckets(list(reversed(trained)), dtype, bucket_bytes)
        ]
        views = {item.name: view for bucket in self._buckets for item, view in bucket.views()}
        # One view for each parameter, not one tensor for each bucket: the norm is then summed in the same
        # order whatever the buckets, and two ranks follow the very bits of one rank with two micro-batches.
        self._in_model_order = [views[item.name] for item in trained]
        for bucket in self._buckets:
            for item, view in bucket.views():
                item.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._taker(bucket, view)
                )

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self._is_first, self._is_last = is_first, is_last
        self._next_to_reduce = 0
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.members)

    def finish(self) -> Sequence[Tensor]:
        # A parameter that took no part in the loss would leave its bucket unsummed, and the ranks would part.
        assert not any(bucket.num_missing for bucket in self._buckets), "a parameter got no gradient"
        for work in self._works:
            work.wait()
        self._works.clear()
        for bucket in self._buckets:
            for item, view in bucket.views():
                # The fused optimizer wants gradients of its own dtype; where they differ this is a copy.
                item.master.grad = view.to(item.master.dtype)
        return self._in_model_order

    def release(self) -> None:
        for bucket in self._buckets:
            for item in bucket.members:
                item.master.grad = None

    def _taker(self, bucket: _Bucket, view: Tensor) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if self._is_first:
                view.copy_(gradient)
            else:
                view.add_(gradient)
            parameter.grad = None
            bucket.num_missing -= 1
            if self._is_last and bucket.num_missing == 0:
                self._reduce_ready()

        return take

    def _reduce_ready(self) -> None:
        """Start the reduction of finished buckets, in their fixed order."""
        if self._group is None:
            return
        for bucket in self._buckets[self._next_to_reduce :]:
            if bucket.num_missing:
                return
            work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)
            self._next_to_reduce += 1


def _flat(members: list[Trained], dtype: torch.dtype) -> Tensor:
    size = sum(item.parameter.numel() for item in members)
    return torch.zeros(size, dtype=dtype, device=members[0].parameter.device)


def _in_buckets(trained: list[Trained], dtype: torch.dtype, bucket_bytes: int) -> list[list[Trained]]:
    """Group parameters in order into buckets of at least bucket_bytes; the last may be smaller."""
    buckets: list[list[Trained]] = []
    current: list[Trained] = []
    size = 0
    for item in trained:
        current.append(item)
        size += item.parameter.numel() * dtype.itemsize
        if size >= bucket_bytes:
            buckets.append(current)
            current, size = [], 0
    return [*buckets, current] if current else buckets
