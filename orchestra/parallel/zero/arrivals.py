"""ZeRO-1 and -2: brings the updated ranges of parameters to all ranks, unit by unit, while others are still
updated; each block's forward pass waits for its own parameters and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from orchestra.model.transformer import Transformer
from orchestra.parallel.zero.collectives import Collectives, Pending
from orchestra.parallel.zero.storage import Units


class Arrivals:
    """Units under way to this rank. *Collective* over the shard group. Units by their number in `units`."""

    def __init__(self, model: Transformer, units: Units, shard: Collectives) -> None:
        self._shard = shard
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
        self._pending[number] = self._shard.gather(self._wholes[number])

    def settle(self) -> None:
        """Wait for all."""
        self._wait(list(self._pending))

    def close(self) -> None:
        """Watch the model no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _waiter(self, numbers: Sequence[int]) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            if self._pending:
                self._wait(numbers)

        return wait

    def _wait(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in self._pending:
                self._pending.pop(number).finish()


def _blocks(model: Transformer) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return the modules before which parameters are waited for, each with those that use them from there."""
    first: list[nn.Module] = [model.embed_tokens]
    if model.embed_positions is not None:
        first.append(model.embed_positions)
    blocks: list[tuple[nn.Module, list[nn.Module]]] = [(model.embed_tokens, first)]
    blocks += [(layer, [layer]) for layer in model.layers]
    return [*blocks, (model.norm, [model.norm, model.lm_head])]
