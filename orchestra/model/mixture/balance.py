"""How evenly the experts of a layer are loaded: what counts it, and the losses and the bias that even it out.

The gradients of the losses are injected where the experts' weights pass: nobody has to carry a loss to the
end of the model, whichever rank that is on, and whoever calls backward. They are scaled as the model's own
loss is, by the share of one token in the global batch.

Shape letters: B sequences, S tokens of each, T tokens (B·S), X experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import ModelConfig, MoeAuxScope, MoeBalance
from orchestra.model.mixture.router import Routing

# Of the loss of balance, where moe_balance=aux and nobody says another.
USUAL_AUX_COEF = 0.01
# Sums over a tensor of other ranks' too.
Totals = Callable[[Tensor], Tensor]
# What `Balance.statistics` sums over tokens: entropy of the scores (nats), squared
# log-sum-exp of the logits, and how many there were.
STATISTICS = ("entropy", "router_z", "tokens")

_is_counting = True


@contextmanager
def uncounted() -> Iterator[None]:
    """Let forward passes count no tokens: those that only repeat what was counted."""
    global _is_counting
    before, _is_counting = _is_counting, False
    try:
        yield
    finally:
        _is_counting = before


def only_here(own: Tensor) -> Tensor:
    """Return sums of which no other rank has a part."""
    return own


def counts_of(experts_NK: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert was chosen in each row: int64 [N, X]. Whoever is dropped has the number X
    and is not counted.
    """
    counts = experts_NK.new_zeros(len(experts_NK), num_experts + 1)
    counts.scatter_add_(1, experts_NK, torch.ones_like(experts_NK))
    return counts[:, :num_experts]


def updated_bias(bias_X: Tensor, counts_X: Tensor, rate: float) -> Tensor:
    """Return the biases after a step in which experts were chosen so often: those of experts below the mean
    grow by `rate`, the others' shrink, and the change sums up to zero (DeepSeek-V3, section 2.1.2).
    """
    counts = counts_X.to(bias_X.dtype)
    change = rate * torch.sign(counts.mean() - counts)
    return bias_X + (change - change.mean())


class _Injected(torch.autograd.Function):
    """Passes weights through; in the backward pass a loss beside them gets `scale` as its gradient."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, _loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grads[0], scale, None


class Balance(nn.Module):
    """Counts a layer's choices over the micro-batches of a step, and injects what evens them out.

    The buffers are no state of a checkpoint: they are zeroed after each step. `loss_share` is what scales the
    loss of each token in the current step.
    """

    tokens_per_expert: Tensor
    dropped: Tensor
    statistics: Tensor
    loss_share: Tensor

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.num_experts = model.num_experts
        usual = USUAL_AUX_COEF if model.moe_balance is MoeBalance.aux else 0.0
        self.aux_coef = usual if model.router_aux_loss_coef is None else model.router_aux_loss_coef
        self.z_coef = model.router_z_loss_coef
        self.is_of_batch = model.moe_aux_scope is MoeAuxScope.batch
        # What cuts batches and sequences over ranks sums the choices of a micro-batch over all that have a
        # part of it, and those of each sequence over those that have a part of that.
        self.totals: Totals = only_here
        self.sequence_totals: Totals = only_here
        # Ranks that route the same tokens, and whose gradients of the router are summed.
        self.num_alike = 1
        self.register_buffer("tokens_per_expert", torch.zeros(self.num_experts, dtype=torch.int64), False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), False)
        self.register_buffer("statistics", torch.zeros(len(STATISTICS), dtype=torch.float64), False)
        self.register_buffer("loss_share", torch.zeros(()), False)

    def forward(self, routing: Routing, num_sequences: int, dropped: Tensor | None = None) -> Tensor:
        """Return the weights [T, K], counted, with the losses' gradients injected; `dropped` (int64) says how
        many of the choices no expert takes.
        """
        if not torch.is_grad_enabled():
            return routing.weights_TK
        counts_BX = counts_of(routing.experts_TK.view(num_sequences, -1), self.num_experts)
        if _is_counting:
            self._count(routing, counts_BX, dropped)
        weights_TK = routing.weights_TK
        if self.aux_coef or self.z_coef:
            scale = self.loss_share / self.num_alike
            weights_TK = _Injected.apply(weights_TK, self._loss(routing, counts_BX), scale)  # type: ignore[no-untyped-call]
        return weights_TK

    def reset(self) -> None:
        """Count anew."""
        for counter in (self.tokens_per_expert, self.dropped, self.statistics):
            counter.zero_()

    @torch.no_grad()
    def _count(self, routing: Routing, counts_BX: Tensor, dropped: Tensor | None) -> None:
        self.tokens_per_expert.add_(counts_BX.sum(0))
        if dropped is not None:
            self.dropped.add_(dropped)
        shares_TX = _shares(routing.scores_TX)
        entropy = torch.special.entr(shares_TX).sum()
        z = routing.logits_TX.logsumexp(dim=-1).square().sum()
        tokens = torch.full_like(z, len(shares_TX))
        self.statistics.add_(torch.stack([entropy, z, tokens]))

    def _loss(self, routing: Routing, counts_BX: Tensor) -> Tensor:
        """Return the losses, summed over tokens."""
        scores_TX = routing.scores_TX
        loss = scores_TX.new_zeros(())
        if self.aux_coef:
            counts = (
                self.totals(counts_BX.sum(0)[None]) if self.is_of_batch else self.sequence_totals(counts_BX)
            )
            even = counts / counts.sum(dim=1, keepdim=True) * self.num_experts
            per_sequence = _shares(scores_TX).view(len(counts_BX), -1, self.num_experts).sum(1)
            loss = loss + self.aux_coef * (even.to(scores_TX.dtype) * per_sequence).sum()
        if self.z_coef:
            loss = loss + self.z_coef * routing.logits_TX.logsumexp(dim=-1).square().sum()
        return loss


def _shares(scores_TX: Tensor) -> Tensor:
    """Return scores that sum up to 1 for each token."""
    return scores_TX / scores_TX.sum(dim=-1, keepdim=True)
