"""What a layer keeps for its backward pass, and what that needs besides."""

from __future__ import annotations

import math
from collections.abc import Iterable

from conf.schema import ContextMethod, Family, PrecisionName, Recompute
from orchestra.sizes.activations import LayerActivations, cheapest_within, every_kth, takes_experts_at_once
from orchestra.sizes.flops import (
    expert_width,
    head_dim,
    key_value_width,
    num_dense_layers,
    value_width,
    without_experts,
)
from orchestra.sizes.training_shape import TrainingShape

_FP32 = 4
# Elements of weights that are in fp32 at a time while they are rounded to fp8: 64 MiB.
FP8_ELEMENTS = 1 << 24


def layer_of(shape: TrainingShape, *, has_experts: bool = True) -> LayerActivations:
    """Return the activations of one layer as `orchestra.sizes.activations` counts them, with experts where
    the model has some, or of its dense layers.
    """
    tokens = shape.tokens
    return LayerActivations(
        model=shape.model if has_experts else without_experts(shape.model),
        num_sequences=tokens.num_sequences,
        seq_len=round(tokens.seq_len),
        element_bytes=tokens.width_bytes,
        tp=tokens.tp,
        is_sequence_parallel=tokens.sequence_parallel,
        gathers_again=shape.options.is_gpu,
        cp=shape.layout.cp,
        exchanges_heads=shape.layout.cp > 1 and shape.options.cp_method is ContextMethod.ulysses,
        experts_at_once=takes_experts_at_once(shape.precision, is_gpu=shape.options.is_gpu),
        is_gpu=shape.options.is_gpu,
    )


def recomputed_kinds(shape: TrainingShape) -> tuple[Recompute, ...]:
    """Return what is recomputed of each layer; everything where a budget is too small for any choice, which
    the rules of configurations refuse.
    """
    options, num_layers = shape.options, shape.model.num_hidden_layers
    if options.activation_bytes is None or shape.recompute is not Recompute.none:
        return every_kth(shape.recompute, options.recompute_every, num_layers)
    layer = layer_of(shape)
    kinds = cheapest_within(layer, num_layers, options.activation_bytes)
    return (Recompute.full,) * num_layers if kinds is None else kinds


def kept_in_fp8(shape: TrainingShape, *, has_experts: bool) -> float:
    """Return how much less a layer in fp8 keeps, which has products' inputs in one byte: the norms' outputs
    and the feed-forward's; the attention's is kept besides, for itself. Of a mixture its shared expert's:
    what its experts multiply is rounded by rows, and kept in 16 bits.
    """
    is_mixture = has_experts and shape.model.num_experts > 0
    if shape.options.is_compiled and not is_mixture:
        return _kept_in_compiled_fp8(shape)
    if not shape.options.keeps_fp8_inputs:
        return 0.0
    model, tokens = shape.model, shape.tokens
    width = model.shared_expert_intermediate_size if is_mixture else model.intermediate_size
    num_norms = 1 if is_mixture and not width else 2
    # Of sequences' parts the whole ones are kept, in one byte, where 16 bits of a part would be.
    is_gathered = tokens.sequence_parallel and shape.options.is_gpu
    norms = num_norms * model.hidden_size * (tokens.width_bytes / (tokens.tp if is_gathered else 1) - 1)
    return tokens.count * (norms + (width - value_width(model)) / tokens.tp)


def _kept_in_compiled_fp8(shape: TrainingShape) -> float:
    """Return the same of a dense layer that is compiled: its backward pass makes again what it can make from
    what is kept besides, as the compiler finds cheaper: the feed-forward's activation from its inputs, and
    the norms' outputs (left in under tensor parallelism). Where one scale holds for a tensor, those that
    several products take are kept in one byte (`precision.fp8._made_apart`).
    """
    model, tokens = shape.model, shape.tokens
    activation = tokens.width_bytes * model.intermediate_size / tokens.tp
    if tokens.tp > 1:
        return tokens.count * activation
    # A GPT's feed-forward begins with one product, a Llama's with two.
    in_bytes = (1 if model.family is Family.gpt else 2) if shape.options.keeps_fp8_inputs else 0
    return tokens.count * (activation + (2 * tokens.width_bytes - in_bytes) * model.hidden_size)


def in_fp8(shape: TrainingShape, layers: Iterable[int]) -> list[bool]:
    """Return of each of some layers that computes in fp8 whether it has experts, where the model has."""
    num_dense = num_dense_layers(shape.model)
    return [layer >= num_dense for layer in layers if layer in shape.layers_in_fp8]


def temporary_bytes(shape: TrainingShape) -> float:
    """Return what the backward pass of a layer needs at its worst beside what was kept: two gradients of the
    feed-forward's inner width; under sequence parallelism four gathered tensors less this rank's parts; in
    fp8 the copies in which a matrix is rounded (one of 2 bytes and two of fp32, and what comes of it), or
    the transposed one of a matrix that was gathered so.
    """
    model, tokens = shape.model, shape.tokens
    inner = tokens.count * model.intermediate_size / tokens.tp
    temporary = 2 * inner * tokens.width_bytes
    if model.num_experts:
        temporary = _temporary_bytes_of_mixture(shape)
    if tokens.outer > 1:
        temporary += 4 * (1 - 1 / tokens.tp) * tokens.count * model.hidden_size * tokens.width_bytes
    # Of a mixture the rows of its experts are more than what else is rounded.
    if shape.precision is PrecisionName.fp8 and not model.num_experts:
        if shape.gathers_fp8:
            temporary += 8 * inner + model.hidden_size * model.intermediate_size / tokens.tp
        elif shape.zero == 3 and shape.num_shards > 1:
            temporary += 12 * max(inner, model.hidden_size * model.intermediate_size / tokens.tp)
        else:
            # Weights are rounded outside of it: of a gradient the count finds about two copies in fp32.
            temporary += 8 * inner
    return temporary


def _temporary_bytes_of_mixture(shape: TrainingShape) -> float:
    """Return what the backward pass of a mixture needs: the gradients of its experts' outputs and their
    products with these, in fp32 (and where that is another type the copy that it is made of), or two
    gradients of the inner width beside those of rows. In fp8 rows are rounded by columns, by a copy in order
    and two of fp32 too; and gathered weights where they are used, by a copy transposed, its numbers
    and parts of it in fp32.
    """
    model, tokens, layout = shape.model, shape.tokens, shape.layout
    row = tokens.count * model.num_experts_per_tok * model.hidden_size
    weighing = row * (2 * _FP32 if tokens.width_bytes == _FP32 else 2 * _FP32 + tokens.width_bytes)
    inner = tokens.count * model.num_experts_per_tok * expert_width(model) / tokens.tp
    stack = math.ceil(model.num_experts / layout.ep) * model.hidden_size * expert_width(model) / tokens.tp
    if shape.precision is PrecisionName.fp8:
        rounding = weighing + (tokens.width_bytes + 1) * inner
        if shape.zero < 3 or shape.num_shards == 1:
            return rounding
        return max(rounding, 3 * stack + 2 * _FP32 * min(stack, FP8_ELEMENTS) + 2 * tokens.width_bytes * row)
    # A kernel over all experts gives the gradients of a stack of weights in memory of their own; those of the
    # last product's rows stand where the rows did.
    multiplying = max(row + 2 * inner, inner + stack) if shape.options.is_gpu else row
    return max(weighing, multiplying * tokens.width_bytes)


def gathered_keys_bytes(shape: TrainingShape) -> float:
    """Return what the backward pass of attention takes whose keys and values are gathered from the ranks of a
    sequence: these, the sum of their gradients, and those of one piece.
    """
    model, tokens, cp = shape.model, shape.tokens, shape.layout.cp
    if cp == 1 or shape.options.cp_method is ContextMethod.ulysses:
        return 0.0
    width = max(key_value_width(model) / tokens.tp / 2, head_dim(model))
    if model.kv_lora_rank is not None:
        width = (model.kv_lora_rank + model.qk_rope_head_dim) / 2
    return 3 * 2 * tokens.count * cp * width * tokens.width_bytes
