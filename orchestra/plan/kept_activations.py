"""Closed forms for the activations that a layer keeps for the backward pass, in bytes.

s sequence length, b micro-batch size, h hidden size, a query heads, F feed-forward width, t tensor-parallel
degree. Activations are 2 bytes wide unless `width` says otherwise.

    GPT (Korthikanti et al., arXiv:2205.05198, table 2; biases, dropout, scores kept)
        none  s·b·h·(10 + 24/t + 5·a·s/(h·t))    selective  s·b·h·(10 + 24/t)    full  2·s·b·h
        with sequence parallelism everything is divided by t: s·b·h/t·(34 + 5·a·s/h), and so on
    Llama (RMSNorm, SwiGLU, grouped queries, no dropout, flash attention; counted on saved tensors)
        s·b·(12·h + 4·kv + 8·F) + 4·s·b·a; 8·s·b·h of it whole on each rank without sequence parallelism
        (kv: width of the keys; terms: norm inputs 2 + 2, inputs of qkv and feed-forward 2 + 2, q 2, k and v
        4·kv/h, attention's output 2, gate, up, silu and product 8·F/h, log-sum-exp 4·a/h)
    Mixture of experts (k experts of width E for each token, a shared one of width S)
        as Llama with F = k·E + S, and the tokens as sorted by expert, in and out: 4·s·b·k·h

Nothing here knows a framework: what one keeps on top of this stands in its profile.
"""

from __future__ import annotations

from conf.schema import Family, ModelConfig, Recompute
from orchestra.plan.case import Tokens
from orchestra.sizes.flops import attention_width, feed_forward_width, head_dim


def gpt_layer_bytes(hidden: int, heads: int, tokens: Tokens, recompute: Recompute) -> float:
    """Return the bytes one GPT layer keeps (Korthikanti et al., table 2), scores and dropout included."""
    whole = tokens.count * hidden / 2 * tokens.width_bytes
    if recompute is Recompute.full:
        return 2 * whole / tokens.outer
    split = 24.0
    if recompute is Recompute.none:
        split += 5 * heads * tokens.seq_len / hidden
    return whole * (10 / tokens.outer + split / tokens.tp)


def llama_layer_bytes(model: ModelConfig, tokens: Tokens, recompute: Recompute) -> float:
    """Return the bytes one Llama layer keeps. `selective` repeats the attention core, of which flash
    attention keeps only its output and the log-sum-exp.
    """
    outer, inner, statistics = _llama_bytes_per_token(model, tokens.width_bytes)
    if recompute is Recompute.full:
        return tokens.count * model.hidden_size * tokens.width_bytes / tokens.outer
    if recompute is Recompute.selective:
        inner, statistics = inner - tokens.width_bytes * attention_width(model), 0
    return tokens.count * (outer / tokens.outer + (inner + statistics) / tokens.tp)


def _llama_bytes_per_token(model: ModelConfig, width: int) -> tuple[float, float, float]:
    hidden, query = model.hidden_size, attention_width(model)
    keys_and_values = 2 * model.num_key_value_heads * head_dim(model)
    outer = 4 * hidden * width
    inner = (2 * query + keys_and_values + 4 * feed_forward_width(model)) * width
    if model.num_experts:
        outer += 2 * model.num_experts_per_tok * hidden * width
    return outer, inner, 4 * model.num_attention_heads


def layer_bytes(model: ModelConfig, tokens: Tokens, recompute: Recompute) -> float:
    """Return the bytes one layer keeps under flash attention.

    A GPT layer without scores is Korthikanti's `selective` form; nothing further is saved by `selective`.
    """
    if model.family is Family.llama:
        return llama_layer_bytes(model, tokens, recompute)
    kept = Recompute.selective if recompute is Recompute.none else recompute
    return gpt_layer_bytes(model.hidden_size, model.num_attention_heads, tokens, kept)


def fused_savings_bytes(model: ModelConfig, tokens: Tokens, *, in_8_bits: bool) -> float:
    """Return what a Llama layer need not keep with Megatron's kernels: SiLU's output, which the fused product
    computes again from its inputs; `in_8_bits`: half of the inputs of the products, kept as they were
    multiplied. Attention keeps its output twice then: wide for itself and narrow for the projection.
    """
    if model.family is not Family.llama:
        return 0.0
    width, hidden, query = tokens.width_bytes, model.hidden_size, attention_width(model)
    outer, inner = 0.0, float(width * feed_forward_width(model))
    if in_8_bits:
        outer = 2 * hidden * (width - 1)
        inner += feed_forward_width(model) * (width - 1) - query
    return tokens.count * (outer / tokens.outer + inner / tokens.tp)


def scores_bytes(model: ModelConfig, tokens: Tokens) -> float:
    """Return what a layer keeps of attention's scores where they pass through memory: the softmax, dropout's
    mask and its output (Korthikanti et al., 5·a·s²·b).
    """
    return 5 / 2 * tokens.width_bytes * model.num_attention_heads * tokens.seq_len * tokens.count / tokens.tp


def num_in_flight(stage: int, pp: int, accumulation: int) -> int:
    """Return how many micro-batches stage `stage` (from 0) of a 1F1B pipeline holds at once."""
    return min(pp - stage, accumulation)


def interleaved_share(pp: int, num_chunks: int) -> float:
    """Return how much more the first stage keeps when each rank holds `num_chunks` parts of the model
    (Korthikanti et al., section 4.2.3): 1 + (p − 1)/(p·v).
    """
    return 1 + (pp - 1) / (pp * num_chunks) if num_chunks > 1 else 1.0


def bubble_ratio(pp: int, accumulation: int, num_chunks: int = 1) -> float:
    """Return idle ÷ busy time of a pipeline: (p − 1)/(v·m), for AFAB, 1F1B and its interleaved form."""
    return (pp - 1) / (num_chunks * accumulation)
