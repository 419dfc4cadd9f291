"""How noisy the gradient is, from gradients of two sizes of batch that a step has anyway (McCandlish et al.,
2018, arXiv:1812.06162, appendix A.1): columns noise/… of metrics.jsonl (`train.noise_scale_every`).

The large batch is the global one, whose norm clipping takes. The small one is a rank's first micro-batch: its
gradients are looked at as they come, before anything is added to them or summed over ranks. From the
expectation |G_B|² = |G|² + tr(Σ)/B of both sizes follow |G|², of the true gradient, and tr(Σ), the variance
of one sequence's. Each is noisy, and their quotient would be biased: they are averaged over steps before
anybody divides. B_simple = tr(Σ) / |G|² is the batch at which noise and signal are alike.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import TrainConfig
from orchestra.optim.adamw import squared_norm
from orchestra.parallel.apply import Parallelized
from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh
from orchestra.run.metrics_file import NOISE_GRADIENT, NOISE_VARIANCE
from orchestra.sizes.step_shares import Part
from orchestra.sizes.topology import StepBatches
from orchestra.train.hooks import StepHook, TrainedStep

# Steps between two rows.
_MOST_MEASURED = 1024


class NoiseScale(StepHook):
    """Measures the squared norms of gradients of every `every_steps`-th step. *Collective*, in these steps.

    Nothing is computed twice, and the training keeps its bits.
    """

    def __init__(
        self,
        every_steps: int,
        parallelized: Parallelized,
        batches: StepBatches,
        mesh: Mesh,
        measured: Iterable[Sequence[float]] = (),
    ) -> None:
        """`measured`: what an earlier attempt measured since its last row."""
        self._every_steps = every_steps
        self._parallel = parallelized
        self._batches = batches
        self._mesh = mesh
        self._watching = contextlib.ExitStack()
        # Of this rank's first micro-batch: the sum of squares, and gradients that are still to be summed over
        # ranks which share the parameter.
        self._squares = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._partial: dict[str, Tensor] = {}
        # |G|² and tr(Σ) of each measured step since the last row, on the device.
        # Ranks but the one that writes rows never ask for them.
        self._measured: deque[Tensor] = deque(
            (torch.tensor(pair, dtype=torch.float64, device=mesh.device) for pair in measured),
            maxlen=_MOST_MEASURED,
        )

    def before_forward(self, step: int, tokens_ABS: Tensor, share: float | Tensor) -> None:  # noqa: ARG002
        """Look at the gradients of a step that is due: from here, as the loss gives its own at once."""
        batch = self._batches.at(step)
        if step % self._every_steps or batch.global_batch_size == batch.micro_batch_size:
            return
        self._squares.zero_()
        self._watching.enter_context(self._parallel.stage.gradients.watched(self._look))

    def _look(self, name: str, gradient: Tensor) -> None:
        place = self._parallel.places[name]
        if place.sum_group is not None:
            self._partial[name] = gradient.detach().float().clone()
        elif place.is_counted:
            self._squares += squared_norm([gradient.detach()]).to(self._squares.device)

    def after_step(self, trained: TrainedStep) -> None:
        """Put the ranks' norms together, and estimate. Waits for no device."""
        batch = self._batches.at(trained.step)
        if trained.step % self._every_steps or batch.global_batch_size == batch.micro_batch_size:
            return
        self._watching.close()
        self._sum_partial()
        squares = self._squares.clone()
        if self._mesh.world_size > 1:
            self._mesh.traffic.add_all_reduce(squares.nbytes, self._mesh.world_size)
            with marked(Part.communication):
                dist.all_reduce(squares)
        small, large = batch.micro_batch_size, batch.global_batch_size
        # Gradients are those of the mean over the global batch, of which a micro-batch has its share.
        result = trained.result
        scale = large / small if result.loss_scale is None else large / small / result.loss_scale.double()
        of_small = squares / self._mesh.layout.dp * scale**2
        of_large = result.grad_norm.double() ** 2
        gradient = (large * of_large - small * of_small) / (large - small)
        variance = (of_small - of_large) / (1.0 / small - 1.0 / large)
        is_sound = torch.isfinite(gradient) & torch.isfinite(variance)
        self._measured.append(torch.where(is_sound, torch.stack([gradient, variance]), math.nan))

    def _sum_partial(self) -> None:
        """Sum what ranks of tensor parallelism have parts of, and count it once."""
        for name, gradient in self._partial.items():
            place = self._parallel.places[name]
            with marked(Part.communication):
                dist.all_reduce(gradient, group=place.sum_group)
            if place.is_counted:
                self._squares += squared_norm([gradient]).to(self._squares.device)
        self._partial.clear()

    @property
    def measured(self) -> list[list[float]]:
        """|G|² and tr(Σ) of each sound step since the last row: a checkpoint between two rows keeps them.
        *Rank 0*; waits for the device.
        """
        found = torch.stack([*self._measured]).tolist() if self._measured else []
        return [pair for pair in found if math.isfinite(pair[0])]

    def columns(self) -> dict[str, float]:
        """Return the means since the last call by their columns, of sound steps. *Rank 0*; waits for the
        device.
        """
        measured = self.measured
        self._measured.clear()
        if not measured:
            return {}
        gradients, variances = zip(*measured, strict=True)
        return {
            NOISE_GRADIENT: math.fsum(gradients) / len(measured),
            NOISE_VARIANCE: math.fsum(variances) / len(measured),
        }


def build_noise_scale(
    train: TrainConfig,
    parallelized: Parallelized,
    batches: StepBatches,
    mesh: Mesh,
    measured: Iterable[Sequence[float]] = (),
) -> NoiseScale | None:
    """Return the hook that measures the noise, of a run that goes on with what was `measured` since the last
    row; None where that is not asked for.
    """
    every = train.noise_scale_every
    return None if every is None else NoiseScale(every, parallelized, batches, mesh, measured)
