"""Bytes of parameters, gradients, masters and optimizer state, and how ZeRO shares them out.

| precision      | parameters | gradients | accumulation | masters | Adam | sum |
|----------------|-----------:|----------:|-------------:|--------:|-----:|----:|
| fp32           |          4 |         4 |              |         |    8 |  16 |
| bf16, fp16     |          2 |         2 |              |       4 |    8 |  16 |
| bf16_fp32_grad |          2 |         2 |            4 |       4 |    8 |  20 |
| fp8            |          4 |         2 |              |       4 |    8 |  18 |

Megatron's products add their gradients to the fp32 ones themselves, and its fp8 parameters are kept in 8 bits
alone, as they are and transposed:

| bf16_fp32_grad |          2 |           |            4 |       4 |    8 |  18 |
| fp8            |          2 |         2 |              |       4 |    8 |  16 |

Sources: ZeRO (arXiv:1910.02054, K = 12) for 16, the Ultra-Scale Playbook for 20, Megatron Core's developer
guide for 18 ("Distributed Optimizer"; 6 + 12/d with ZeRO-1); fp8 is bf16 with two copies. It counts model
states only, and knows neither layers nor tokens.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from conf.schema import PrecisionName
from orchestra.plan.cases.case import Case
from orchestra.plan.cases.stages import Held


@dataclass(frozen=True)
class StateBytes:
    """Bytes of each kind of state: per parameter in the tables, of one rank where they are multiplied out."""

    parameters: float
    gradients: float
    accumulation: float
    masters: float
    optimizer: float

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> float:
        """All of them together."""
        return self.parameters + self.gradients + self.accumulation + self.masters + self.optimizer


PER_PARAMETER = {
    PrecisionName.fp32: StateBytes(4, 4, 0, 0, 8),
    PrecisionName.bf16: StateBytes(2, 2, 0, 4, 8),
    PrecisionName.bf16_fp32_grad: StateBytes(2, 2, 4, 4, 8),
    PrecisionName.fp16: StateBytes(2, 2, 0, 4, 8),
    PrecisionName.fp8: StateBytes(4, 2, 0, 4, 8),
}
_WITH_FUSED_KERNELS = {
    **PER_PARAMETER,
    PrecisionName.bf16_fp32_grad: StateBytes(2, 0, 4, 4, 8),
    PrecisionName.fp8: StateBytes(2, 2, 0, 4, 8),
}


def widths_of(case: Case) -> StateBytes:
    """Return the bytes of one parameter's states in the case's precision and trainer."""
    table = _WITH_FUSED_KERNELS if case.framework.fuses_kernels else PER_PARAMETER
    width, moments = table[case.precision], 2 * case.choices.moment_bytes
    return width if moments == width.optimizer else replace(width, optimizer=moments)


def state_bytes(num_parameters: float, zero: int, num_shards: int, width: StateBytes) -> StateBytes:
    """Return the bytes on one of `num_shards` ranks: ZeRO 1 divides masters and optimizer, 2 also gradients,
    3 also parameters (arXiv:1910.02054, figure 1).
    """
    optimizer = num_parameters / (num_shards if zero >= 1 else 1)
    gradients = num_parameters / (num_shards if zero >= 2 else 1)
    parameters = num_parameters / (num_shards if zero >= 3 else 1)
    return StateBytes(
        parameters=parameters * width.parameters,
        gradients=gradients * width.gradients,
        accumulation=gradients * width.accumulation,
        masters=optimizer * width.masters,
        optimizer=optimizer * width.optimizer,
    )


def states_of_rank(case: Case, held: Held) -> StateBytes:
    """Return the bytes on one rank: fewer ranks have the same experts and share them out."""
    width = widths_of(case)
    zero = case.kept_zero
    dense = state_bytes(held.dense, zero, case.num_shards, width)
    if not held.experts:
        return dense
    return dense + state_bytes(held.experts, zero, case.num_expert_shards, width)


def checkpoint_bytes(num_parameters: float) -> float:
    """Return the size of a checkpoint of mixed-precision Adam: 2 + 4 + 8 bytes a parameter."""
    width = PER_PARAMETER[PrecisionName.bf16]
    return num_parameters * (width.parameters + width.masters + width.optimizer)
