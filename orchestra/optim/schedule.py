"""The learning rate as a pure function of the step. Integers and floats only; it imports no torch.

Steps count from 1 to `steps`. Warm-up rises linearly from lr/warmup to lr; the shape then leads from lr to
min_lr, which is reached at the last step. The default warm-up is in `orchestra.sizes.topology`, where the
rules find it too.
"""

from __future__ import annotations

import math

from conf.schema import OptimConfig, Schedule, TrainConfig
from orchestra.sizes.topology import warmup_steps

_MIN_LR_FRACTION = 0.1


def min_learning_rate(optim: OptimConfig) -> float:
    """Return the configured lowest learning rate, or a tenth of the highest."""
    return optim.lr * _MIN_LR_FRACTION if optim.min_lr is None else optim.min_lr


def learning_rate(optim: OptimConfig, train: TrainConfig, step: int) -> float:
    """Return the learning rate of `step` (1 … train.steps)."""
    warmup = warmup_steps(optim, train)
    if step <= warmup:
        return optim.lr * step / warmup
    progress = (step - warmup) / max(1, train.steps - warmup)
    low = min_learning_rate(optim)
    return low + (optim.lr - low) * _share_left(optim, progress)


def _share_left(optim: OptimConfig, progress: float) -> float:
    """Return how much of (lr − min_lr) is left when `progress` (0 … 1) of the steps after warm-up is done."""
    match optim.schedule:
        case Schedule.constant:
            return 1.0
        case Schedule.linear:
            return 1.0 - progress
        case Schedule.cosine:
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case Schedule.wsd:
            return min(1.0, (1.0 - progress) / optim.wsd_decay_fraction)
