"""AdamW's update of matrices in fp32 from 16-bit gradients as one compiled pass, for GPUs.

A kernel reads gradient, master and moments of an element, and writes master, moments and the 16-bit
parameter: 28 bytes, and nothing is widened in memory. It computes what torch's fused kernel does, and rounds
otherwise in the last digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements. Tensors of whole rows of this length share one graph, whatever their number: the compiler then
# knows that rows are aligned.
ROW = 32


class CompiledUpdate:
    """The update with constant betas and eps. What changes from step to step is on the device, so that
    nothing is compiled again for it, and nobody waits.
    """

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self._betas, self._eps = betas, eps
        # One graph for the first size and one for all others; another for parts of matrices.
        self._pass = torch.compile(_update_)

    def begin_step(self, lr: float, weight_decay: float, num_updates: Tensor) -> None:
        """Take the learning rate, and the count of updates with this one (fp32)."""
        beta1, beta2 = self._betas
        count = num_updates.double()
        self._step_size = (lr / (1.0 - beta1**count)).float()
        self._root_correction = (1.0 - beta2**count).sqrt().float()
        self._kept = torch.full_like(num_updates, 1.0 - lr * weight_decay)

    def update(
        self,
        state: tuple[Tensor, Tensor, Tensor],
        gradient: Tensor,
        parameter: Tensor,
        divisor: Tensor,
        is_left_out: Tensor,
        rate: float = 1.0,
    ) -> None:
        """Update master and moments (`state`, fp32) with gradient / divisor unless it is left out (1.0), and
        round the master into the parameter. All flat and of one length, a multiple of ROW. `rate` multiplies
        the learning rate, and not the decay.
        """
        step_size = self._step_size if rate == 1.0 else self._step_size * rate
        master, first, second = (tensor.view(-1, ROW) for tensor in state)
        self._pass(
            master,
            first,
            second,
            gradient.view(-1, ROW),
            parameter.view(-1, ROW),
            step_size,
            self._root_correction,
            self._kept,
            divisor,
            is_left_out,
            *self._betas,
            self._eps,
        )


def _update_(
    master: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    parameter: Tensor,
    step_size: Tensor,
    root_correction: Tensor,
    kept: Tensor,
    divisor: Tensor,
    is_left_out: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    wide = gradient.float() / divisor
    is_taken = is_left_out == 0.0
    new_first = beta1 * first + (1.0 - beta1) * wide
    new_second = beta2 * second + (1.0 - beta2) * wide * wide
    new = master * kept - step_size * new_first / (new_second.sqrt() / root_correction + eps)
    # Chosen and not multiplied: what is left out may be no number.
    new = torch.where(is_taken, new, master)
    first.copy_(torch.where(is_taken, new_first, first))
    second.copy_(torch.where(is_taken, new_second, second))
    master.copy_(new)
    parameter.copy_(new)
