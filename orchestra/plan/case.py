"""One thing to predict: what is trained, on which devices and network, by which trainer.

Also which layers a pipeline stage holds, and how many parameters one of its ranks has: integers only. Layers
are divided evenly, as most trainers do, or by cost with the output product counted as a block (nanotron),
which gives the last stage fewer layers when the vocabulary is large. orchestra's own trainer cuts as
`orchestra.sizes.stage_cut` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from conf.schema import ModelConfig, PipelineSchedule
from orchestra.plan.devices import Accelerator, CollectiveGroup, Network
from orchestra.plan.frameworks import OWN, Framework
from orchestra.sizes.activations import keeps_attention
from orchestra.sizes.flops import (
    num_dense_layers,
    num_expert_parameters,
    num_layer_parameters,
    num_parameters,
    without_experts,
)
from orchestra.sizes.topology import Layout, most_nodes
from orchestra.sizes.training_shape import PipelineStage, TrainingShape, even_stages

# nanotron divides after the output product too: the cast to fp32 and the loss may have stages of their own.
_BLOCKS_AFTER_HEAD = 2
_WHOLE_ZERO = 3


@lru_cache(maxsize=4096)
def stages(model: ModelConfig, pp: int, *, by_cost: bool = False) -> tuple[PipelineStage, ...]:
    """Return the stages of other trainers than orchestra's, in order. More stages than layers leave some
    without any.
    """
    if not by_cost:
        return even_stages(model.num_hidden_layers, pp)
    layers, head = _by_cost(model, pp)
    return tuple(
        PipelineStage(index, layers[index], has_embedding=index == 0, has_head=index == head)
        for index in range(pp)
    )


def has_idle_stage(cut: tuple[PipelineStage, ...]) -> bool:
    """Whether a stage has nothing at all to do, which a trainer refuses or trips over: of 74 such runs of the
    playbook's one got through, whatever their memory.
    """
    if all(each.chunks for each in cut):
        return any(not layers for each in cut for layers in each.chunks)
    head = next(each.index for each in cut if each.has_head)
    is_bare = any(not (each.num_layers or each.has_embedding) for each in cut[:head])
    return is_bare or len(cut) - 1 - head > _BLOCKS_AFTER_HEAD


def _by_cost(model: ModelConfig, pp: int) -> tuple[list[int], int]:
    """Cut where the running sum of matrix products passes each p-th of the whole; the embedding is free."""
    hidden = model.hidden_size
    layer = 4 * hidden * hidden + 3 * hidden * model.intermediate_size
    head = model.vocab_size * hidden
    share = (model.num_hidden_layers * layer + head) / pp
    counts, stage, done = [0] * pp, 0, 0
    for _ in range(model.num_hidden_layers):
        stage = _stage_at(done, share, stage, pp)
        counts[stage] += 1
        done += layer
    return counts, _stage_at(done, share, stage, pp)


def _stage_at(done: int, share: float, stage: int, pp: int) -> int:
    while stage < pp - 1 and done >= share * (stage + 1) - 1e-9:
        stage += 1
    return stage


def stage_parameters(model: ModelConfig, stage: PipelineStage, pp: int) -> int:
    """Return the parameters of a stage over all its tensor-parallel ranks.

    A tied embedding stands on the first stage and, in a pipeline, once more where the output product is.
    """
    table = model.vocab_size * model.hidden_size
    num_dense = num_dense_layers(model)
    fewer = num_layer_parameters(model) - num_layer_parameters(without_experts(model))
    layers = model.num_hidden_layers * num_layer_parameters(model) - num_dense * fewer
    tables = table * (1 if model.tie_word_embeddings else 2)
    beside = num_parameters(model) - layers - tables  # final norm, and learned positions
    count = stage.num_layers * num_layer_parameters(model) - stage.num_of_first(num_dense) * fewer
    count += table if stage.has_embedding else 0
    if stage.has_head:
        shares_table = model.tie_word_embeddings and (pp == 1 or stage.has_embedding)
        count += beside + (0 if shares_table else table)
    return count


@dataclass(frozen=True)
class RankElements:
    """Elements that one rank holds, before ZeRO shares them out: of routed experts, which expert parallelism
    has divided, and of all else. Sums, such as that of a stage's layers, are taken part by part.
    """

    dense: float
    experts: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.dense + self.experts


def held_by_rank(model: ModelConfig, stage: PipelineStage, layout: Layout) -> RankElements:
    """Return what a rank of a stage holds that has the most experts; these are cut by tp like all else."""
    mixtures = stage.num_layers - stage.num_of_first(num_dense_layers(model))
    experts = mixtures * num_expert_parameters(model)
    dense = stage_parameters(model, stage, layout.pp) - experts
    return RankElements(dense / layout.tp, experts / layout.tp / layout.ep * most_experts(model, layout.ep))


def held_of_layer(model: ModelConfig, layout: Layout) -> RankElements:
    """Return what a rank that has the most experts holds of one layer."""
    experts = num_expert_parameters(model)
    return RankElements(
        (num_layer_parameters(model) - experts) / layout.tp,
        experts / layout.tp / layout.ep * most_experts(model, layout.ep),
    )


def most_experts(model: ModelConfig, ep: int) -> float:
    """Return the experts of the rank that has the most over those of the mean one; 1 without any."""
    return math.ceil(model.num_experts / ep) * ep / model.num_experts if model.num_experts else 1.0


@dataclass(frozen=True, kw_only=True)
class PlanCase(TrainingShape):
    """Everything a prediction depends on: the shape of the training, devices and network, and the trainer."""

    device: Accelerator
    devices_per_node: int
    network: Network
    framework: Framework

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks fill."""
        return -(-self.layout.world_size // self.devices_per_node)

    @cached_property
    def stages(self) -> tuple[PipelineStage, ...]:
        """The pipeline stages as this trainer cuts them."""
        if self.framework.name == OWN:
            return super().stages
        return stages(self.model, self.layout.pp, by_cost=self.framework.cuts_by_cost)

    @property
    def is_counted_in_full(self) -> bool:
        """Whether memory is counted as the trainer allocates it: orchestra's own."""
        return self.framework.name == OWN

    @property
    def counts_passes(self) -> bool:
        """Whether memory traffic is counted from the trainer's code (`plan.kernels.memory_passes`)."""
        is_own = self.is_counted_in_full and self.options.is_gpu
        return is_own and not self.framework.computes_on_host

    @property
    def keeps_attention(self) -> bool:
        """Whether `selective` recomputation keeps the attention's output, as orchestra's does."""
        if not self.is_counted_in_full or self.framework.passes.repeats_attention:
            return False
        return keeps_attention(self.model, self.layout.cp, is_gpu=self.options.is_gpu)

    @property
    def kept_zero(self) -> int:
        """ZeRO's stage by what a rank keeps from one micro-batch to the next."""
        is_kept = self.zero == _WHOLE_ZERO and self.framework.gathers_once and self.layout.pp > 1
        return 1 if is_kept else self.zero

    def group(self, num_ranks: int, stride: int) -> CollectiveGroup:
        """Return the group of `num_ranks` ranks that are `stride` apart: tp 1, cp tp, data-parallel tp."""
        nodes = most_nodes(num_ranks, stride, self.devices_per_node, self.layout.world_size)
        return CollectiveGroup(num_ranks, nodes)


def num_chunks(case: PlanCase) -> int:
    """Return how many parts of the model each pipeline rank of another trainer holds: as many as an
    interleaved schedule was given, else as usual; at most one a layer, and one where the stages do not divide
    the micro-batches, as interleaving demands (Megatron-LM).
    """
    if case.layout.pp == 1 or case.accumulation % case.layout.pp:
        return 1
    is_given = case.schedule is PipelineSchedule["interleaved"]
    wanted = case.virtual_stages if is_given else case.framework.pipeline_chunks
    return max(1, min(wanted, case.model.num_hidden_layers // case.layout.pp))
