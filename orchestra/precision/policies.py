"""Precision policies by name: the data types of parameters, gradients, their reduction and the masters.

| name           | parameters, products | gradients accumulate in | masters and optimizer state |
|----------------|----------------------|-------------------------|-----------------------------|
| fp32           | fp32                 | fp32                    | fp32 (the parameters)       |
| bf16           | bf16                 | bf16                    | fp32                        |
| bf16_fp32_grad | bf16                 | fp32                    | fp32                        |
| fp16           | fp16                 | fp16, loss scaled       | fp32                        |
| fp8            | bf16, fp8 in blocks  | bf16                    | fp32                        |

Gradients travel between ranks in the type they accumulate in, unless precision.reduce_dtype names another.
Norm statistics, softmax and the loss are computed in fp32 under every policy. The products of fp8 are in
`fp8`. Under fp16 the loss has a factor that keeps the gradients in range and follows overflows: a gradient
below 6e-8 is 0 in fp16 and one above 65,504 infinite. The factor grows until gradients overflow now and then;
such a step is left out and halves it. It is a power of two and changes no digit of any number that stays in
range. It lives on the device and is decided there: no step waits for the host. At a factor of 1 there is no
more to halve: gradients that are not finite then are not the factor's doing. Whoever tells all ranks the same
gets the same factor on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.schema import DType, LossScale, PrecisionConfig, PrecisionName

_LEAST = 1.0
# Far above what any gradient needs; its square is still finite in fp32.
MOST = 2.0**24


@dataclass(frozen=True)
class PrecisionPolicy:
    """Data types of one precision; `reduce` is the one in which gradients travel to be summed over ranks."""

    parameter: torch.dtype
    gradient: torch.dtype
    reduce: torch.dtype
    master: torch.dtype = torch.float32


_POLICIES = {
    PrecisionName.fp32: PrecisionPolicy(torch.float32, torch.float32, torch.float32),
    PrecisionName.bf16: PrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    PrecisionName.bf16_fp32_grad: PrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
    PrecisionName.fp16: PrecisionPolicy(torch.float16, torch.float16, torch.float16),
    PrecisionName.fp8: PrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16),
}
_TYPES = {DType.fp32: torch.float32, DType.bf16: torch.bfloat16, DType.fp16: torch.float16}


def policy(precision: PrecisionConfig) -> PrecisionPolicy:
    """Return the policy of a configuration that has passed the rules."""
    named = _POLICIES[precision.name]
    if precision.reduce_dtype is None:
        return named
    return replace(named, reduce=_TYPES[precision.reduce_dtype])


@dataclass(frozen=True)
class ScaleState:
    """The factor, the good steps since it last moved, and the steps left out since the run began."""

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
        """Halve the factor after an overflow, and double it after enough good steps, else change nothing."""
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
    """Return the factor, as it was `saved` if it was; None where gradients have the range of fp32."""
    if precision.name is not PrecisionName.fp16:
        return None
    return DynamicLossScale(precision.loss_scale, device, saved)
