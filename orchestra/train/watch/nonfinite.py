"""What follows from steps whose loss or gradient norm is not finite, or whose loss is a spike: they are
counted and recorded, and by the policy they end the training with an error or a roll-back.

Overflows of a scaled loss are none of these: they belong to fp16, correct the factor, and are recorded only.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import OnNonfinite, OnSpike, TrainConfig
from orchestra.errors import LossSpikeError, NonFiniteError, TrainingError
from orchestra.precision.loss_scale import DynamicLossScale
from orchestra.run.events import EventWriter
from orchestra.run.files import Record
from orchestra.run.rollback import NOT_FINITE, SPIKE, BadSteps
from orchestra.train.hooks import StepHook, StepResult


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
            if bool(unread_result.was_skipped):
                self._count(unread_step, unread_result)
            else:
                self._num_in_a_row = 0
            if self._num_in_a_row >= self._limit:
                words = self._explained(unread_step, unread_result)
                if self._policy is not OnNonfinite.roll_back:
                    return NonFiniteError(words)
                return BadSteps(unread_step - self._num_in_a_row + 1, unread_step, NOT_FINITE, words)
            if unread_result.is_spike is not None and bool(unread_result.is_spike):
                self._record_spike(unread_step, unread_result)
                if self._on_spike is OnSpike.stop:
                    return LossSpikeError(_spike_explained(unread_step, unread_result))
                if self._on_spike is OnSpike.roll_back:
                    return BadSteps(unread_step, unread_step, SPIKE, _spike_found(unread_step, unread_result))
        return None

    def counts(self) -> NonFiniteSteps:
        """Return the counts up to the last step that was read."""
        return NonFiniteSteps(self.num_skipped, self._num_in_a_row)

    def _count(self, step: int, result: StepResult) -> None:
        self.num_skipped += 1
        self._num_in_a_row += 1
        loss, grad_norm = repr(float(result.loss)), repr(float(result.grad_norm))
        self._events.write("nonfinite_step", step=step, loss=loss, grad_norm=grad_norm)

    def _record_spike(self, step: int, result: StepResult) -> None:
        numbers = {"loss": float(result.loss), "grad_norm": float(result.grad_norm)}
        self._events.write("loss_spike", step=step, action=self._on_spike.name, **numbers)

    def _explained(self, step: int, result: StepResult) -> str:
        problem = (
            f"step {step}: loss {float(result.loss)}, gradient norm {float(result.grad_norm)}: not finite"
        )
        if self._policy is OnNonfinite.stop:
            return (
                f"{problem}, and train.on_nonfinite=stop; the parameters are those of the step before. Lower "
                "optim.lr or look at this step's data (data.ledger=true writes its sample ids)"
            )
        in_a_row = (
            f"{problem}; {self._num_in_a_row} steps in a row were skipped "
            f"(train.max_nonfinite_steps={self._limit})"
        )
        if self._policy is OnNonfinite.roll_back:
            return in_a_row
        return (
            f"{in_a_row}. Lower optim.lr, raise optim.warmup_steps, or use "
            "precision=fp32 to see whether it is a matter of range"
        )


def _spike_found(step: int, result: StepResult) -> str:
    return f"step {step}: the loss rose to {float(result.loss):.4g}, far above the last ones"


def _spike_explained(step: int, result: StepResult) -> str:
    return (
        f"{_spike_found(step, result)}, and "
        "recovery.loss_spike.action=stop; the parameters are those of the step before. Look at this step's "
        "data (data.ledger=true writes its sample ids), lower optim.lr, or go on without this step's update: "
        "`orchestra resume RUN recovery.loss_spike.action=skip`"
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
            self._events.write("loss_scale_lowered", step=step, **evidence)
        return {"loss_scale": state.scale, "overflow_steps": state.num_overflows}
