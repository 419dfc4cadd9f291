"""The part of the schema that is about how a model is trained and not what: over which ranks it is laid out,
and in which numbers it is computed; `conf.schema` has the rest and all names.

Standard library only, under the same rules as `conf.schema`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Offload(Enum):
    """What lies in host memory instead of the GPU's. `optimizer`: masters and moments, which are updated
    there. `all`: also the ranges of parameters that a rank owns, with ZeRO-3.
    """

    none = "none"
    optimizer = "optimizer"
    all = "all"


@dataclass(frozen=True)
class ParallelismConfig:
    """Degrees of the mesh axes. World size = dp × tp × pp × cp; ep lies inside dp."""

    # `auto`: whatever the world size leaves over.
    dp: int | str = "auto"
    zero: int = 0
    # Ranks over which ZeRO shards; null: all of dp. Smaller than dp: hybrid sharding.
    shard_degree: int | None = None
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    cp: int = 1
    ep: int = 1
    # Bytes of gradient in one all-reduce, in MiB (overlapped with the backward pass).
    bucket_mib: float = 25.0
    offload: Offload = Offload.none


class PrecisionName(Enum):
    """What parameters, gradients and products are kept and computed in."""

    fp32 = "fp32"
    bf16 = "bf16"
    bf16_fp32_grad = "bf16_fp32_grad"
    fp16 = "fp16"
    fp8 = "fp8"


class DType(Enum):
    """Data types by their usual short names."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Scaling(Enum):
    """What one scale of fp8 numbers is for: a whole tensor, or each row along the sum of a product."""

    tensor = "tensor"
    row = "row"


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss that keeps fp16 gradients in range, and how it moves (precision=fp16 only)."""

    # The first factor, a power of two. A step whose gradients overflow is left out and halves it.
    initial: int = 65536
    # Steps in a row without overflow after which it doubles.
    growth_steps: int = 2000


@dataclass(frozen=True)
class PrecisionConfig:
    """Names a policy of `orchestra.precision`; the fields below it override single choices."""

    name: PrecisionName = PrecisionName.fp32
    # Data type in which gradients are summed over ranks; null: as the policy says.
    reduce_dtype: DType | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    # For precision=fp8 only.
    fp8_scaling: Scaling = Scaling.tensor
    # Blocks at each end of the model whose products stay in bf16, with precision=fp8.
    fp8_bf16_blocks: int = 0
