"""AdamW over fp32 masters: decay groups, clipping and the skip of a bad step, all inside torch's fused
kernel.

The kernel divides gradients by `grad_scale` and leaves everything as it is where `found_inf` is 1. These are
the two attributes that torch's own gradient scaler sets; clipping and skipping through them costs no extra
pass over the gradients and no wait for the device.

The optimizer's state is made with it, not at the first step: what a run needs is taken before it trains, and
a restored state is written into it in place. It consists of two moments for each master and one count of
updates, which torch keeps once per parameter and which is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import OptimConfig

# torch's names of the state that has a master's shape.
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Trained:
    """One parameter in training: the tensor the model computes with, and the one the optimizer updates.

    They are the same tensor unless the model computes in 16 bits; then `master` is its fp32 original.
    """

    name: str
    parameter: Tensor
    master: Tensor


def decays(parameter: Tensor) -> bool:
    """Matrices decay; norm gains and biases (one dim) do not."""
    return parameter.dim() >= 2


def make_adamw(trained: Iterable[Trained], optim: OptimConfig) -> torch.optim.AdamW:
    """Return the fused AdamW over the masters, in two groups: with and without weight decay."""
    masters = [item.master for item in trained]
    groups = [
        {"params": [master for master in masters if decays(master)], "weight_decay": optim.weight_decay},
        {"params": [master for master in masters if not decays(master)], "weight_decay": 0.0},
    ]
    first, second = optim.betas
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=(first, second),
        eps=optim.eps,
        fused=True,
    )
    for master in masters:
        optimizer.state[master] = _empty_state(master)
    return optimizer


def _empty_state(master: Tensor) -> dict[str, Tensor]:
    """Return what torch's fused AdamW would make for a parameter at its first step."""
    state = {name: torch.zeros_like(master, memory_format=torch.preserve_format) for name in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32, device=master.device), **state}


def num_updates(optimizer: torch.optim.AdamW) -> int:
    """Return how many updates were made; skipped steps do not count. Waits for the device."""
    return int(next(iter(optimizer.state.values()))["step"])


def set_num_updates(optimizer: torch.optim.AdamW, value: int) -> None:
    """Set how many updates were made: the correction of both moments' bias follows from it."""
    for state in optimizer.state.values():
        state["step"].fill_(value)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = value


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm over all gradients as an fp32 scalar on their device."""
    # In fp32 from the first sum: the norm of bf16 gradients would itself be rounded to 8 bits.
    norms = torch._foreach_norm(list(grads), 2, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def step_clipped(
    optimizer: torch.optim.AdamW, grad_norm: Tensor, is_bad: Tensor, clip_norm: float | None
) -> None:
    """Update with the gradients scaled so that their norm is at most clip_norm; do nothing where is_bad.

    grad_norm and is_bad (bool) are scalars on the device and are not read by the host.
    """
    limit = torch.inf if clip_norm is None else clip_norm
    divisor = torch.clamp(grad_norm / limit, min=1.0)
    optimizer.grad_scale = torch.where(is_bad, 1.0, divisor)  # type: ignore[attr-defined]
    optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
    optimizer.step()
