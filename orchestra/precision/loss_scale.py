"""The factor of the loss that keeps the gradients of fp16 in range, and how it follows overflows.

A gradient below 6e-8 is 0 in fp16 and one above 65,504 infinite. The factor grows until gradients overflow
now and then; such a step is left out and halves it. It is a power of two and changes no digit of any number
that stays in range. It lives on the device and is decided there: no step waits for the host.

At a factor of 1 there is no more to halve: gradients that are not finite then are not the factor's doing. It
knows neither gradients nor ranks; whoever tells all ranks the same gets the same factor on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import LossScale, PrecisionConfig, PrecisionName

_LEAST = 1.0
# Far above what any gradient needs; its square is still finite in fp32.
MOST = 2.0**24


@dataclass(frozen=True)
class ScaleState:
    """The factor, the steps without overflow since it last moved, and the steps left out since the run
    began.
    """

    scale: float
    num_good_steps: int = 0
    num_overflows: int = 0


class DynamicLossScale:
    """A factor on a device. `scale` is fp32 without dims; *any rank*, alike on all of them."""

    def __init__(self, config: LossScale, device: torch.device, saved: ScaleState | None = None) -> None:
        state = saved or ScaleState(float(config.initial))
        self._growth_steps = config.growth_steps
        self.scale = torch.tensor(state.scale, device=device)
        self._num_good_steps = torch.tensor(state.num_good_steps, dtype=torch.int64, device=device)
        self._num_overflows = torch.tensor(state.num_overflows, dtype=torch.int64, device=device)

    def overflowed(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return whether a step's gradients are not finite because of the factor (bool, without dims).

        A loss that is not finite is computed before any factor, and so no overflow of this kind.
        """
        return torch.isfinite(loss) & ~torch.isfinite(grad_norm) & (self.scale > _LEAST)

    def follow(self, has_overflowed: Tensor, is_good: Tensor) -> None:
        """Halve the factor after an overflow, and double it after enough good steps; any other step
        changes nothing.
        """
        good = torch.where(has_overflowed, 0, self._num_good_steps + is_good)
        grows = good >= self._growth_steps
        grown = torch.where(grows, self.scale * 2.0, self.scale)
        # A new tensor: the results of earlier steps keep theirs.
        self.scale = torch.where(has_overflowed, self.scale * 0.5, grown).clamp(_LEAST, MOST)
        self._num_good_steps = torch.where(grows, 0, good)
        self._num_overflows = self._num_overflows + has_overflowed

    @property
    def state(self) -> ScaleState:
        """The state as numbers. Waits for the device."""
        return ScaleState(float(self.scale), int(self._num_good_steps), int(self._num_overflows))


def make_loss_scale(
    precision: PrecisionConfig, device: torch.device, saved: ScaleState | None = None
) -> DynamicLossScale | None:
    """Return the factor of a precision, which goes on from a state that was `saved`; None where gradients
    have the range of fp32.
    """
    if precision.name is not PrecisionName.fp16:
        return None
    return DynamicLossScale(precision.loss_scale, device, saved)
