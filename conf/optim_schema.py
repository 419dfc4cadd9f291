"""The section `optim` of the typed schema: the optimizer and its learning rate.

Standard library only. Kept beside `conf.schema`, which has the other sections and hands these on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Schedule(Enum):
    """Shape of the learning rate after warm-up, over the tokens of the run. `wsd`: constant, then a linear
    decay over the last fifth.
    """

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


class RampRate(Enum):
    """What a smaller batch of train.batch_ramp does to the learning rate: nothing, or `sqrt`, which
    multiplies it by √(batch ÷ last batch).
    """

    none = "none"
    sqrt = "sqrt"


class StateDType(Enum):
    """Data types of the optimizer's moments."""

    fp32 = "fp32"
    bf16 = "bf16"


class Parametrization(Enum):
    """How initial values and learning rates of parameters follow from the model's sizes. `standard`: one rate
    for all. `mup`: so that the best rate of a small model is that of a large one (maximal update).
    """

    standard = "standard"
    mup = "mup"


@dataclass(frozen=True)
class MupConfig:
    """The sizes that optim.parametrization=mup counts from: there it is the standard one. Take those of the
    small model whose values are carried over; all widths inside the layers are to grow with hidden_size.
    """

    # null: those of the model itself.
    base_hidden: int | None = None
    base_layers: int | None = None
    # For heads that grow wider; those that grow more numerous need nothing.
    base_head_dim: int | None = None
    # Learning rate of the embeddings over optim.lr, which is to be found on the small model too.
    embedding_rate: float = 1.0


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, AdamW unless `target` names another, and its learning-rate schedule."""

    lr: float = 3e-4
    # Learning rate at the last step; null: a tenth of lr.
    min_lr: float | None = None
    # null: 10 % of the steps, at most 2,000.
    warmup_steps: int | None = None
    schedule: Schedule = Schedule.cosine
    # Only matrices (two or more dims) decay; norms and biases do not.
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    # Largest global L2 norm of the gradient; null: no clipping.
    clip_norm: float | None = 1.0
    # Share of the tokens after the warm-up in which schedule=wsd decays.
    wsd_decay_fraction: float = 0.2
    batch_ramp_lr: RampRate = RampRate.none
    # Data type of both moments; bf16 is rounded stochastically. Masters are fp32 always.
    state_dtype: StateDType = StateDType.fp32
    parametrization: Parametrization = Parametrization.standard
    mup: MupConfig = field(default_factory=MupConfig)
    # Another optimizer in AdamW's place: package.module:name, called as name(params, lr=lr, **options), which
    # returns a torch.optim.Optimizer; then weight_decay, betas, eps and state_dtype are not used.
    target: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    # Bytes of state that it keeps for each parameter, for planning; null: 8, as two moments in fp32, or what
    # a try on a small matrix showed when the run was checked.
    state_bytes_per_parameter: float | None = None
