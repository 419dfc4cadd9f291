"""Delayed scaling: the largest numbers of the last steps, from which products in fp8 take their scales.

A tensor that is rounded by a scale that is known needs no pass that looks for its largest number first. It is
found in the pass that rounds, and counts from the next step on. What is larger than ever is rounded to the
largest number that fp8 has, for one step. Inputs and gradients of the blocks' products are scaled so; weights
change little and are rounded once a step, by their own numbers.

The size of a tensor is the largest number of a step, or `DECAY` times its last size if that is more: one
number stands for a short history, forgets an outlier in some tens of steps, and follows growth at once. All
ranks hold the same sizes: they take the largest over all of them, in one message a step. A step that is left
out leaves them as they are. The first step of a run that has none scales by the moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from orchestra.precision.fp8 import BACKWARD, FORWARD, attach_history

# Half an outlier is forgotten after 7 steps, less than a bit of fp8's range.
DECAY = 0.9
# Scales of what nothing is known of, because it was all zeros, or the first step was left out: e4m3 holds
# activations as they are, and e5m2 with this one gradients from 1e-12 to 3e-3.
_UNKNOWN = {FORWARD: 1.0, BACKWARD: 2.0**-24}


class ScaleHistory:
    """The sizes of a model's rounded tensors. *Any rank*, alike on all of them.

    `is_known`: whether a step, or a checkpoint, has told them.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._names: list[str] = []
        self._scales: list[Tensor] = []
        self._found: list[Tensor] = []
        self._sizes = self._limits = self._unknown = torch.zeros(0)

    def attach(self, products: Sequence[Mapping[str, Tensor]]) -> None:
        """Give the weights, by name and for each input the products of it, what they are scaled by."""
        limits, unknown = [], []
        for weights in products:
            for name, (scale, found, dtype) in attach_history(weights).items():
                self._names.append(name)
                self._scales.append(scale)
                self._found.append(found)
                limits.append(torch.finfo(dtype).max)
                unknown.append(_UNKNOWN[dtype])
        self._limits = torch.tensor(limits, device=self._scales[0].device)
        self._unknown = torch.tensor(unknown, device=self._limits.device)
        self._sizes = torch.zeros_like(self._limits)

    @property
    def state(self) -> dict[str, float]:
        """The sizes by the names of what is rounded; none before the first step. Waits for the device."""
        return dict(zip(self._names, self._sizes.tolist(), strict=True)) if self.is_known else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take saved sizes. What was saved of other tensors, by other settings, does not count."""
        if state.keys() == set(self._names):
            self._set(self._limits.new_tensor([state[name] for name in self._names]))

    def begin_step(self) -> None:
        """Forget what was found since the last step, in an evaluation, say."""
        torch._foreach_zero_(self._found)

    def found(self) -> Tensor:
        """Return the largest numbers that this rank has rounded in the step, infinite where one is NaN."""
        return torch.nan_to_num(torch.stack(self._found), nan=math.inf, posinf=math.inf)

    def follow(self, found: Tensor, is_left_out: Tensor) -> None:
        """Take the largest numbers of all ranks for the next step; none that is infinite."""
        sizes = torch.maximum(found, self._sizes * DECAY)
        self._set(torch.where(is_left_out | ~torch.isfinite(found), self._sizes, sizes))

    def _set(self, sizes: Tensor) -> None:
        self._sizes, self.is_known = sizes, True
        scales = torch.where(sizes > 0, sizes / self._limits, self._unknown)
        torch._foreach_copy_(self._scales, list(scales.unbind()))
