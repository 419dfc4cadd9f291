"""Which gradients are not there yet, of a rank whose parameters no other one has.

It takes the memory of a unit with the unit's first gradient of a step, and lets it go with the update. Once a
stage's first backward pass is over its gradients are there until then.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from orchestra.sizes.pipeline_check import HeldState
from orchestra.sizes.training_shape import PipelineStage, RankParameters, TrainingShape, buckets, widths


@dataclass(frozen=True)
class _Made:
    """Bytes of a stage's gradients that are there when its backward pass has come so far: behind the loss, in
    a layer at the gradients of its feed-forward, and behind it. Layers from the model's end on.
    """

    total: float
    at_loss: float
    in_layers: tuple[float, ...]
    behind_layers: tuple[float, ...]


@dataclass(frozen=True)
class UnmadeGradients:
    """The gradients of a rank's stages, in bytes. `table`: of a table that is a unit by itself, which the
    loss or, without one, the first stage's end makes.
    """

    stages: tuple[_Made, ...]
    table: float
    # The place among the rank's stages of the one that makes the table, and whether that is at its loss.
    table_at: int
    is_table_of_loss: bool

    def beside(self, state: HeldState) -> float:
        """Return what is missing of the stages that are not at work, and of the table."""
        pairs = enumerate(zip(self.stages, state.made, strict=True))
        stages = sum(each.total for at, (each, made) in pairs if not made and at != state.at_work)
        is_begun = self.is_table_of_loss and state.at_work == self.table_at
        return stages + self.table * (not (state.made[self.table_at] or is_begun))

    def at_loss(self, at: int) -> float:
        """Return what is missing of a stage behind the loss of its first micro-batch."""
        return self.stages[at].total - self.stages[at].at_loss

    def in_layers(self, at: int) -> Iterator[tuple[float, float]]:
        """Yield what is missing of a stage in each layer's backward pass, in the model's order: at the
        gradients of its feed-forward, and at its end.
        """
        made = self.stages[at]
        for inside, behind in zip(made.in_layers[::-1], made.behind_layers[::-1], strict=True):
            yield made.total - inside, made.total - behind


def unmade_gradients(shape: TrainingShape, stage: PipelineStage, parts: RankParameters) -> UnmadeGradients:
    """Return what a rank's gradients take, and when."""
    width, numbers = widths(shape.precision).gradients, shape.pipeline.stages_of(stage.index)
    last, others = shape.pipeline.num_stages - 1, shape.without_table_apart(stage, parts)
    least = shape.options.bucket_bytes / width
    is_tied = shape.model.tie_word_embeddings and shape.layout.pp == 1
    stages = tuple(
        _made_of(
            others.before if number == 0 else 0,
            others.after if number == last else 0,
            tuple(_tensors_of(parts, layer) for layer in layers),
            tuple(bool(parts.of_experts) and layer >= parts.num_dense for layer in layers),
            parts.of_experts,
            least,
            width,
            is_tied=is_tied,
        )
        for number, layers in zip(numbers, stage.chunks, strict=True)
    )
    is_of_loss = last in numbers
    return UnmadeGradients(
        stages=stages,
        table=1.0 * shape.table_apart(stage) * width,
        table_at=numbers.index(last if is_of_loss else min(numbers)),
        is_table_of_loss=is_of_loss,
    )


def _tensors_of(parts: RankParameters, layer: int) -> tuple[int, ...]:
    return parts.of_dense if layer < parts.num_dense else parts.of_layer


@lru_cache(maxsize=1024)
def _made_of(
    before: int,
    after: int,
    layers: tuple[tuple[int, ...], ...],
    are_mixtures: tuple[bool, ...],
    of_experts: tuple[int, ...],
    least: float,
    width: int,
    *,
    is_tied: bool,
) -> _Made:
    ends_first = [after, *(each for tensors in layers[::-1] for each in tensors[::-1]), before]
    others = _borders(buckets(tuple(ends_first), least))
    experts = _borders(buckets(of_experts * sum(are_mixtures), least))

    def taken(end: float, end_of_experts: float) -> float:
        """Return what units take that hold some of the elements up to these places."""
        place = bisect.bisect_left(others, end)
        # The loss begins the unit of a tied table, which is the last one.
        table = others[-1] - others[-2] if is_tied and place < len(others) - 1 else 0.0
        return others[place] + table + experts[bisect.bisect_left(experts, end_of_experts)]

    at, at_experts, inside, behind = float(after), 0.0, [], []
    for tensors, is_mixture in zip(layers[::-1], are_mixtures[::-1], strict=True):
        at_experts += sum(of_experts) * is_mixture
        # A feed-forward's last product has its gradient first; of a mixture all experts have.
        first = 0 if is_mixture else max(tensors)
        inside.append(width * taken(at + first, at_experts))
        at += sum(tensors)
        behind.append(width * taken(at, at_experts))
    return _Made(
        total=width * (others[-1] + experts[-1]),
        at_loss=width * taken(after, 0.0) if after or is_tied else 0.0,
        in_layers=tuple(inside),
        behind_layers=tuple(behind),
    )


def _borders(sizes: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(sizes)]
