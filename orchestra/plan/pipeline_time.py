"""How long a step's micro-batches take in a pipeline of orchestra's trainer: its schedule, run with the times
that a case's layers and messages take.

`orchestra.plan.predict` asks. Beyond some micro-batches each further one takes as long as the one before, so
that only so many are run (`fewer_micro_batches`). `orchestra.sizes.pipeline_check` runs the same lists with
proofs; here they are run often, in the order in which they can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from conf.schema import PipelineSchedule
from orchestra.sizes.pipeline_check import PassTimes, fewer_micro_batches, needed_first
from orchestra.sizes.pipeline_schedule import Pass, PipelineShape, StagePass, schedule

# In the order of a stage's costs.
_KINDS = [Pass.forward, Pass.backward, Pass.input_gradient, Pass.weight_gradient]


@dataclass(frozen=True)
class PipelineTime:
    """Seconds of all micro-batches of a step, from the first pass to the last: `busy` of the rank that has
    most to do, what it waits besides where messages take no time, and what messages add.
    """

    busy: float
    bubble: float
    hand_over: float


def pipeline_time(
    kind: PipelineSchedule, shape: PipelineShape, num_micro_batches: int, times: PassTimes
) -> PipelineTime:
    """Return how long a schedule takes."""
    each = [0.0] * shape.num_ranks
    costs = []
    for stage in range(shape.num_stages):
        forward, inputs, weights = (
            times.forward[stage],
            times.input_gradient[stage],
            times.weight_gradient[stage],
        )
        costs += [forward, inputs + weights, inputs, weights]
        each[shape.rank_of(stage)] += forward + inputs + weights
    busy = num_micro_batches * max(each)
    fewer = fewer_micro_batches(kind, shape, num_micro_batches)
    at_once, whole = _run(kind, shape, fewer, costs, times.message)
    if fewer < num_micro_batches:
        further = (num_micro_batches - fewer) / shape.num_ranks
        more = _run(kind, shape, fewer + shape.num_ranks, costs, times.message)
        at_once, whole = (
            least + further * (most - least) for least, most in zip((at_once, whole), more, strict=True)
        )
    return PipelineTime(busy, max(0.0, at_once - busy), max(0.0, whole - at_once))


def _run(
    kind: PipelineSchedule, shape: PipelineShape, count: int, costs: list[float], message: float
) -> tuple[float, float]:
    """Return when the last pass ends where messages take no time, and where each takes `message`."""
    clocks, late_clocks = [0.0] * shape.num_ranks, [0.0] * shape.num_ranks
    ends: list[float] = []
    late_ends: list[float] = []
    # The innermost loop of a search: builtins are slow in it.
    for rank, place, source, is_sent in _in_order(kind, shape, count):
        begin, late_begin, cost = clocks[rank], late_clocks[rank], costs[place]
        if source >= 0:
            arrived, late_arrived = ends[source], late_ends[source]
            if is_sent:
                late_arrived += message
            if arrived > begin:
                begin = arrived
            if late_arrived > late_begin:
                late_begin = late_arrived
        clocks[rank] = end = begin + cost
        ends.append(end)
        late_clocks[rank] = late_end = late_begin + cost
        late_ends.append(late_end)
    return max(clocks), max(late_clocks)


@lru_cache(maxsize=512)
def _in_order(
    kind: PipelineSchedule, shape: PipelineShape, count: int
) -> tuple[tuple[int, int, int, bool], ...]:
    """Return all passes in an order in which each comes after what it needs: the rank, the place of its cost,
    the place in this order of the pass whose result it takes (-1: none), and whether that is a message.
    """
    lists = schedule(kind, shape, count)
    found: list[tuple[int, int, int, bool]] = []
    places: dict[StagePass, int] = {}
    nexts, num_passes = [0] * len(lists), sum(map(len, lists))
    rank_of = [shape.rank_of(stage) for stage in range(shape.num_stages)]
    while len(found) < num_passes:
        for rank, actions in enumerate(lists):
            while nexts[rank] < len(actions):
                action = actions[nexts[rank]]
                source = needed_first(action, shape, is_split=action.kind is Pass.input_gradient)
                if source is not None and source not in places:
                    break
                place = -1 if source is None else places[source]
                is_sent = source is not None and rank_of[source.stage] != rank
                places[action] = len(found)
                cost = action.stage * len(_KINDS) + _KINDS.index(action.kind)
                found.append((rank, cost, place, is_sent))
                nexts[rank] += 1
    return tuple(found)
