"""Precision policies by name: the data types of parameters, gradients, their reduction and the masters.

| name           | parameters, products | gradients accumulate in | masters and optimizer state |
|----------------|----------------------|-------------------------|-----------------------------|
| fp32           | fp32                 | fp32                    | fp32 (the parameters)       |
| bf16           | bf16                 | bf16                    | fp32                        |
| bf16_fp32_grad | bf16                 | fp32                    | fp32                        |

Norm statistics, softmax and the loss are computed in fp32 under every policy. It converts nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from conf.schema import PrecisionConfig, PrecisionName


@dataclass(frozen=True)
class Policy:
    """Data types of one precision."""

    parameter: torch.dtype
    gradient: torch.dtype
    master: torch.dtype = torch.float32


_POLICIES = {
    PrecisionName.fp32: Policy(torch.float32, torch.float32),
    PrecisionName.bf16: Policy(torch.bfloat16, torch.bfloat16),
    PrecisionName.bf16_fp32_grad: Policy(torch.bfloat16, torch.float32),
}


def policy(precision: PrecisionConfig) -> Policy:
    """Return the policy of a configuration that has passed the rules."""
    return _POLICIES[precision.name]
