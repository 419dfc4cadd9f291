"""Precision policies by name: the data types of parameters, gradients, their reduction and the masters.

| name           | parameters, products | gradients accumulate in | masters and optimizer state |
|----------------|----------------------|-------------------------|-----------------------------|
| fp32           | fp32                 | fp32                    | fp32 (the parameters)       |
| bf16           | bf16                 | bf16                    | fp32                        |
| bf16_fp32_grad | bf16                 | fp32                    | fp32                        |
| fp16           | fp16                 | fp16, loss scaled       | fp32                        |
| fp8            | bf16, fp8 in blocks  | bf16                    | fp32                        |

Gradients travel between ranks in the type they accumulate in, unless precision.reduce_dtype names another.
Norm statistics, softmax and the loss are computed in fp32 under every policy. It converts nothing itself;
the loss's factor is in `loss_scale`, the products of fp8 in `fp8`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from conf.schema import DType, PrecisionConfig, PrecisionName


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
