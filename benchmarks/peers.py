"""What orchestra's step is measured against: a plainly written Llama, transformers' Llama, and the limit.

The limit is the time of the step's own matrix products alone (linear layers and output matrix, forward and
both backward products, into memory that is already there); attention's inner products are left out, which
makes the limit harder to reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig
from orchestra.model.transformer import Transformer


class PlainNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def half_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class PlainBlock(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.hidden_size // model.num_attention_heads
        self.width = width
        self.norm_1, self.norm_2 = PlainNorm(model.hidden_size), PlainNorm(model.hidden_size)
        self.q = nn.Linear(model.hidden_size, model.num_attention_heads * width, bias=False)
        self.k = nn.Linear(model.hidden_size, model.num_key_value_heads * width, bias=False)
        self.v = nn.Linear(model.hidden_size, model.num_key_value_heads * width, bias=False)
        self.o = nn.Linear(model.num_attention_heads * width, model.hidden_size, bias=False)
        self.gate = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        y = self.norm_1(x)
        q, k, v = (
            part(y).view(batch, sequence, -1, self.width).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = half_rotated(q, cos, sin), half_rotated(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).reshape(batch, sequence, -1))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainLlama(nn.Module):
    """The same architecture as orchestra's, as one writes it in an afternoon. Returns the mean loss."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(model) for _ in range(model.num_hidden_layers))
        self.norm = PlainNorm(model.hidden_size)
        self.output = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        width = model.hidden_size // model.num_attention_heads
        self.frequencies = 1.0 / model.rope_theta ** (torch.arange(0, width, 2).float() / width)
        self.tables: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.tables is None:
            angles = torch.outer(torch.arange(tokens.shape[1]).float(), self.frequencies).to(x.device)
            angles = torch.cat((angles, angles), -1)
            self.tables = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for layer in self.layers:
            x = layer(x, *self.tables)
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def transformers_llama(model: ModelConfig) -> nn.Module:
    """transformers' LlamaForCausalLM of the same shape, with its SDPA attention."""
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_shared(model)))


def transformers_mixture(model: ModelConfig) -> nn.Module:
    """transformers' Mixtral, or Qwen3-MoE where heads are normed, with its SDPA attention and all experts of
    a layer in one kernel.
    """
    import transformers

    shared = _shared(model)
    if model.qk_norm:
        config: Any = transformers.Qwen3MoeConfig(
            **shared,
            head_dim=model.head_dim,
            num_experts=model.num_experts,
            num_experts_per_tok=model.num_experts_per_tok,
            moe_intermediate_size=model.moe_intermediate_size,
            norm_topk_prob=True,
        )
        kind: Any = transformers.Qwen3MoeForCausalLM
    else:
        config = transformers.MixtralConfig(
            **shared, num_local_experts=model.num_experts, num_experts_per_tok=model.num_experts_per_tok
        )
        kind = transformers.MixtralForCausalLM
    config._experts_implementation = "grouped_mm"
    made: nn.Module = kind(config)
    return made


def _shared(model: ModelConfig) -> dict[str, Any]:
    """Return what the configurations of transformers' families have in common."""
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_parameters": _rope_parameters(model),
        "tie_word_embeddings": model.tie_word_embeddings,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }


def _rope_parameters(model: ModelConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    if not scaling.enabled:
        return {"rope_type": "default", "rope_theta": model.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": model.rope_theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }


class MeanLoss(Transformer):
    """orchestra's own model with the signature of the others."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None, loss_scale: float = 1.0) -> Tensor:
        assert targets is not None
        return super().forward(tokens, targets, loss_scale / targets.numel())


def bare_step(module: nn.Module, tokens_BS: Tensor, lr: float = 3e-4) -> Callable[[], Any]:
    """Return the bare loop's step: forward, backward, clip, fused AdamW, gradients set to None."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, fused=True)
    inputs, targets = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()

    def step() -> Tensor:
        out = module(inputs, targets)
        out.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return out.detach()

    return step


class TransformersLoss(nn.Module):
    """Gives transformers' model the signature of the others; its loss is computed from its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.inner(tokens).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def matrix_products(
    model: ModelConfig, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that does the step's matrix products and nothing else."""
    shapes = product_shapes(model)
    operands = {
        shape: [torch.randn(size, device=device, dtype=dtype) for size in _operand_sizes(*shape, num_tokens)]
        for shape in shapes
    }
    results = {
        shape: [torch.empty(size, device=device, dtype=dtype) for size in _result_sizes(*shape, num_tokens)]
        for shape in shapes
    }

    def products() -> None:
        for shape, count in shapes.items():
            x, weight, grad = operands[shape]
            y, grad_x, grad_weight = results[shape]
            for _ in range(count):
                torch.mm(x, weight.t(), out=y)
                torch.mm(grad, weight, out=grad_x)
                torch.mm(grad.t(), x, out=grad_weight)

    return products


def product_shapes(model: ModelConfig) -> dict[tuple[int, int], int]:
    """Return (inputs, outputs) of every linear layer and how often each comes."""
    width = model.hidden_size // model.num_attention_heads
    layers, key_values = model.num_hidden_layers, model.num_key_value_heads * width
    counts: dict[tuple[int, int], int] = {}
    for shape, count in [
        ((model.hidden_size, model.hidden_size), 2 * layers),
        ((model.hidden_size, key_values), 2 * layers),
        ((model.hidden_size, model.intermediate_size), 2 * layers),
        ((model.intermediate_size, model.hidden_size), layers),
        ((model.hidden_size, model.vocab_size), 1),
    ]:
        counts[shape] = counts.get(shape, 0) + count
    return counts


def _operand_sizes(inputs: int, outputs: int, tokens: int) -> list[tuple[int, int]]:
    return [(tokens, inputs), (outputs, inputs), (tokens, outputs)]


def _result_sizes(inputs: int, outputs: int, tokens: int) -> list[tuple[int, int]]:
    return [(tokens, outputs), (tokens, inputs), (outputs, inputs)]
