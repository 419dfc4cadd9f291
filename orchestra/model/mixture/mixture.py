"""A feed-forward layer of experts, of which each token goes through some.

Shape letters: B batch, S sequence, T tokens (B·S), E hidden size, X experts, K experts of a token, M rows of
experts (T·K).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from conf.schema import ModelConfig
from orchestra.model.layers import SwiGLU
from orchestra.model.mixture.balance import Balance, counts_of
from orchestra.model.mixture.experts import Experts
from orchestra.model.mixture.router import Router

# What experts make of rows sorted by expert, and of how many each has.
ExpertsOfRows = Callable[[Tensor, Tensor], Tensor]
# Given the weights [T, K] of choices and the experts, returns [T, E]: each token's sum of what its experts
# made of it, by their weights.
Combine = Callable[[Tensor, ExpertsOfRows], Tensor]
# What a layer over ranks does to the input before it, and to the output after it.
Passage = Callable[[Tensor], Tensor]
# Returns, for choices [B, S·K] in the order of tokens, the place of each among its sequence's choices of the
# same expert.
Places = Callable[[Tensor, int], Tensor]


class Dispatch(Protocol):
    """Brings tokens to experts and back."""

    def __call__(self, x_TE: Tensor, experts_TK: Tensor) -> Combine:
        """Start to bring tokens to their experts. A choice of the number X is one that no expert takes."""


class LocalDispatch:
    """Experts that are all here. Everything is summed in a fixed order."""

    def __init__(self, num_experts: int, *, has_capacity: bool) -> None:
        self.num_experts, self.has_capacity = num_experts, has_capacity

    def __call__(self, x_TE: Tensor, experts_TK: Tensor) -> Combine:
        expert_M, order_M = experts_TK.flatten().sort(stable=True)
        place_TK = inverse(order_M).view(experts_TK.shape)
        counts_X = counts_of(expert_M[None], self.num_experts)[0]
        rows_ME = gathered_rows(x_TE, order_M, place_TK)

        def combine(weights_TK: Tensor, experts: ExpertsOfRows) -> Tensor:
            if not self.has_capacity:
                return combined_rows(experts(rows_ME, counts_X), weights_TK, order_M, place_TK)
            # What no expert computes must not be summed, forward or backward: it may be no number.
            is_left_M1 = (expert_M == self.num_experts)[:, None]
            made_ME = experts(rows_ME.masked_fill(is_left_M1, 0.0), counts_X).masked_fill(is_left_M1, 0.0)
            return combined_rows(made_ME, weights_TK, order_M, place_TK)

        return combine


def inverse(order_M: Tensor) -> Tensor:
    """Return where each entry went that `order_M` has brought into order."""
    return torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))


class _Gathered(torch.autograd.Function):
    """Row m is the token of choice order[m]; a token's gradient is the sum over its K places."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, order_M: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return x_TE[order_M // place_TK.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_TK,) = ctx.saved_tensors
        return _summed(grads[0], place_TK), None, None


class _Combined(torch.autograd.Function):
    """A token's sum of its K rows by their weights, in fp32; all gradients are gathered, none scattered."""

    @staticmethod
    def forward(ctx: Any, rows_ME: Tensor, weights_TK: Tensor, order_M: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_ME, weights_TK, order_M, place_TK)
        return _summed(rows_ME, place_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad_TE,) = grads
        rows_ME, weights_TK, order_M, place_TK = ctx.saved_tensors
        num_chosen = place_TK.shape[1]
        weight_M1 = weights_TK.flatten()[order_M][:, None]
        grad_ME = grad_TE[order_M // num_chosen]
        of_choice_M = (grad_ME.to(weights_TK.dtype) * rows_ME).sum(dim=1)
        grad_rows = (grad_ME * weight_M1).to(rows_ME.dtype)
        return grad_rows, of_choice_M[place_TK], None, None


def _summed(rows_ME: Tensor, place_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Return each token's sum of its rows, taken in fp32 and in the order of its choices."""
    wide = torch.promote_types(rows_ME.dtype, torch.float32)
    total_TE: Tensor | None = None
    for choice in range(place_TK.shape[1]):
        row_TE = rows_ME[place_TK[:, choice]].to(wide)
        if weights_TK is not None:
            row_TE = row_TE * weights_TK[:, choice, None]
        total_TE = row_TE if total_TE is None else total_TE + row_TE
    assert total_TE is not None
    return total_TE.to(rows_ME.dtype)


def gathered_rows(x_TE: Tensor, order_M: Tensor, place_TK: Tensor) -> Tensor:
    """Return the row [M, E] of each choice, in the order of `order_M`, whose inverse is `place_TK`."""
    return _Gathered.apply(x_TE, order_M, place_TK)  # type: ignore[no-any-return, no-untyped-call]


def combined_rows(rows_ME: Tensor, weights_TK: Tensor, order_M: Tensor, place_TK: Tensor) -> Tensor:
    """Return for each token the sum [T, E] of the rows of its choices by their weights."""
    return _Combined.apply(rows_ME, weights_TK, order_M, place_TK)  # type: ignore[no-any-return, no-untyped-call]


def places_in_sequence(experts_BN: Tensor, num_experts: int) -> Tensor:
    """Return how many choices of the same expert come before each one in its sequence; all of it is here."""
    num_sequences, length = experts_BN.shape
    sequence_B1 = torch.arange(num_sequences, device=experts_BN.device)[:, None]
    key_M, order_M = (experts_BN + sequence_B1 * num_experts).flatten().sort(stable=True)
    counts = counts_of(experts_BN, num_experts).flatten()
    begins = counts.cumsum(0) - counts
    place_M = torch.arange(num_sequences * length, device=key_M.device) - begins[key_M]
    return place_M[inverse(order_M)].view(num_sequences, length)


class Mixture(nn.Module):
    """The experts that a router chooses for each token, and one that every token goes through, if any."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.num_experts = model.num_experts
        self.num_chosen = model.num_experts_per_tok
        self.capacity_factor = model.moe_capacity_factor
        self.gate = Router(model)
        self.experts = Experts(model)
        shared = model.shared_expert_intermediate_size
        self.shared_experts = SwiGLU(model, shared) if shared else None
        self.balance = Balance(model)
        # What brings experts, inner widths or sequences to several ranks puts its own in these places.
        self.dispatch: Dispatch = LocalDispatch(
            self.num_experts, has_capacity=self.capacity_factor is not None
        )
        self.entering: Passage | None = None
        self.leaving: Passage | None = None
        self.places: Places = places_in_sequence
        # Tokens of a whole sequence, where this has a part; None: all of each is here.
        self.whole_length: int | None = None

    def forward(self, x_BSE: Tensor) -> Tensor:
        own_BSE = x_BSE if self.entering is None else self.entering(x_BSE)
        routing = self.gate(own_BSE.flatten(0, 1))
        experts_TK, dropped = routing.experts_TK, None
        if self.capacity_factor is not None:
            experts_TK, dropped = self._within_capacity(experts_TK, own_BSE.shape[0])
        weights_TK = self.balance(routing, own_BSE.shape[0], dropped)
        combine = self.dispatch(own_BSE.flatten(0, 1), experts_TK)
        # While tokens are on their way.
        shared = None if self.shared_experts is None else self.shared_experts(x_BSE)
        out = combine(weights_TK, self.experts).view_as(own_BSE)
        out = out if self.leaving is None else self.leaving(out)
        return out if shared is None else out + shared

    def _within_capacity(self, experts_TK: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Return the choices, those that no expert takes as the number X, and how many these are."""
        assert self.capacity_factor is not None
        experts_BN = experts_TK.view(num_sequences, -1)
        length = self.whole_length or experts_BN.shape[1] // self.num_chosen
        most = math.ceil(self.capacity_factor * length * self.num_chosen / self.num_experts)
        is_left_BN = self.places(experts_BN, self.num_experts) >= most
        taken_BN = experts_BN.masked_fill(is_left_BN, self.num_experts)
        return taken_BN.view_as(experts_TK), is_left_BN.sum()
