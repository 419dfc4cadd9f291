"""Which losses are spikes: far above those of the last steps. Decided on the device, without a wait for it.

A loss is a spike that is more than `factor` spreads above the median of the last `window` losses. The spread
is their median distance from their median, scaled so that it is the standard deviation of a normal
distribution, and at least a hundredth of the median: losses that hardly vary would make anything a spike. A
spike joins the window like any other loss, so that a level that is higher for good is soon the usual one.
What follows from a spike is decided by `nonfinite`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import LossSpikeConfig, OnSpike

# The standard deviation of a normal distribution over its median absolute deviation.
_NORMAL = 1.4826
_LEAST_SPREAD = 0.01
# What is done to a spike's update where it is not trained.
LEAVES_OUT = (OnSpike.skip, OnSpike.roll_back, OnSpike.stop)


class LossSpikes:
    """The last losses of a run, on the device; `recent` are those of earlier attempts, oldest first.

    All ranks judge the same loss; where they must act alike over `group`, they agree: losses that were summed
    over different groups may differ in the last bit.
    """

    def __init__(
        self,
        config: LossSpikeConfig,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        recent: Sequence[float] = (),
    ) -> None:
        self._factor = config.factor
        self._group = group if config.action in LEAVES_OUT else None
        self._losses = torch.zeros(config.window, dtype=torch.float32, device=device)
        # Saved losses may be of a window that was longer or shorter.
        taken = list(recent)[-config.window :]
        self._losses[: len(taken)] = torch.tensor(taken, device=device)
        self._num_losses = len(taken)

    def is_spike(self, loss: Tensor) -> Tensor:
        """Judge the loss of a step (fp32 scalar on the device) and remember it; return a bool like it.

        *Collective* over the group, if there is one. None is a spike before the window is full; one that is
        not finite is none, and is remembered as a repetition of the one before.
        """
        window = len(self._losses)
        is_finite = torch.isfinite(loss)
        is_spike = torch.zeros_like(is_finite)
        if self._num_losses >= window:
            median = _median(self._losses)
            spread = _NORMAL * _median((self._losses - median).abs())
            least = _LEAST_SPREAD * median.abs()
            is_spike = is_finite & (loss > median + self._factor * torch.maximum(spread, least))
        if self._group is not None:
            agreed = is_spike.to(torch.int32)
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
            is_spike = agreed > 0
        before = self._losses[(self._num_losses - 1) % window]
        self._losses[self._num_losses % window] = torch.where(is_finite, loss.float(), before)
        self._num_losses += 1
        return is_spike

    @property
    def recent(self) -> list[float]:
        """The last losses, oldest first. Waits for the device."""
        kept = min(self._num_losses, len(self._losses))
        losses = self._losses.tolist()
        begin = self._num_losses % len(losses) if kept == len(losses) else 0
        return [*losses[begin:], *losses[:begin]][:kept]


def _median(values: Tensor) -> Tensor:
    """Return the lower median of some values without a wait for the device, as torch.median has one."""
    return values.sort().values[(len(values) - 1) // 2]


def make_loss_spikes(
    config: LossSpikeConfig,
    device: torch.device,
    group: dist.ProcessGroup | None,
    recent: Sequence[float] = (),
) -> LossSpikes | None:
    """Return the judge of a run's losses; None where spikes are not looked for."""
    return None if config.action is OnSpike.none else LossSpikes(config, device, group, recent)
