"""What sums of gradients over ranks take."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from orchestra.sizes.activations import takes_experts_at_once
from orchestra.sizes.training_shape import (
    PipelineStage,
    RankParameters,
    TrainingShape,
    buckets,
    gradient_units,
    widths,
)


def message_bytes(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> float:
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
    is_tied = shape.model.tie_word_embeddings and shape.layout.pp == 1
    if shape.zero >= 2 and is_tied and stage.has_embedding and stage.has_head:
        # The loss begins the unit of a tied table, and the embedding, last in the backward pass, ends it.
        filling = max(filling, units[-1] + max(units[:-1], default=0.0))
    if shape.zero == 2:
        filling += _filling_beside(shape, stage, others)
    if shape.zero == 1 and reduce != width.gradients:
        # What is summed in another type is copied; a tied table last, when activations are gone.
        filling = max(units[:-1] if is_tied else units, default=0.0)
    return (filling + direct) * reduce


def _filling_beside(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> float:
    """Return the most elements that ZeRO-2's units take beside the memory of the largest one, while the
    backward pass is in a layer's experts: one unit of theirs fills, or all three matrices' where one expert
    follows the other, and mostly one that was begun before, which may have the largest one's memory.
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
    most, before = 0.0, float(others[0])
    for layer, tensors in enumerate(layers[:mixtures]):
        touched = of_experts.touched(layer * of_layer, (layer + 1) * of_layer)
        besides = 0.0 if of_others.touched(before, before) else max(touched)
        most = max(most, (max(touched) if at_once else sum(touched)) - besides)
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
