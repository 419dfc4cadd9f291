"""ZeRO-3: gathers each unit's parameters before they are needed, and then reuses their memory.

The units are the model's blocks, their experts apart. Each has its place in one of a few buffers that blocks
use in turn, fixed once: parameters, and whatever autograd keeps of them, stay views of the same memory, which
is filled again before the backward pass reads it. While a block computes, the next one's parameters come.
What a buffer still holds is not gathered a second time: at the turn from the forward to the backward pass,
and between micro-batches. Experts that one rank alone has are there all the time.

The hooks stand around the blocks as modules, outside of what is compiled or recomputed inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from orchestra.model.transformer import Transformer
from orchestra.parallel.zero.buffers import Units, block_of
from orchestra.parallel.zero.late_update import LateUpdate
from orchestra.parallel.zero.reducer import Reducer
from orchestra.parallel.zero.rounded_units import RoundedUnits
from orchestra.parallel.zero.zero_collectives import DataRanks, Pending


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
    """Fills the parameters of a model by blocks. *Collective* over the groups that share units.

    Units are counted in the model's order here: 0 is what comes before the layers, the last one what comes
    after them; and so are blocks, which have one unit or, with experts, two. `rounded` brings the units that
    it contains.
    """

    def __init__(
        self,
        model: Transformer,
        units: Units,
        ranks: DataRanks,
        reducer: Reducer,
        rounded: RoundedUnits,
        late: LateUpdate | None = None,
    ) -> None:
        self._late = late
        self._units = units.units[::-1]
        self._ranks = ranks
        self._reducer = reducer
        self._rounded = rounded
        self._is_backward = False
        memories = {unit.whole.untyped_storage()._cdata: _Buffer() for unit in self._units}
        self._buffers = [memories[unit.whole.untyped_storage()._cdata] for unit in self._units]
        # Collectives write through an alias that counts no versions: autograd must not take the refilling of
        # a buffer for a change of what it has kept.
        self._wholes = [unit.whole.data for unit in self._units]
        unit_of = {
            id(item.parameter): number for number, unit in enumerate(self._units) for item in unit.trained
        }
        keys = [(unit.part, block_of(unit.layout)) for unit in self._units]
        by_block = groupby(range(len(keys)), key=lambda number: keys[number])
        self._blocks = [list(numbers) for _, numbers in by_block]
        # Of the part after it nothing is fetched in advance: another rank may come first.
        self._parts = [self._units[numbers[0]].part for numbers in self._blocks]
        block_with = {number: block for block, numbers in enumerate(self._blocks) for number in numbers}
        # The embedding's backward pass needs no parameters.
        self._with_backward: set[int] = set()
        self._hooks = []
        for block, users in _blocks(model):
            parameters = [parameter for user in users for parameter in user.parameters()]
            numbers = sorted({unit_of[id(parameter)] for parameter in parameters})
            last = block_with[numbers[-1]]
            self._hooks.append(block.register_forward_pre_hook(self._before_forward(numbers, last)))
            if block not in (model.embed_tokens, model.norm):
                self._with_backward.add(last)
                self._hooks.append(block.register_forward_hook(self._after_forward(last)))

    def begin(self, part: int = 0) -> None:
        """Start to fetch what a forward pass needs first."""
        self._is_backward = False
        first = self._parts.index(part)
        self._prefetch(first, part)
        self._prefetch(first + 1, part)

    def forget(self) -> None:
        """Let nothing count as gathered any more: the parameters are about to change."""
        self._rounded.forget()
        for buffer in self._buffers:
            buffer.settle()
            buffer.holder = None

    @property
    def rounded_bytes(self) -> int:
        """Bytes that are kept because matrices travel rounded."""
        return self._rounded.num_bytes

    def close(self) -> None:
        """Watch the model no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_forward(self, numbers: Sequence[int], last: int) -> Callable[..., None]:
        def gather(*_: Any) -> None:
            for number in numbers:
                self._need(number)
            if not self._is_backward:  # a block that is recomputed needs no other one
                self._prefetch(last + 1, self._parts[last])

        return gather

    def _after_forward(self, block: int) -> Callable[..., None]:
        def before_backward(_: Tensor) -> None:
            self._is_backward = True
            for number in self._blocks[block]:
                self._need(number)
            if block - 1 in self._with_backward:
                self._prefetch(block - 1, self._parts[block])

        def watch(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if output.requires_grad and not self._is_backward:
                output.register_hook(before_backward)  # type: ignore[no-untyped-call]

        return watch

    def _need(self, number: int) -> None:
        """Have a unit's parameters in place."""
        if self._buffers[number].holder != number:
            self._start(number)
        self._buffers[number].settle()

    def _prefetch(self, block: int, part: int) -> None:
        """Start to gather the units of a block of a part whose buffers are not in use."""
        if block == len(self._blocks) or self._parts[block] != part:
            return
        for number in self._blocks[block]:
            holder = self._buffers[number].holder
            is_busy = holder is not None and self._is_backward and not self._is_through(holder)
            if holder != number and not is_busy:
                self._start(number)

    def _is_through(self, number: int) -> bool:
        return self._reducer.is_taken(self._number(number))

    def _number(self, number: int) -> int:
        """Return the number of a unit as the others count."""
        return len(self._units) - 1 - number

    @torch.no_grad()
    def _start(self, number: int) -> None:
        unit, whole, buffer = self._units[number], self._wholes[number], self._buffers[number]
        buffer.settle()
        if self._late is not None:
            self._late.wait(self._number(number))
        if not unit.is_split:
            pass  # Its parameters are where they are updated.
        elif self._number(number) in self._rounded:
            buffer.pending = self._rounded.gather(self._number(number))
        else:
            begin, end = unit.layout.range_of(unit.index)
            whole[begin:end].copy_(unit.owned, non_blocking=True)
            shard = self._ranks.of(unit).shard
            assert shard is not None
            buffer.pending = shard.gather(whole)
        buffer.holder = number


# ZeRO-1 and -2: brings the updated ranges of parameters to all ranks, unit by unit, while others are still
# updated; each block's forward pass waits for its own parameters and no others. Where the update itself goes
# on in a thread, whoever waits for a unit brings it, and those before it: all ranks in the same order.


class Arrivals:
    """Units under way to this rank. *Collective* over the groups that share them. Units by their number in
    `units`.

    Without `ranks` (ZeRO-0) only the update in a thread is waited for.
    """

    def __init__(
        self, model: Transformer, units: Units, ranks: DataRanks | None, late: LateUpdate | None
    ) -> None:
        self._shards = [None if ranks is None else ranks.of(unit).shard for unit in units.units]
        self._late = late
        # Units that the thread updates, in its order, and that nobody has started to bring.
        self._expected: list[int] = []
        self._wholes = [unit.whole for unit in units.units]
        self._pending: dict[int, Pending] = {}
        unit_of = {
            id(item.parameter): number for number, unit in enumerate(units.units) for item in unit.trained
        }
        self._hooks = []
        for block, users in _blocks(model):
            parameters = [parameter for user in users for parameter in user.parameters()]
            numbers = sorted({unit_of[id(parameter)] for parameter in parameters})
            self._hooks.append(block.register_forward_pre_hook(self._waiter(numbers)))

    def start(self, number: int) -> None:
        """Start to bring a unit to all ranks; its owned range has its new values."""
        shard = self._shards[number]
        if shard is not None:
            self._pending[number] = shard.gather(self._wholes[number])

    def expect(self, numbers: Sequence[int]) -> None:
        """Bring these units, which are being updated in this order, when they are waited for."""
        self._expected = list(numbers)

    def settle(self) -> None:
        """Wait for all."""
        self._wait([*self._pending, *self._expected])

    def close(self) -> None:
        """Watch the model no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _waiter(self, numbers: Sequence[int]) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            if self._pending or self._expected:
                self._wait(numbers)

        return wait

    def _wait(self, numbers: Sequence[int]) -> None:
        wanted = set(numbers)
        while not wanted.isdisjoint(self._expected):
            number = self._expected.pop(0)
            assert self._late is not None
            self._late.wait(number)
            self.start(number)
        for number in numbers:
            if number in self._pending:
                self._pending.pop(number).finish()


def _blocks(model: Transformer) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return the modules before which parameters are waited for, each with those that use them from there."""
    blocks: list[tuple[nn.Module, list[nn.Module]]] = []
    if model.has_embedding:
        first: list[nn.Module] = [model.embed_tokens]
        if model.embed_positions is not None:
            first.append(model.embed_positions)
        blocks.append((model.embed_tokens, first))
    blocks += [(layer, [layer]) for layer in model.layers]
    if model.has_output:
        blocks.append((model.norm, [model.norm, model.lm_head]))
    return blocks
