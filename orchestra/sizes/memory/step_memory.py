"""What a step adds to what a rank keeps: its moments, and the largest of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from conf.schema import Family, PipelineSchedule, Recompute
from orchestra.sizes.activations import LayerActivations, peak_bytes
from orchestra.sizes.flops import (
    attention_width,
    feed_forward_width,
    head_dim,
    key_value_width,
    num_dense_layers,
    value_width,
)
from orchestra.sizes.memory.layer_memory import (
    gathered_keys_bytes,
    in_fp8,
    kept_in_fp8,
    layer_of,
    recomputed_kinds,
    temporary_bytes,
)
from orchestra.sizes.memory.loss_memory import loss_bytes
from orchestra.sizes.memory.replay_memory import replayed_bytes
from orchestra.sizes.memory.unmade_gradients import UnmadeGradients, unmade_gradients
from orchestra.sizes.pipeline_check import HeldState, fewer_micro_batches, held_states
from orchestra.sizes.pipeline_schedule import splits_backward
from orchestra.sizes.training_shape import (
    PipelineStage,
    RankParameters,
    TrainingShape,
    largest_owned,
    widths,
)

_FP32 = 4
# Elements of gradients and moments that AdamW holds in fp32 at a time, on CPU for each thread: they stay in
# its cache. Multiples of what any kernel takes at once.
ROUNDED_CPU, ROUNDED_GPU = 1 << 16, 1 << 24


@dataclass(frozen=True)
class StepBytes:
    """What a step adds on the device at its worst moment, and which gradients are not there yet."""

    activations: float
    logits: float
    unmade: float = 0.0

    @property
    def total(self) -> float:
        """Bytes beside what lasts, all gradients counted with that."""
        return self.activations + self.logits - self.unmade


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
        done = whole * (shape.options.reduce_bytes or 0) + temporary_bytes(shape)
    done = max(done, _update_bytes(shape, stage, parts) - ends)
    works = [_work_of(shape, stage, layers, parts) for layers in stage.chunks]
    is_late = shape.makes_gradients_late
    if shape.layout.pp == 1 and not is_late:
        return works[0].at_most(0.0, ends, done)
    if shape.layout.pp > 1:
        # What arrives is asked for one pass ahead: a message of each kind.
        ends += 2 * hidden
    unmade = unmade_gradients(shape, stage, parts) if is_late else None
    moments = [StepBytes(done + ends, 0.0)]
    for state in schedule_states(shape, stage):
        held = sum(count * work.kept for count, work in zip(state.live, works, strict=True))
        held += sum(count * work.waiting for count, work in zip(state.waiting, works, strict=True))
        at_work = _NO_WORK if state.at_work is None else works[state.at_work]
        if unmade is None:
            moments.append(at_work.at_most(held, ends, 0.0))
            continue
        missing = unmade.beside(state)
        if state.at_work is None or state.made[state.at_work]:
            found = [at_work.at_most(held, ends, 0.0)]
        elif splits_backward(shape.schedule) and shape.layout.pp > 1:
            # The loss alone gives one of them.
            found, missing = [at_work.at_most(held, ends, 0.0)], missing + unmade.at_loss(state.at_work)
        else:
            layers = stage.chunks[state.at_work]
            found = list(_first_backward(shape, layers, held, ends, unmade, state.at_work))
        moments += [replace(moment, unmade=moment.unmade + missing) for moment in found]
    return max(moments, key=lambda moment: moment.total)


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
    rounded = shape.layers_in_fp8
    is_kept = [kind is Recompute.none and layer in rounded for layer, kind in zip(layers, kinds, strict=True)]
    fewer = kept_in_fp8(shape, has_experts=False) * sum(is_kept[:num_dense])
    fewer += kept_in_fp8(shape, has_experts=True) * sum(is_kept[num_dense:])
    replayed = replayed_bytes(shape, stage, parts)
    working = replace(shape, model=dense.model) if num_dense == len(kinds) else shape
    temporary = max(temporary_bytes(working), replayed.in_layer, gathered_keys_bytes(shape))
    waiting = _waiting_bytes(shape, layers)
    backward = _most_with_waiting(layer, dense, kinds, num_dense, waiting / max(1, len(kinds)))
    backward += temporary - fewer + replayed.in_backward
    has_loss = stage.has_head and layers.stop == shape.model.num_hidden_layers
    return _StageWork(
        kept=kept,
        waiting=waiting,
        fewer=fewer,
        loss=loss_bytes(shape) + replayed.in_loss if has_loss else 0.0,
        backward=max(backward, replayed.at_the_end),
    )


def _most_with_waiting(
    layer: LayerActivations,
    dense: LayerActivations,
    kinds: Sequence[Recompute],
    num_dense: int,
    waiting: float,
) -> float:
    """Return the most that layers hold in their backward pass, where each leaves `waiting` bytes behind for
    the gradients of its weights, which are taken later.
    """
    if not waiting:
        return peak_bytes(layer, kinds, num_dense)
    most = before = 0.0
    for number, kind in enumerate(kinds):
        its = dense if number < num_dense else layer
        behind = waiting * (len(kinds) - 1 - number)
        most = max(most, before + its.kept_bytes(Recompute.none) + behind)
        before += its.kept_bytes(kind)
    return most


def _first_backward(
    shape: TrainingShape, layers: range, held: float, ends: float, unmade: UnmadeGradients, place: int
) -> Iterator[StepBytes]:
    """Yield the moments of a stage's first backward pass in a step, which makes its gradients, beside what is
    held of other micro-batches: each layer, at the gradients of its feed-forward and where its own are all
    there, and the loss, which makes the output matrix'.
    """
    num_dense = num_dense_layers(shape.model)
    of_kind = {kind: layer_of(shape, has_experts=kind) for kind in (False, True)}
    temporary = {
        kind: max(temporary_bytes(replace(shape, model=layer.model)), gathered_keys_bytes(shape))
        for kind, layer in of_kind.items()
    }
    kinds = recomputed_kinds(shape)
    for number, (inside, behind) in zip(layers, unmade.in_layers(place), strict=True):
        is_mixture = shape.model.num_experts > 0 and number >= num_dense
        is_fp8 = kinds[number] is Recompute.none and number in shape.layers_in_fp8
        fewer = kept_in_fp8(shape, has_experts=is_mixture) if is_fp8 else 0.0
        at_work = held + of_kind[is_mixture].kept_bytes(Recompute.none) - fewer + temporary[is_mixture]
        yield StepBytes(at_work + ends, 0.0, inside)
        yield StepBytes(held + temporary[is_mixture] + ends, 0.0, behind)
        held += of_kind[is_mixture].kept_bytes(kinds[number]) - fewer
    has_loss = layers.stop == shape.model.num_hidden_layers
    yield StepBytes(held + ends, loss_bytes(shape) if has_loss else 0.0, unmade.at_loss(place))


def _waiting_bytes(shape: TrainingShape, layers: range) -> float:
    """Return what the gradients of layers' weights are made of where they are taken later, whatever is
    recomputed: inputs of products, whole under tensor parallelism, and gradients of their outputs; of
    products in fp8 as they were rounded, in one byte.
    """
    if shape.layout.pp == 1 or not splits_backward(shape.schedule):
        return 0.0
    num_fp8 = len(in_fp8(shape, layers))
    return (num_fp8 + shape.tokens.width_bytes * (len(layers) - num_fp8)) * _waiting_numbers(shape)


def _waiting_numbers(shape: TrainingShape) -> float:
    model, tokens = shape.model, shape.tokens
    kv, latents = max(key_value_width(model) / tokens.tp, 2 * head_dim(model)), 0
    if model.kv_lora_rank is not None:
        # Latents as products give them, and normed as others take them; keys without positions, and values.
        latents = 2 * ((model.q_lora_rank or 0) + model.kv_lora_rank) + model.qk_rope_head_dim
        kv = model.num_attention_heads * (model.qk_nope_head_dim + model.v_head_dim) / tokens.tp
    inner = (2 if model.family is Family.gpt else 3) * feed_forward_width(model) / tokens.tp
    split = (attention_width(model) + value_width(model)) / tokens.tp + kv + inner
    rows = 2 * model.num_experts_per_tok * model.hidden_size if model.num_experts else 0
    return tokens.count * (4 * model.hidden_size + split + rows + latents)


def schedule_states(shape: TrainingShape, stage: PipelineStage) -> tuple[HeldState, ...]:
    """Return what a rank holds at its fullest moments, in a pipeline of other micro-batches too."""
    kind, count = shape.schedule, shape.accumulation
    if shape.layout.pp == 1:
        return (HeldState(0, live=(0,), waiting=(0,), made=(count > 1,)),)
    if kind is not PipelineSchedule["afab"]:
        count = fewer_micro_batches(kind, shape.pipeline, count)
    return held_states(kind, shape.pipeline, count)[stage.index]


def _update_bytes(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> float:
    """Return what the update needs, for some elements of a unit at a time: gradients in fp32 where theirs is
    narrower; moments of two bytes in fp32, with the random bits of their rounding (32 bytes an element of one
    tensor, as counted).
    """
    width = widths(shape.precision)
    if shape.options.is_plugged:
        shards = max(1, shape.num_shards) if shape.zero else 1
        of_experts = shape.num_expert_shards if shape.zero else 1
        updated = parts.of(stage) / shards + parts.experts_of(stage) / of_experts
        return updated * _FP32 if width.gradients < _FP32 else 0.0
    unit = largest_owned(shape, stage, parts, width.gradients)
    block = min(unit, ROUNDED_GPU if shape.options.is_gpu else ROUNDED_CPU)
    update = block * _FP32 if width.gradients < _FP32 else 0.0
    if shape.options.moment_bytes < _FP32:
        largest = max(parts.before, parts.after, *parts.of_layer, *parts.of_experts)
        update += 2 * block * _FP32 + 32 * min(largest, block)
    return update


def _is_summed_in_another_type(shape: TrainingShape) -> bool:
    reduce, own = shape.options.reduce_bytes, widths(shape.precision).gradients
    is_whole = shape.zero == 0 or shape.num_shards == 1
    return is_whole and shape.layout.dp * shape.layout.cp > 1 and reduce is not None and reduce != own
