"""Attention that stays inside of documents, where a sample is packed from several (`data.document_masks`).

A sample's documents are found in its tokens: each ends with the separator, the last one with the sample.
Variable-length flash attention takes where they end and never computes what is masked; where it does not run
(CPUs, fp32, old GPUs), scaled dot-product attention gets an exact mask, at the cost of attention over whole
samples.

Shape letters: B batch, S sequence, T tokens (B·S), N documents of the batch, H query heads, K key-value
heads, D head width.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from orchestra.model.initial import is_fake

# What torch's flash attention takes: 16-bit numbers on Ampere or later, heads of these widths.
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_CAPABILITY = (8, 0)
_FLASH_MOST_WIDTH, _FLASH_WIDTH_MULTIPLE = 256, 8
_varying_lengths: VaryingLengths | None = None


def document_bounds(tokens_BS: Tensor, separator_id: int) -> Tensor:
    """Return where the documents begin, and the end: int32 [N + 1], counted over all tokens of the batch.

    No document goes on from one sample to the next, so there are at least B. How many there are is known on
    the host afterwards: for tokens on a GPU it waits for them.
    """
    batch, sequence = tokens_BS.shape
    if is_fake(tokens_BS):  # no values: one document a sample
        return torch.arange(batch + 1, device=tokens_BS.device, dtype=torch.int32) * sequence
    is_last = tokens_BS == separator_id
    is_last[:, -1] = True
    ends = is_last.flatten().nonzero().flatten() + 1
    return torch.cat([ends.new_zeros(1), ends]).int()


def on_device(bounds: Tensor, device: torch.device) -> Tensor:
    """Return bounds on a device; no host waits for it."""
    return bounds if bounds.device == device else bounds.pin_memory().to(device, non_blocking=True)


def documents_for(bounds: Tensor, tokens_BS: Tensor, dtype: torch.dtype, head_dim: int | None) -> Tensor:
    """Return what `attend_within` takes on the tokens' device, for queries of this type and head width: the
    bounds themselves, or a mask [B, 1, S, S] of that type, 0 where a query (third dim) sees a key, else −∞.
    """
    device = tokens_BS.device
    bounds = on_device(bounds, device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if has_varying_lengths(capability, dtype, head_dim):
        _load_varying_lengths()
        return bounds
    return document_mask(bounds, tokens_BS, dtype, torch.arange(tokens_BS.shape[1], device=device))


def document_mask(bounds: Tensor, tokens_BS: Tensor, dtype: torch.dtype, place_Q: Tensor) -> Tensor:
    """Return the mask [B, 1, Q, S] of the queries at some places of each sample: 0 where one sees a key, else
    −∞. `bounds`, `tokens_BS` and `place_Q` are on one device.
    """
    batch, sequence = tokens_BS.shape
    place = torch.arange(batch * sequence, device=bounds.device)
    document_BS = torch.bucketize(place, bounds, right=True).view(batch, sequence)
    is_seen = document_BS[:, None, place_Q, None] == document_BS[:, None, None, :]
    is_seen &= place_Q[:, None] >= place[:sequence]
    # Numbers that are added to the scores: of bools each layer would make its own mask, and keep it.
    return torch.zeros_like(is_seen, dtype=dtype).masked_fill_(~is_seen, -torch.inf)


def has_varying_lengths(capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int | None) -> bool:
    """Whether flash attention over documents of any length runs on a GPU of a compute capability (None: on a
    CPU) for this type and head width (None: values have another one). Not with ROCm, where nobody has
    tried it.
    """
    if capability is None or head_dim is None or torch.version.hip is not None:
        return False
    is_width = head_dim <= _FLASH_MOST_WIDTH and head_dim % _FLASH_WIDTH_MULTIPLE == 0
    return capability >= _FLASH_CAPABILITY and dtype in _FLASH_DTYPES and is_width


@dataclass(frozen=True)
class VaryingLengths:
    """torch's attention over lengths that vary; `shares_heads`: takes fewer key-value heads than queries, as
    2.11 does not yet.
    """

    attend: Callable[..., Any]
    shares_heads: bool


def _load_varying_lengths() -> VaryingLengths:
    """Import it where it is needed: its module imports torch's compiler, which takes a second."""
    global _varying_lengths
    if _varying_lengths is None:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        _varying_lengths = VaryingLengths(attend, "enable_gqa" in inspect.signature(attend).parameters)
    return _varying_lengths


def attend_within(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, documents: Tensor) -> Tensor:
    """Return causal attention inside of documents, [B, S, H, D]; `documents` is of `documents_for`."""
    num_sharing = q_BSHD.shape[2] // k_BSKD.shape[2]
    if documents.is_floating_point():
        q_BHSD, k_BKSD, v_BKSD = (each.transpose(1, 2) for each in (q_BSHD, k_BSKD, v_BSKD))
        out_BHSD = F.scaled_dot_product_attention(
            q_BHSD, k_BKSD, v_BKSD, attn_mask=documents, enable_gqa=num_sharing > 1
        )
        return out_BHSD.transpose(1, 2)
    sequence = q_BSHD.shape[1]
    q_THD, k_TKD, v_TKD = (each.flatten(0, 1) for each in (q_BSHD, k_BSKD, v_BSKD))
    varying = _load_varying_lengths()
    options: dict[str, Any] = {"enable_gqa": num_sharing > 1} if varying.shares_heads else {}
    if num_sharing > 1 and not varying.shares_heads:
        k_TKD, v_TKD = (each.repeat_interleave(num_sharing, dim=1) for each in (k_TKD, v_TKD))
    # No document is longer than a sample: no length has to be read back.
    lengths = (documents, documents, sequence, sequence)
    out = varying.attend(q_THD, k_TKD, v_TKD, *lengths, window_size=(-1, 0), **options)
    assert isinstance(out, Tensor)
    return out.view(q_BSHD.shape)
