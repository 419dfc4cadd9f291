"""The order of a pipeline's passes as pure data: `schedule` gives each rank its list of actions.

The executor runs the lists, `orchestra.sizes.pipeline_check` proves them and times them, and the planner
takes its times and memory from that. No torch, no devices, no seconds.

A *stage* is a run of consecutive layers, numbered through the whole model; a rank has one, or several with
virtual stages (its *chunks*). Every stage takes the micro-batches in their order, forward and backward, so
that gradients are summed in the order in which a process without a pipeline sums them.

Sends and receives are not actions, since they follow from them: the forward pass of a stage ends with sending
its output to the rank of the next stage, the backward pass (or that of the inputs alone) with sending the
gradient of its input to the rank of the stage before; nothing is sent where both are on one rank, as at the
turn of a V. Between two ranks, activations and gradients each arrive in the order in which they are wanted.
Both together do not (zbv), so each needs a channel of its own.

F, I and W stand below for the forward pass, the gradient of inputs and the gradient of weights; B is I and W
at once. p is the number of ranks, m of micro-batches, v of stages on a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from conf.schema import ParallelismConfig, PipelineSchedule

_CHUNKS_OF_V = 2


class Pass(Enum):
    """What an action computes of one stage and micro-batch; `backward` is both gradients at once."""

    forward = "F"
    backward = "B"
    input_gradient = "I"
    weight_gradient = "W"


class StagePass(NamedTuple):
    """One pass of one micro-batch through one stage; both are counted from 0, stages over all ranks."""

    kind: Pass
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro_batch}"


RankOrder = tuple[StagePass, ...]


@dataclass(frozen=True)
class PipelineShape:
    """Which rank of a pipeline has which stages. `is_v`: the second half of the stages goes back over the
    ranks, so that the first one has the first stage and the last one.
    """

    num_ranks: int
    num_chunks: int = 1
    is_v: bool = False

    @property
    def num_stages(self) -> int:
        """The stages of all ranks."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a stage."""
        chunk, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.is_v and chunk % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in their order in the model."""
        back = self.num_ranks - 1 - rank if self.is_v else rank
        places = ((rank, back)[chunk % 2] for chunk in range(self.num_chunks))
        return tuple(chunk * self.num_ranks + place for chunk, place in enumerate(places))


def pipeline_shape(parallelism: ParallelismConfig) -> PipelineShape:
    """Return where the stages of a configuration are."""
    return shape_of_pipeline(parallelism.schedule, parallelism.pp, parallelism.virtual_stages)


def shape_of_pipeline(kind: PipelineSchedule, num_ranks: int, virtual_stages: int) -> PipelineShape:
    """Return where a schedule has its stages; without a pipeline, one stage on one rank."""
    if num_ranks == 1:
        return PipelineShape(1)
    if kind is PipelineSchedule["zbv"]:
        return PipelineShape(num_ranks, _CHUNKS_OF_V, is_v=True)
    return PipelineShape(num_ranks, virtual_stages)


def splits_backward(kind: PipelineSchedule) -> bool:
    """Whether gradients of inputs and of weights are separate actions."""
    return kind in (PipelineSchedule["zero_bubble"], PipelineSchedule["zbv"])


def schedule(kind: PipelineSchedule, shape: PipelineShape, num_micro_batches: int) -> tuple[RankOrder, ...]:
    """Return for each rank its actions in order, for any number of micro-batches.

    Raises ValueError for a shape that the schedule does not have; the rules of a configuration refuse it.
    """
    if num_micro_batches < 1:
        raise ValueError(f"a pipeline of {num_micro_batches} micro-batches; use 1 or more")
    if shape.num_stages == 1:
        kind = PipelineSchedule["1f1b"]
    if problem := shape_problem(kind, shape, shape.num_chunks):
        raise ValueError(problem)
    order = _ORDERS[kind.name]
    return tuple(tuple(order(shape, rank, num_micro_batches)) for rank in range(shape.num_ranks))


def shape_problem(kind: PipelineSchedule, shape: PipelineShape, virtual_stages: int) -> str | None:
    """Return what keeps a schedule from this shape: found, expected, what to do. `virtual_stages` is what was
    asked for.
    """
    found = f"parallelism.schedule={kind.name} with parallelism.virtual_stages={virtual_stages}"
    if kind is PipelineSchedule["zbv"]:
        is_v = shape.is_v and shape.num_chunks == _CHUNKS_OF_V and virtual_stages <= _CHUNKS_OF_V
        return None if is_v else f"{found}: a V has 2 stages on each rank; use virtual_stages=2"
    if kind is PipelineSchedule["interleaved"]:
        is_one = shape.num_chunks == 1
        return f"{found} interleaves nothing; use virtual_stages=2 or more" if is_one else None
    if shape.num_chunks > 1:
        return (
            f"{found}: it has one stage on each rank; use virtual_stages=1, or "
            "parallelism.schedule=interleaved"
        )
    return None


def _all_forward_all_backward(_: PipelineShape, rank: int, count: int) -> Iterator[StagePass]:
    for kind in (Pass.forward, Pass.backward):
        yield from (StagePass(kind, rank, index) for index in range(count))


def _one_forward_one_backward(shape: PipelineShape, rank: int, count: int) -> Iterator[StagePass]:
    """PipeDream-Flush (arXiv:2006.09503, 2104.04473): p - 1 - rank forward passes more than backward ones."""
    ahead = min(count, shape.num_ranks - 1 - rank)
    yield from (StagePass(Pass.forward, rank, index) for index in range(ahead))
    for index in range(count):
        if index + ahead < count:
            yield StagePass(Pass.forward, rank, index + ahead)
        yield StagePass(Pass.backward, rank, index)


def _interleaved(shape: PipelineShape, rank: int, count: int) -> Iterator[StagePass]:
    """Megatron-LM's interleaved 1F1B (arXiv:2104.04473, section 2.2): micro-batches go through the first
    chunks of all ranks in groups of p, then through the second chunks, and backward likewise.

    Where p does not divide m, the groups differ by one at most, the larger ones first, so that none is
    smaller than p unless m is.
    """
    chunks = shape.stages_of(rank)
    groups = _groups(count, shape.num_ranks)
    forward = [StagePass(Pass.forward, stage, each) for group in groups for stage in chunks for each in group]
    backward = [
        StagePass(Pass.backward, stage, each)
        for group in groups
        for stage in reversed(chunks)
        for each in group
    ]
    ahead = 2 * (shape.num_ranks - 1 - rank) + (len(chunks) - 1) * len(groups[0])
    yield from _alternating(forward, backward, min(ahead, len(forward)))


def _groups(count: int, num_ranks: int) -> list[range]:
    """Return the micro-batches in groups of `num_ranks` or little more."""
    number = max(1, count // num_ranks)
    least, larger = divmod(count, number)
    begins = [group * least + min(group, larger) for group in range(number + 1)]
    return [range(begin, end) for begin, end in pairwise(begins)]


def _alternating(forward: list[StagePass], backward: list[StagePass], ahead: int) -> Iterator[StagePass]:
    yield from forward[:ahead]
    for index, action in enumerate(backward):
        yield from forward[index + ahead : index + ahead + 1]
        yield action


def _zero_bubble(shape: PipelineShape, rank: int, count: int) -> Iterator[StagePass]:
    """ZB-H1 (arXiv:2401.10241, section 3.1): 1F1B whose W on rank r stays r micro-batches behind its I, so
    that every rank keeps what p micro-batches need and the end of the pipeline has work.
    """
    ahead = min(count, shape.num_ranks - 1 - rank)
    yield from (StagePass(Pass.forward, rank, index) for index in range(ahead))
    weighed = 0
    for index in range(count):
        if index + ahead < count:
            yield StagePass(Pass.forward, rank, index + ahead)
        yield StagePass(Pass.input_gradient, rank, index)
        # The last forward pass is done: W fill the waits for gradients.
        if index >= rank or index + ahead >= count:
            yield StagePass(Pass.weight_gradient, rank, weighed)
            weighed += 1
    yield from (StagePass(Pass.weight_gradient, rank, index) for index in range(weighed, count))


def _zero_bubble_v(shape: PipelineShape, rank: int, count: int) -> Iterator[StagePass]:
    """ZB-V (arXiv:2401.10241, section 6): no rank waits from its first pass to its last where F, I and W take
    equally long, and each keeps what 2p halves of a rank's layers need.

    The phases below are made for 2p - 1 micro-batches or more; with fewer, the others are left out of them.
    """
    after, enough = shape.num_ranks - rank, max(count, 2 * shape.num_ranks - 1)
    down, up = shape.stages_of(rank)
    taken = dict.fromkeys([(kind, stage) for kind in _SPLIT for stage in (down, up)], 0)

    def take(stage: int, *kinds: Pass) -> Iterator[StagePass]:
        for kind in kinds:
            index = taken[kind, stage]
            taken[kind, stage] += 1
            if index < count:
                yield StagePass(kind, stage, index)

    f, i, w = _SPLIT
    for _ in range(2 * after - 1):
        yield from take(down, f)
    for _ in range(rank):
        yield from take(up, f)
        yield from take(down, f)
    for _ in range(after):
        yield from take(up, f, i, w)
    while taken[f, up] < enough:
        if taken[f, down] < enough:
            yield from take(down, f)
        yield from take(down, i, w)
        yield from take(up, f, i, w)
    for _ in range(rank):
        yield from take(down, i)
        yield from take(up, i)
    for _ in range(after):
        yield from take(down, i, w)
    for stage in (up, down):
        while taken[w, stage] < enough:
            yield from take(stage, w)


_SPLIT = (Pass.forward, Pass.input_gradient, Pass.weight_gradient)
_ORDERS = {
    "afab": _all_forward_all_backward,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
    "zbv": _zero_bubble_v,
}
