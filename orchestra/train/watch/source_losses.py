"""The training's loss by source, where a blend has several (`data.blend`): columns train/NAME/loss.

The loss goes over the tokens one by one anyway: it writes down what it finds of each, and their sums by
sequence stay on the device until a row is written. Nothing is computed twice, and nothing else sees it.

Shape letters: A accumulated micro-batches, B sequences of one micro-batch, T tokens of one, K sources.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from orchestra.data.source import Blend, SampleSource
from orchestra.model.loss import Loss
from orchestra.model.transformer import Transformer
from orchestra.parallel.mesh import Mesh
from orchestra.run.metrics_file import train_column
from orchestra.train.hooks import StepHook, TrainedStep


class SourceLosses(StepHook):
    """Keeps the summed loss of each sequence of a step.

    It stands in the place of the model's loss, and before and after the training's as if it were not there.
    Losses of a step are taken in the order of its micro-batches.
    """

    def __init__(self, blend: Blend, model: Transformer, mesh: Mesh) -> None:
        self._blend = blend
        self._mesh = mesh
        self._loss: Loss = model.loss
        model.loss = self._kept
        # What is computed before the first step is none of it.
        self._sums_AB = torch.zeros((0, 0), dtype=torch.float64, device=mesh.device)
        self._num_taken = self._num_targets = 0

    def before_forward(self, step: int, tokens_ABS: Tensor, share: float | Tensor) -> None:  # noqa: ARG002
        """Forget the last step. Of a pipeline the ranks without the loss keep nothing."""
        self._sums_AB = self._sums_AB.new_zeros(tokens_ABS.shape[:2])
        self._num_taken = self._num_targets = 0

    def _kept(self, hidden_TE: Tensor, weight_VE: Tensor, target_T: Tensor, **options: Any) -> Tensor:
        """Return what the loss returns; keep the sums of its sequences."""
        if self._num_taken == len(self._sums_AB):
            return self._loss(hidden_TE, weight_VE, target_T, **options)
        losses_T = torch.empty(target_T.shape, dtype=torch.float32, device=target_T.device)
        total = self._loss(hidden_TE, weight_VE, target_T, token_losses=losses_T, **options)
        losses_BS = losses_T.view(self._sums_AB.shape[1], -1)
        torch.sum(losses_BS, 1, dtype=torch.float64, out=self._sums_AB[self._num_taken])
        self._num_taken, self._num_targets = self._num_taken + 1, losses_BS.shape[1]
        return total

    def columns(self, trained: TrainedStep) -> dict[str, float]:
        """Return the mean loss in nats per token of each source that has samples in a step, by the column of
        its row. *Collective*; waits for the device.
        """
        names, parts = self._blend.names, self._blend.parts_of(trained.batch.sample_ids).ravel()
        sums = np.bincount(parts, self._sums_AB.cpu().numpy().ravel(), minlength=len(names))
        counts = np.bincount(parts, minlength=len(names)) * self._num_targets
        sums_2K = torch.from_numpy(np.stack([sums, counts.astype(np.float64)])).to(self._mesh.device)
        if self._mesh.loss_group is not None:
            dist.all_reduce(sums_2K, group=self._mesh.loss_group)
        found = zip(names, *sums_2K.tolist(), strict=True)
        return {train_column(name): total / count for name, total, count in found if count}


def build_source_losses(source: SampleSource, model: Transformer, mesh: Mesh) -> SourceLosses | None:
    """Return the hook that keeps the losses by source; None where there is one source alone."""
    return SourceLosses(source, model, mesh) if isinstance(source, Blend) else None
