"""Memory of orchestra's own trainer, as it allocates: the closed forms beside `orchestra plan --exact`.

Other trainers are described by their profiles; of this one everything is known but what libraries take. A
rank holds its part of flat units (parameters, gradients, masters, moments), with ZeRO-3 three buffers that
units are gathered into, and with ZeRO-2 and -3 the memory of gradients that are summed. The optimizer's state
is made before the first step. A step adds the most of two moments: the loss of a micro-batch, when all layers
keep their activations, and the backward pass of the last layer.

It reads no file and measures nothing. Alignment of units and small vectors are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from conf.schema import Family, ModelConfig, Offload, PrecisionName, Recompute
from orchestra.plan.case import Case, Stage, num_chunks
from orchestra.plan.kept_activations import num_in_flight
from orchestra.sizes.activations import LayerActivations, cheapest_within, every_kth, peak_bytes
from orchestra.sizes.flops import attention_width, head_dim

_FP32 = 4
# As in orchestra.model.loss, which this plane cannot load: bytes of fp32 logits that exist at once where the
# configuration says nothing, and the fewest tokens.
_CHUNK_BYTES_CPU, _CHUNK_BYTES_GPU, _MIN_CHUNK_TOKENS = 16 << 20, 256 << 20, 256
# As in orchestra.optim.adamw: elements of narrow moments that are in fp32 at a time.
_ROUNDED_CPU, _ROUNDED_GPU = 1 << 16, 1 << 24


@dataclass(frozen=True)
class Widths:
    """Bytes of one element as this trainer keeps it. `masters`: 0 where they are the parameters."""

    parameters: int
    gradients: int
    masters: int


_WIDTHS = {
    PrecisionName.fp32: Widths(4, 4, 0),
    PrecisionName.bf16: Widths(2, 2, 4),
    PrecisionName.bf16_fp32_grad: Widths(2, 4, 4),
    PrecisionName.fp16: Widths(2, 2, 4),
    # Weights are quantized for each product and not kept.
    PrecisionName.fp8: Widths(2, 2, 4),
}


def widths(precision: PrecisionName) -> Widths:
    """Return the widths of a precision policy."""
    return _WIDTHS[precision]


@dataclass(frozen=True)
class RankParameters:
    """Elements of one tensor-parallel rank, padding of a cut vocabulary counted: what stands before the
    layers, each layer, and what stands behind them.
    """

    before: int
    layer: int
    behind: int
    # The single tensors of a layer, in the model's order.
    of_layer: tuple[int, ...]

    def of(self, stage: Stage) -> int:
        """Return the elements of a pipeline stage."""
        ends = self.before * stage.has_embedding + self.behind * stage.has_head
        return ends + stage.num_layers * self.layer


def rank_parameters(model: ModelConfig, tp: int, *, has_both_ends: bool = True) -> RankParameters:
    """Return what one of `tp` ranks has: heads, inner width and words are cut, norms and the biases of sums
    are whole, and a rank has at least one key-value head. A tied table stands once where both ends are on
    one stage.
    """
    hidden, wide = model.hidden_size, math.ceil(model.intermediate_size / tp)
    query = attention_width(model) // tp
    kv = head_dim(model) * max(model.num_key_value_heads // tp, 1)
    table = math.ceil(model.vocab_size / tp) * hidden
    norm: tuple[int, ...] = (hidden,)
    tensors: tuple[int, ...]
    positions = 0
    if model.family is Family.gpt:
        norm = (hidden, hidden)
        tensors = (*norm, hidden * query, query, hidden * kv, kv, hidden * kv, kv, hidden * query, hidden)
        tensors += (*norm, hidden * wide, wide, hidden * wide, hidden)
        positions = model.max_position_embeddings * hidden
    else:
        tensors = (*norm, hidden * query, hidden * kv, hidden * kv, hidden * query)
        tensors += (*norm, *(hidden * wide,) * 3)
    head = 0 if model.tie_word_embeddings and has_both_ends else table
    return RankParameters(table + positions, sum(tensors), sum(norm) + head, tensors)


@dataclass(frozen=True)
class StepBytes:
    """What a step adds on the device at its worst moment."""

    activations: float
    logits: float


@dataclass(frozen=True)
class OwnBytes:
    """Bytes of one rank. `buffers` is there from the second step on, `first_buffers` of it from the start."""

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    step: StepBytes
    first_buffers: float
    buffers: float
    host: float

    @property
    def growing_buffers(self) -> float:
        """What is taken when gradients are summed for the first time, and then kept."""
        return self.buffers - self.first_buffers


def own_bytes(case: Case, stage: Stage) -> OwnBytes:
    """Return what a rank of a stage takes in orchestra's trainer."""
    width, choices = widths(case.precision), case.choices
    parts = rank_parameters(case.model, case.layout.tp, has_both_ends=case.layout.pp == 1)
    size, shards = parts.of(stage), max(1, case.num_shards)
    owned = size / (shards if case.zero >= 1 else 1)
    is_split = case.zero == 3 and shards > 1
    states = owned * (width.masters + 2 * choices.moment_bytes)
    parameters = (owned if is_split else size) * width.parameters
    host = 0.0
    masters, moments = owned * width.masters, 2 * owned * choices.moment_bytes
    if choices.offload is not Offload.none and choices.is_gpu:
        # fp32 masters lie apart from the parameters there, and rounded ones leave from their own memory.
        leaving = owned * width.parameters if width.masters else owned * _FP32
        host, masters, moments = states + leaving, 0.0, 0.0
        parameters = 0.0 if choices.offload is Offload.all and is_split else parameters
    gathered = _gathered(parts, stage) * width.parameters if is_split else 0.0
    return OwnBytes(
        parameters=parameters,
        gradients=(owned if case.zero >= 2 else size) * width.gradients,
        masters=masters,
        optimizer=moments,
        step=step_bytes(case, stage, parts),
        first_buffers=gathered,
        buffers=gathered + _messages(case, stage, parts),
        host=host,
    )


def step_bytes(case: Case, stage: Stage, parts: RankParameters) -> StepBytes:
    """Return the larger of the two moments of a step: the loss, or the backward pass of a layer."""
    width = case.tokens.width_bytes
    layer, kinds = layer_of(case), _kinds(case, stage)
    each = {kind: layer.kept_bytes(kind) for kind in set(kinds)}
    kept = sum(each[kind] for kind in kinds)
    others: float = num_in_flight(stage.index, case.layout.pp, case.accumulation) - 1
    others += (case.layout.pp - 1) / num_chunks(case) if num_chunks(case) > 1 else 0
    waiting = kept * others
    hidden = case.tokens.count * case.model.hidden_size * width
    # The final norm's input and output; the latter gathered for the loss.
    ends = (2 * hidden / case.tokens.outer) * stage.has_head
    fewer = _kept_in_fp8(case) * sum(kind is Recompute.none for kind in kinds)
    backward = peak_bytes(layer, kinds) - fewer + _temporary_bytes(case)
    if _is_summed_in_another_type(case) and stage.num_layers:
        # All copies together, when the first layer's backward pass ends.
        copies = parts.of(stage) * (case.choices.reduce_bytes or 0)
        backward = max(backward, copies + _temporary_bytes(case))
    backward = max(backward, _update_bytes(case, stage, parts) - ends)
    loss = _loss_bytes(case) if stage.has_head else 0.0
    if kept - fewer + loss >= backward:
        return StepBytes(waiting + kept - fewer + ends, loss)
    return StepBytes(waiting + backward + ends, 0.0)


def _update_bytes(case: Case, stage: Stage, parts: RankParameters) -> float:
    """Return what the update needs: a unit's gradients in the masters' type, where theirs is narrower, and
    moments of two bytes in fp32 with the random bits of their rounding, some elements at a time (of 2^24
    elements the count finds 42 bytes each).
    """
    unit = _largest_units(case, stage, parts)[0] / (max(1, case.num_shards) if case.zero else 1)
    found = unit * _FP32 if widths(case.precision).gradients < _FP32 else 0.0
    if case.choices.moment_bytes < _FP32:
        largest = min(unit, max(parts.before, parts.behind, *parts.of_layer))
        found += 42 * min(largest, _ROUNDED_GPU if case.choices.is_gpu else _ROUNDED_CPU)
    return found


def _temporary_bytes(case: Case) -> float:
    """Return what the backward pass of a layer needs at its worst beside what was kept: two gradients of the
    feed-forward's inner width; under sequence parallelism four gathered tensors less this rank's parts; in
    fp8 the copies in which a matrix is rounded (one of 2 bytes and two of fp32, and what comes of it).
    """
    model, tokens = case.model, case.tokens
    inner = tokens.count * model.intermediate_size / tokens.tp
    found = 2 * inner * tokens.width_bytes
    if tokens.outer > 1:
        found += 4 * (1 - 1 / tokens.tp) * tokens.count * model.hidden_size * tokens.width_bytes
    if case.precision is PrecisionName.fp8:
        found += 12 * max(inner, model.hidden_size * model.intermediate_size / tokens.tp)
    return found


def _kept_in_fp8(case: Case) -> float:
    """Return how much less a layer keeps whose products' inputs are kept in one byte: the norms' outputs and
    the feed-forward's; the attention's is kept besides, for itself.
    """
    if case.precision is not PrecisionName.fp8 or not case.choices.keeps_fp8_inputs:
        return 0.0
    model, tokens = case.model, case.tokens
    norms = 0 if tokens.tp > 1 else 2 * model.hidden_size
    inner = (model.intermediate_size - attention_width(model)) / tokens.tp
    return tokens.count * (norms + inner)


def _is_summed_in_another_type(case: Case) -> bool:
    reduce, own = case.choices.reduce_bytes, widths(case.precision).gradients
    is_whole = case.zero == 0 or case.num_shards == 1
    return is_whole and case.layout.dp * case.layout.cp > 1 and reduce is not None and reduce != own


def layer_of(case: Case) -> LayerActivations:
    """Return the activations of one layer as `orchestra.sizes.activations` counts them."""
    tokens = case.tokens
    return LayerActivations(
        model=case.model,
        num_sequences=tokens.num_sequences,
        seq_len=round(tokens.seq_len),
        element_bytes=tokens.width_bytes,
        tp=tokens.tp,
        is_sequence_parallel=tokens.sequence_parallel,
        gathers_again=case.choices.is_gpu,
    )


def _kinds(case: Case, stage: Stage) -> tuple[Recompute, ...]:
    """Return what is recomputed of the stage's layers."""
    chosen = kinds_of_layers(case)
    begin = sum(other.num_layers for other in case.stages[: stage.index])
    return chosen[begin : begin + stage.num_layers]


def kinds_of_layers(case: Case) -> tuple[Recompute, ...]:
    """Return what is recomputed of each layer; everything where a budget is too small for any choice, which
    the rules of configurations refuse.
    """
    choices, num_layers = case.choices, case.model.num_hidden_layers
    if choices.activation_bytes is None or case.recompute is not Recompute.none:
        return every_kth(case.recompute, choices.recompute_every, num_layers)
    layer = layer_of(case)
    kinds = cheapest_within(layer, num_layers, choices.activation_bytes)
    return (Recompute.full,) * num_layers if kinds is None else kinds


def chunk_tokens(case: Case) -> int:
    """Return how many tokens' logits exist at once."""
    tokens, words = round(case.tokens.count), math.ceil(case.model.vocab_size / case.layout.tp)
    if case.choices.loss_chunk_tokens is not None:
        return min(tokens, case.choices.loss_chunk_tokens)
    limit = (_CHUNK_BYTES_GPU if case.choices.is_gpu else _CHUNK_BYTES_CPU) // (4 * words)
    return max(1, min(tokens, max(_MIN_CHUNK_TOKENS, limit)))


def _loss_bytes(case: Case) -> float:
    """Return what the chunked loss adds: chunks of logits in the products' type and in fp32, the hidden
    states' gradient, and the output matrix' gradient in fp32 beside its own type.

    One chunk's gradient is still alive when the next one's logits are made. Over cut vocabularies two chunks
    are under way.
    """
    tokens, width = case.tokens.count, case.tokens.width_bytes
    words, hidden = math.ceil(case.model.vocab_size / case.layout.tp), case.model.hidden_size
    chunk = chunk_tokens(case)
    # The second chunk, which is short where it is the last one.
    second = max(0, min(chunk, tokens - chunk))
    narrow = 0 if width == _FP32 else width
    if case.layout.tp > 1:
        making = chunk * _FP32 + second * (_FP32 + narrow) if second else chunk * (_FP32 + narrow)
        using = (chunk + second) * _FP32 + chunk * narrow
        held = 0.0
    else:
        making = (chunk + second) * _FP32 if narrow else 0.0
        using = chunk * (_FP32 + narrow) if narrow else 0.0
        # The products' own memory serves all chunks; in fp32 it is the only one.
        held = chunk * (narrow or _FP32)
    matrix = words * hidden * _FP32
    product = words * hidden * narrow
    whole = tokens * hidden * width
    gathered = 2 * whole if case.tokens.outer > 1 else 0.0
    found = held * words + max(making * words, using * words + product) + matrix + whole + gathered
    # On a GPU nobody looks whether the loss' own gradient is 1: both gradients are made once more.
    again = 2 * (words * hidden * width + whole) if case.choices.is_gpu else 0.0
    return max(found, again)


def _gathered(parts: RankParameters, stage: Stage) -> float:
    """Return the elements of the buffers of ZeRO-3: two for layers, and one that both ends share."""
    ends = max(parts.before * stage.has_embedding, parts.behind * stage.has_head)
    return min(2, stage.num_layers) * parts.layer + ends


def _messages(case: Case, stage: Stage, parts: RankParameters) -> float:
    """Return the memory that sums of gradients over ranks take besides, and keep once they have it."""
    width, choices, shards = widths(case.precision), case.choices, case.num_shards
    reduce = choices.reduce_bytes or width.gradients
    num_ranks = case.layout.dp * case.layout.cp
    if num_ranks == 1 or case.zero == 0 or shards == 1:
        return 0.0
    largest, second = _largest_units(case, stage, parts)
    # gloo's ranks send each other their parts of a unit.
    direct = 0.0 if choices.is_gpu else largest * (shards - 1) / shards
    # A unit that fills waits for the memory of the one that is summed, unless two fill at the same time: the
    # gradients of one input's products come together.
    has_two = case.zero == 2 and choices.bucket_bytes / width.gradients < parts.layer
    filling = (largest + second * has_two) if case.zero >= 2 else 0.0
    return (filling + direct) * reduce


def _largest_units(case: Case, stage: Stage, parts: RankParameters) -> tuple[float, float]:
    """Return the sizes of the two largest units that gradients are summed in: whole blocks with ZeRO-3, else
    buckets of at least so many bytes, filled from the model's end.
    """
    ends = (parts.behind * stage.has_head, parts.before * stage.has_embedding)
    if case.zero == 3:
        return _two_largest([*ends, *[parts.layer] * min(2, stage.num_layers)])
    least = case.choices.bucket_bytes / widths(case.precision).gradients
    return _largest_buckets(ends, parts.of_layer, stage.num_layers, least)


@lru_cache(maxsize=1024)
def _largest_buckets(
    ends: tuple[int, int], of_layer: tuple[int, ...], num_layers: int, least: float
) -> tuple[float, float]:
    sizes, filling = [], 0.0
    for size in (ends[0], *of_layer[::-1] * num_layers, ends[1]):
        filling += size
        if filling >= least:
            sizes.append(filling)
            filling = 0.0
    return _two_largest([*sizes, filling])


def _two_largest(sizes: Sequence[float]) -> tuple[float, float]:
    largest, second, *_ = [*sorted(sizes, reverse=True), 0.0, 0.0]
    return largest, second
