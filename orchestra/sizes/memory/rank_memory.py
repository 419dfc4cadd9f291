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

import math
from dataclasses import dataclass, replace
from itertools import chain

from conf.schema import Offload, PrecisionName
from orchestra.sizes.memory.layer_memory import in_fp8
from orchestra.sizes.memory.message_memory import message_bytes
from orchestra.sizes.memory.step_memory import StepBytes, step_bytes
from orchestra.sizes.training_shape import (
    PipelineStage,
    RankParameters,
    TrainingShape,
    largest_owned,
    rank_parameters,
    rounded_elements,
    widths,
)

_FP32 = 4
# Share of a device's memory that tensors can fill: the CUDA context, NCCL and fragmentation take the rest
# before an allocation fails.
USABLE_SHARE = 0.91


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
        return self.state + self.step.total + self.buffers

    @property
    def components(self) -> dict[str, float]:
        """The parts of `total` by the names that people read."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients - self.step.unmade,
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
        buffers=state.first_buffers + message_bytes(shape, stage, parts),
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
        unit = largest_owned(shape, stage, parts, width.gradients)
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
    elements = sum(of_kind[has_experts] for has_experts in in_fp8(shape, chain(*stage.chunks)))
    if shape.options.fp8_output and stage.has_head:
        elements += math.ceil(model.vocab_size / layout.tp) * model.hidden_size
    return 2.0 * elements


def _elements_kept_whole(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> float:
    """Return the elements of what every rank has whole where matrices are gathered in fp8: norms, biases,
    routers.
    """
    model, layout = shape.model, shape.layout
    found = 0.0
    for has_experts in in_fp8(shape, chain(*stage.chunks)):
        tensors = parts.of_layer if has_experts or not parts.of_dense else parts.of_dense
        rounded = rounded_elements(model, layout.tp, layout.ep, has_experts=has_experts)
        experts = sum(parts.of_experts) if has_experts else 0
        found += sum(tensors) - (rounded - experts)
    if shape.options.fp8_output and stage.has_head and not model.tie_word_embeddings:
        found += parts.after - math.ceil(model.vocab_size / layout.tp) * model.hidden_size
    return found


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
