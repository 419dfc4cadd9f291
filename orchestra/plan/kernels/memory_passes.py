"""Bytes that orchestra's own trainer moves through a GPU's memory beside products and attention.

Counted from what its code reads and writes, not fitted; `orchestra.plan.compute` divides them by bandwidth. A
pass reads or writes each element of a tensor once. E hidden size, Q and K widths of queries and of keys, F
feed-forward width, V words; activations and logits have 2 bytes (4 in fp32).

| passes for each token    | E  | Q + K | F  | of which |
|--------------------------|---:|------:|---:|----------|
| compiled: norms, sums    | 20 |       |    | forward 2 + 4 (with a sum) + 3; backward 5 + 6 |
| compiled: rotary, SwiGLU |    | 4     | 8  | forward 2 and 3; backward 2 and 5 |
| eager: norms, sums       | 40 |       |    | sums, and the gradients of norms' weights, by themselves |
| eager: rotary, SwiGLU    |    | 22    | 16 | forward 11 and 5; backward 11 and 11 |

fp8 rounds inputs, weights and gradients of products: see `rounding_bytes`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from conf.schema import Family, PrecisionName, Scaling
from orchestra.plan.case import PlanCase, held_of_layer
from orchestra.sizes.flops import (
    attention_width,
    expert_width,
    feed_forward_width,
    key_value_width,
    value_width,
    without_experts,
)
from orchestra.sizes.hardware import row
from orchestra.sizes.memory.loss_memory import loss_chunk_tokens
from orchestra.sizes.training_shape import widths

# Of the data sheet's bandwidth. The kernels of a step on one H200 that are neither products nor attention
# (sums of gradients, the loss, the optimizer, norms and gates) moved 1,510 GB in 469 ms: 3.2 of 4.8 TB/s.
STREAM_SHARE = 0.67
# The same of the compiled pass that updates parameters, with the norm: 2.7 to 2.8 of one H100's 3.35 TB/s.
UPDATE_SHARE = 0.82
# The share of a step in which the device works; from the same traces, 0.97 to 0.99.
BUSY_SHARE = 0.98
_COMPILED, _EAGER = (20, 4, 8), (40, 22, 16)
# Bytes of rounding a number of experts' rows or gradients; of a weight at its two uses, or once a step where
# it is kept. Eager: 33 by rows and 48 by columns, and of weights 33 each way, with a transposed copy.
_OF_EXPERTS, _OF_EXPERTS_EAGER = (14.0, 10.0, 14.0), (81.0, 70.0, 70.0)
# Bytes of rounding a number of an activation or a gradient; of a weight once a step where it is kept; at its
# two uses where it is not; and of a rank's own range at each gather: compiled, and eager.
_OF_TENSOR = (7.0, 9.0, 14.0, 3.0), (35.0, 35.0, 70.0, 29.0)
_OF_ROWS = (10.0, 14.0, 10.0, 0.0), (70.0, 66.0, 70.0, 0.0)
# GELU in the place of rotary positions and SwiGLU: forward 2, backward 3, and the bias's gradient.
_GELU = 6


def layer_bytes(case: PlanCase) -> float:
    """Return the bytes of norms, sums, positions and gates of one layer on one micro-batch."""
    model, tokens = case.model, case.tokens
    hidden, turned, gated = _COMPILED if case.options.is_compiled else _EAGER
    if model.family is Family.gpt:
        turned, gated = 0, _GELU
    inner = turned * (_query_width(case) + _key_width(case)) + gated * feed_forward_width(model)
    elements = hidden * model.hidden_size / tokens.outer + inner / tokens.tp
    return elements * tokens.count * tokens.width_bytes


def gradient_bytes(case: PlanCase) -> float:
    """Return the bytes of a layer's gradients on one micro-batch, beside what products write: of experts they
    are added to what is there, which their products can't.
    """
    held, width = held_of_layer(case.model, case.layout), case.tokens.width_bytes
    added = width + 2 * widths(case.precision).gradients
    return case.framework.passes.gradient * held.total + added * held.experts


def rounding_bytes(case: PlanCase) -> float:
    """Return the bytes that rounding one layer to fp8 moves on one micro-batch; 0 in other precisions.

    One scale for a tensor. Inputs and gradients: largest number 2 (not with the last step's scale), read 2,
    write 1, transposed 2. Weights, once a step: largest number 2, rounded 3, copied to where they are kept 2
    and transposed 2; at each use, where they are not kept: forward 2 + 3, backward a transposed copy in 16
    bits 4 and again 5. Where they are gathered in fp8: backward transposed 2, and of a rank's own range once
    a step largest number 2, and rounded 3 at each of two gathers. A scale for each row. The row's largest
    number is found in the pass that rounds: forward 3, backward the transposed copy 4 and rounded 3;
    gradients and weights alike. Where products share an input, the parts of its gradient are added one by
    one: three times 3 passes in 16 bits, of which norms' own are 3 already. Experts: see
    `_rounding_bytes_of_experts`.

    Eager each is an operator of its own. What rounds: sizes 4, the largest 2, to fp32 6, divided 8, limited
    8, to fp8 5; of weights that are kept, or own ranges, in parts: the last four, and copied 2.
    """
    if case.precision is not PrecisionName.fp8:
        return 0.0
    if case.model.num_experts:
        # What all tokens go through is a layer without experts and as wide as the shared one.
        shared = case.model.shared_expert_intermediate_size
        others = replace(case, model=replace(without_experts(case.model), intermediate_size=shared))
        return rounding_bytes(others) + _rounding_bytes_of_experts(case)
    model, tokens = case.model, case.tokens
    width, query = feed_forward_width(model), _query_width(case)
    # Queries, keys and values share an input, and gate and up do.
    inputs = (2 * model.hidden_size + query + width) / tokens.tp
    gradients = sum(outputs for _, outputs in layer_matrices(case))
    activation, weight = _bytes_each(case)
    sums = 12 * model.hidden_size * tokens.count / tokens.outer
    return (
        sums
        + activation * (inputs + gradients) * tokens.count
        + weight * sum(n * m for n, m in layer_matrices(case))
    )


def _rounding_bytes_of_experts(case: PlanCase) -> float:
    """Return the bytes of rounding rows, their gradients and the weights of a layer's experts, by rows. What
    products take by rows: read 2, written 1. By columns, backward: in order 4, largest numbers 2, rounded 3,
    transposed 2. Weights as matrices with a scale for each row. Eager each of these is many passes, as many
    as were counted of torch's operators.
    """
    model, tokens = case.model, case.tokens
    width = 3 * expert_width(model) / tokens.tp
    rows = tokens.count * model.num_experts_per_tok
    is_kept = case.framework.passes.keeps_fp8_weights and not (case.zero == 3 and case.num_shards > 1)
    activation, weight, kept = _OF_EXPERTS if case.options.is_compiled else _OF_EXPERTS_EAGER
    weight = kept / case.accumulation if is_kept else weight
    return (
        activation * rows * (2 * model.hidden_size + width)
        + weight * held_of_layer(model, case.layout).experts
    )


def _bytes_each(case: PlanCase) -> tuple[float, float]:
    """Return the bytes of rounding a number of an activation or a gradient, and of a weight."""
    is_row, is_compiled = case.options.fp8_scaling is Scaling.row, case.options.is_compiled
    rounding = _OF_ROWS if is_row else _OF_TENSOR
    activation, kept, used, gathered = rounding[0] if is_compiled else rounding[1]
    if is_compiled and case.options.fp8_delayed_scaling:
        activation -= 2
    if case.framework.passes.keeps_fp8_weights and not (case.zero == 3 and case.num_shards > 1):
        return activation, kept / case.accumulation
    if case.gathers_fp8:
        return activation, 2 + (2 / case.accumulation + 2 * gathered) / case.num_shards
    return activation, used


def loss_bytes(case: PlanCase) -> float:
    """Return the bytes of the loss on one micro-batch: of logits, of the output matrix's gradient, which
    several chunks add up in fp32 (and is then cast to 16 bits), and of rounding an output product in fp8.
    """
    model, tokens, passes = case.model, case.tokens, case.framework.passes
    words = model.vocab_size / tokens.tp
    each = passes.compiled_loss * tokens.width_bytes / 2 if case.options.is_compiled else passes.eager_loss
    moved = each * tokens.count * words
    further = math.ceil(tokens.count / loss_chunk_tokens(case)) - 1
    if further and tokens.width_bytes < 4:
        moved += (passes.chunk * further + 6) * words * model.hidden_size
    if case.precision is PrecisionName.fp8 and case.options.fp8_output:
        activation, weight = _bytes_each(case)
        # The pass that computes the logits' gradient rounds it, by a scale known before: one byte is written
        # instead of two, and transposed.
        moved += tokens.count * words + activation * tokens.count * model.hidden_size
        moved += weight * words * model.hidden_size
    return moved


def layer_matrices(case: PlanCase) -> list[tuple[float, float]]:
    """Return inputs and outputs of a rank's matrices of one layer."""
    model, tp = case.model, case.tokens.tp
    hidden, width = model.hidden_size, feed_forward_width(model) / tp
    query, key = _query_width(case) / tp, _key_width(case) / tp
    attention: list[tuple[float, float]] = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    if model.kv_lora_rank is not None:
        both = model.num_attention_heads * (model.qk_nope_head_dim + model.v_head_dim) / tp
        down = model.kv_lora_rank + model.qk_rope_head_dim
        attention = [(hidden, down), (model.kv_lora_rank, both), (value_width(model) / tp, hidden)]
        rank = model.q_lora_rank
        attention += [(hidden, query)] if rank is None else [(hidden, rank), (rank, query)]
    gates = [(hidden, width)] * (2 if model.family is Family.llama else 1)
    return [*attention, *gates, (width, hidden)]


def half_flops(case: PlanCase) -> float:
    """Return the rate of products in 16 bits where the others are in fp8, else that of all products."""
    peaks = row(case.device.name).peak_flops
    if case.precision is not PrecisionName.fp8 or not peaks:
        return case.device.product_flops
    return case.device.product_flops * peaks["bf16"] / peaks["fp8"]


def _query_width(case: PlanCase) -> float:
    return attention_width(case.model)


def _key_width(case: PlanCase) -> float:
    return key_value_width(case.model) / 2
