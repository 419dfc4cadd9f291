"""ZeRO-3: gathers each unit's parameters before they are needed and lets other units have the memory behind.

The units are the model's blocks. Each has its place in one of a few buffers that blocks use in turn, fixed
once: parameters, and whatever autograd keeps of them, stay views of the same memory, which is filled again
before the backward pass reads it. While a block computes, the next one's parameters come. What a buffer still
holds is not gathered a second time: at the turn from the forward to the backward pass, and between
micro-batches.

The hooks stand around the blocks as modules, outside of what is compiled or recomputed inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from orchestra.model.transformer import Transformer
from orchestra.parallel.zero.collectives import Collectives, Pending
from orchestra.parallel.zero.reducer import Reducer
from orchestra.parallel.zero.storage import Units


class _Buffer:
    """One memory, which unit's parameters it holds (None: nobody's), and what still fills it."""

    def __init__(self) -> None:
        self.holder: int | None = None
        self.pending: Pending | None = None

    def settle(self) -> None:
        if self.pending is not None:
            self.pending.finish()
            self.pending = None


class Gatherer:
    """Fills the parameters of a model by blocks. *Collective* over the shard group.

    Units are counted in the model's order here: 0 is what stands before the layers, the last one what stands
    behind.
    """

    def __init__(self, model: Transformer, units: Units, shard: Collectives, reducer: Reducer) -> None:
        self._units = units.units[::-1]
        self._shard = shard
        self._reducer = reducer
        self._is_backward = False
        memories = {unit.whole.untyped_storage()._cdata: _Buffer() for unit in self._units}
        self._buffers = [memories[unit.whole.untyped_storage()._cdata] for unit in self._units]
        # Collectives write through an alias that counts no versions: autograd must not take the refilling of
        # a buffer for a change of what it has kept.
        self._wholes = [unit.whole.data for unit in self._units]
        blocks = [model.embed_tokens, *model.layers, model.norm]
        assert len(blocks) == len(self._units)
        self._hooks = [
            block.register_forward_pre_hook(self._before_forward(number))
            for number, block in enumerate(blocks)
        ]
        self._hooks += [
            block.register_forward_hook(self._behind_forward(number))
            for number, block in enumerate(model.layers, 1)
        ]

    def begin(self) -> None:
        """Start to fetch what a forward pass needs first."""
        self._is_backward = False
        self._prefetch(0)
        self._prefetch(1)

    def forget(self) -> None:
        """Let nothing count as gathered any more: the parameters are about to change."""
        for buffer in self._buffers:
            buffer.settle()
            buffer.holder = None

    def close(self) -> None:
        """Watch the model no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_forward(self, number: int) -> Callable[..., None]:
        def gather(*_: Any) -> None:
            self._need(number)
            if not self._is_backward:  # a block that is recomputed needs no other one
                self._prefetch(number + 1)

        return gather

    def _behind_forward(self, number: int) -> Callable[..., None]:
        def before_backward(_: Tensor) -> None:
            self._is_backward = True
            self._need(number)
            # The embedding's backward pass needs no parameters.
            if number > 1:
                self._prefetch(number - 1)

        def watch(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if output.requires_grad and not self._is_backward:
                output.register_hook(before_backward)  # type: ignore[no-untyped-call]

        return watch

    def _need(self, number: int) -> None:
        """Have a unit's parameters in place."""
        if self._buffers[number].holder != number:
            self._start(number)
        self._buffers[number].settle()

    def _prefetch(self, number: int) -> None:
        """Start to gather a unit, unless its buffer is in use."""
        if number == len(self._units):
            return
        holder = self._buffers[number].holder
        is_busy = holder is not None and self._is_backward and not self._is_through(holder)
        if holder != number and not is_busy:
            self._start(number)

    def _is_through(self, number: int) -> bool:
        return self._reducer.is_taken(len(self._units) - 1 - number)

    @torch.no_grad()
    def _start(self, number: int) -> None:
        unit, whole, buffer = self._units[number], self._wholes[number], self._buffers[number]
        buffer.settle()
        begin, end = unit.layout.range_of(unit.index)
        whole[begin:end].copy_(unit.owned, non_blocking=True)
        buffer.pending = self._shard.gather(whole)
        buffer.holder = number
