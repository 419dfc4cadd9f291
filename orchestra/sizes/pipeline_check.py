"""Proves that the lists of a pipeline schedule can be run, and says what running them takes.

`check` goes through the lists as ranks would, each in order: sends are asynchronous, receives block. Tests
prove every schedule with it, the planner takes its times from it, and `held_bytes` is what it takes memory
from.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from conf.schema import PipelineSchedule
from orchestra.sizes.pipeline_schedule import Pass, PipelineShape, RankOrder, StagePass, schedule

# So many micro-batches a rank, and the pipeline has begun, is at work as usual, and ends.
_ENOUGH = 4
_RELEASING = (Pass.backward, Pass.input_gradient)


class ScheduleError(ValueError):
    """Raised for lists of actions that are no schedule: missing, twice, out of order or stuck."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of each stage's passes on one micro-batch (B is I and W), and of a message between ranks."""

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    message: float = 0.0

    def of(self, action: StagePass) -> float:
        """Return the seconds of an action."""
        stage, kind = action.stage, action.kind
        if kind is Pass.forward:
            return self.forward[stage]
        inputs = self.input_gradient[stage] if kind is not Pass.weight_gradient else 0.0
        return inputs + (self.weight_gradient[stage] if kind is not Pass.input_gradient else 0.0)


def unit_times(shape: PipelineShape) -> PassTimes:
    """Return times in which F, I and W take one each, and messages nothing."""
    ones = (1.0,) * shape.num_stages
    return PassTimes(ones, ones, ones)


@dataclass(frozen=True)
class CheckedSchedule:
    """What a schedule takes. `live` of each rank: the most passes through a stage whose activations are held
    at one time, forward done or under way and the gradient of inputs not; `waiting`: the most whose gradient
    of inputs is done and that of weights not. `idle_s`: of each rank, out of `makespan_s`.
    """

    live: tuple[int, ...]
    waiting: tuple[int, ...]
    makespan_s: float
    idle_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        return sum(self.idle_s) / (len(self.idle_s) * self.makespan_s)


def check(
    lists: Sequence[RankOrder], shape: PipelineShape, num_micro_batches: int, times: PassTimes | None = None
) -> CheckedSchedule:
    """Prove that every stage has every micro-batch once forward and once backward, in order, that no rank
    waits for ever, and that between two ranks activations arrive in the order in which they are wanted, and
    gradients too. Raises ScheduleError naming the first action that is wrong.
    """
    for stage in range(shape.num_stages):
        _check_stage(lists[shape.rank_of(stage)], stage, num_micro_batches)
    _check_channels(lists, shape)
    makespan, idle = _run(lists, shape, times or unit_times(shape))
    ones, zeros = (1.0,) * shape.num_stages, (0.0,) * shape.num_stages
    return CheckedSchedule(
        live=tuple(int(held_bytes(actions, ones, zeros)) for actions in lists),
        waiting=tuple(int(held_bytes(actions, zeros, ones)) for actions in lists),
        makespan_s=makespan,
        idle_s=idle,
    )


def held_bytes(actions: RankOrder, live: Sequence[float], waiting: Sequence[float]) -> float:
    """Return the most that a rank holds at one time where a micro-batch in a stage holds `live[stage]` from
    its forward pass to the gradient of its inputs, and `waiting[stage]` from there to that of its weights.
    """
    most = now = 0.0
    for action in actions:
        if action.kind is Pass.forward:
            now += live[action.stage]
        most = max(most, now)
        if action.kind in _RELEASING:
            now -= live[action.stage]
        if action.kind is Pass.input_gradient:
            now += waiting[action.stage]
        most = max(most, now)
        if action.kind is Pass.weight_gradient:
            now -= waiting[action.stage]
    return most


@dataclass(frozen=True)
class HeldState:
    """What a rank holds beside a pass that is at work: for each of its stages the micro-batches from their
    forward pass to the gradient of inputs, and from there to that of weights. `at_work`: the place among the
    rank's stages of a backward pass, whose own micro-batch is not counted; None of a forward pass, whose is.
    `made`: whether a micro-batch before has given gradients of a stage's weights.
    """

    at_work: int | None
    live: tuple[int, ...]
    waiting: tuple[int, ...]
    made: tuple[bool, ...]

    def is_within(self, other: HeldState) -> bool:
        """Whether another one holds as much or more of everything."""
        if self.at_work != other.at_work:
            return False
        mine, others = (*self.live, *self.waiting, *self.made), (*other.live, *other.waiting, *other.made)
        return all(map(operator.le, mine, others))

    @property
    def num_held(self) -> int:
        """What is held, counted: a state that is within another one has less of it."""
        return sum(self.live) + sum(self.waiting) + sum(self.made)


@lru_cache(maxsize=1024)
def held_states(
    kind: PipelineSchedule, shape: PipelineShape, num_micro_batches: int
) -> tuple[tuple[HeldState, ...], ...]:
    """Return for each rank the states in which it holds most: no other one holds as much of everything."""
    lists = schedule(kind, shape, num_micro_batches)
    return tuple(_largest(lists[rank], shape.stages_of(rank)) for rank in range(shape.num_ranks))


def fewer_micro_batches(kind: PipelineSchedule, shape: PipelineShape, count: int) -> int:
    """Return a number of micro-batches that fills the pipeline as `count` does, and its groups likewise: from
    there on each further p micro-batches take equally long, and but for afab ranks hold no more.
    """
    num_ranks = shape.num_ranks
    if count <= _ENOUGH * num_ranks:
        return count
    groups, rest = divmod(count, num_ranks)
    if kind is PipelineSchedule["interleaved"] and rest:
        rest = (_ENOUGH - 1) * (math.ceil(rest / groups) - 1) + 1
    return (_ENOUGH - 1) * num_ranks + rest


def _largest(actions: RankOrder, stages: tuple[int, ...]) -> tuple[HeldState, ...]:
    place = {stage: number for number, stage in enumerate(stages)}
    live, waiting, made = [0] * len(stages), [0] * len(stages), [False] * len(stages)
    found: dict[tuple[int | None, tuple[int, ...], tuple[int, ...], tuple[bool, ...]], None] = {}
    for action in actions:
        here = place[action.stage]
        if action.kind is Pass.weight_gradient:
            waiting[here] -= 1
            made[here] = True
            continue
        live[here] += 1 if action.kind is Pass.forward else -1
        at_work = None if action.kind is Pass.forward else here
        found[at_work, tuple(live), tuple(waiting), tuple(made)] = None
        waiting[here] += action.kind is Pass.input_gradient
        made[here] |= action.kind is Pass.backward
    states = [HeldState(*each) for each in found]
    largest: list[HeldState] = []
    for state in sorted(states, key=lambda state: state.num_held, reverse=True):
        if not any(map(state.is_within, largest)):
            largest.append(state)
    return tuple(state for state in states if state in largest)


def needed_first(action: StagePass, shape: PipelineShape, *, is_split: bool) -> StagePass | None:
    """Return the action of another stage that makes what this one takes in; None where nothing comes in."""
    stage, index = action.stage, action.micro_batch
    if action.kind is Pass.forward:
        return StagePass(Pass.forward, stage - 1, index) if stage else None
    if action.kind is Pass.weight_gradient or stage == shape.num_stages - 1:
        return None
    return StagePass(Pass.input_gradient if is_split else Pass.backward, stage + 1, index)


def _check_stage(actions: RankOrder, stage: int, num_micro_batches: int) -> None:
    """Each micro-batch has F and then B, or F, I and W, and each of them goes through them in order."""
    own = [action for action in actions if action.stage == stage]
    places = {action: place for place, action in enumerate(own)}
    if len(places) != len(own):
        raise ScheduleError(f"stage {stage}: a pass stands in the list twice")
    last_of: dict[Pass, int] = {}
    for index in range(num_micro_batches):
        is_split = StagePass(Pass.input_gradient, stage, index) in places
        backward = [Pass.input_gradient, Pass.weight_gradient] if is_split else [Pass.backward]
        before = -1
        for kind in (Pass.forward, *backward):
            place = places.pop(action := StagePass(kind, stage, index), None)
            if place is None:
                raise ScheduleError(f"{action} is missing")
            if place < max(before, last_of.get(kind, -1)):
                raise ScheduleError(f"{action} comes too early in its rank's list")
            before = last_of[kind] = place
    if places:
        raise ScheduleError(f"{next(iter(places))} is too much")


def _check_channels(lists: Sequence[RankOrder], shape: PipelineShape) -> None:
    """What one rank sends another, in the order of its list, is what that one takes in, in the order of its.

    Activations and gradients have channels of their own: (from, to, whether forward).
    """
    sent: dict[tuple[int, int, bool], list[StagePass]] = defaultdict(list)
    taken: dict[tuple[int, int, bool], list[StagePass]] = defaultdict(list)
    for rank, actions in enumerate(lists):
        for action in actions:
            is_forward = action.kind is Pass.forward
            next_stage = action.stage + (1 if is_forward else -1)
            if action.kind is not Pass.weight_gradient and 0 <= next_stage < shape.num_stages:
                sent[rank, shape.rank_of(next_stage), is_forward].append(action)
            source = needed_first(action, shape, is_split=action.kind is Pass.input_gradient)
            if source is not None:
                taken[shape.rank_of(source.stage), rank, is_forward].append(source)
    for channel, actions_sent in sent.items():
        for source, wanted in zip(actions_sent, taken[channel], strict=True):
            if source != wanted and channel[0] != channel[1]:
                raise ScheduleError(
                    f"rank {channel[1]} waits for {wanted} while rank {channel[0]} sends {source}"
                )


def _run(
    lists: Sequence[RankOrder], shape: PipelineShape, times: PassTimes
) -> tuple[float, tuple[float, ...]]:
    """Return when the last rank ends, and how long each one waits until then."""
    makespan = max(_ends(lists, shape, times).values())
    return makespan, tuple(makespan - sum(map(times.of, actions)) for actions in lists)


def turns(lists: Sequence[RankOrder], shape: PipelineShape) -> tuple[tuple[int, ...], ...]:
    """Return for each rank when its passes begin, counted in passes that all take equally long (B: two).

    What waits for a pass, directly or through others, comes in a later turn: of ranks that wait for one that
    hangs, all are ahead of it.
    """
    times = unit_times(shape)
    ends = _ends(lists, shape, times)
    return tuple(tuple(round(ends[action] - times.of(action)) for action in actions) for actions in lists)


def _ends(lists: Sequence[RankOrder], shape: PipelineShape, times: PassTimes) -> dict[StagePass, float]:
    """Return when each pass ends."""
    ends: dict[StagePass, float] = {}
    places, clocks = [0] * len(lists), [0.0] * len(lists)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, actions in enumerate(lists):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                source = needed_first(action, shape, is_split=action.kind is Pass.input_gradient)
                if source is not None:
                    if source not in ends:
                        break
                    is_sent = shape.rank_of(source.stage) != rank
                    clocks[rank] = max(clocks[rank], ends[source] + times.message * is_sent)
                clocks[rank] += times.of(action)
                ends[action] = clocks[rank]
                places[rank] += 1
                is_moving = True
    stuck = [rank for rank, actions in enumerate(lists) if places[rank] < len(actions)]
    if stuck:
        waits = ", ".join(f"rank {rank} at {lists[rank][places[rank]]}" for rank in stuck)
        raise ScheduleError(f"deadlock: {waits}")
    return ends
