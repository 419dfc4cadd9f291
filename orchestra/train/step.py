"""One optimizer step: forward and backward over the micro-batches, reduction, clipping, update.

Called by the training loop (`trainer`), by the dry build and by the search for a micro-batch size. It never
waits for the device: the results stay on it until they are read. Shape letters: A accumulated micro-batches,
B sequences of one micro-batch, S sequence length.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Config
from orchestra.optim.plugged import Optimizer
from orchestra.optim.schedule import learning_rate
from orchestra.parallel.apply import Parallelized
from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.pipeline.passes import PassHooks, Pipeline
from orchestra.parallel.zero.stages import norm_over_ranks
from orchestra.precision.policies import DynamicLossScale
from orchestra.precision.scale_history import ScaleHistory
from orchestra.run.heartbeat import Phase
from orchestra.sizes.pipeline_schedule import Pass, StagePass
from orchestra.sizes.step_shares import Part
from orchestra.sizes.topology import StepBatches
from orchestra.train.hooks import StepHooks, StepResult
from orchestra.train.watch.bad_losses import LEAVES_OUT, LossSpikes


class TrainingStep:
    """Runs optimizer steps on one rank's share of each global batch. *Collective* over all ranks.

    `loss_scale` is None where gradients have the range of fp32, `spikes` where loss spikes are not looked
    for, `scale_history` without delayed scaling; the three may be read between steps.
    """

    def __init__(
        self,
        parallelized: Parallelized,
        optimizer: Optimizer,
        config: Config,
        mesh: Mesh,
        batches: StepBatches,
        hooks: StepHooks,
        loss_scale: DynamicLossScale | None = None,
        spikes: LossSpikes | None = None,
    ) -> None:
        self._parallel = parallelized
        self._optimizer = optimizer
        self._optim = config.optim
        self._train = config.train
        self._mesh = mesh
        self._batches = batches
        self._hooks = hooks
        self._leaves_out_spikes = config.recovery.loss_spike.action in LEAVES_OUT
        self.scale_history = parallelized.scale_history
        self.loss_scale = loss_scale
        self.spikes = spikes

    def run(self, step: int, tokens_ABS: Tensor) -> StepResult:
        """Train on this rank's micro-batches [A, B, S + 1] (int64, any device) and update the parameters.

        Raises ReplayError, on all ranks and before the update, where a micro-batch that was computed twice
        came out differently.
        """
        loss, loss_work = self._forward_backward(step, tokens_ABS)
        self._hooks.after_backward(step)
        self._hooks.enter(Phase.reduce, step)
        # The sum of squares is the first part of clipping.
        with marked(Part.optimizer):
            grad_norm = norm_over_ranks(self._parallel.stage.finish(), self._mesh)
        if loss_work is not None:
            with marked(Part.communication):
                loss_work.wait()
        scale = None if self.loss_scale is None else self.loss_scale.scale
        if scale is not None:
            loss, grad_norm = loss / scale, grad_norm / scale
        is_bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        is_spike = None if self.spikes is None else self.spikes.is_spike(loss)
        is_left_out = is_bad | is_spike if is_spike is not None and self._leaves_out_spikes else is_bad
        self._hooks.enter(Phase.update, step)
        if self.scale_history is not None:
            self._follow_scales(self.scale_history, is_left_out)
        lr = self._update(step, grad_norm, is_left_out, scale)
        if self._parallel.expert_balance is not None:
            self._parallel.expert_balance.end_step(is_left_out)
        if self.loss_scale is None:
            return StepResult(loss, grad_norm, is_bad, lr, is_spike=is_spike)
        has_overflowed = self.loss_scale.overflowed(loss, grad_norm)
        self.loss_scale.follow(has_overflowed, ~is_bad)
        return StepResult(loss, grad_norm, is_bad & ~has_overflowed, lr, scale, has_overflowed, is_spike)

    def _follow_scales(self, history: ScaleHistory, is_left_out: Tensor) -> None:
        found = history.found()
        if self._mesh.world_size > 1:
            self._mesh.traffic.add_all_reduce(found.nbytes, self._mesh.world_size)
            with marked(Part.communication):
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
        history.follow(found, is_left_out)

    def _update(self, step: int, grad_norm: Tensor, is_left_out: Tensor, scale: Tensor | None) -> float:
        """Update masters, moments and parameters; return the learning rate."""
        lr = learning_rate(self._optim, self._train, step)
        self._optimizer.lr = lr
        self._optimizer.begin_step(step, grad_norm, is_left_out, scale)
        with marked(Part.optimizer):
            optimizer = self._optimizer
            self._parallel.stage.update(optimizer.update, at_once=optimizer.takes_all_at_once)
        return lr

    def _forward_backward(self, step: int, tokens_ABS: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Return the loss, summed over micro-batches and, once the work is done, over the ranks."""
        # The loss is normalised by the tokens of the whole global batch, so that sums over micro-batches and
        # ranks are the gradient of the mean, whatever the layout. It takes its gradients in the forward pass:
        # what scales them has to come in there.
        mean = 1.0 / self._batches.at(step).tokens_per_step
        share = mean if self.loss_scale is None else self.loss_scale.scale * mean
        if self._parallel.expert_balance is not None:
            self._parallel.expert_balance.begin_step(share)
        self._hooks.before_forward(step, tokens_ABS, share)
        if self.scale_history is not None:
            self.scale_history.begin_step()
        if self._parallel.pipeline is not None:
            return self._through_pipeline(self._parallel.pipeline, step, tokens_ABS, share)
        num_micro_batches = tokens_ABS.shape[0]
        total = torch.zeros((), device=self._mesh.device)
        work: dist.Work | None = None
        for index in range(num_micro_batches):
            self._hooks.enter(Phase.forward, step, index)
            if index == 0 and (factor := self._hooks.loss_factor(step)) != 1.0:
                share = share * factor
            is_last = index == num_micro_batches - 1
            self._parallel.stage.begin(is_first=index == 0, is_last=is_last)
            # Where the tokens come from, so that nobody waits for them to arrive.
            bounds = self._parallel.model.document_bounds(tokens_ABS[index, :, :-1])
            tokens_BS = tokens_ABS[index].to(self._mesh.device, non_blocking=True)
            with marked(Part.forward):
                loss = self._parallel.model(tokens_BS[:, :-1], tokens_BS[:, 1:], share, bounds)
            total += loss.detach()
            if is_last and self._mesh.loss_group is not None:
                # Every rank needs the global loss to agree on a skip; it is reduced during the backward pass.
                work = dist.all_reduce(total, group=self._mesh.loss_group, async_op=True)
            self._hooks.enter(Phase.backward, step, index)
            with marked(Part.backward), self._hooks.around_backward(step, index, loss):
                loss.backward()
        return total, work

    def _through_pipeline(
        self, pipeline: Pipeline, step: int, tokens_ABS: Tensor, share: float | Tensor
    ) -> tuple[Tensor, dist.Work | None]:
        def enter(action: StagePass, turn: int) -> None:
            phase = Phase.forward if action.kind is Pass.forward else Phase.backward
            self._hooks.enter(phase, step, action.micro_batch, turn)

        def around_backward(micro_batch: int, loss: Tensor) -> AbstractContextManager[object]:
            return self._hooks.around_backward(step, micro_batch, loss)

        hooks = PassHooks(enter, around_backward, lambda: self._hooks.loss_factor(step))
        total = pipeline.run(tokens_ABS, share, hooks)
        return total, dist.all_reduce(total, group=self._mesh.loss_group, async_op=True)
