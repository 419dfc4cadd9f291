"""The whole prediction of one case: memory by stage and over time, time by part, and the rates people quote.

The time of one optimizer step is the pipeline's micro-batches, the gradients' reduction, and the optimizer:

    T = m·slowest stage + Σ other stages ÷ v + hand-overs + reduction of gradients + optimizer + fixed

which for equal stages is (m + (p − 1)/v)·stage, v parts of the model on each rank. A stage inside the
pipeline has two borders, so m micro-batches hand over 2·m times; the first one passes all p − 1 borders,
which adds p − 3 (with two stages they hand over m times). Of orchestra's own trainer the schedule itself is
run instead (`orchestra.plan.pipeline_time`). The reduction is what the backward pass of the last micro-batch
does not hide; ZeRO-1 reduces and scatters the gradients and gathers the parameters instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from conf.schema import Offload, Recompute, TrainConfig
from orchestra.plan.case import PlanCase, RankElements, has_idle_stage, held_by_rank, num_chunks
from orchestra.plan.compute import (
    LayerTime,
    ends_s,
    hand_over_time,
    head_time,
    layer_time,
    mean_layer_time,
    sharded_s,
    travelling_gradient_bytes,
)
from orchestra.plan.frameworks import OWN
from orchestra.plan.kernels.memory_passes import BUSY_SHARE, STREAM_SHARE, UPDATE_SHARE
from orchestra.plan.pipeline_time import pipeline_time
from orchestra.plan.stage_memory import Memory, fits, is_pressed, stage_memory, states_of_rank, widths_of
from orchestra.sizes.flops import (
    hardware_flops_per_token,
    model_flops_per_token,
    model_flops_per_token_causal,
)
from orchestra.sizes.memory.layer_memory import recomputed_kinds
from orchestra.sizes.memory.rank_memory import rank_bytes
from orchestra.sizes.pipeline_check import PassTimes
from orchestra.sizes.topology import batch_ramp
from orchestra.sizes.training_shape import NUM_SLOTS, PipelineStage, rank_parameters

_FP32 = 4
# Between a device and its host: copies into pinned memory measured at 51 GB/s (PCIe 5). What a host's part of
# an update moves for one device, assumed: 16 cores without overlap took an update of 1.56 B parameters at 50.
PCIE_BYTES_PER_S = 50e9
HOST_BYTES_PER_S = 50e9
# Of a micro-batch's time.
_BACKWARD = 2 / 3


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


def step_time(case: PlanCase, *, is_pressed: bool = False, waits: bool | None = None) -> StepTime:
    """Return the time of one step and what it goes to; `is_pressed`: on a device that is nearly full;
    `waits`: see `hand_over_time`.
    """
    layer, head = mean_layer_time(case, is_pressed=is_pressed), head_time(case)
    busy_share = BUSY_SHARE if case.counts_passes else 1.0
    ends = [ends_s(case, stage, layer) for stage in case.stages]
    times = [
        (stage.num_layers * layer.total + head * stage.has_head) / busy_share + sum(end)
        for stage, end in zip(case.stages, ends, strict=True)
    ]
    slowest = max(times)
    # The stage that is at work all the time decides what the time goes to.
    stage, exchanged = case.stages[times.index(slowest)], sum(ends[times.index(slowest)])
    accumulation = case.accumulation
    communicating = layer.communicating
    layers = stage.num_layers * accumulation
    hand_over = hand_over_time(case, is_pressed=is_pressed, waits=waits)
    if case.layout.pp > 1 and case.framework.name == OWN:
        first, last = (max(each) for each in zip(*ends, strict=True))
        passes = _pass_times(case, layer, (first, head / busy_share + last), hand_over / 2)
        run = pipeline_time(case.schedule, case.pipeline, accumulation, passes)
        handed, bubble = run.hand_over, run.bubble
    else:
        borders = case.layout.pp - 1
        busy_borders = min(2, borders)
        handed = accumulation * busy_borders * hand_over
        bubble = (sum(times) - slowest) / num_chunks(case) + (borders - busy_borders) * hand_over
    idle = accumulation * (slowest - exchanged) * (1 - busy_share)
    return StepTime(
        compute=layers * (layer.device - communicating) + accumulation * head * stage.has_head,
        tensor_parallel=layers * communicating + accumulation * exchanged,
        host=layers * (layer.total - layer.device) + idle,
        hand_over=handed,
        bubble=bubble,
        reduction=_reduction(case, _BACKWARD * times[0]),
        optimizer=_exposed_update(case, (1 - _BACKWARD) * times[0]),
        layer=layer,
    )


def _pass_times(case: PlanCase, layer: LayerTime, ends: tuple[float, float], message: float) -> PassTimes:
    """Return what a micro-batch's passes through each stage take. A layer's forward pass is a third of what
    it takes without recomputation, and its weights' gradients are a third of its products. What is done at
    the model's ends, output product and loss among it, goes with the backward passes there.
    """
    busy_share = BUSY_SHARE if case.counts_passes else 1.0
    once = layer if case.recompute is Recompute.none else layer_time(replace(case, recompute=Recompute.none))
    whole, forward, weights = (each / busy_share for each in (layer.total, once.total / 3, once.products / 3))
    pipeline, ranks = case.pipeline, case.stages
    num_layers = [
        len(ranks[pipeline.rank_of(stage)].chunks[stage // pipeline.num_ranks])
        for stage in range(pipeline.num_stages)
    ]
    first, last = ends
    at_ends = [first, *[0.0] * (len(num_layers) - 2), last]
    return PassTimes(
        forward=[count * forward for count in num_layers],
        input_gradient=[
            count * (whole - forward - weights) + end for count, end in zip(num_layers, at_ends, strict=True)
        ],
        weight_gradient=[count * weights for count in num_layers],
        message=message,
    )


def _of_largest_stage(case: PlanCase) -> RankElements:
    different = {(stage.num_layers, stage.has_embedding, stage.has_head): stage for stage in case.stages}
    held = [held_by_rank(case.model, stage, case.layout) for stage in different.values()]
    return max(held, key=lambda elements: elements.total)


def _reduction(case: PlanCase, backward: float) -> float:
    """Gradients over dp · cp ranks; beyond the ranks that ZeRO shards over, an all-reduce of the shards.

    Where whole gradients are summed bucket by bucket, the last micro-batch's backward pass, of so many
    seconds, hides all but the last bucket.
    """
    mesh, held = case.layout, _of_largest_stage(case)
    num_ranks = mesh.dp * mesh.cp
    if num_ranks == 1:
        return 0.0
    width = widths_of(case)
    gradients = width.accumulation or width.gradients
    if case.is_counted_in_full:
        gradients = travelling_gradient_bytes(case)
    if case.zero == 0 or case.num_shards == 1:
        moved = _summed(case, held.dense * gradients, num_ranks, mesh.tp)
        moved += _summed(case, held.experts * gradients, num_ranks // mesh.ep, mesh.tp * mesh.ep)
        if case.counts_passes:
            total = (held.dense + held.experts) * gradients
            return max(moved * min(1.0, case.options.bucket_bytes / total), moved - backward)
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


def _summed(case: PlanCase, num_bytes: float, num_ranks: int, stride: int) -> float:
    """Return the seconds of an all-reduce; 0 where there is nothing to sum, or nobody to sum it with."""
    if not num_bytes or num_ranks <= 1:
        return 0.0
    group = case.group(num_ranks, stride)
    return case.network.all_reduce_s(num_bytes, group, case.device.link_bytes_per_s)


def _exposed_update(case: PlanCase, forward: float) -> float:
    """Return the seconds that an update takes from a step, whose next forward pass, of so many seconds, hides
    what the host does of it.
    """
    hidden = forward if case.framework.passes.updates_late else 0.0
    if _keeps_state_on_disk(case):
        return max(_optimizer(case), _disk_s(case) - hidden)
    if not case.is_counted_in_full or case.options.offload is Offload.none or not case.options.is_gpu:
        return _optimizer(case)
    gradients, parameters, update_s = _on_host(case)
    # The gradients leave when all are there; parameters come back while others are updated.
    return gradients / PCIE_BYTES_PER_S + max(0.0, update_s + parameters / PCIE_BYTES_PER_S - hidden)


def _on_host(case: PlanCase) -> tuple[float, float, float]:
    """Return the bytes of gradients that go to the host and of parameters that come back, and the seconds in
    which the host reads and writes the state, reads the gradients and writes the parameters.
    """
    held, width = _of_largest_stage(case), widths_of(case)
    updated, count = states_of_rank(case, held), _updated_elements(case, held)
    gradients, parameters = count * width.gradients, count * width.parameters
    moved = 2 * (updated.masters + updated.optimizer) + gradients + parameters
    return gradients, parameters, moved / HOST_BYTES_PER_S + case.framework.step_s


def _updated_elements(case: PlanCase, held: RankElements) -> float:
    """Return how many parameters a rank updates."""
    if not case.zero:
        return held.total
    return held.dense / case.num_shards + held.experts / case.num_expert_shards


def _disk_s(case: PlanCase) -> float:
    """Return the seconds in which state that lies on disk is read and written once, by all ranks of a node;
    the update of what has come is hidden behind it.
    """
    largest = max(rank_bytes(case, stage).disk for stage in case.stages)
    ranks = min(case.devices_per_node, case.layout.world_size)
    return 2 * largest * ranks / case.options.disk_bytes_per_s


def _optimizer(case: PlanCase) -> float:
    held, width = _of_largest_stage(case), widths_of(case)
    updated, count = states_of_rank(case, held), _updated_elements(case, held)
    if case.counts_passes:
        # State is read and written; gradients are read for their norm and for the update.
        moved = 2 * (updated.masters + updated.optimizer) + count * (width.parameters + 2 * width.gradients)
        besides = case.framework.passes.update
        # Not of rounded moments, nor of gradients in fp32.
        is_compiled = case.options.is_compiled and case.options.moment_bytes > width.gradients
        share = UPDATE_SHARE if is_compiled and not besides else STREAM_SHARE
        moved += besides * count
        return moved / (share * case.device.memory_bytes_per_s) + case.framework.step_s
    moved = updated.masters + updated.optimizer + count * (width.parameters + width.gradients)
    passes = case.framework.optimizer_passes
    return passes * moved / case.device.memory_bytes_per_s + case.framework.step_s


@dataclass(frozen=True)
class Prediction:
    """What a case takes. MFU and HFU in PaLM's convention (see `orchestra.sizes.flops`), as shares of the
    peak; `mfu_causal` counts only what the causal mask leaves of attention, which is what runs. None where
    layers are a plug-in, whose work nobody knows: time and activations are then those of the family's own
    layers.

    `fits`: memory suffices and every pipeline stage has something to do.
    """

    case: PlanCase
    stages: tuple[Memory, ...]
    time: StepTime
    fits: bool
    tokens_per_s: float
    mfu: float | None
    mfu_causal: float | None
    hfu: float | None

    @property
    def peak(self) -> Memory:
        """The memory of the fullest stage, which decides whether it fits."""
        return max(self.stages, key=lambda memory: memory.total)

    @property
    def fullest_stage(self) -> PipelineStage:
        """The stage that has the peak."""
        return self.case.stages[self.stages.index(self.peak)]

    @property
    def reported_peak(self) -> Memory:
        """The memory that the trainer's benchmark would report: of the first stage, or of the fullest; of
        orchestra's own on a GPU that of its tensors, without what torch's allocator holds besides.
        """
        framework = self.case.framework
        if framework.name == OWN and not framework.computes_on_host:
            return replace(self.peak, framework=0.0)
        return self.stages[0] if framework.reports_first_stage else self.peak

    @property
    def time_if_nothing_waits(self) -> float:
        """The seconds of a step in which no stage of the pipeline waits for another beyond the bubble."""
        return min(self.time.total, step_time(self.case, waits=False).total)

    @property
    def time_if_stages_wait(self) -> float:
        """The same where all of them wait at every hand-over (see `frameworks.Stalls`)."""
        can_wait = self.case.layout.pp > 1 and self.case.num_nodes > 1
        return max(self.time.total, step_time(self.case, waits=can_wait).total)

    @property
    def if_balanced(self) -> Prediction:
        """The same with routing that is forced to be even, as other trainers' published numbers have it."""
        framework = self.case.framework
        if framework.uneven_routing == 1 or self.case.layout.ep == 1:
            return self
        return predict(replace(self.case, framework=replace(framework, uneven_routing=1.0)))

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_s / self.case.layout.world_size


def predict(case: PlanCase) -> Prediction:
    """Predict memory and speed, the latter also where the former does not fit."""
    time = step_time(case)
    memory = stage_memory(case, time.layer)
    if is_pressed(case, memory):
        memory, time = stage_memory(case, time.layer, is_pressed=True), step_time(case, is_pressed=True)
    rate = case.tokens_per_step / time.total
    share = rate / case.layout.world_size / case.device.peak_flops
    is_known = case.model.block is None
    return Prediction(
        case=case,
        stages=memory,
        time=time,
        fits=fits(case, memory) and not has_idle_stage(case.stages),
        tokens_per_s=rate,
        mfu=share * model_flops_per_token(case.model, case.seq_len) if is_known else None,
        mfu_causal=share * model_flops_per_token_causal(case.model, case.seq_len) if is_known else None,
        hfu=share * _hardware_flops(case) if is_known else None,
    )


def _hardware_flops(case: PlanCase) -> int:
    kinds, is_kept = recomputed_kinds(case), case.keeps_attention
    return hardware_flops_per_token(case.model, case.seq_len, kinds, keeps_attention=is_kept)


def run_seconds(prediction: Prediction, train: TrainConfig) -> float:
    """Return the time of all steps of a run; those of smaller batches of a ramp have less accumulation."""
    case = prediction.case
    if not train.batch_ramp:
        return train.steps * prediction.time.total
    unit = case.micro_batch_size * case.layout.dp
    counts = batch_ramp(train).num_steps(train.steps)
    accumulations = [(count, stage.global_batch_size // unit) for stage, count in counts]
    times = [
        (count, predict(replace(case, accumulation=number)).time.total) for count, number in accumulations
    ]
    return sum(count * seconds for count, seconds in times)


@dataclass(frozen=True)
class OverTime:
    """Bytes of a rank: before it trains, at the most of the first step, and of every later one."""

    built: float
    first_step: float
    later_steps: float


def over_time(prediction: Prediction) -> OverTime:
    """Return how the memory of the fullest stage's rank comes to its peak.

    torch's optimizers make their moments in the first update, so that a first step which fits says nothing of
    the second one. orchestra makes them before it trains; its first sums over ranks then take buffers that
    stay.
    """
    case, peak = prediction.case, prediction.peak
    fixed = peak.parameters + peak.masters + peak.framework
    if case.is_counted_in_full:
        own = rank_bytes(case, prediction.fullest_stage)
        first = peak.total - own.growing_buffers * (case.accumulation == 1)
        # One rank alone takes the memory of its gradients with the first backward pass.
        kept = peak.gradients + peak.accumulation if case.layout.dp * case.layout.cp > 1 else 0.0
        return OverTime(fixed + peak.optimizer + kept + own.first_buffers, first, peak.total)
    return OverTime(fixed, peak.total - peak.optimizer, peak.total)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory that a rank of orchestra's trainer takes beside its process. `copies`: of its
    state, and of a rank's of the node before it.
    """

    offloaded: float
    checkpoint_image: float
    copies: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.offloaded + self.checkpoint_image + self.copies


def disk_bytes(prediction: Prediction) -> float:
    """Return what a rank of the fullest stage keeps on its node's own disk: its masters and moments, and the
    image in which a checkpoint is put together.
    """
    case, stage = prediction.case, prediction.fullest_stage
    if not _keeps_state_on_disk(case):
        return 0.0
    return rank_bytes(case, stage).disk + _image_bytes(case, stage)


def _keeps_state_on_disk(case: PlanCase) -> bool:
    return case.is_counted_in_full and case.options.offload is Offload.optimizer_disk


def _image_bytes(case: PlanCase, stage: PipelineStage) -> float:
    """Return the image of a rank's masters and moments: every element once over the ranks that have it."""
    if not case.options.saves:
        return 0.0
    ranks = case.layout.dp * case.layout.cp
    return _masters_and_moments(case, stage, ranks, max(1, ranks // case.layout.ep))


def _copies_bytes(case: PlanCase, stage: PipelineStage) -> float:
    """Return what the copies of masters and moments take that a rank's node keeps, its own and a neighbour's:
    all that it updates, which without ZeRO is everything.
    """
    if not case.options.copies:
        return 0.0
    shards = (case.num_shards, case.num_expert_shards) if case.zero else (1, 1)
    num_copies = NUM_SLOTS * (2 if case.num_nodes > 1 else 1)
    return num_copies * _masters_and_moments(case, stage, *shards)


def _masters_and_moments(case: PlanCase, stage: PipelineStage, ranks: int, of_experts: int) -> float:
    """Return a rank's masters and moments, shared out over so many ranks, and over so many of experts."""
    held = held_by_rank(case.model, stage, case.layout)
    count, at_ends = held.dense / ranks + held.experts / of_experts, 0.0
    if case.is_counted_in_full:
        parts = rank_parameters(case.model, case.layout.tp, case.layout.ep)
        count = parts.of(stage) / ranks + parts.experts_of(stage) / of_experts
        at_ends = case.options.more_at_ends * parts.ends_of(stage) / ranks
    return count * (_FP32 + 2 * case.options.moment_bytes) + at_ends


def host_memory(prediction: Prediction) -> HostMemory:
    """Return what the fullest stage's rank offloads, the image of masters and moments that is staged while
    training goes on, unless it lies on disk, and the copies from which lost nodes come back.
    """
    case, stage = prediction.case, prediction.fullest_stage
    if case.framework.name != OWN:
        return HostMemory(0.0, 0.0, 0.0)
    image = 0.0 if _keeps_state_on_disk(case) else _image_bytes(case, stage)
    offloaded = rank_bytes(case, stage).host if case.options.offload is not Offload.none else 0.0
    return HostMemory(offloaded, image, _copies_bytes(case, stage))
