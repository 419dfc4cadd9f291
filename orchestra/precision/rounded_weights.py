"""Weights in fp8, rounded once a step: kept beside the parameters, as the forward and the backward pass need
them.

A weight changes once a step, and is used in every micro-batch. Whoever updates it calls `forget`; the first
forward pass after that rounds it, block by block, when its parameters have arrived. The memory is made once:
two bytes an element. The output matrix is among them where its products are in fp8. Where parameters are
gathered on demand nothing is kept: they arrive rounded, or are rounded at each use (see `fp8`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import Scaling
from orchestra.precision.fp8 import (
    attach_rounded,
    attached,
    round_by_largest_,
    round_rows_and_columns_,
    round_weight_,
    scaling_of,
)


class RoundedWeights:
    """The rounded weights of some blocks, by block. *Any rank*.

    `is_compiled`: by compiled code, which needs no memory besides.
    """

    def __init__(
        self, blocks: Mapping[nn.Module, Sequence[Tensor]], scaling: Scaling, *, is_compiled: bool = False
    ) -> None:
        self._scaling = scaling
        self._is_compiled = is_compiled
        self._stale = dict.fromkeys(blocks, True)
        self._tensors: list[Tensor] = []
        self._hooks = []
        for block, weights in blocks.items():
            for weight in weights:
                self._tensors += attach_rounded(weight, scaling_of(weight, scaling))
            self._hooks.append(block.register_forward_pre_hook(self._refresher(block, list(weights))))

    # A graph for each kind of block. Made when first used: what is eager does without loading the compiler.
    @cached_property
    def _round_by_largest_(self) -> Callable[[list[Tensor], Sequence[Tensor], list[list[Tensor]]], None]:
        return torch.compile(round_by_largest_, dynamic=False)

    @cached_property
    def _round_rows_and_columns_(self) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
        return torch.compile(round_rows_and_columns_)

    def forget(self) -> None:
        """Let every weight be rounded again before its next use: it has changed, or is about to."""
        self._stale = dict.fromkeys(self._stale, True)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def close(self) -> None:
        """Watch the model no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _refresher(self, block: nn.Module, weights: Sequence[Tensor]) -> Callable[..., None]:
        def refresh(*_: Any) -> None:
            if self._stale[block]:
                self._stale[block] = False
                with torch.no_grad():
                    self._round_(weights)

        return refresh

    def _round_(self, weights: Sequence[Tensor]) -> None:
        if not self._is_compiled:
            for weight in weights:
                round_weight_(weight, scaling_of(weight, self._scaling))
            return
        by_tensor = []
        for weight in weights:
            if scaling_of(weight, self._scaling) is Scaling.tensor:
                by_tensor.append(weight)
            else:
                self._round_rows_and_columns_(weight.detach(), *attached([weight]))
        if by_tensor:
            # All of a block in one graph: a few calls of the host instead of some for each weight.
            numbers = [weight.detach() for weight in by_tensor]
            # By torch itself: one number of all is what the compiler is slow at, 20 times on an H100.
            largest = torch._foreach_norm(numbers, math.inf)
            self._round_by_largest_(numbers, largest, [attached([weight]) for weight in by_tensor])
