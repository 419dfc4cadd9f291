"""Tokens on their way to experts on other ranks and back (`parallelism.ep`).

Each rank sends the rows of its tokens to the ranks that have their experts, and gets back what these made of
them: an exchange of uneven parts before the experts and one after, and both again in the backward pass. How
many rows come is exchanged first; the host waits for these numbers, and the ranks of a group therefore always
meet in the same order, whatever is chosen.

Between a start and a finish others may compute: the rows travel while a layer's shared expert does, in the
backward pass too.

Shape letters: T tokens, E hidden size, X experts, K experts of a token, M = T·K rows of this rank's tokens, R
rows that arrive, N ranks, P places for experts on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestra.model.initial import is_fake
from orchestra.model.mixture.balance import counts_of
from orchestra.model.mixture.mixture import (
    Combine,
    ExpertsOfRows,
    combined_rows,
    gathered_rows,
    inverse,
)
from orchestra.parallel.experts.expert_shares import ExpertShares
from orchestra.parallel.found_once import once
from orchestra.parallel.marks import Traffic, marked
from orchestra.parallel.uncompiled import leave_uncompiled
from orchestra.sizes.step_shares import Part


@dataclass(frozen=True)
class ExchangeGroup:
    """The ranks that share out the experts, and what counts the bytes that this one sends."""

    process_group: dist.ProcessGroup
    traffic: Traffic

    def start(self, rows_ME: Tensor, sent: Sequence[int], received: Sequence[int]) -> ArrivingRows:
        """Start to send the first sent[0] rows to rank 0, the next ones to rank 1 and so on, and to receive
        received[0] rows from rank 0 and so on. *Collective*.
        """
        rows_ME = rows_ME.contiguous()
        arrived = rows_ME.new_empty(sum(received), *rows_ME.shape[1:])
        rank = dist.get_rank(self.process_group)
        to_others = rows_ME[: sum(sent) - sent[rank]]
        self.traffic.add_exchanged(to_others.nbytes)
        with marked(Part.communication):
            work = dist.all_to_all_single(
                arrived, rows_ME, list(received), list(sent), group=self.process_group, async_op=True
            )
        assert work is not None
        return ArrivingRows(arrived, rows_ME, work)


class ArrivingRows:
    """Rows that are being exchanged; what is sent is kept until they are there."""

    def __init__(self, arrived: Tensor, sent: Tensor, work: dist.Work) -> None:
        self.rows = arrived
        self._sent: Tensor | None = sent
        self._work = work

    def wait(self) -> Tensor:
        with marked(Part.communication):
            self._work.wait()
        self._sent = None
        return self.rows


class _Exchange:
    """One exchange of a forward pass, and the one that takes its gradients back."""

    def __init__(self, group: ExchangeGroup, sent: Sequence[int], received: Sequence[int]) -> None:
        self._group, self._sent, self._received = group, sent, received
        self._forward: ArrivingRows | None = None
        self._backward: ArrivingRows | None = None

    def start(self, rows_ME: Tensor) -> Tensor:
        """Return the rows that are to arrive, not there yet."""
        started: Tensor = _Started.apply(rows_ME, self)  # type: ignore[no-untyped-call]
        return started

    def finish(self, rows_RE: Tensor) -> Tensor:
        """Return the rows that `start` has returned, when they are there."""
        arrived: Tensor = _Finished.apply(rows_RE, self)  # type: ignore[no-untyped-call]
        return arrived

    def start_forward(self, rows_ME: Tensor) -> Tensor:
        self._forward = self._group.start(rows_ME, self._sent, self._received)
        return self._forward.rows

    def finish_forward(self) -> None:
        assert self._forward is not None
        self._forward.wait()
        self._forward = None

    def start_backward(self, grad_RE: Tensor) -> None:
        self._backward = self._group.start(grad_RE, self._received, self._sent)

    def finish_backward(self) -> Tensor:
        assert self._backward is not None
        arrived, self._backward = self._backward.wait(), None
        return arrived


class _Started(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ME: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start_forward(rows_ME)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        # What came here is what has been sent.
        return ctx.exchange.finish_backward(), None


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RE: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish_forward()
        return rows_RE.view_as(rows_RE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start_backward(grads[0])
        return grads[0], None


class _Permuted(torch.autograd.Function):
    """Rows in another order; gradients are gathered and not scattered."""

    @staticmethod
    def forward(ctx: Any, rows_RE: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(place_R)
        return rows_RE[order_R]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_R,) = ctx.saved_tensors
        return grads[0][place_R], None, None


def _permuted(rows_RE: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
    permuted: Tensor = _Permuted.apply(rows_RE, order_R, place_R)  # type: ignore[no-untyped-call]
    return permuted


@dataclass(frozen=True)
class _Arrivals:
    """What arrives at this rank: rows sent to and received from each rank, those for each of its experts
    (int64 [P]), and the order that sorts them by expert, with its inverse.
    """

    sent: list[int]
    received: list[int]
    counts: Tensor
    order: Tensor
    place: Tensor


class ExchangedDispatch:
    """Takes the place of `LocalDispatch`: experts are shared out over the ranks of a group. *Collective*, in
    the backward pass too.
    """

    def __init__(self, group: ExchangeGroup, shares: ExpertShares) -> None:
        leave_uncompiled(ExchangedDispatch)
        self._group, self._shares = group, shares
        # Each expert's place in the room of all ranks, and after them that of choices that no expert takes.
        self._places: Tensor | None = None

    def follow(self, shares: ExpertShares) -> None:
        """Bring tokens to experts by other shares from now on. *Any rank*, between two steps."""
        self._shares, self._places = shares, None

    def __call__(self, x_TE: Tensor, experts_TK: Tensor) -> Combine:
        num_places = self._shares.num_ranks * self._shares.padded
        if self._places is None:
            self._places = torch.tensor([*self._shares.places, num_places], device=experts_TK.device)
        sorted_M, order_M = self._places[experts_TK].flatten().sort(stable=True)
        place_TK = inverse(order_M).view(experts_TK.shape)
        counts_NP = counts_of(sorted_M[None], num_places).view(self._shares.num_ranks, -1)
        arrivals = self._announced(counts_NP, len(order_M))
        rows_ME = gathered_rows(x_TE, order_M, place_TK)
        # Choices that no expert takes come last: they stay here.
        num_sent = sum(arrivals.sent)
        to_experts = _Exchange(self._group, arrivals.sent, arrivals.received)
        arriving_RE = to_experts.start(rows_ME[:num_sent])

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def combine(weights_TK: Tensor, experts: ExpertsOfRows) -> Tensor:
            rows_RE = _permuted(to_experts.finish(arriving_RE), arrivals.order, arrivals.place)
            made_RE = _permuted(experts(rows_RE, arrivals.counts), arrivals.place, arrivals.order)
            to_tokens = _Exchange(self._group, arrivals.received, arrivals.sent)
            made_ME = to_tokens.finish(to_tokens.start(made_RE))
            if num_sent < len(order_M):
                left = made_ME.new_zeros(len(order_M) - num_sent, made_ME.shape[1])
                made_ME = torch.cat([made_ME, left])
            return combined_rows(made_ME, weights_TK, order_M, place_TK)

        return combine  # type: ignore[no-any-return]

    @torch.no_grad()
    def _announced(self, counts_NP: Tensor, num_rows: int) -> _Arrivals:
        """Tell all ranks how many rows they get for each of their experts. Waits for the device, but in a
        repetition.
        """
        num_ranks, padded = counts_NP.shape
        sent, received, coming_NP = once(lambda: self._asked(counts_NP, num_rows))
        expert_P = torch.arange(padded, device=counts_NP.device)
        expert_R = expert_P.repeat(num_ranks)
        if is_fake(counts_NP):
            order_R = torch.arange(sum(received), device=counts_NP.device)
        else:
            expert_R = expert_R.repeat_interleave(coming_NP.flatten(), output_size=sum(received))
            order_R = expert_R.sort(stable=True).indices
        return _Arrivals(sent, received, coming_NP.sum(0), order_R, inverse(order_R))

    def _asked(self, counts_NP: Tensor, num_rows: int) -> tuple[list[int], list[int], Tensor]:
        """Return how many rows go to each rank and come from it, and for which expert these are [N, P]."""
        num_ranks = len(counts_NP)
        coming_NP = torch.empty_like(counts_NP)
        self._group.traffic.add_all_to_all(counts_NP.nbytes, num_ranks)
        with marked(Part.communication):
            dist.all_to_all_single(coming_NP, counts_NP, group=self._group.process_group)
        if is_fake(counts_NP):
            # Without values every rank sends as much to each.
            sent = received = [num_rows // num_ranks] * num_ranks
        else:
            sent, received = torch.stack([counts_NP.sum(1), coming_NP.sum(1)]).tolist()
        return sent, received, coming_NP
