"""AdamW over fp32 masters: decay groups, clipping and the skip of a bad step are all inside torch's fused
kernel.

The kernel divides gradients by `grad_scale` and leaves everything as it is where `found_inf` is 1: torch's
own gradient scaler works so. Clipping and skipping through them costs no extra pass over the gradients and no
wait for the device.

Masters are updated some at a time, as their gradients come: whoever shards or rounds them can begin to send
the first while the last are still to be done. The state is made with the optimizer, not at the first step:
what a run needs is taken before it trains, and a restored state is written into it in place. It consists of
two moments for each master and one count of updates for all of them.

Moments may be kept in bf16. They are then updated in fp32, some elements at a time, and rounded
stochastically. Masters may lie in host memory (`parallelism.offload`): the state lies where they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import OptimConfig, StateDType
from orchestra.model.initial import is_fake, mixed_bits, random_key
from orchestra.sizes.memory import ROUNDED_CPU, ROUNDED_GPU

# Stochastic rounding of fp32 to bf16: up or down with the probabilities that keep the mean.
#
# A moment that is rounded to nearest stands still as soon as its change of one step is below half of bf16's
# last digit (1/256 of it); rounded stochastically it moves by the right amount on average. The random bits
# are a function of (seed, step, name, global index) by the generator of the initial values: every layout
# rounds alike, a run that goes on from a checkpoint rounds as it would have, and there is no state to save.


# Digits of fp32 that bf16 does not have.
_LOST_BITS = 16
_LOST_MASK = (1 << _LOST_BITS) - 1


def round_stochastically_(out: Tensor, values: Tensor, bits: Tensor, number: int = 0) -> None:
    """Fill the bf16 `out` with finite fp32 values of its shape; a number that bf16 holds stays as it is.

    `number`, 0 to 3, says which 16 of the 64 random bits of each element are used.
    """
    lost = ((bits >> (_LOST_BITS * number)) & _LOST_MASK).to(torch.int32)
    # Adding to the lower digits of a finite number carries into the upper ones, whatever its sign.
    carried = (values.contiguous().view(torch.int32) + lost) & ~_LOST_MASK
    out.copy_(carried.view(torch.float32))


# torch's names of the state that has a master's shape.
MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements of one dot product of a norm.
_DOT_LENGTH = 1 << 16


@dataclass(frozen=True)
class Trained:
    """One parameter in training: the tensor the model computes with, and the one the optimizer updates.

    `master` holds the elements [start, stop) of the parameter as it lies in memory: in the parameter's shape
    where these are all of it, one-dimensional where they are fewer, empty where other ranks have them all. It
    shares the parameter's memory unless the model computes in 16 bits; then it is its fp32 original.
    """

    name: str
    parameter: Tensor
    master: Tensor
    start: int
    stop: int


# Returns the int64 flat indices, in the whole parameter, of the elements [start, stop) of what a rank holds.
GlobalIndex = Callable[[Trained, int, int], Tensor]


class AdamW:
    """AdamW by torch's fused kernel: matrices with weight decay, norm gains and biases (one dim) without.

    `state` has the moments by master; `lr` is set before each step. `seed` and `global_index` choose the
    random bits of rounded moments.
    """

    def __init__(
        self, trained: Sequence[Trained], optim: OptimConfig, seed: int, global_index: GlobalIndex
    ) -> None:
        device = trained[0].master.device
        self.lr = optim.lr
        self._is_rounded = optim.state_dtype is StateDType.bf16
        dtype = torch.bfloat16 if self._is_rounded else None
        self.state: dict[Tensor, dict[str, Tensor]] = {
            item.master: {name: torch.zeros_like(item.master, dtype=dtype) for name in MOMENTS}
            for item in trained
        }
        self._seed, self._global_index = seed, global_index
        self._step = 0
        # In fp32 and on the device, as the kernel reads it.
        self._num_updates = torch.zeros((), dtype=torch.float32, device=device)
        self._weight_decay = optim.weight_decay
        self._betas = optim.betas
        self._eps = optim.eps
        self._clip_norm = optim.clip_norm
        self._grad_scale = torch.ones((), dtype=torch.float32, device=device)
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)

    @property
    def num_updates(self) -> int:
        """Updates so far, skipped steps left out. Waits for the device."""
        return int(self._num_updates)

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        """Set the count: the correction of both moments' bias follows from it."""
        self._num_updates.fill_(value)

    def begin_step(
        self, step: int, grad_norm: Tensor, is_bad: Tensor, loss_scale: Tensor | None = None
    ) -> None:
        """Begin a step whose gradients are scaled to a norm of at most clip_norm, or left out where is_bad.

        grad_norm, of all gradients together, and is_bad (bool) are scalars on the device and are not read by
        the host unless the masters lie there. The gradients that come are loss_scale times too large.
        """
        limit = torch.inf if self._clip_norm is None else self._clip_norm
        divisor = torch.clamp(grad_norm / limit, min=1.0)
        if loss_scale is not None:
            divisor = divisor * loss_scale
        device = self._num_updates.device
        self._grad_scale = torch.where(is_bad, 1.0, divisor).to(device)
        self._found_inf = is_bad.float().to(device)
        self._num_updates += 1.0 - self._found_inf
        self._step = step

    def update(self, trained: Sequence[Trained], gradients: Sequence[Tensor]) -> None:
        """Update some masters with their gradients, which have their dtype and are overwritten.

        Each master once in a step; one without elements is left out.
        """
        for has_decay in (True, False):
            chosen = [
                (item, gradient)
                for item, gradient in zip(trained, gradients, strict=True)
                if (item.parameter.dim() >= 2) is has_decay and gradient.numel()
            ]
            weight_decay = self._weight_decay if has_decay else 0.0
            if self._is_rounded:
                for item, gradient in chosen:
                    self._update_rounded(item, gradient, weight_decay)
            elif chosen:
                states = [self.state[item.master] for item, _ in chosen]
                self._update(
                    [item.master for item, _ in chosen],
                    [gradient for _, gradient in chosen],
                    ([state[MOMENTS[0]] for state in states], [state[MOMENTS[1]] for state in states]),
                    weight_decay,
                )

    @torch.no_grad()
    def _update(
        self,
        masters: list[Tensor],
        gradients: list[Tensor],
        moments: tuple[list[Tensor], list[Tensor]],
        weight_decay: float,
    ) -> None:
        torch._fused_adamw_(
            masters,
            gradients,
            *moments,
            [],
            [self._num_updates] * len(masters),
            lr=self.lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=self._grad_scale,
            found_inf=self._found_inf,
        )

    @torch.no_grad()
    def _update_rounded(self, item: Trained, gradient: Tensor, weight_decay: float) -> None:
        """Update one master whose moments are bf16, some elements at a time."""
        # A dry run on the CPU takes large steps too: it is about a GPU, or has too many of the small ones.
        is_large = item.master.is_cuda or is_fake(item.master)
        length = ROUNDED_GPU if is_large else ROUNDED_CPU
        key = random_key("rounding", self._seed, self._step, item.name)
        master, flat_gradient = item.master.view(-1), gradient.reshape(-1)
        moments = [self.state[item.master][name].view(-1) for name in MOMENTS]
        for begin in range(0, master.numel(), length):
            part = slice(begin, begin + length)
            wide = [moment[part].float() for moment in moments]
            self._update([master[part]], [flat_gradient[part]], ([wide[0]], [wide[1]]), weight_decay)
            first = item.start + begin
            index = self._global_index(item, first, first + wide[0].numel())
            bits = mixed_bits(index, key, rounds=1)
            for number, (moment, value) in enumerate(zip(moments, wide, strict=True)):
                round_stochastically_(moment[part], value, bits, number)


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all gradients, which may be none, as an fp64 scalar.

    Of fp32 tensors on CPU by dot products of a limited length: as fast as torch's norm, which sums a million
    squares with an error of 1e-5 (1e-7 so). Of 16-bit numbers in fp64, for the same reason.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    if gradients[0].is_cuda:
        norms = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32))
        return norms.double().square().sum()
    flat = [gradient.view(-1) for gradient in gradients]
    if flat[0].dtype is torch.float32 and not is_fake(flat[0]):
        pieces = [piece for part in flat for piece in torch.split(part, _DOT_LENGTH)]
        return torch.stack([torch.dot(piece, piece) for piece in pieces]).double().sum()
    return torch.stack(torch._foreach_norm(flat, 2, dtype=torch.float64)).square().sum()
