"""One optimizer step: forward and backward over the micro-batches, reduction, clipping, update.

Nothing here waits for the device: the results stay on it until somebody reads them. Shape letters: A
accumulated micro-batches, B sequences of one micro-batch, S sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Config
from orchestra.optim.adamw import AdamW
from orchestra.optim.schedule import learning_rate
from orchestra.parallel.apply import Parallelized
from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.zero.stages import norm_over_ranks
from orchestra.precision.loss_scale import DynamicLossScale
from orchestra.run.heartbeat import Phase
from orchestra.sizes.step_shares import Part
from orchestra.train.watch.inject_faults import Moments, flip_bit
from orchestra.train.watch.loss_spikes import LEAVES_OUT, LossSpikes
from orchestra.train.watch.replay import Replay


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
    # Whether the loss is far above the last ones; None where nobody looks.
    is_spike: Tensor | None = None


def _nothing() -> None:
    pass


class TrainingStep:
    """Runs optimizer steps on one rank's share of each global batch. *Collective* over all ranks."""

    def __init__(
        self,
        parallelized: Parallelized,
        optimizer: AdamW,
        config: Config,
        mesh: Mesh,
        tokens_per_step: int,
        loss_scale: DynamicLossScale | None = None,
        spikes: LossSpikes | None = None,
    ) -> None:
        self._parallel = parallelized
        self._optimizer = optimizer
        self._config = config
        self._mesh = mesh
        # The loss is normalised by the tokens of the whole global batch, so that sums over micro-batches and
        # ranks are the gradient of the mean, whatever the layout.
        self._share = 1.0 / tokens_per_step
        self.loss_scale = loss_scale
        self.spikes = spikes
        self.moments = Moments()
        # Called when gradients are complete, before masters and moments change: whoever reads them ends then.
        self.before_update: Callable[[], None] = _nothing
        # Computes other ranks' steps again; None: nobody does.
        self.replay: Replay | None = None

    def run(self, step: int, tokens_ABS: Tensor) -> StepResult:
        """Train on this rank's micro-batches [A, B, S + 1] (int64, any device) and update the parameters.

        Raises ReplayError, on all ranks and before the update, where a micro-batch that was computed twice
        came out differently.
        """
        lr = learning_rate(self._config.optim, self._config.train, step)
        replay = self.replay if self.replay is not None and self.replay.is_due(step) else None
        loss, loss_work = self._forward_backward(step, tokens_ABS, replay)
        if replay is not None:
            replay.compare()
        self.moments.enter(Phase.reduce, step)
        stage = self._parallel.stage
        # The sum of squares is the first part of clipping.
        with marked(Part.optimizer):
            grad_norm = norm_over_ranks(stage.finish(), self._mesh)
        if loss_work is not None:
            with marked(Part.communication):
                loss_work.wait()
        scale = None if self.loss_scale is None else self.loss_scale.scale
        if scale is not None:
            loss, grad_norm = loss / scale, grad_norm / scale
        is_bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        is_spike = None if self.spikes is None else self.spikes.is_spike(loss)
        is_left_out = is_bad
        if is_spike is not None and self._config.recovery.loss_spike.action in LEAVES_OUT:
            is_left_out = is_bad | is_spike
        self.moments.enter(Phase.update, step)
        self.before_update()
        self._optimizer.lr = lr
        self._optimizer.begin_step(step, grad_norm, is_left_out, scale)
        with marked(Part.optimizer):
            stage.update(self._optimizer.update)
        if self.loss_scale is None:
            return StepResult(loss, grad_norm, is_bad, lr, is_spike=is_spike)
        has_overflowed = self.loss_scale.overflowed(loss, grad_norm)
        self.loss_scale.follow(has_overflowed, ~is_bad)
        return StepResult(loss, grad_norm, is_bad & ~has_overflowed, lr, scale, has_overflowed, is_spike)

    def _forward_backward(
        self, step: int, tokens_ABS: Tensor, replay: Replay | None
    ) -> tuple[Tensor, dist.Work | None]:
        num_micro_batches = tokens_ABS.shape[0]
        total = torch.zeros((), device=self._mesh.device)
        work: dist.Work | None = None
        # The loss takes its gradients in the forward pass: what scales them has to come in there.
        share = self._share if self.loss_scale is None else self.loss_scale.scale * self._share
        if replay is not None:
            replay.begin(step, tokens_ABS[0], share)
        for index in range(num_micro_batches):
            self.moments.enter(Phase.forward, step, index)
            if index == 0 and (factor := self.moments.faults.factor(step)) != 1.0:
                share = share * factor
            is_last = index == num_micro_batches - 1
            self._parallel.stage.begin(is_first=index == 0, is_last=is_last)
            tokens_BS = tokens_ABS[index].to(self._mesh.device, non_blocking=True)
            with marked(Part.forward):
                loss = self._parallel.model(tokens_BS[:, :-1], tokens_BS[:, 1:], share)
            total += loss.detach()
            if is_last and self._mesh.dp_group is not None:
                # Every rank needs the global loss to agree on a skip; its reduction hides behind the backward
                # pass.
                work = dist.all_reduce(total, group=self._mesh.dp_group, async_op=True)
            self.moments.enter(Phase.backward, step, index)
            with marked(Part.backward), self._disturbed_and_watched(step, index, loss, replay):
                loss.backward()
        return total, work

    @contextmanager
    def _disturbed_and_watched(
        self, step: int, index: int, loss: Tensor, replay: Replay | None
    ) -> Iterator[None]:
        """Flip a bit of a gradient where that is planned; let it be seen by who compares."""
        with ExitStack() as stack:
            if index == 0 and self.moments.faults.flips(step):
                # Before the gradients are looked at: so does a broken device.
                parameter = self._parallel.trained[-1].parameter
                stack.callback(parameter.register_hook(flip_bit).remove)  # type: ignore[no-untyped-call]
            if index == 0 and replay is not None:
                replay.saw(loss)
                stack.enter_context(replay.watched())
            yield
