"""Cross-entropy over the vocabulary in chunks of tokens, so that the full logits never exist.

The gradients of the hidden states and of the output matrix are computed chunk by chunk in the forward pass,
while the chunk's logits are at hand: the same three matrix products as the plain loss, without keeping T·V
numbers. Shape letters: T tokens, E hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orchestra.model.initial import is_fake
from orchestra.sizes.memory import chunk_tokens

# Targets with this value take no part in the loss (torch's own default of cross_entropy).
IGNORED_TARGET = -100
# What is called like `cross_entropy_sum` and may take its place.
Loss = Callable[..., Tensor]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TE: Tensor, weight_VE: Tensor, target_T: Tensor, scale: float | Tensor, chunk: int
    ) -> Tensor:
        wide = torch.promote_types(hidden_TE.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_TE.device)
        grads = ChunkGradients(hidden_TE, weight_VE, wide) if any(ctx.needs_input_grad[:2]) else None
        logits_CV = hidden_TE.new_empty((min(chunk, len(hidden_TE)), len(weight_VE)))
        for start in range(0, len(hidden_TE), chunk):
            rows = slice(start, start + chunk)
            chunk_CV = logits_CV[: len(hidden_TE[rows])]
            torch.mm(hidden_TE[rows], weight_VE.t(), out=chunk_CV)
            loss, grad_logits = _loss_and_gradient(chunk_CV.to(wide), target_T[rows], scale)
            total += loss
            if grads is not None:
                grads.add(grad_logits.to(weight_VE.dtype), rows)
        if grads is not None:
            ctx.save_for_backward(grads.hidden_TE, grads.weight_VE.to(weight_VE.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        if not is_surely_one(grad):
            grad_hidden, grad_weight = grad_hidden * grad, grad_weight * grad
        return grad_hidden, grad_weight, None, None, None


def is_surely_one(grad: Tensor) -> bool:
    """Whether the loss' own gradient, a scalar, is 1 and can be left out.

    The scale is in the gradients already, so it is 1 in training. Looking costs nothing on CPU and saves a
    pass over the matrix; on a GPU looking would mean waiting for it, and in a dry run there is nothing to
    see.
    """
    return not (grad.is_cuda or is_fake(grad)) and bool(grad == 1)


class ChunkGradients:
    """The gradients of the summed loss, filled chunk by chunk; the output matrix's is summed in `wide`."""

    def __init__(self, hidden_TE: Tensor, weight_VE: Tensor, wide: torch.dtype) -> None:
        self._inputs = hidden_TE, weight_VE
        self.hidden_TE = torch.empty_like(hidden_TE)
        self.weight_VE = torch.empty_like(weight_VE, dtype=wide)

    def add(self, grad_logits_CV: Tensor, rows: slice) -> None:
        hidden_TE, weight_VE = self._inputs
        torch.mm(grad_logits_CV, weight_VE, out=self.hidden_TE[rows])
        if rows.start == 0 and grad_logits_CV.dtype == self.weight_VE.dtype:
            torch.mm(grad_logits_CV.t(), hidden_TE[rows], out=self.weight_VE)
        elif rows.start == 0:
            self.weight_VE.copy_(grad_logits_CV.t() @ hidden_TE[rows])
        elif grad_logits_CV.dtype == self.weight_VE.dtype:
            self.weight_VE.addmm_(grad_logits_CV.t(), hidden_TE[rows])
        else:
            self.weight_VE += grad_logits_CV.t() @ hidden_TE[rows]


def _loss_and_gradient(logits_CV: Tensor, target_C: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the scaled sum of the loss and, in the logits' memory, scale · (softmax − one-hot)."""
    taken = target_C != IGNORED_TARGET
    index = torch.where(taken, target_C, 0).unsqueeze(1)
    logits_CV.sub_(logits_CV.amax(dim=1, keepdim=True))
    target_logit = logits_CV.gather(1, index).squeeze(1)
    gradient = logits_CV.exp_()
    normalizer = gradient.sum(dim=1, keepdim=True)
    loss = ((normalizer.squeeze(1).log() - target_logit) * taken).sum() * scale
    factor = taken.unsqueeze(1).to(gradient.dtype) * scale
    gradient.mul_(factor / normalizer)
    # Not scatter_add_, which has no deterministic form on a GPU.
    gradient.scatter_(1, index, gradient.gather(1, index) - factor)
    return loss, gradient


def cross_entropy_sum(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    target_T: Tensor,
    *,
    scale: float | Tensor = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """Return `scale` times the summed cross-entropy of hidden @ weightᵀ against the targets, in nats, as a
    scalar of at least fp32.

    `scale` is a number, or one on the device. Targets equal to IGNORED_TARGET are left out. `chunk` is the
    number of tokens whose logits exist at once.
    """
    num_tokens, vocab_size = hidden_TE.shape[0], weight_VE.shape[0]
    rows = chunk or chunk_tokens(num_tokens, vocab_size, hidden_TE.is_cuda)
    return _ChunkedCrossEntropy.apply(hidden_TE, weight_VE, target_T, scale, rows)  # type: ignore[no-any-return, no-untyped-call]
