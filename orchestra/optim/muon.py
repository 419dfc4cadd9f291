"""Muon for the matrices of the blocks, AdamW for all else (`optim=muon`).

The momentum of a matrix is replaced by the nearest matrix with orthogonal rows or columns, about, by a few
iterations of Newton and Schulz (Jordan et al., 2024, github.com/KellerJordan/Muon), and scaled to the size of
an AdamW update, so that one rate and one decay serve both (Moonlight, arXiv:2502.16982, section 2.2).

It takes parameters as `optim.target` gives them. The whole matrix has to be orthogonalized: where a rank has
a range of one, the momenta of its parts are put together first, and each rank that has a part takes it from
the result. State: one momentum of each matrix of the blocks, two moments of all other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestra.optim.plugged import MATRICES, Gather, gather_nothing

# Of the polynomial a·x + b·x³ + c·x⁵, which takes singular values near 1 in few iterations (Jordan et al.).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def orthogonalized(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """Return about U·Vᵀ of a matrix U·S·Vᵀ, or of each of several that are stacked, in its shape and dtype;
    computed in bf16 on a GPU.
    """
    a, b, c = _COEFFICIENTS
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + _EPS)
    for _ in range(num_iterations):
        squared = x @ x.mT
        x = a * x + (b * squared + c * squared @ squared) @ x
    result: Tensor = x.mT if is_tall else x
    return result.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Muon with AdamW beside it: `layers.…` in groups of kind `matrices` are Muon's, those of stacked
    experts each by itself.

    Without `param_names` in the groups all parameters of two dims are. `momentum`, `nesterov` and
    `num_iterations` are Muon's, `betas` and `eps` AdamW's. `update_size` is the root mean square of an update
    with a rate of 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        num_iterations: int = 5,
        update_size: float = 0.2,
        weight_decay: float = 0.1,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} is not from 0 to below 1")
        if num_iterations < 1:
            raise ValueError(f"num_iterations={num_iterations} is too small; use 1 or more")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={list(betas)} are not two numbers from 0 to below 1")
        self._nesterov, self._num_iterations, self._update_size = nesterov, num_iterations, update_size
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "betas": tuple(betas), "eps": eps})
        self._name_of: dict[Tensor, str] = {}
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for place, parameter in enumerate(group["params"]):
                is_ours = parameter.dim() == 2 if names is None else group.get("kind", MATRICES) == MATRICES
                if is_ours and (names is None or names[place].startswith("layers.")):
                    self._name_of[parameter] = f"{number}.{place}" if names is None else names[place]
        self.gather: Gather = gather_nothing

    @property
    def gathered_names(self) -> set[str]:
        """The names of the parameters on this rank whose whole matrices a step needs."""
        return set(self._name_of.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step. *Collective* where `gather` is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pieces: dict[str, tuple[Tensor, Tensor]] = {}
        group_of: dict[Tensor, dict[str, Any]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                group_of[parameter] = group
                if parameter in self._name_of:
                    pieces[self._name_of[parameter]] = (parameter, self._momentum(parameter, group))
                else:
                    self._step_of_adamw(parameter, group)
        for matrix in self.gather(pieces):
            group = group_of[matrix.parameter]
            direction = orthogonalized(matrix.whole, self._num_iterations)
            size = self._update_size * max(matrix.whole.shape[-2:]) ** 0.5
            matrix.parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            matrix.parameter.add_(matrix.mine(direction), alpha=-group["lr"] * size)
        return loss

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Follow the gradient; return what is to be orthogonalized, shaped like the parameter."""
        state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1.0 - momentum)
        return gradient.lerp(buffer, momentum) if self._nesterov else buffer

    def _step_of_adamw(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["num_updates"] = 0
        beta1, beta2 = group["betas"]
        state["num_updates"] += 1
        first, second, count = state["exp_avg"], state["exp_avg_sq"], state["num_updates"]
        first.lerp_(gradient, 1.0 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        root = (second / (1.0 - beta2**count)).sqrt_().add_(group["eps"])
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first, root, value=-group["lr"] / (1.0 - beta1**count))
