"""The layers of the decoder: norms, rotary positions, attention and the two feed-forward forms. Single
device.

Parameter names are Hugging Face Llama's, so that weights go in and out without a table of names.

Shape letters: B batch, S sequence, E hidden size, H attention heads, K key-value heads, D head width,
F feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import Family, ModelConfig, RopeScaling
from orchestra.model.documents import attend_within
from orchestra.model.initial import is_fake, takes_gpu_kernels
from orchestra.model.kernels import first_rows, lookup, products, rms_norm, rotate, swiglu
from orchestra.sizes.flops import head_dim


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain and no bias (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def make_norm(model: ModelConfig) -> nn.Module:
    """Return the norm of the model's family."""
    if model.family is Family.gpt:
        return nn.LayerNorm(model.hidden_size, eps=model.norm_eps)
    return RMSNorm(model.hidden_size, model.norm_eps)


# What is called like `products_of`: whatever cuts a layer over ranks puts its own in that place.
Products = Callable[..., tuple[Tensor, ...]]


def products_of(x_BSE: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Return linear(x) for each linear layer."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return products(x_BSE, [linear.weight for linear in linears], biases)


class Linear(nn.Linear):
    """torch's linear layer; its weight's gradient goes where the weight says."""

    def forward(self, x: Tensor) -> Tensor:
        (out,) = products_of(x, self)
        return out


class Embedding(nn.Embedding):
    """torch's table of rows to look up; its gradient goes where the table says."""

    def forward(self, row: Tensor) -> Tensor:
        return lookup(row, self.weight)


def rotary_frequencies(model: ModelConfig) -> Tensor:
    """Return the fp32 angular frequencies of rotary positions, one for two numbers of what they turn: a head,
    or its rotary part. Scaled as Llama 3 where configured.
    """
    width = head_dim(model) if model.kv_lora_rank is None else model.qk_rope_head_dim
    exponent = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    frequencies = 1.0 / (model.rope_theta**exponent)
    return _llama3_scaled(frequencies, model.rope_scaling) if model.rope_scaling.enabled else frequencies


def _llama3_scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow down low frequencies by `factor`, keep high ones, blend between (Llama 3, as in transformers)."""
    context = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


# cos [S, 1, D] and sin [S, 1, D/2] of rotary positions; None for family gpt.
Rotary = tuple[Tensor, Tensor] | None
# Keeps the logarithms of sums and no scores, as all of a GPU's kernels do.
_KERNEL_OF_LATENTS = torch.ops.aten._scaled_dot_product_efficient_attention
# What is called like `attend`: whatever cuts sequences over ranks puts its own in that place.
Attend = Callable[..., Tensor]


def attend(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, rotary: Rotary, documents: Tensor | None = None
) -> Tensor:
    """Return causal attention [B, S, H, D] over queries and keys that positions have not turned yet."""
    if rotary is not None:
        q_BSHD, k_BSKD = rotate(q_BSHD, *rotary), rotate(k_BSKD, *rotary)
    return causal_attention(q_BSHD, k_BSKD, v_BSKD, documents)


def stands_for_latents_on_gpu(query: Tensor, value: Tensor) -> bool:
    """Whether these are fake tensors of latent attention that stand for a GPU's: torch would choose by the
    device, which is not there, a way without a kernel for such widths.
    """
    return query.shape[-1] != value.shape[-1] and is_fake(query) and takes_gpu_kernels(query)


def attend_as_on_gpu(q_BCHD: Tensor, k_BSHD: Tensor, v_BSHV: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the attention [B, C, H, V] of such tensors; `bias` [B, H, C, S]: None: causal."""
    heads = (each.transpose(1, 2) for each in (q_BCHD, k_BSHD, v_BSHV))
    out_BHCV: Tensor = _KERNEL_OF_LATENTS(*heads, bias, True, is_causal=bias is None)[0]
    return out_BHCV.transpose(1, 2)


def causal_attention(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, documents: Tensor | None) -> Tensor:
    """Return causal attention [B, S, H, D]. `documents`: what it stays inside of, from `documents_for`."""
    if documents is not None:
        return attend_within(q_BSHD, k_BSKD, v_BSKD, documents)
    if stands_for_latents_on_gpu(q_BSHD, v_BSKD):
        return attend_as_on_gpu(q_BSHD, k_BSKD, v_BSKD)
    return F.scaled_dot_product_attention(
        q_BSHD.transpose(1, 2),
        k_BSKD.transpose(1, 2),
        v_BSKD.transpose(1, 2),
        is_causal=True,
        enable_gqa=q_BSHD.shape[2] != k_BSKD.shape[2],
    ).transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention; H query heads share K key-value heads (K = H: multi-head, K = 1: MQA)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, has_bias = head_dim(model), model.family is Family.gpt
        self.head_dim = width
        self.products: Products = products_of
        self.attend: Attend = attend
        self.q_proj = Linear(model.hidden_size, model.num_attention_heads * width, bias=has_bias)
        self.k_proj = Linear(model.hidden_size, model.num_key_value_heads * width, bias=has_bias)
        self.v_proj = Linear(model.hidden_size, model.num_key_value_heads * width, bias=has_bias)
        self.o_proj = Linear(model.num_attention_heads * width, model.hidden_size, bias=has_bias)
        # Of each head, before positions turn them.
        self.q_norm = RMSNorm(width, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(width, model.norm_eps) if model.qk_norm else None

    def forward(self, x_BSE: Tensor, rotary: Rotary, documents: Tensor | None = None) -> Tensor:
        """Return the output [B, S, E].

        `documents`: what attention stays inside of, from `documents_for`; None: the samples.
        """
        projected = self.products(x_BSE, self.q_proj, self.k_proj, self.v_proj)
        # The products say how long the sequence is: x may be only this rank's part of it.
        batch, sequence, _ = projected[0].shape
        heads = (batch, sequence, -1, self.head_dim)
        q_BSHD, k_BSKD, v_BSKD = (each.view(heads) for each in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHD, k_BSKD = self.q_norm(q_BSHD), self.k_norm(k_BSKD)
        out_BSHD = self.attend(q_BSHD, k_BSKD, v_BSKD, rotary, documents)
        out: Tensor = self.o_proj(out_BSHD.reshape(batch, sequence, -1))
        return out


class Positions(nn.Embedding):
    """Learned positions, one row of E numbers each."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return what is added to the embedded tokens, broadcast over the batch: the rows [S, E]."""
        return first_rows(self.weight, tokens_BS.shape[1])


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), without biases (Shazeer, 2020); `inner`: its width where that is not the
    model's.
    """

    def __init__(self, model: ModelConfig, inner: int | None = None) -> None:
        super().__init__()
        width = model.intermediate_size if inner is None else inner
        self.gate_proj = Linear(model.hidden_size, width, bias=False)
        self.up_proj = Linear(model.hidden_size, width, bias=False)
        self.down_proj = Linear(width, model.hidden_size, bias=False)
        self.products: Products = products_of

    def forward(self, x_BSE: Tensor) -> Tensor:
        gate_BSF, up_BSF = self.products(x_BSE, self.gate_proj, self.up_proj)
        out: Tensor = self.down_proj(swiglu(gate_BSF, up_BSF))
        return out


class GeluMLP(nn.Module):
    """down(gelu(up(x))), with biases, as in GPT-2 and GPT-3 (tanh form of GELU)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.up_proj = Linear(model.hidden_size, model.intermediate_size)
        self.down_proj = Linear(model.intermediate_size, model.hidden_size)
        self.products: Products = products_of

    def forward(self, x_BSE: Tensor) -> Tensor:
        (up_BSF,) = self.products(x_BSE, self.up_proj)
        out: Tensor = self.down_proj(F.gelu(up_BSF, approximate="tanh"))
        return out
