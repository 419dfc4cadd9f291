"""The learning rate as a pure function of the step. Integers and floats only; it imports no torch.

Steps count from 1 to `steps`. Warm-up rises linearly from lr/warmup to lr, over steps; the shape then leads
from lr to min_lr, which is reached at the last step. It follows the sequences that the run has trained on,
which without a ramp of the batch is the same as following the steps. The default warm-up is in
`orchestra.sizes.topology`, where the rules find it too.
"""

from __future__ import annotations

import math

from conf.schema import OptimConfig, RampRate, Schedule, TrainConfig
from orchestra.sizes.topology import batch_ramp, warmup_steps

_MIN_LR_FRACTION = 0.1


def min_learning_rate(optim: OptimConfig) -> float:
    """Return the configured lowest learning rate, or a tenth of the highest."""
    return optim.lr * _MIN_LR_FRACTION if optim.min_lr is None else optim.min_lr


def learning_rate(optim: OptimConfig, train: TrainConfig, step: int) -> float:
    """Return the learning rate of `step` (1 … train.steps)."""
    return _rate_of_last_batch(optim, train, step) * batch_factor(optim, train, step)


def batch_factor(optim: OptimConfig, train: TrainConfig, step: int) -> float:
    """Return what the rate of `step` is multiplied by for its batch, by optim.batch_ramp_lr (0 to 1)."""
    if optim.batch_ramp_lr is RampRate.none:
        return 1.0
    ramp = batch_ramp(train)
    return math.sqrt(ramp.at(step).global_batch_size / ramp.stages[-1].global_batch_size)


def _rate_of_last_batch(optim: OptimConfig, train: TrainConfig, step: int) -> float:
    warmup = warmup_steps(optim, train)
    if step <= warmup:
        return optim.lr * step / warmup
    begin, now, end = map(batch_ramp(train).sequences_through, (warmup, step, train.steps))
    # Of whole numbers the quotient is rounded once: the same bits as (step − warmup) / (steps − warmup).
    progress = (now - begin) / max(1, end - begin)
    low = min_learning_rate(optim)
    return low + (optim.lr - low) * _share_left(optim, progress)


def _share_left(optim: OptimConfig, progress: float) -> float:
    """Return how much of (lr − min_lr) is left when `progress` (0 … 1) of the way after warm-up is done."""
    match optim.schedule:
        case Schedule.constant:
            return 1.0
        case Schedule.linear:
            return 1.0 - progress
        case Schedule.cosine:
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case Schedule.wsd:
            return min(1.0, (1.0 - progress) / optim.wsd_decay_fraction)
