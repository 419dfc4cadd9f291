"""Steps whose loss is bad: not finite, or a spike far above the last ones. Called by the step and the loop.

**Which losses are spikes** is decided on the device, without a wait for it. A loss is a spike that is more
than `factor` spreads above the median of the last `window` losses. The spread is their median distance from
their median, scaled so that it is the standard deviation of a normal distribution, and at least a hundredth
of the median: losses that hardly vary would make anything a spike. A spike joins the window like any other
loss, so that a level that is higher for good is soon the usual one.

**What follows** from either: they are counted and recorded, and by the policy they end the training with an
error or a roll-back. Overflows of a scaled loss are none of these: they belong to fp16, correct the factor,
and are recorded only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import LossSpikeConfig, OnNonfinite, OnSpike, TrainConfig
from orchestra.errors import LossSpikeError, NonFiniteError, TrainingError
from orchestra.precision.policies import DynamicLossScale
from orchestra.run.events import EventWriter
from orchestra.run.files import Record
from orchestra.run.rollback import NOT_FINITE, SPIKE, BadSteps
from orchestra.train.hooks import StepHook, StepResult

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


@dataclass(frozen=True)
class NonFiniteSteps:
    """How many steps were skipped since the run began, and how many of them were the last ones in a row."""

    num_skipped: int = 0
    num_in_a_row: int = 0


class NonFiniteGuard(StepHook):
    """Applies train.on_nonfinite to steps whose loss or gradient norm is not finite, and recovery.loss_spike
    to those whose loss is far above the last ones.

    The update itself was already left out on the device, by all ranks alike. Reading the flags makes the host
    wait for a GPU, so with policies that do not stop they are read at logged and saved steps only there.
    """

    def __init__(
        self,
        config: TrainConfig,
        on_spike: OnSpike,
        events: EventWriter,
        reads_every_step: bool,
        before: NonFiniteSteps,
    ) -> None:
        self._policy = config.on_nonfinite
        self._limit = 1 if self._policy is OnNonfinite.stop else config.max_nonfinite_steps
        self._on_spike = on_spike
        stops = self._policy is OnNonfinite.stop or self._on_spike is OnSpike.stop
        self._reads_every_step = reads_every_step or stops
        self._events = events
        self._unread: list[tuple[int, StepResult]] = []
        self._num_in_a_row = before.num_in_a_row
        self.num_skipped = before.num_skipped

    def verdict(self, step: int, result: StepResult, *, must_read: bool) -> TrainingError | BadSteps | None:
        """Count a skipped step; return the error to raise where the policy says to stop, the steps to go back
        before where it says so. All ranks agree.

        With `must_read` the counts are complete afterwards.
        """
        self._unread.append((step, result))
        if not (self._reads_every_step or must_read):
            return None
        unread, self._unread = self._unread, []
        for unread_step, unread_result in unread:
            end = self._end_at(unread_step, unread_result)
            if end is not None:
                return end
        return None

    def _end_at(self, step: int, result: StepResult) -> TrainingError | BadSteps | None:
        if bool(result.was_skipped):
            self._count(step, result)
        else:
            self._num_in_a_row = 0
        if self._num_in_a_row >= self._limit:
            return self._not_finite(step, result)
        if result.is_spike is not None and bool(result.is_spike):
            return self._spiked(step, result)
        return None

    def counts(self) -> NonFiniteSteps:
        """Return the counts up to the last step that was read."""
        return NonFiniteSteps(self.num_skipped, self._num_in_a_row)

    def _count(self, step: int, result: StepResult) -> None:
        self.num_skipped += 1
        self._num_in_a_row += 1
        loss, grad_norm = repr(float(result.loss)), repr(float(result.grad_norm))
        self._record("nonfinite_step", step, loss=loss, grad_norm=grad_norm)

    def _record(self, event: str, step: int, **evidence: Any) -> None:
        # A full disk takes the record; the training goes on, on all ranks alike.
        with contextlib.suppress(OSError):
            self._events.write(event, step=step, **evidence)

    def _spiked(self, step: int, result: StepResult) -> TrainingError | BadSteps | None:
        """Record a spike; return what the policy makes of it."""
        loss, grad_norm = float(result.loss), float(result.grad_norm)
        self._record("loss_spike", step, action=self._on_spike.name, loss=loss, grad_norm=grad_norm)
        problem = f"step {step}: the loss rose to {loss:.4g}, far above the last ones"
        if self._on_spike is OnSpike.roll_back:
            return BadSteps(step, step, SPIKE, problem)
        if self._on_spike is not OnSpike.stop:
            return None
        return LossSpikeError(
            f"{problem}, and recovery.loss_spike.action=stop; the parameters are those of the step before. "
            "Look at this step's data (data.ledger=true writes its sample ids), lower optim.lr, or go on "
            "without this step's update: `orchestra resume RUN recovery.loss_spike.action=skip`"
        )

    def _not_finite(self, step: int, result: StepResult) -> TrainingError | BadSteps:
        """Return what the policy makes of steps in a row that were not finite."""
        problem = (
            f"step {step}: loss {float(result.loss)}, gradient norm {float(result.grad_norm)}: not finite"
        )
        if self._policy is OnNonfinite.stop:
            return NonFiniteError(
                f"{problem}, and train.on_nonfinite=stop; the parameters are those of the step before. Lower "
                "optim.lr or look at this step's data (data.ledger=true writes its sample ids)"
            )
        num = self._num_in_a_row
        problem += f"; {num} steps in a row were skipped (train.max_nonfinite_steps={self._limit})"
        if self._policy is OnNonfinite.roll_back:
            return BadSteps(step - num + 1, step, NOT_FINITE, problem)
        return NonFiniteError(
            f"{problem}. Lower optim.lr, raise optim.warmup_steps, or use "
            "precision=fp32 to see whether it is a matter of range"
        )


class OverflowLog:
    """Records what a scaled loss does, at logged steps: two columns more in the metrics, and an event where
    steps were left out since the last logged one. *Rank 0 only*; without a scaled loss it records nothing.
    """

    def __init__(self, loss_scale: DynamicLossScale | None, events: EventWriter) -> None:
        self._loss_scale = loss_scale
        self._events = events
        self._num_recorded = 0 if loss_scale is None else loss_scale.state.num_overflows

    def columns(self, step: int) -> Record:
        """Return the factor of the step to come, and the steps left out since the run began. Waits for the
        device.
        """
        if self._loss_scale is None:
            return {}
        state = self._loss_scale.state
        num_new, self._num_recorded = state.num_overflows - self._num_recorded, state.num_overflows
        if num_new:
            evidence = {"num_skipped": num_new, "loss_scale": state.scale}
            with contextlib.suppress(OSError):
                self._events.write("loss_scale_lowered", step=step, **evidence)
        return {"loss_scale": state.scale, "overflow_steps": state.num_overflows}
