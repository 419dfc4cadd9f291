"""Cross-entropy over the vocabulary in chunks of tokens, so that the full logits never exist.

The gradients of the hidden states and of the output matrix are computed chunk by chunk in the forward pass,
while the chunk's logits are at hand: the same three matrix products as the plain loss, without keeping T·V
numbers. Shape letters: T tokens, E hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Targets with this value take no part in the loss (torch's own default of cross_entropy).
IGNORED_TARGET = -100
# Bytes of fp32 logits in one chunk when the configuration gives no size. On CPU a chunk and its gradient
# should stay in the cache; on a GPU a chunk must be large enough to fill the device.
_CHUNK_BYTES_CPU = 4 << 20
_CHUNK_BYTES_GPU = 256 << 20


def chunk_tokens(num_tokens: int, vocab_size: int, on_gpu: bool) -> int:
    """Return how many tokens' logits exist at once, at least 1."""
    limit = (_CHUNK_BYTES_GPU if on_gpu else _CHUNK_BYTES_CPU) // (4 * vocab_size)
    return max(1, min(num_tokens, limit))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TE: Tensor, weight_VE: Tensor, target_T: Tensor, chunk: int) -> Tensor:
        needs_grad = any(ctx.needs_input_grad[:2])
        total = torch.zeros((), dtype=torch.float32, device=hidden_TE.device)
        if hidden_TE.dtype == torch.float64:
            total = total.double()
        grad_hidden = torch.empty_like(hidden_TE) if needs_grad else None
        grad_weight = torch.zeros_like(weight_VE, dtype=total.dtype) if needs_grad else None
        for start in range(0, hidden_TE.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = (hidden_TE[rows] @ weight_VE.t()).to(total.dtype)
            loss, probability = _loss_and_probability(logits, target_T[rows])
            total += loss
            if grad_hidden is not None and grad_weight is not None:
                grad_logits = probability.to(weight_VE.dtype)
                torch.mm(grad_logits, weight_VE, out=grad_hidden[rows])
                if grad_weight.dtype == grad_logits.dtype:
                    grad_weight.addmm_(grad_logits.t(), hidden_TE[rows])
                else:
                    grad_weight += grad_logits.t() @ hidden_TE[rows]
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight_VE.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            grad_hidden * scale.to(grad_hidden.dtype),
            grad_weight * scale.to(grad_weight.dtype),
            None,
            None,
        )


def _loss_and_probability(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss and, in the logits' own memory, its gradient: softmax minus one-hot."""
    taken = target_C != IGNORED_TARGET
    index = torch.where(taken, target_C, 0).unsqueeze(1)
    maximum = logits_CV.amax(dim=1, keepdim=True)
    logits_CV.sub_(maximum)
    target_logit = logits_CV.gather(1, index).squeeze(1)
    probability = logits_CV.exp_()
    normalizer = probability.sum(dim=1, keepdim=True)
    loss = ((normalizer.squeeze(1).log() - target_logit) * taken).sum()
    probability.mul_(taken.unsqueeze(1) / normalizer)
    probability.scatter_add_(1, index, -taken.unsqueeze(1).to(probability.dtype))
    return loss, probability


def cross_entropy_sum(
    hidden_TE: Tensor, weight_VE: Tensor, target_T: Tensor, chunk: int | None = None
) -> Tensor:
    """Return the summed cross-entropy of hidden @ weightᵀ against the targets, in nats, as an fp32 scalar.

    Targets equal to IGNORED_TARGET are left out. `chunk` is the number of tokens whose logits exist at once.
    """
    num_tokens, vocab_size = hidden_TE.shape[0], weight_VE.shape[0]
    rows = chunk or chunk_tokens(num_tokens, vocab_size, hidden_TE.is_cuda)
    return _ChunkedCrossEntropy.apply(hidden_TE, weight_VE, target_T, rows)  # type: ignore[no-any-return, no-untyped-call]


def plain_cross_entropy_sum(hidden_TE: Tensor, weight_VE: Tensor, target_T: Tensor) -> Tensor:
    """The same without chunks: the reference that tests and benchmarks compare with."""
    logits = (hidden_TE @ weight_VE.t()).to(torch.promote_types(hidden_TE.dtype, torch.float32))
    return F.cross_entropy(logits, target_T, ignore_index=IGNORED_TARGET, reduction="sum")
