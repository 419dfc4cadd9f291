"""How many bytes a rank of orchestra's trainer needs: the one closed form of it, without torch.

Used by the planner, by `orchestra submit` before it submits, and by the message of a rank that ran out of
memory; `orchestra plan --exact` compares it with a count of the real modules' tensors, within 1 to 2 %.

A rank keeps its part of flat units (parameters, gradients, masters, moments), with ZeRO-3 three buffers that
units are gathered into, and with ZeRO-2 and -3 the memory of gradients that are summed. The optimizer's state
is made before the first step. A step adds the larger of two moments: the loss of a micro-batch, when all
layers keep their activations, and the backward pass of the last layer. Alignment of units, small vectors, and
what libraries and the driver take are left out.

The trainer takes its own block sizes from here (`chunk_tokens`, `ROUNDED_CPU`, `ROUNDED_GPU`, `FP8_WORDS`,
`FP8_ELEMENTS`), so that the closed form and the code cannot disagree on them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, groupby

from conf.schema import (
    ContextMethod,
    Family,
    Offload,
    PipelineSchedule,
    PrecisionName,
    Recompute,
    Scaling,
)
from orchestra.sizes.activations import (
    LayerActivations,
    cheapest_within,
    every_kth,
    peak_bytes,
    takes_experts_at_once,
)
from orchestra.sizes.flops import (
    attention_width,
    expert_width,
    feed_forward_width,
    head_dim,
    key_value_width,
    num_dense_layers,
    value_width,
    without_experts,
)
from orchestra.sizes.pipeline_check import HeldState, fewer_micro_batches, held_states
from orchestra.sizes.pipeline_schedule import splits_backward
from orchestra.sizes.training_shape import (
    PipelineStage,
    RankParameters,
    TrainingShape,
    buckets,
    gradient_units,
    rank_parameters,
    rounded_elements,
    widths,
)

_FP32 = 4
# Bytes of logits in one chunk of the loss when the configuration gives no size: on a GPU 8,192 tokens of
# 128,000 words in 16 bits, so that the output matrix's gradient is summed over few chunks. On CPU 16 MiB of
# fp32, but at least 256 tokens, below which the products lose speed (measured with 8,192 and 32,000 words:
# chunks of 64 tokens took 1.35 times as long as chunks of 512, and whole logits at once 2 times).
_CHUNK_BYTES_CPU = 16 << 20
_CHUNK_BYTES_GPU = 2 << 30
_MIN_CHUNK_TOKENS = 256
# Rows that a product on a GPU takes at a time, or a part of them.
_TILE_TOKENS = 128
# Elements of gradients and moments that AdamW holds in fp32 at a time, on CPU for each thread: they stay in
# its cache. Multiples of what any kernel takes at once.
ROUNDED_CPU, ROUNDED_GPU = 1 << 16, 1 << 24
# Elements of a gradient that a replay looks at together, on CPU as many as its caches hold, and what it takes
# for each: its bits, factors and products in 64 bits.
REPLAYED_CPU, REPLAYED_GPU = 1 << 16, 1 << 22
_REPLAYED_BYTES = 32
# Words whose gradients an output product in fp8 adds to earlier ones at a time.
FP8_WORDS = 1 << 14
# Elements of weights that are in fp32 at a time while they are rounded to fp8: 64 MiB.
FP8_ELEMENTS = 1 << 24
# Share of a device's memory that tensors can fill: the CUDA context, NCCL and fragmentation take the rest
# before an allocation fails.
USABLE_SHARE = 0.91


def chunk_tokens(num_tokens: int, vocab_size: int, bytes_each: int, *, on_gpu: bool) -> int:
    """Return how many tokens' logits, of `bytes_each`, exist at once where the configuration does not say.

    At least 1. On a GPU chunks are as equal as tiles of products allow.
    """
    if not on_gpu:
        # As for fp32, whatever they take: no precision gives other chunks.
        return max(1, min(num_tokens, max(_MIN_CHUNK_TOKENS, _CHUNK_BYTES_CPU // (_FP32 * vocab_size))))
    limit = max(_MIN_CHUNK_TOKENS, _CHUNK_BYTES_GPU // (bytes_each * vocab_size))
    tiles = math.ceil(num_tokens / math.ceil(num_tokens / limit) / _TILE_TOKENS)
    return min(num_tokens, tiles * _TILE_TOKENS)


def logit_bytes(width: int, is_compiled: bool) -> int:
    """Return what a logit takes while the loss is computed, for products whose results have `width` bytes:
    their memory and, eager, a copy in fp32.
    """
    return width if is_compiled or width >= _FP32 else width + _FP32


@dataclass(frozen=True)
class StepBytes:
    """What a step adds on the device at its worst moment."""

    activations: float
    logits: float


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank, on the device but for `host` and `disk`.

    `first_buffers` is what ZeRO-3 gathers units into, there from the start. `buffers` adds what the first sum
    of gradients over ranks takes and keeps.
    """

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    step: StepBytes
    first_buffers: float
    buffers: float
    host: float
    disk: float = 0.0

    @property
    def growing_buffers(self) -> float:
        """What is taken when gradients are summed over ranks for the first time, and then kept."""
        return self.buffers - self.first_buffers

    @property
    def state(self) -> float:
        """Parameters, gradients, master weights and optimizer state: what ZeRO divides."""
        return self.parameters + self.gradients + self.masters + self.optimizer

    @property
    def total(self) -> float:
        """The peak of tensors on the device."""
        return self.state + self.step.activations + self.step.logits + self.buffers

    @property
    def components(self) -> dict[str, float]:
        """The parts of `total` by the names that people read."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "master weights": self.masters,
            "optimizer state": self.optimizer,
            "gathered parameters": self.first_buffers,
            "activations": self.step.activations,
            "loss and logits": self.step.logits,
            "communication buffers": self.growing_buffers,
        }


def rank_bytes(shape: TrainingShape, stage: PipelineStage) -> RankBytes:
    """Return what a rank of a stage takes in orchestra's trainer."""
    parts = _parts_of(shape)
    state = _state_of(shape, stage, parts)
    return replace(
        state,
        step=step_bytes(shape, stage, parts),
        buffers=state.first_buffers + _messages(shape, stage, parts),
    )


def lasting_bytes(shape: TrainingShape, stage: PipelineStage) -> float:
    """Return what of `rank_bytes` is there between steps and from the first one on, in far less time."""
    return _state_of(shape, stage, _parts_of(shape)).total


def _parts_of(shape: TrainingShape) -> RankParameters:
    pipeline = shape.pipeline
    has_both_ends = pipeline.rank_of(0) == pipeline.rank_of(pipeline.num_stages - 1)
    return rank_parameters(shape.model, shape.layout.tp, shape.layout.ep, has_both_ends=has_both_ends)


def _state_of(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> RankBytes:
    """Return what a rank takes without what a step and sums over ranks add."""
    width, options = widths(shape.precision), shape.options
    shards, of_experts = max(1, shape.num_shards), shape.num_expert_shards
    experts, rest = parts.experts_of(stage), parts.of(stage)
    size = rest + experts
    owned = rest / shards + experts / of_experts if shape.zero >= 1 else size
    is_split = shape.zero == 3 and shards > 1
    # What keeps state on a host or a disk is AdamW, which keeps the same of all.
    at_ends = options.more_at_ends * parts.ends_of(stage) / (shards if shape.zero >= 1 else 1)
    states = owned * (width.masters + 2 * options.moment_bytes)
    parameters = (owned if is_split else size) * width.parameters
    if not is_split:
        parameters += _rounded_bytes(shape, stage)
    elif shape.gathers_fp8:
        parameters += width.parameters * _elements_kept_whole(shape, stage, parts)
    host = disk = 0.0
    masters, moments = owned * width.masters, 2 * owned * options.moment_bytes + at_ends
    if options.offload is Offload.optimizer_disk:
        each = _FP32 + 2 * options.moment_bytes
        unit = max(gradient_units(shape, stage, parts, width.gradients)) / (shards if shape.zero >= 1 else 1)
        leaving = 1.0 * width.parameters if options.is_gpu and width.masters else 0.0
        masters, disk, in_memory = 0.0, owned * each, 2 * unit * (each + leaving)
        # On a CPU the host's memory is the device's.
        host, moments = (in_memory, 0.0) if options.is_gpu else (0.0, in_memory)
    elif options.offload is not Offload.none and options.is_gpu:
        # fp32 masters lie apart from the parameters there, and rounded ones leave from their own memory.
        leaving = owned * width.parameters if width.masters else owned * _FP32
        host, masters, moments = states + leaving, 0.0, 0.0
        parameters = 0.0 if options.offload is Offload.all and is_split else parameters
    gathered = _gathered(shape, parts, stage) * width.parameters if is_split else 0.0
    whole_too = shape.table_apart(stage) * (1 - 1 / shards)
    return RankBytes(
        parameters=parameters,
        gradients=(owned + whole_too if shape.zero >= 2 else size) * width.gradients,
        masters=masters,
        optimizer=moments,
        step=StepBytes(0.0, 0.0),
        first_buffers=gathered,
        buffers=gathered,
        host=host,
        disk=disk,
    )


def _rounded_bytes(shape: TrainingShape, stage: PipelineStage) -> float:
    """Return what is kept of a stage's matrices in fp8: by rows and by columns, one byte an element each."""
    if shape.precision is not PrecisionName.fp8:
        return 0.0
    model, layout = shape.model, shape.layout
    of_kind = {
        has_experts: rounded_elements(model, layout.tp, layout.ep, has_experts=has_experts)
        for has_experts in (False, True)
    }
    elements = sum(of_kind[has_experts] for has_experts in _in_fp8(shape, chain(*stage.chunks)))
    if shape.options.fp8_output and stage.has_head:
        elements += math.ceil(model.vocab_size / layout.tp) * model.hidden_size
    return 2.0 * elements


def _in_fp8(shape: TrainingShape, layers: Iterable[int]) -> list[bool]:
    """Return of each of some layers that computes in fp8 whether it has experts, where the model has."""
    num_dense = num_dense_layers(shape.model)
    return [layer >= num_dense for layer in layers if layer in shape.layers_in_fp8]


def _elements_kept_whole(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> float:
    """Return the elements of what every rank has whole where matrices are gathered in fp8: norms, biases,
    routers.
    """
    model, layout = shape.model, shape.layout
    found = 0.0
    for has_experts in _in_fp8(shape, chain(*stage.chunks)):
        tensors = parts.of_layer if has_experts or not parts.of_dense else parts.of_dense
        rounded = rounded_elements(model, layout.tp, layout.ep, has_experts=has_experts)
        experts = sum(parts.of_experts) if has_experts else 0
        found += sum(tensors) - (rounded - experts)
    if shape.options.fp8_output and stage.has_head and not model.tie_word_embeddings:
        found += parts.after - math.ceil(model.vocab_size / layout.tp) * model.hidden_size
    return found


def step_bytes(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> StepBytes:
    """Return the largest of the moments of a step: the loss, the backward pass of a layer, or what comes when
    all micro-batches are done. In a pipeline other micro-batches are held besides.
    """
    hidden = shape.tokens.count * shape.model.hidden_size * shape.tokens.width_bytes / shape.tokens.outer
    # The final norm's input and output; the latter gathered for the loss.
    ends = 2 * hidden * stage.has_head
    done = 0.0
    if _is_summed_in_another_type(shape) and stage.num_layers:
        # All copies together, when the first layer's backward pass ends.
        whole = parts.of(stage) + parts.experts_of(stage)
        done = whole * (shape.options.reduce_bytes or 0) + _temporary_bytes(shape)
    done = max(done, _update_bytes(shape, stage, parts) - ends)
    works = [_work_of(shape, stage, layers, parts) for layers in stage.chunks]
    if shape.layout.pp == 1:
        return works[0].at_most(0.0, ends, done)
    # What arrives is asked for one pass ahead: a message of each kind.
    ends += 2 * hidden
    moments = []
    for state in schedule_states(shape, stage):
        held = sum(count * work.kept for count, work in zip(state.live, works, strict=True))
        held += sum(count * work.waiting for count, work in zip(state.waiting, works, strict=True))
        at_work = _NO_WORK if state.at_work is None else works[state.at_work]
        moments.append(at_work.at_most(held, ends, done))
    return max(moments, key=lambda moment: moment.activations + moment.logits)


@dataclass(frozen=True)
class _StageWork:
    """Bytes of one micro-batch in one stage. `kept`: activations between forward and backward pass.
    `waiting`: what the gradients of weights need after that of the input. `fewer`: how much less the loss
    finds kept. `loss`: what it adds. `backward`: activations and all else while gradients are computed.
    """

    kept: float
    waiting: float
    fewer: float
    loss: float
    backward: float

    def at_most(self, held: float, ends: float, done: float) -> StepBytes:
        """Return the larger moment of this work beside what else is held; `done`: what comes after it."""
        backward = max(self.backward, self.waiting, done - held)
        if self.kept - self.fewer + self.loss >= backward:
            return StepBytes(held + self.kept - self.fewer + ends, self.loss)
        return StepBytes(held + backward + ends, 0.0)


_NO_WORK = _StageWork(0.0, 0.0, 0.0, 0.0, 0.0)


def _work_of(shape: TrainingShape, stage: PipelineStage, layers: range, parts: RankParameters) -> _StageWork:
    layer, kinds = layer_of(shape), recomputed_kinds(shape)[layers.start : layers.stop]
    num_dense = max(0, min(len(kinds), num_dense_layers(shape.model) - layers.start))
    dense = layer_of(shape, has_experts=False)
    kept = sum(dense.kept_bytes(kind) * sum(1 for _ in alike) for kind, alike in groupby(kinds[:num_dense]))
    kept += sum(layer.kept_bytes(kind) * sum(1 for _ in alike) for kind, alike in groupby(kinds[num_dense:]))
    in_fp8 = shape.layers_in_fp8
    is_kept = [kind is Recompute.none and layer in in_fp8 for layer, kind in zip(layers, kinds, strict=True)]
    fewer = kept_in_fp8(shape, has_experts=False) * sum(is_kept[:num_dense])
    fewer += kept_in_fp8(shape, has_experts=True) * sum(is_kept[num_dense:])
    replayed = _replayed_bytes(shape, stage, parts)
    working = replace(shape, model=dense.model) if num_dense == len(kinds) else shape
    temporary = max(_temporary_bytes(working), replayed.in_layer, _gathered_keys_bytes(shape))
    backward = peak_bytes(layer, kinds, num_dense) - fewer + temporary + replayed.in_backward
    has_loss = stage.has_head and layers.stop == shape.model.num_hidden_layers
    return _StageWork(
        kept=kept,
        waiting=_waiting_bytes(shape, layers),
        fewer=fewer,
        loss=_loss_bytes(shape) + replayed.in_loss if has_loss else 0.0,
        backward=max(backward, replayed.at_the_end),
    )


def _waiting_bytes(shape: TrainingShape, layers: range) -> float:
    """Return what the gradients of layers' weights are made of where they are taken later, whatever is
    recomputed: inputs of products, whole under tensor parallelism, and gradients of their outputs; of
    products in fp8 as they were rounded, in one byte.
    """
    if shape.layout.pp == 1 or not splits_backward(shape.schedule):
        return 0.0
    num_fp8 = len(_in_fp8(shape, layers))
    return (num_fp8 + shape.tokens.width_bytes * (len(layers) - num_fp8)) * _waiting_numbers(shape)


def _waiting_numbers(shape: TrainingShape) -> float:
    model, tokens = shape.model, shape.tokens
    kv = max(key_value_width(model) / tokens.tp, 2 * head_dim(model))
    inner = (2 if model.family is Family.gpt else 3) * feed_forward_width(model) / tokens.tp
    split = 2 * attention_width(model) / tokens.tp + kv + inner
    rows = 2 * model.num_experts_per_tok * model.hidden_size if model.num_experts else 0
    return tokens.count * (4 * model.hidden_size + split + rows)


def schedule_states(shape: TrainingShape, stage: PipelineStage) -> tuple[HeldState, ...]:
    """Return what a rank of a pipeline holds at its fullest moments."""
    kind, count = shape.schedule, shape.accumulation
    if kind is not PipelineSchedule["afab"]:
        count = fewer_micro_batches(kind, shape.pipeline, count)
    return held_states(kind, shape.pipeline, count)[stage.index]


@dataclass(frozen=True)
class _Replayed:
    """What the gradients of a micro-batch that is computed again take (`recovery.replay_every_steps`), each
    until it has been looked at: those of the training have memory of their own.

    `in_layer`: with the gradient of the feed-forward's inner width, beside what layers keep. `in_backward`:
    to its end, of a tied table that the loss begins. `at_the_end`: with the embedding's from autograd.
    """

    in_loss: float = 0.0
    in_layer: float = 0.0
    in_backward: float = 0.0
    at_the_end: float = 0.0


def _replayed_bytes(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> _Replayed:
    """Return what a replay takes; nothing where there is none."""
    if not shape.options.replays or shape.layout.dp == 1:
        return _Replayed()
    model, tokens, made_in = shape.model, shape.tokens, _made_in(shape)
    chunk = REPLAYED_GPU if shape.options.is_gpu else REPLAYED_CPU
    inner = math.ceil(feed_forward_width(model) / tokens.tp)
    matrix = max(inner * model.hidden_size, *parts.of_layer, *parts.of_experts)
    table = math.ceil(model.vocab_size / tokens.tp) * model.hidden_size
    # Products whose results have another type than gradients have memory for them too.
    product = tokens.width_bytes if made_in != tokens.width_bytes else 0
    is_tied = model.tie_word_embeddings and stage.has_embedding and stage.has_head
    embedding = parts.before * (tokens.width_bytes + made_in) * stage.has_embedding
    return _Replayed(
        in_loss=table * made_in,
        in_layer=tokens.count * inner * tokens.width_bytes
        + matrix * made_in
        + max(matrix * product, min(chunk, matrix) * _REPLAYED_BYTES),
        in_backward=table * made_in if is_tied else 0.0,
        at_the_end=embedding + min(chunk, parts.before) * _REPLAYED_BYTES,
    )


def _made_in(shape: TrainingShape) -> int:
    """Return the bytes of an element of the output matrix' gradients as a micro-batch makes them."""
    gradient = widths(shape.precision).gradients
    is_whole = shape.zero < 2 or shape.num_shards == 1 or shape.has_table_apart
    return gradient if is_whole else shape.options.reduce_bytes or gradient


def _update_bytes(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> float:
    """Return what the update needs, for some elements of a unit at a time: gradients in fp32 where theirs is
    narrower; moments of two bytes in fp32, with the random bits of their rounding (32 bytes an element of one
    tensor, as counted).
    """
    shards, width = max(1, shape.num_shards) if shape.zero else 1, widths(shape.precision)
    if shape.options.is_plugged:
        of_experts = shape.num_expert_shards if shape.zero else 1
        updated = parts.of(stage) / shards + parts.experts_of(stage) / of_experts
        return updated * _FP32 if width.gradients < _FP32 else 0.0
    unit = max(gradient_units(shape, stage, parts, width.gradients)) / shards
    block = min(unit, ROUNDED_GPU if shape.options.is_gpu else ROUNDED_CPU)
    update = block * _FP32 if width.gradients < _FP32 else 0.0
    if shape.options.moment_bytes < _FP32:
        largest = max(parts.before, parts.after, *parts.of_layer, *parts.of_experts)
        update += 2 * block * _FP32 + 32 * min(largest, block)
    return update


def _temporary_bytes(shape: TrainingShape) -> float:
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
    if shape.precision is PrecisionName.fp8:
        rounding = weighing + (tokens.width_bytes + 1) * inner
        if shape.zero < 3 or shape.num_shards == 1:
            return rounding
        stack = math.ceil(model.num_experts / layout.ep) * model.hidden_size * expert_width(model) / tokens.tp
        return max(rounding, 3 * stack + 2 * _FP32 * min(stack, FP8_ELEMENTS) + 2 * tokens.width_bytes * row)
    multiplying = (row + 2 * inner) * tokens.width_bytes if shape.options.is_gpu else row * tokens.width_bytes
    return max(weighing, multiplying)


def _gathered_keys_bytes(shape: TrainingShape) -> float:
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
    norms = 0 if tokens.tp > 1 else num_norms * model.hidden_size
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


def _is_summed_in_another_type(shape: TrainingShape) -> bool:
    reduce, own = shape.options.reduce_bytes, widths(shape.precision).gradients
    is_whole = shape.zero == 0 or shape.num_shards == 1
    return is_whole and shape.layout.dp * shape.layout.cp > 1 and reduce is not None and reduce != own


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


def loss_chunk_tokens(shape: TrainingShape) -> int:
    """Return how many tokens' logits exist at once."""
    tokens, words = round(shape.tokens.count), math.ceil(shape.model.vocab_size / shape.layout.tp)
    if shape.options.loss_chunk_tokens is not None:
        return min(tokens, shape.options.loss_chunk_tokens)
    bytes_each = logit_bytes(shape.tokens.width_bytes, shape.options.is_compiled)
    return chunk_tokens(tokens, words, bytes_each, on_gpu=shape.options.is_gpu)


def _loss_bytes(shape: TrainingShape) -> float:
    """Return what the chunked loss adds: chunks of logits in the products' type and, eager, in fp32, the
    hidden states' gradient, and where gradients are kept in 16 bits the output matrix' in fp32, unless one
    chunk is all.

    One chunk's gradient is still alive when the next one's logits are made. Over cut vocabularies two chunks
    are under way.
    """
    tokens, width = shape.tokens.count, shape.tokens.width_bytes
    words, hidden = math.ceil(shape.model.vocab_size / shape.layout.tp), shape.model.hidden_size
    chunk = loss_chunk_tokens(shape)
    # The second chunk, which is short where it is the last one.
    second = max(0, min(chunk, tokens - chunk))
    wide = width if shape.options.is_compiled else _FP32
    narrow = 0 if width == wide else width
    if shape.layout.tp > 1:
        making = chunk * wide + second * (wide + narrow) if second else chunk * (wide + narrow)
        using = (chunk + second) * wide + chunk * narrow
        kept = 0.0
    else:
        making = (chunk + second) * wide if narrow else 0.0
        using = chunk * (wide + narrow) if narrow else 0.0
        # The products' own memory serves all chunks; in fp32 or compiled it is the only one.
        kept = chunk * (narrow or wide)
    made_in = _made_in(shape)
    is_direct = made_in == _FP32 or chunk >= tokens
    matrix = 0.0 if is_direct else words * hidden * _FP32
    product = words * hidden * width if width < _FP32 and (made_in == _FP32 or not is_direct) else 0.0
    whole = tokens * hidden * width
    gathered = 2 * whole if shape.tokens.outer > 1 else 0.0
    if shape.precision is PrecisionName.fp8 and shape.options.fp8_output:
        # The gradient by rows and by columns stands where one in 16 bits did, if that had memory of its own.
        using += chunk * (2 - narrow)
        is_row = shape.options.fp8_scaling is Scaling.row
        product = min(words, FP8_WORDS) * hidden * (width if is_row else _FP32)
        if chunk >= tokens and shape.accumulation == 1:
            product = 0.0
        if is_row:
            # The hidden states of a chunk are rounded by columns: their copy and two in fp32.
            product = max(product, (width + 2 * _FP32) * chunk * hidden)
        whole += (tokens + chunk) * hidden
        if shape.zero == 3 and shape.num_shards > 1:
            # By words and by inputs; by words it was gathered, but for a table that is looked up.
            is_gathered = shape.gathers_fp8 and not shape.model.tie_word_embeddings
            whole += (1 if is_gathered else 2) * words * hidden
    return kept * words + max(making * words, using * words + product) + matrix + whole + gathered


def _gathered(shape: TrainingShape, parts: RankParameters, stage: PipelineStage) -> float:
    """Return the elements of the buffers of ZeRO-3: two for layers, two for their experts unless one rank has
    them alone, and one that both ends share; in a pipeline each end has its own.
    """
    both = (parts.before * stage.has_embedding, parts.after * stage.has_head)
    ends = max(both) if shape.layout.pp == 1 else sum(both)
    layers = parts.layer_sizes_of(stage)[::-1]
    # Layers take turns, from the model's end on: each buffer is as large as the largest of its own.
    own = max(layers[::2], default=0) + max(layers[1::2], default=0)
    is_shared = shape.num_expert_shards > 1
    experts = min(2, parts.num_mixtures_of(stage)) * sum(parts.of_experts) if is_shared else 0
    return own + experts + ends


def _messages(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> float:
    """Return the memory that sums of gradients over ranks take besides, and keep once they have it."""
    width, options, shards = widths(shape.precision), shape.options, shape.num_shards
    reduce = options.reduce_bytes or width.gradients
    if shape.zero == 0 or shards == 1:
        return 0.0
    units = gradient_units(shape, stage, parts, width.gradients)
    # gloo's ranks send each other their parts of a unit.
    direct = 0.0 if options.is_gpu else max(units) * (shards - 1) / shards
    # A unit that fills waits for the memory of the one that is summed; a table apart is summed where it is.
    others = shape.without_table_apart(stage, parts)
    of_others = gradient_units(shape, stage, others, width.gradients)
    filling = max(of_others, default=0.0) if shape.zero >= 2 else 0.0
    if shape.zero == 2:
        filling = max(filling, _filling_at_experts(shape, stage, others))
    is_tied = shape.model.tie_word_embeddings and shape.layout.pp == 1
    if shape.zero >= 2 and is_tied and stage.has_embedding and stage.has_head:
        # The loss begins the unit of a tied table, and the embedding, last in the backward pass, ends it.
        filling = max(filling, units[-1] + max(units[:-1], default=0.0))
    return (filling + direct) * reduce


def _filling_at_experts(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> float:
    """Return the most elements of ZeRO-2's units that fill while the backward pass is in a layer's experts:
    one of theirs, or all three matrices' where one expert follows the other; and what was unfinished before.
    """
    mixtures = parts.num_mixtures_of(stage)
    if not mixtures or (shape.num_expert_shards == 1 and shape.layout.ep > 1):
        return 0.0
    least = shape.options.bucket_bytes / widths(shape.precision).gradients
    at_once = takes_experts_at_once(shape.precision, is_gpu=shape.options.is_gpu)
    return _most_filling(stage, parts, least, at_once=at_once)


@lru_cache(maxsize=4096)
def _most_filling(stage: PipelineStage, parts: RankParameters, least: float, *, at_once: bool) -> float:
    mixtures = parts.num_mixtures_of(stage)
    layers = parts.layers_of(stage)[::-1]
    others = (parts.after * stage.has_head, *(each for tensors in layers for each in tensors[::-1]))
    of_others = _Units(buckets((*others, parts.before * stage.has_embedding), least))
    of_experts = _Units(buckets(parts.of_experts * mixtures, least))
    of_layer = sum(parts.of_experts)
    most, before = 0.0, others[0]
    for layer, tensors in enumerate(layers[:mixtures]):
        touched = of_experts.touched(layer * of_layer, (layer + 1) * of_layer)
        open_now = of_others.touched(before, before)
        most = max(most, sum(open_now) + (max(touched) if at_once else sum(touched)))
        before += sum(tensors)
    return most


class _Units:
    """Units of elements, one after the other."""

    def __init__(self, sizes: Sequence[float]) -> None:
        self._sizes = sizes
        self._borders = [0.0, *accumulate(sizes)]

    def touched(self, begin: float, end: float) -> Sequence[float]:
        """Return the sizes of those that hold some of the elements `begin` to `end`; of none, that of the one
        with some before and some after them.
        """
        first = bisect.bisect_right(self._borders, begin, lo=1) - 1
        return self._sizes[first : bisect.bisect_left(self._borders, end, hi=len(self._sizes))]
