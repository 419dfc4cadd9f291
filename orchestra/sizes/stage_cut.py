"""Where the model is cut into the stages of a pipeline: layers per stage, so that all take equally long.

The executor makes the layers that `stage_layers` gives its stages, and the planner counts with the same ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from conf.schema import Config, ModelConfig, Recompute
from orchestra.sizes.flops import core_width, num_active_layer_parameters
from orchestra.sizes.pipeline_schedule import PipelineShape, pipeline_shape
from orchestra.sizes.topology import listed

# What a device multiplies while it moves a byte: A100 153, H100 295, H200 206.
_FLOPS_PER_BYTE = 200
# Bytes moved per token and element of the width, forward and backward: a layer between its products (600 to
# 860 in the planner's fitted profiles, scores aside), rows of the embedding read and their gradients added
# (in fp32), and the loss per word of the vocabulary (20 to 32).
_LAYER_BYTES, _EMBEDDING_BYTES, _LOSS_BYTES = 600, 16, 20


def stage_layers(config: Config) -> tuple[range, ...]:
    """Return the layers of each stage, numbered through the model, in the order of the stages.

    parallelism.stages decides, else `cut_layers`; the rules of a configuration have checked both.
    """
    shape = pipeline_shape(config.parallelism)
    by_hand = config.parallelism.stages
    if by_hand is not None:
        return ranges_of(by_hand)
    return ranges_of(cut_layers(config.model, config.train.seq_len, config.train.recompute, shape.num_stages))


def ranges_of(counts: Sequence[int]) -> tuple[range, ...]:
    """Return the layers of stages that have so many each."""
    return tuple(range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0)))


@lru_cache(maxsize=4096)
def cut_layers(model: ModelConfig, seq_len: int, recompute: Recompute, num_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has, at least one, so that the slowest stage is as fast as can be.

    The first stage has the embedding besides, the last one the output product and the loss. Of stages that
    are equally good the later one gets a layer: it keeps the activations of fewer micro-batches.
    """
    layer, first, last = _layer_flops(model, seq_len, recompute), *_end_flops(model)
    counts = [1] * num_stages
    # What each stage would take with one layer more.
    longer = [
        (2 * layer + first * (stage == 0) + last * (stage == num_stages - 1), -stage)
        for stage in range(num_stages)
    ]
    heapq.heapify(longer)
    for _ in range(model.num_hidden_layers - num_stages):
        flops, place = longer[0]
        counts[-place] += 1
        heapq.heapreplace(longer, (flops + layer, place))
    return tuple(counts)


def _layer_flops(model: ModelConfig, seq_len: int, recompute: Recompute) -> float:
    """Return what a layer takes of a token, in operations of matrix products: attention is causal. Where
    `selective` repeats it (`keeps_attention`) that changes no cut that was tried, and is left out.
    """
    attention = 2 * core_width(model) * seq_len
    forward = 2 * num_active_layer_parameters(model) + attention
    again = forward if recompute is Recompute.full else 0
    return 3 * forward + again + _FLOPS_PER_BYTE * _LAYER_BYTES * model.hidden_size


def _end_flops(model: ModelConfig) -> tuple[float, float]:
    """Return the same of the embedding, and of output product and loss."""
    product = 3 * 2 * model.hidden_size * model.vocab_size
    loss = _FLOPS_PER_BYTE * _LOSS_BYTES * model.vocab_size
    return _FLOPS_PER_BYTE * _EMBEDDING_BYTES * model.hidden_size, product + loss


def stages_problems(stages: Sequence[int], shape: PipelineShape, num_layers: int) -> Iterator[str]:
    """Yield what is wrong with a cut by hand."""
    found = f"parallelism.stages=[{','.join(map(str, stages))}]"
    if len(stages) != shape.num_stages:
        yield (
            f"{found} has {len(stages)} stages and the pipeline has {shape.num_stages} (parallelism.pp="
            f"{shape.num_ranks} × {shape.num_chunks} on each rank); use {shape.num_stages} numbers, or null"
        )
    elif empty := [index for index, count in enumerate(stages) if count < 1]:
        yield f"{found}: stage {listed(empty)} has no layer; give each stage 1 or more"
    elif sum(stages) != num_layers:
        yield (
            f"{found} has {sum(stages)} layers and model.num_hidden_layers={num_layers}; use numbers that "
            "add up to that, or null"
        )
