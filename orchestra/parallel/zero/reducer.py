"""Gradients in flat units: taken as autograd finishes them, accumulated over micro-batches, and summed over
the data-parallel ranks while the backward pass still runs.

Kept whole (ZeRO-0 and -1) they accumulate in full, and a unit's sum starts after its last gradient of the
last micro-batch. Otherwise (ZeRO-2 and -3) a unit's gradients exist only from the first one of a micro-batch
until they are summed into the ranges of their owners, and accumulate there; the memory then serves the next
unit. Units start in a fixed order on every rank, whatever order autograd finishes in, so that the collectives
always match.

The sum is not divided: the loss is normalised by the global number of tokens before the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchestra.parallel.zero.buffers import SpareMemory, Unit, Units
from orchestra.parallel.zero.zero_collectives import Collectives, Pending
from orchestra.precision.policies import PrecisionPolicy

# Sums under way that need memory beside the gradients: one that is sent while the next unit fills.
_MAX_UNDER_WAY = 1


@dataclass
class _Gradients:
    """One unit's gradients. `whole` is None where they are not kept and none of them has come yet."""

    unit: Unit
    owned: Tensor
    whole: Tensor | None
    views: list[Tensor] = field(default_factory=list)
    num_missing: int = 0


@dataclass(frozen=True)
class _UnderWay:
    """The sum of one unit's ranges, and the micro-batch that it belongs to."""

    gradients: _Gradients
    whole: Tensor
    pending: Pending
    is_first: bool
    is_last: bool


class Reducer:
    """Takes the gradients of some units and sums them. *Collective* over both groups.

    `shard` sums each rank's range, `replicate` what is then still to be summed; either may be None. After
    `finish`, `owned(number)` holds the sum of the range that this rank owns of unit `number`.
    """

    def __init__(
        self,
        units: Units,
        precision: PrecisionPolicy,
        shard: Collectives | None,
        replicate: Collectives | None,
        *,
        keeps_whole: bool,
    ) -> None:
        self._shard, self._replicate = shard, replicate
        self._keeps_whole = keeps_whole or shard is None
        self._is_first = self._is_last = True
        self._next_to_sum = 0
        self._under_way: deque[_UnderWay] = deque()
        self._of_replicas: list[Pending] = []
        self._spare = SpareMemory(precision.reduce)
        self._units = [self._made(unit, precision.gradient) for unit in units.units]
        self._hooks = [
            item.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._taker(gradients, number)
            )
            for gradients in self._units
            for number, item in enumerate(gradients.unit.trained)
        ]

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """Expect the gradients of a micro-batch."""
        self._is_first, self._is_last = is_first, is_last
        self._next_to_sum = 0
        for gradients in self._units:
            gradients.num_missing = len(gradients.unit.trained)

    def finish(self) -> None:
        """Wait for all sums."""
        # A parameter that took no part in the loss would leave its unit unsummed, and the ranks would part.
        assert all(self.is_taken(number) for number in range(len(self._units))), "a parameter got no gradient"
        while self._under_way:
            self._complete()
        for pending in self._of_replicas:
            pending.finish()
        self._of_replicas.clear()

    def owned(self, number: int) -> Tensor:
        """Return the flat gradients of the range that this rank owns of a unit."""
        return self._units[number].owned

    def is_taken(self, number: int) -> bool:
        """Whether the backward pass of this micro-batch is through with a unit."""
        return self._units[number].num_missing == 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients that are kept from one micro-batch to the next."""
        kept = (unit.whole if self._keeps_whole else unit.owned for unit in self._units)
        return sum(flat.nbytes for flat in kept if flat is not None)

    def close(self) -> None:
        """Take no more gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _made(self, unit: Unit, dtype: torch.dtype) -> _Gradients:
        if not self._keeps_whole:
            return _Gradients(unit, torch.zeros_like(unit.owned, dtype=dtype, device=unit.whole.device), None)
        whole = torch.zeros_like(unit.whole, dtype=dtype)
        begin, end = unit.layout.range_of(unit.index)
        return _Gradients(unit, whole[begin:end], whole, unit.whole_views(whole))

    def _taker(self, gradients: _Gradients, number: int) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if gradients.whole is None:
                self._give_memory(gradients)
            if self._is_first or not self._keeps_whole:
                gradients.views[number].copy_(gradient)
            else:
                gradients.views[number].add_(gradient)
            parameter.grad = None
            gradients.num_missing -= 1
            if gradients.num_missing == 0:
                self._sum_ready()

        return take

    def _give_memory(self, gradients: _Gradients) -> None:
        """Let a unit use memory that another one has left; gaps in it hold what they may."""
        while not self._spare and self._under_way:
            self._complete()
        unit = gradients.unit
        memory = self._spare.take(unit.layout.size, unit.whole.device)
        gradients.whole = memory
        gradients.views = unit.whole_views(memory)

    def _sum_ready(self) -> None:
        """Start the sums of finished units, in their fixed order."""
        if self._keeps_whole and not self._is_last:
            return
        for gradients in self._units[self._next_to_sum :]:
            if gradients.num_missing:
                return
            self._next_to_sum += 1
            self._sum(gradients)

    def _sum(self, gradients: _Gradients) -> None:
        assert gradients.whole is not None
        if self._shard is None:
            if self._replicate is not None:
                self._of_replicas.append(self._replicate.sum_whole(gradients.whole))
            return
        while len(self._under_way) >= _MAX_UNDER_WAY:
            self._complete()
        whole = gradients.whole
        pending = self._shard.sum_range(whole[: gradients.unit.layout.size])
        self._under_way.append(_UnderWay(gradients, whole, pending, self._is_first, self._is_last))
        if not self._keeps_whole:
            gradients.whole = None
            gradients.views = []

    def _complete(self) -> None:
        """Wait for the oldest sum of ranges, and put it where it belongs."""
        done = self._under_way.popleft()
        done.pending.finish()
        owned = done.gradients.owned
        if not self._keeps_whole:
            begin, end = done.gradients.unit.layout.range_of(done.gradients.unit.index)
            if done.is_first:
                owned.copy_(done.whole[begin:end])
            else:
                owned.add_(done.whole[begin:end])
            self._spare.give(done.whole)
        if done.is_last and self._replicate is not None:
            self._of_replicas.append(self._replicate.sum_whole(owned))
