"""What may watch or change a training step from outside: the protocol `StepHook`, and lists of such hooks.

The loop (`trainer`) and the step (`step`) call the hooks without importing them. A hook overrides the methods
that it needs; the others do nothing and are never called, so that a hook costs a step only what it uses.
Hooks are called in the order of their list, which `trainer.assemble` writes down once.
"""

# ruff: noqa: ARG002  the methods of StepHook do nothing
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestra.errors import TrainingError
from orchestra.run.heartbeat import Heart, Phase
from orchestra.run.rollback import BadSteps

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.data.loader import Batch
    from orchestra.data.order import Ledger


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device: mean loss in nats per token over the global batch, gradient norm before
    clipping, and whether the update was left out because one of the two was not finite.

    With a scaled loss, `loss_scale` is the factor it had, and an update that was left out because of it
    counts as `has_overflowed` and not as skipped.
    """

    loss: Tensor
    grad_norm: Tensor
    was_skipped: Tensor
    lr: float
    loss_scale: Tensor | None = None
    has_overflowed: Tensor | None = None
    # Whether the loss is far above the last ones; None where spikes are not looked for.
    is_spike: Tensor | None = None


@dataclass(frozen=True)
class TrainedStep:
    """A step that was trained; it began at `began` (`time.perf_counter`) and first waited for its batch."""

    step: int
    batch: Batch
    result: StepResult
    began: float
    data_time_s: float


class StepHook:
    """One concern of a training beside the training itself. *Training thread only.*

    All ranks have the same hooks in the same order, so that a method may be *collective*.
    """

    def around_step(self, step: int) -> AbstractContextManager[object]:
        """Return the context of the whole step, its wait for data included; a failure leaves it too."""
        return nullcontext()

    def enter(self, phase: Phase, step: int, micro_batch: int, turn: int) -> None:
        """Hear that this rank begins `phase` of a step (0: before the first), before it does anything of it.

        `turn` is the place of a micro-batch's pass in the order of the step's passes, over all ranks: its
        number, but in a pipeline.
        Gradients are complete, and parameters and moments unchanged, at `Phase.update`.
        """

    def before_forward(self, step: int, tokens_ABS: Tensor, share: float | Tensor) -> None:
        """Act before the first forward pass on this rank's micro-batches [A, B, S + 1]; `share` is what the
        sum of a micro-batch's token losses is multiplied by.
        """

    def loss_factor(self, step: int) -> float:
        """Return what the step's loss is multiplied by from its first micro-batch on."""
        return 1.0

    def around_backward(self, step: int, micro_batch: int, loss: Tensor) -> AbstractContextManager[object]:
        """Return the context of a micro-batch's backward pass; `loss` is not yet summed over anything."""
        return nullcontext()

    def after_backward(self, step: int) -> None:
        """Act when the backward pass of the last micro-batch was started, before gradients are awaited."""

    def after_step(self, trained: TrainedStep) -> None:
        """Act after the update, before the ranks agree on a stop."""

    def verdict(self, step: int, result: StepResult, *, must_read: bool) -> TrainingError | BadSteps | None:
        """Return why the training may not go on: an error, or steps to go back before. All ranks agree.

        With `must_read` the verdict is about all steps so far, though the host has to wait for the device.
        """
        return None


class StepHooks:
    """Hooks in the order in which they are called; None in `hooks` stands for one that is off.

    The methods are those of `StepHook`, for all of them: the first hook's context is the outermost, factors
    are multiplied, and the first reason to end the training counts, though all are asked.
    """

    def __init__(self, hooks: Iterable[StepHook | None] = ()) -> None:
        used = [hook for hook in hooks if hook is not None]

        def overriding(name: str) -> list[StepHook]:
            return [hook for hook in used if getattr(type(hook), name) is not getattr(StepHook, name)]

        self._around_step = overriding("around_step")
        self._enter = overriding("enter")
        self._before_forward = overriding("before_forward")
        self._loss_factor = overriding("loss_factor")
        self._around_backward = overriding("around_backward")
        self._after_backward = overriding("after_backward")
        self._after_step = overriding("after_step")
        self._verdict = overriding("verdict")

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        with ExitStack() as stack:
            for hook in self._around_step:
                stack.enter_context(hook.around_step(step))
            yield

    def enter(self, phase: Phase, step: int = 0, micro_batch: int = 0, turn: int | None = None) -> None:
        for hook in self._enter:
            hook.enter(phase, step, micro_batch, micro_batch if turn is None else turn)

    def before_forward(self, step: int, tokens_ABS: Tensor, share: float | Tensor) -> None:
        for hook in self._before_forward:
            hook.before_forward(step, tokens_ABS, share)

    def loss_factor(self, step: int) -> float:
        return math.prod(hook.loss_factor(step) for hook in self._loss_factor)

    @contextmanager
    def around_backward(self, step: int, micro_batch: int, loss: Tensor) -> Iterator[None]:
        with ExitStack() as stack:
            for hook in self._around_backward:
                stack.enter_context(hook.around_backward(step, micro_batch, loss))
            yield

    def after_backward(self, step: int) -> None:
        for hook in self._after_backward:
            hook.after_backward(step)

    def after_step(self, trained: TrainedStep) -> None:
        for hook in self._after_step:
            hook.after_step(trained)

    def verdict(self, step: int, result: StepResult, *, must_read: bool) -> TrainingError | BadSteps | None:
        reasons = [hook.verdict(step, result, must_read=must_read) for hook in self._verdict]
        return next((reason for reason in reasons if reason is not None), None)


class HeartbeatHook(StepHook):
    """Writes into this rank's heartbeat which phase it enters. About a microsecond, no wait for a device."""

    def __init__(self, heart: Heart) -> None:
        self._heart = heart

    def around_step(self, step: int) -> AbstractContextManager[object]:
        self.enter(Phase.step, step, 0, 0)
        return nullcontext()

    def enter(self, phase: Phase, step: int, micro_batch: int, turn: int) -> None:
        self._heart.beat(phase, step, micro_batch, turn)


class LedgerHook(StepHook):
    """Records the sample ids of each step on this rank (`data.ledger=true`)."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def after_step(self, trained: TrainedStep) -> None:
        self._ledger.write(trained.step, trained.batch.sample_ids)
