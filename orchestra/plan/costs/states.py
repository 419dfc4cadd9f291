"""Bytes of parameters, gradients, masters and optimizer state, and how ZeRO shares them out.

| precision      | parameters | gradients | accumulation | masters | Adam | sum |
|----------------|-----------:|----------:|-------------:|--------:|-----:|----:|
| fp32           |          4 |         4 |              |         |    8 |  16 |
| bf16, fp16     |          2 |         2 |              |       4 |    8 |  16 |
| bf16_fp32_grad |          2 |         2 |            4 |       4 |    8 |  20 |
| fp8            |          4 |         2 |              |       4 |    8 |  18 |

Sources: ZeRO (arXiv:1910.02054, K = 12) for 16, the Ultra-Scale Playbook for 20; fp8 is bf16 with two copies.
It counts model states only, and knows neither layers nor tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import PrecisionName


@dataclass(frozen=True)
class StateBytes:
    """Bytes of each kind of state: per parameter in the tables, of one rank where they are multiplied out."""

    parameters: float
    gradients: float
    accumulation: float
    masters: float
    optimizer: float

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


def checkpoint_bytes(num_parameters: float) -> float:
    """Return the size of a checkpoint of mixed-precision Adam: 2 + 4 + 8 bytes a parameter."""
    width = PER_PARAMETER[PrecisionName.bf16]
    return num_parameters * (width.parameters + width.masters + width.optimizer)
