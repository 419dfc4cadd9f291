"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads come
from a few numbers a token, and one rotary part of the keys is shared by all heads.

Queries and keys are wider than values; they go to scaled dot-product attention as they are. The rotary parts
are laid out as DeepSeek's: neighbouring numbers make a pair.

Shape letters: B batch, S sequence, E hidden size, H heads, N width without positions, R rotary width, V width
of values, L numbers of a latent, D = N + R.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from conf.schema import ModelConfig
from orchestra.model.kernels import rotate
from orchestra.model.layers import Attend, Linear, Products, RMSNorm, Rotary, attend, products_of

# Of the norms of latents: DeepSeek's, whatever that of the model's other norms is.
_LATENT_EPS = 1e-6
# What tensor parallelism does to the latents of this rank's tokens, before its own heads use them.
LatentsEntering = Callable[[Tensor], Tensor]
# What context parallelism makes of normed latents and turned rotary parts [B, S, L + R]: those of all places.
WholeKeys = Callable[[Tensor], Tensor]


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are products of a latent, and perhaps its queries too."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.kv_lora_rank is not None
        hidden, heads = model.hidden_size, model.num_attention_heads
        self.latent_width, self.query_width = model.kv_lora_rank, model.q_lora_rank
        self.widths = (model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim)
        plain, rotary, of_values = self.widths
        if model.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * (plain + rotary), bias=False)
        else:
            self.q_a_proj = Linear(hidden, model.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(model.q_lora_rank, _LATENT_EPS)
            self.q_b_proj = Linear(model.q_lora_rank, heads * (plain + rotary), bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, self.latent_width + rotary, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent_width, _LATENT_EPS)
        self.kv_b_proj = Linear(self.latent_width, heads * (plain + of_values), bias=False)
        self.o_proj = Linear(heads * of_values, hidden, bias=False)
        # Of the hidden state, with weights that are whole on every rank; and of q_proj, where heads are cut.
        self.latents: Products = products_of
        self.products: Products = products_of
        # Of latents, with weights whose rows are heads: what enters has been through `entering`.
        self.of_latents: Products = products_of
        self.entering: LatentsEntering | None = None
        self.whole_keys: WholeKeys | None = None
        self.attend: Attend = attend

    def forward(self, x_BSE: Tensor, rotary: Rotary, documents: Tensor | None = None) -> Tensor:
        """Return the output [B, S, E]; `documents` as `Attention.forward` has it."""
        assert rotary is not None
        q_BSHD, latent_BSL, turning_BSR = self._queries_and_latents(x_BSE)
        plain, turned, of_values = self.widths
        query, query_turning = torch.split(q_BSHD, [plain, turned], dim=-1)
        q_BSHD = torch.cat([query, rotate(_halves(query_turning), *rotary)], dim=-1)
        key_BS1R = rotate(_halves(turning_BSR[:, :, None]), *rotary)
        if self.whole_keys is not None:
            packed = self.whole_keys(torch.cat([latent_BSL, key_BS1R[:, :, 0]], dim=-1))
            latent_BSL, key_BSR = torch.split(packed, [self.latent_width, turned], dim=-1)
            key_BS1R = key_BSR[:, :, None]
        (kv,) = self.of_latents(latent_BSL, self.kv_b_proj)
        kv = kv.view(*kv.shape[:2], -1, plain + of_values)
        key, v_BSHV = torch.split(kv, [plain, of_values], dim=-1)
        k_BSHD = torch.cat([key, key_BS1R.expand(-1, -1, key.shape[2], -1)], dim=-1)
        out_BSHV = self.attend(q_BSHD, k_BSHD, v_BSHV, None, documents)
        out: Tensor = self.o_proj(out_BSHV.flatten(2))
        return out

    def _queries_and_latents(self, x_BSE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries [B, S, H, D], the normed latent [B, S, L] and the keys' rotary part [B, S, R],
        which nothing has turned yet.
        """
        rotary = self.widths[1]
        if self.query_width is None:
            (low,) = self.latents(x_BSE, self.kv_a_proj_with_mqa)
            low = low if self.entering is None else self.entering(low)
            (q,) = self.products(x_BSE, self.q_proj)
        else:
            both = torch.cat(self.latents(x_BSE, self.q_a_proj, self.kv_a_proj_with_mqa), dim=-1)
            both = both if self.entering is None else self.entering(both)
            query_low, low = torch.split(both, [self.query_width, self.latent_width + rotary], dim=-1)
            (q,) = self.of_latents(self.q_a_layernorm(query_low), self.q_b_proj)
        latent_BSL, turning_BSR = torch.split(low, [self.latent_width, rotary], dim=-1)
        q_BSHD = q.view(*q.shape[:2], -1, self.widths[0] + rotary)
        return q_BSHD, self.kv_a_layernorm(latent_BSL), turning_BSR


def _halves(x_BSHR: Tensor) -> Tensor:
    """Return numbers of which neighbours make a pair in the order of `rotate`: the first of each pair, then
    the second ones.
    """
    return x_BSHR.reshape(*x_BSHR.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
