"""The time of one optimizer step: the pipeline's micro-batches, the gradients' reduction, the optimizer.

    T = m·slowest stage + Σ other stages ÷ v + hand-overs + reduction of gradients + optimizer + fixed

which for equal stages is (m + (p − 1)/v)·stage, v parts of the model on each rank. A stage inside the
pipeline has two borders, so m micro-batches hand over 2·m times; the first one passes all p − 1 borders,
which adds p − 3 (with two stages they hand over m times). The reduction is what the backward pass of the last
micro-batch does not hide; ZeRO-1 reduces and scatters the gradients and gathers the parameters instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.plan.cases.case import Case, num_chunks
from orchestra.plan.cases.stages import Held, held_by_rank
from orchestra.plan.costs.compute import LayerTime, hand_over_time, head_time, mean_layer_time, sharded_s
from orchestra.plan.costs.states import states_of_rank, widths_of


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, by what they go to; they add up to `total`."""

    compute: float
    tensor_parallel: float
    host: float
    hand_over: float
    bubble: float
    reduction: float
    optimizer: float
    layer: LayerTime

    @property
    def total(self) -> float:
        """The whole step."""
        return (
            self.compute
            + self.tensor_parallel
            + self.host
            + self.hand_over
            + self.bubble
            + self.reduction
            + self.optimizer
        )


def step_time(case: Case, *, is_pressed: bool = False) -> StepTime:
    """Return the time of one step and what it goes to; `is_pressed`: on a device that is nearly full."""
    layer, head = mean_layer_time(case, is_pressed=is_pressed), head_time(case)
    hand_over = hand_over_time(case, is_pressed=is_pressed)
    times = [stage.num_layers * layer.total + head * stage.has_head for stage in case.stages]
    slowest = max(times)
    # The stage that is at work all the time decides what the time goes to.
    stage = case.stages[times.index(slowest)]
    accumulation = case.accumulation
    communicating = layer.communicating
    layers = stage.num_layers * accumulation
    borders = case.layout.pp - 1
    busy_borders = min(2, borders)
    return StepTime(
        compute=layers * (layer.device - communicating) + accumulation * head * stage.has_head,
        tensor_parallel=layers * communicating,
        host=layers * (layer.total - layer.device),
        hand_over=accumulation * busy_borders * hand_over,
        bubble=(sum(times) - slowest) / num_chunks(case) + (borders - busy_borders) * hand_over,
        reduction=_reduction(case),
        optimizer=_optimizer(case),
        layer=layer,
    )


def _of_largest_stage(case: Case) -> Held:
    held = [held_by_rank(case.model, stage, case.layout) for stage in case.stages]
    return max(held, key=lambda it: it.total)


def _reduction(case: Case) -> float:
    """Gradients over dp · cp ranks; beyond the ranks that ZeRO shards over, an all-reduce of the shards."""
    mesh, held = case.layout, _of_largest_stage(case)
    num_ranks = mesh.dp * mesh.cp
    if num_ranks == 1:
        return 0.0
    width = widths_of(case)
    gradients = width.accumulation or width.gradients
    if case.zero == 0 or case.num_shards == 1:
        moved = _summed(case, held.dense * gradients, num_ranks, mesh.tp)
        moved += _summed(case, held.experts * gradients, num_ranks // mesh.ep, mesh.tp * mesh.ep)
        return case.framework.exposed_reduction * moved
    moved = 0.0
    if case.kept_zero < 3:
        # ZeRO-2 keeps no whole gradients from one micro-batch to the next.
        times = case.accumulation if case.zero == 2 else 1
        moved += times * sharded_s(case, held, gradients)
        moved += sharded_s(case, held, width.parameters)
    shards, of_experts = case.num_shards, case.num_expert_shards
    moved += _summed(case, held.dense * gradients / shards, num_ranks // shards, mesh.tp * shards)
    replicas = num_ranks // mesh.ep // of_experts
    moved += _summed(case, held.experts * gradients / of_experts, replicas, mesh.tp * mesh.ep * of_experts)
    return case.framework.exposed_reduction * moved


def _summed(case: Case, num_bytes: float, num_ranks: int, stride: int) -> float:
    """Return the seconds of an all-reduce; 0 where there is nothing to sum, or nobody to sum it with."""
    if not num_bytes or num_ranks <= 1:
        return 0.0
    group = case.group(num_ranks, stride)
    return case.network.all_reduce_s(num_bytes, group, case.device.link_bytes_per_s)


def _optimizer(case: Case) -> float:
    held, width = _of_largest_stage(case), widths_of(case)
    updated = states_of_rank(case, held)
    count = held.total
    if case.zero:
        count = held.dense / case.num_shards + held.experts / case.num_expert_shards
    moved = updated.masters + updated.optimizer + count * (width.parameters + width.gradients)
    passes = case.framework.optimizer_passes
    return passes * moved / case.device.memory_bytes_per_s + case.framework.step_s
