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
from orchestra.plan.cases.stages import stage_parameters
from orchestra.plan.costs.compute import LayerTime, hand_over_time, head_time, mean_layer_time
from orchestra.plan.costs.states import PER_PARAMETER, state_bytes


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
    communicating = layer.collectives + layer.context + layer.sharded
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


def _largest_stage_parameters(case: Case) -> float:
    counts = [stage_parameters(case.model, stage, case.layout.pp) for stage in case.stages]
    return max(counts) / case.layout.tp


def _reduction(case: Case) -> float:
    """Gradients over dp · cp ranks; beyond the ranks that ZeRO shards over, an all-reduce of the shards."""
    num_ranks = case.layout.dp * case.layout.cp
    if num_ranks == 1:
        return 0.0
    count, width = _largest_stage_parameters(case), PER_PARAMETER[case.precision]
    network, link, tp = case.network, case.device.link_bytes_per_s, case.layout.tp
    gradients = count * (width.accumulation or width.gradients)
    if case.zero == 0 or case.num_shards == 1:
        moved = network.all_reduce_s(gradients, case.group(num_ranks, tp), link)
        return case.framework.exposed_reduction * moved
    shards = case.group(case.num_shards, tp)
    moved = 0.0
    if case.zero < 3:
        # ZeRO-2 keeps no whole gradients from one micro-batch to the next.
        times = case.accumulation if case.zero == 2 else 1
        moved += times * network.all_gather_s(gradients, shards, link)
        moved += network.all_gather_s(count * width.parameters, shards, link)
    replicas = num_ranks // case.num_shards
    if replicas > 1:
        group = case.group(replicas, tp * case.num_shards)
        moved += network.all_reduce_s(gradients / case.num_shards, group, link)
    return case.framework.exposed_reduction * moved


def _optimizer(case: Case) -> float:
    count, width = _largest_stage_parameters(case), PER_PARAMETER[case.precision]
    updated = state_bytes(count, max(1, case.zero) if case.zero else 0, case.num_shards, width)
    share = 1 / case.num_shards if case.zero else 1.0
    moved = updated.masters + updated.optimizer + share * count * (width.parameters + width.gradients)
    passes = case.framework.optimizer_passes
    return passes * moved / case.device.memory_bytes_per_s + case.framework.step_s
