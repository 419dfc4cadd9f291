"""Attention of one piece of a sequence over all keys up to the piece's end, forward and backward by hand.

The backward pass is a function of what the forward pass got and gave, so that keys and values may be gone
in between. Which operator computes it depends on the device alone:

- CPU: torch's flash attention, in which a causal window begins at the first key. So a piece attends to the
  keys before it, and causally to its own; the two results are merged by their log-sum-exps, and no mask of
  the size of the scores exists.
- GPU, 16 bits: flash attention, whose causal window ends at the last key.
- else, and with documents on a GPU: scaled dot-product attention with a mask; the backward pass computes it
  again.

Shape letters: B batch, C queries of the piece, E keys up to its end, H query heads, K key-value heads, D head
width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from orchestra.model.documents import has_varying_lengths
from orchestra.model.layers import attend_as_on_gpu, stands_for_latents_on_gpu

_aten = torch.ops.aten


def piece_forward(
    q_BCHD: Tensor, k_BEKD: Tensor, v_BEKD: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the attention [B, C, H, D] of the last C of E places, and the log-sum-exps for its gradients.

    `mask` [B, 1, C, E]: what is added to the scores, the causal window in it; None: that window alone.
    """
    if q_BCHD.device.type != "cuda":
        return _forward_on_cpu(q_BCHD, k_BEKD, v_BEKD, mask)
    if has_sums(q_BCHD, mask):
        lengths = (q_BCHD.shape[1], k_BEKD.shape[1])
        out, lse, *_ = _aten._flash_attention_forward(
            q_BCHD, k_BEKD, v_BEKD, None, None, *lengths, 0.0, True, False
        )
        return out, lse
    return masked(q_BCHD, k_BEKD, v_BEKD, mask), q_BCHD.new_empty(0)


def piece_backend(device: torch.device, dtype: torch.dtype, width: int, *, with_documents: bool) -> str:
    """Return which kernel computes pieces on a GPU: `flash`, or `masked`, torch's own choice with a mask."""
    has_flash = has_varying_lengths(torch.cuda.get_device_capability(device), dtype, width)
    return "flash" if has_flash and not with_documents else "masked"


def has_sums(query: Tensor, mask: Tensor | None) -> bool:
    """Whether the backward pass starts from log-sum-exps [B, H, C] (fp32) of `piece_forward`."""
    return query.device.type != "cuda" or (mask is None and _has_flash(query))


def piece_backward(
    grad: Tensor,
    q_BCHD: Tensor,
    k_BEKD: Tensor,
    v_BEKD: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    sums: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the gradient of the queries, and add those of keys and values to `sums`, of their shapes."""
    if q_BCHD.device.type != "cuda":
        return _backward_on_cpu(grad, q_BCHD, k_BEKD, v_BEKD, out, lse, mask, sums)
    if has_sums(q_BCHD, mask):
        lengths = (q_BCHD.shape[1], k_BEKD.shape[1])
        # Without dropout nothing is read of the state of random numbers.
        state = q_BCHD.new_empty(2, dtype=torch.int64)
        found = _aten._flash_attention_backward(
            grad.contiguous(), q_BCHD, k_BEKD, v_BEKD, out, lse, None, None, *lengths, 0.0, True, state, state
        )
    else:
        found = masked_backward(grad, q_BCHD, k_BEKD, v_BEKD, mask)
    grad_q: Tensor = found[0]
    for total, gradient in zip(sums, found[1:], strict=True):
        total += gradient
    return grad_q


def _has_flash(query: Tensor) -> bool:
    capability = torch.cuda.get_device_capability(query.device)
    return has_varying_lengths(capability, query.dtype, query.shape[-1])


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _forward_on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    forward: Any = _aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = _heads_first(q, k, v)
    if mask is not None:
        out, lse = forward(q, k, v, 0.0, False, attn_mask=mask)
        return out.transpose(1, 2), lse
    start = k.shape[2] - q.shape[2]
    out, lse = forward(q, k[:, :, start:], v[:, :, start:], 0.0, True)
    if start:
        before, lse_before = forward(q, k[:, :, :start], v[:, :, :start], 0.0, False)
        both = torch.logaddexp(lse, lse_before)
        out *= (lse - both).exp_().unsqueeze(-1)
        out += before.mul_((lse_before - both).exp_().unsqueeze(-1))
        lse = both
    return out.transpose(1, 2), lse


def _backward_on_cpu(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    sums: tuple[Tensor, Tensor],
) -> Tensor:
    start = 0 if mask is not None else k.shape[1] - q.shape[1]
    grad, q, k, v, out, *totals = _heads_first(grad, q, k, v, out, *sums)

    def added(keys: slice, *, is_causal: bool) -> Tensor:
        """Add the gradients of some keys and values; return the queries'.

        With results and log-sum-exps of all keys each part's probabilities are those of the whole.
        """
        backward: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad_q, *found = backward(
            grad, q, k[:, :, keys], v[:, :, keys], out, lse, 0.0, is_causal, attn_mask=mask
        )
        for total, gradient in zip(totals, found, strict=True):
            total[:, :, keys] += gradient
        return grad_q  # type: ignore[no-any-return]

    grad_q = added(slice(start, None), is_causal=mask is None)
    if start:
        grad_q += added(slice(start), is_causal=False)
    return grad_q.transpose(1, 2)


def masked(q_BCHD: Tensor, k_BEKD: Tensor, v_BEKD: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention [B, C, H, D] by torch's own choice of kernel."""
    num, end = q_BCHD.shape[1], k_BEKD.shape[1]
    if mask is None:
        mask = torch.ones(num, end, dtype=torch.bool, device=q_BCHD.device).tril_(end - num)
    if stands_for_latents_on_gpu(q_BCHD, v_BEKD):
        # A GPU's kernels take what is added to the scores.
        bias = mask
        if mask.dtype is torch.bool:
            bias = torch.zeros_like(mask, dtype=q_BCHD.dtype).masked_fill_(~mask, -torch.inf)
        return attend_as_on_gpu(
            q_BCHD, k_BEKD, v_BEKD, bias.expand(q_BCHD.shape[0], q_BCHD.shape[2], num, end)
        )
    q, k, v = _heads_first(q_BCHD, k_BEKD, v_BEKD)
    shares = q_BCHD.shape[2] != k_BEKD.shape[2]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shares).transpose(1, 2)


def masked_backward(
    grad: Tensor, q_BCHD: Tensor, k_BEKD: Tensor, v_BEKD: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values for `masked`, which is computed again."""
    query, key, value = (each.detach().requires_grad_() for each in (q_BCHD, k_BEKD, v_BEKD))
    with torch.enable_grad():
        out = masked(query, key, value, mask)
    grad_q, grad_k, grad_v = torch.autograd.grad(out, (query, key, value), grad)
    return grad_q, grad_k, grad_v
