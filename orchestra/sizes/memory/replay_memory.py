"""What a micro-batch takes that is computed again, to find ranks that compute wrongly."""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestra.sizes.flops import feed_forward_width
from orchestra.sizes.memory.loss_memory import gradient_width
from orchestra.sizes.training_shape import PipelineStage, RankParameters, TrainingShape

# Elements of a gradient that a replay looks at together, on CPU as many as its caches hold, and what it takes
# for each: its bits, factors and products in 64 bits.
REPLAYED_CPU, REPLAYED_GPU = 1 << 16, 1 << 22
_REPLAYED_BYTES = 32


@dataclass(frozen=True)
class Replayed:
    """What the gradients of a micro-batch that is computed again take (`recovery.replay_every_steps`), each
    until it has been looked at: those of the training have memory of their own.

    `in_layer`: with the gradient of the feed-forward's inner width, beside what layers keep. `in_backward`:
    to its end, of a tied table that the loss begins. `at_the_end`: with the embedding's from autograd.
    """

    in_loss: float = 0.0
    in_layer: float = 0.0
    in_backward: float = 0.0
    at_the_end: float = 0.0


def replayed_bytes(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> Replayed:
    """Return what a replay takes; nothing where there is none."""
    if not shape.options.replays or shape.layout.dp == 1:
        return Replayed()
    model, tokens, made_in = shape.model, shape.tokens, gradient_width(shape)
    chunk = REPLAYED_GPU if shape.options.is_gpu else REPLAYED_CPU
    inner = math.ceil(feed_forward_width(model) / tokens.tp)
    matrix = max(inner * model.hidden_size, *parts.of_layer, *parts.of_experts)
    table = math.ceil(model.vocab_size / tokens.tp) * model.hidden_size
    # Products whose results have another type than gradients have memory for them too.
    product = tokens.width_bytes if made_in != tokens.width_bytes else 0
    is_tied = model.tie_word_embeddings and stage.has_embedding and stage.has_head
    embedding = parts.before * (tokens.width_bytes + made_in) * stage.has_embedding
    return Replayed(
        in_loss=table * made_in,
        in_layer=tokens.count * inner * tokens.width_bytes
        + matrix * made_in
        + max(matrix * product, min(chunk, matrix) * _REPLAYED_BYTES),
        in_backward=table * made_in if is_tied else 0.0,
        at_the_end=embedding + min(chunk, parts.before) * _REPLAYED_BYTES,
    )
