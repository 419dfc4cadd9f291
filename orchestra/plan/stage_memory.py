"""Peak memory of one rank by component, for each pipeline stage, as a caching allocator counts it.

Model states by ZeRO's division, activations by closed forms times the micro-batches in flight, the loss where
the output product is, and what the trainer's profile says it keeps besides. Of orchestra's own trainer all of
it comes from `orchestra.sizes.memory`. What the driver and NCCL take outside the allocator is not in the sum:
`fits` leaves a share of the device free for it.

Bytes of parameters, gradients, masters and optimizer state, before ZeRO divides them:

| precision      | parameters | gradients | accumulation | masters | Adam | sum |
|----------------|-----------:|----------:|-------------:|--------:|-----:|----:|
| fp32           |          4 |         4 |              |         |    8 |  16 |
| bf16, fp16     |          2 |         2 |              |       4 |    8 |  16 |
| bf16_fp32_grad |          2 |         2 |            4 |       4 |    8 |  20 |
| fp8            |          4 |         2 |              |       4 |    8 |  18 |

Megatron's products add their gradients to the fp32 ones themselves, and its fp8 parameters are kept in 8 bits
alone, as they are and transposed:

| bf16_fp32_grad |          2 |           |            4 |       4 |    8 |  18 |
| fp8            |          2 |         2 |              |       4 |    8 |  16 |

Sources: ZeRO (arXiv:1910.02054, K = 12) for 16, the Ultra-Scale Playbook for 20, Megatron Core's developer
guide for 18 ("Distributed Optimizer"; 6 + 12/d with ZeRO-1); fp8 is bf16 with two copies.

Activations that a layer keeps for the backward pass. s sequence length, b micro-batch size, h hidden size,
a query heads, F feed-forward width, t tensor-parallel degree; 2 bytes an element unless the tokens say
otherwise.

    GPT (Korthikanti et al., arXiv:2205.05198, table 2; biases, dropout, scores kept)
        none  s·b·h·(10 + 24/t + 5·a·s/(h·t))    selective  s·b·h·(10 + 24/t)    full  2·s·b·h
        with sequence parallelism everything is divided by t: s·b·h/t·(34 + 5·a·s/h), and so on
    Llama (RMSNorm, SwiGLU, grouped queries, no dropout, flash attention; counted on saved tensors)
        s·b·(12·h + 4·kv + 8·F) + 4·s·b·a; 8·s·b·h of it whole on each rank without sequence parallelism
        (kv: width of the keys; terms: norm inputs 2 + 2, inputs of qkv and feed-forward 2 + 2, q 2, k and v
        4·kv/h, attention's output 2, gate, up, silu and product 8·F/h, log-sum-exp 4·a/h)
    Mixture of experts (k experts of width E for each token, a shared one of width S)
        as Llama with F = k·E + S, and the tokens as sorted by expert, in and out: 4·s·b·k·h
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from conf.schema import Family, ModelConfig, PrecisionName, Recompute
from orchestra.plan.case import PlanCase, RankElements, held_by_rank, held_of_layer, num_chunks
from orchestra.plan.compute import LayerTime, waits_at_hand_over
from orchestra.plan.frameworks import OWN
from orchestra.sizes.flops import attention_width, feed_forward_width, key_value_width, num_dense_layers
from orchestra.sizes.memory.layer_memory import recomputed_kinds
from orchestra.sizes.memory.rank_memory import lasting_bytes, rank_bytes
from orchestra.sizes.memory.step_memory import schedule_states
from orchestra.sizes.pipeline_schedule import splits_backward
from orchestra.sizes.training_shape import MicroBatchTokens, PipelineStage


@dataclass(frozen=True)
class StateBytes:
    """Bytes of each kind of state: per parameter in the tables, of one rank where they are multiplied out."""

    parameters: float
    gradients: float
    accumulation: float
    masters: float
    optimizer: float

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> float:
        """All of them together."""
        return self.parameters + self.gradients + self.accumulation + self.masters + self.optimizer


PER_PARAMETER = {
    PrecisionName.fp32: StateBytes(4, 4, 0, 0, 8),
    PrecisionName.bf16: StateBytes(2, 2, 0, 4, 8),
    PrecisionName.bf16_fp32_grad: StateBytes(2, 2, 4, 4, 8),
    PrecisionName.fp16: StateBytes(2, 2, 0, 4, 8),
    PrecisionName.fp8: StateBytes(4, 2, 0, 4, 8),
}
_WITH_FUSED_KERNELS = {
    **PER_PARAMETER,
    PrecisionName.bf16_fp32_grad: StateBytes(2, 0, 4, 4, 8),
    PrecisionName.fp8: StateBytes(2, 2, 0, 4, 8),
}


def widths_of(case: PlanCase) -> StateBytes:
    """Return the bytes of one parameter's states in the case's precision and trainer."""
    table = _WITH_FUSED_KERNELS if case.framework.fuses_kernels else PER_PARAMETER
    width, moments = table[case.precision], 2 * case.options.moment_bytes
    return width if moments == width.optimizer else replace(width, optimizer=moments)


def state_bytes(num_parameters: float, zero: int, num_shards: int, width: StateBytes) -> StateBytes:
    """Return the bytes on one of `num_shards` ranks: ZeRO 1 divides masters and optimizer, 2 also gradients,
    3 also parameters (arXiv:1910.02054, figure 1).
    """
    optimizer = num_parameters / (num_shards if zero >= 1 else 1)
    gradients = num_parameters / (num_shards if zero >= 2 else 1)
    parameters = num_parameters / (num_shards if zero >= 3 else 1)
    return StateBytes(
        parameters=parameters * width.parameters,
        gradients=gradients * width.gradients,
        accumulation=gradients * width.accumulation,
        masters=optimizer * width.masters,
        optimizer=optimizer * width.optimizer,
    )


def states_of_rank(case: PlanCase, held: RankElements) -> StateBytes:
    """Return the bytes on one rank: fewer ranks have the same experts and share them out."""
    width = widths_of(case)
    zero = case.kept_zero
    dense = state_bytes(held.dense, zero, case.num_shards, width)
    if not held.experts:
        return dense
    return dense + state_bytes(held.experts, zero, case.num_expert_shards, width)


@dataclass(frozen=True)
class Memory(StateBytes):
    """Bytes of one rank at its peak, by component."""

    activations: float
    logits: float
    buffers: float
    framework: float

    @property
    def total(self) -> float:
        """The sum."""
        return super().total + self.activations + self.logits + self.buffers + self.framework


def stage_memory(case: PlanCase, layer: LayerTime, *, is_pressed: bool = False) -> tuple[Memory, ...]:
    """Return the peak of a rank on each stage, in order; `is_pressed`: on a device that is nearly full."""
    kept = _gathered_bytes(case, layer, is_pressed=is_pressed)
    return tuple(_of_stage(case, stage, kept) for stage in case.stages)


def fullest_stage_bytes(case: PlanCase, layer: LayerTime) -> float:
    """Return the peak of the fullest stage alone, in less time: of stages alike the first holds the most
    micro-batches, and the last one the most whose weights' gradients are taken later.
    """
    firsts = _stages_by_kind(case, case.stages[::-1])
    if case.framework.name == OWN and splits_backward(case.schedule):
        firsts += _stages_by_kind(case, case.stages)
    kept = _gathered_bytes(case, layer, is_pressed=False)
    return max(_of_stage(case, stage, kept).total for stage in firsts)


def least_bytes(case: PlanCase) -> float:
    """Return what the fullest stage takes without what its steps add, in far less time than with it."""
    stages = _stages_by_kind(case, case.stages)
    if case.is_counted_in_full:
        return max(lasting_bytes(case, stage) for stage in stages)
    return max(states_of_rank(case, held_by_rank(case.model, stage, case.layout)).total for stage in stages)


def _stages_by_kind(case: PlanCase, stages: Sequence[PipelineStage]) -> list[PipelineStage]:
    """Return the last ones of those alike."""
    num_dense = num_dense_layers(case.model)
    kinds = {
        (stage.num_layers, stage.num_of_first(num_dense), stage.has_embedding, stage.has_head): stage
        for stage in stages
    }
    return list(kinds.values())


def fits(case: PlanCase, memory: tuple[Memory, ...]) -> bool:
    """Whether the largest stage leaves room for what the allocator does not count."""
    return max(stage.total for stage in memory) <= case.device.usable_bytes


def is_pressed(case: PlanCase, memory: tuple[Memory, ...]) -> bool:
    """Whether the allocator has to free what it holds, so that everything waits (see `frameworks.Stalls`)."""
    stalls = case.framework.stalls
    limit = float("inf") if stalls is None else stalls.pressed_share * case.device.memory_bytes
    return max(stage.total for stage in memory) > limit


def _of_own_stage(case: PlanCase, stage: PipelineStage) -> Memory:
    own, is_wide = rank_bytes(case, stage), case.precision is PrecisionName.bf16_fp32_grad
    gradients = own.gradients - own.step.unmade
    framework = case.framework
    is_twice = case.layout.tp > 1 and not framework.computes_on_host
    return Memory(
        parameters=own.parameters,
        gradients=0.0 if is_wide else gradients,
        accumulation=gradients if is_wide else 0.0,
        masters=own.masters,
        optimizer=own.optimizer,
        activations=own.step.activations * framework.step_share,
        logits=own.step.logits * framework.step_share,
        buffers=own.buffers,
        framework=framework.fixed_bytes * (2 if is_twice else 1),
    )


def _of_stage(case: PlanCase, stage: PipelineStage, gathered: float) -> Memory:
    if case.is_counted_in_full:
        return _of_own_stage(case, stage)
    framework, tokens, model = case.framework, case.tokens, case.model
    states = states_of_rank(case, held_by_rank(model, stage, case.layout))
    hidden = tokens.count * model.hidden_size * tokens.width_bytes
    layer, working = _mean_kept(case), _kept(case, Recompute.none)
    per_layer = layer + gathered * hidden / tokens.width_bytes * (1 - 1 / tokens.tp)
    activations = per_layer * _held_layers(case, stage)
    activations += framework.layer_temporaries * working
    if case.recompute is Recompute.full and stage.num_layers:
        # One layer is whole again, its input among it.
        activations += working - layer
    return Memory(
        **vars(states),
        activations=activations,
        logits=_logits(case) if stage.has_head else 0.0,
        buffers=framework.whole_bytes * hidden / 2 + _live_parameters(case),
        framework=framework.fixed_bytes * (2 if tokens.tp > 1 else 1),
    )


def _held_layers(case: PlanCase, stage: PipelineStage) -> float:
    """Return how many times a rank holds what a layer keeps of one micro-batch."""
    pp = case.layout.pp
    if pp == 1 or case.framework.name != OWN:
        in_flight = num_in_flight_interleaved(stage.index, pp, case.accumulation, num_chunks(case))
        return stage.num_layers * in_flight
    lengths = [len(layers) for layers in stage.chunks]
    return max(
        sum(
            (live + waiting) * length
            for live, waiting, length in zip(state.live, state.waiting, lengths, strict=True)
        )
        for state in schedule_states(case, stage)
    )


def num_in_flight_interleaved(stage: int, pp: int, accumulation: int, chunks: int) -> float:
    """Return the micro-batches that a stage (from 0) of a 1F1B pipeline holds at once, in wholes, where each
    rank has `chunks` parts of the model: interleaving begins (p − 1)/v more of them (Korthikanti et al.,
    section 4.2.3), but never more than there are.
    """
    ahead = (pp - 1) / chunks if chunks > 1 else 0.0
    return min(min(pp - stage, accumulation) + ahead, accumulation)


def _mean_kept(case: PlanCase) -> float:
    """Return the bytes that a layer keeps of one micro-batch: the mean where not all are recomputed alike."""
    if case.options.recompute_every == 1 and case.options.activation_bytes is None:
        return _kept(case, case.recompute)
    kinds = Counter(recomputed_kinds(case))
    return sum(count * _kept(case, kind) for kind, count in kinds.items()) / sum(kinds.values())


def _kept(case: PlanCase, recompute: Recompute) -> float:
    """Return the bytes that a layer keeps of one micro-batch with a kind of recomputation."""
    model, tokens, framework = case.model, case.tokens, case.framework
    if recompute is Recompute.selective and framework.selective_share < 1:
        return framework.selective_share * layer_bytes(model, tokens, Recompute.none)
    kept = layer_bytes(model, tokens, recompute)
    if framework.fuses_kernels and recompute is not Recompute.full:
        kept -= fused_savings_bytes(model, tokens, in_8_bits=case.precision is PrecisionName.fp8)
    if framework.score_bytes and recompute is Recompute.none:
        kept += scores_bytes(model, tokens)
    return kept


def _gathered_bytes(case: PlanCase, layer: LayerTime, *, is_pressed: bool) -> float:
    """Blocks freed by a communication stream are used again only when the device has passed them. A host that
    runs ahead therefore holds the gathered inputs of all layers; one that is late does not.
    """
    framework, layout = case.framework, case.layout
    if layout.tp == 1 or not case.sequence_parallel:
        return 0.0
    host_is_late = layout.pp == 2 and case.num_nodes > 1 and layer.host > layer.device
    waits = is_pressed or host_is_late or waits_at_hand_over(case)
    return framework.gathered_bytes_waiting if waits else framework.gathered_bytes


def _logits(case: PlanCase) -> float:
    framework, tokens = case.framework, case.tokens
    count = tokens.count
    if framework.loss_chunk_tokens is not None:
        count = min(count, framework.loss_chunk_tokens)
    width = framework.logit_bytes + (framework.stale_logit_bytes if case.accumulation > 1 else 0.0)
    return count * case.model.vocab_size / tokens.tp * width


def _live_parameters(case: PlanCase) -> float:
    """ZeRO-3 holds the layer at work and the one fetched ahead of it, whole."""
    if case.kept_zero < 3 or case.num_shards == 1:
        return 0.0
    held = held_of_layer(case.model, case.layout)
    gathered = held.dense + (held.experts if case.num_expert_shards > 1 else 0.0)
    return 2 * gathered * case.tokens.width_bytes


def gpt_layer_bytes(hidden: int, heads: int, tokens: MicroBatchTokens, recompute: Recompute) -> float:
    """Return the bytes one GPT layer keeps (Korthikanti et al., table 2), scores and dropout included."""
    whole = tokens.count * hidden / 2 * tokens.width_bytes
    if recompute is Recompute.full:
        return 2 * whole / tokens.outer
    split = 24.0
    if recompute is Recompute.none:
        split += 5 * heads * tokens.seq_len / hidden
    return whole * (10 / tokens.outer + split / tokens.tp)


def llama_layer_bytes(model: ModelConfig, tokens: MicroBatchTokens, recompute: Recompute) -> float:
    """Return the bytes one Llama layer keeps. `selective` repeats the attention core, of which flash
    attention keeps only its output and the log-sum-exp.
    """
    outer, inner, statistics = _llama_bytes_per_token(model, tokens.width_bytes)
    if recompute is Recompute.full:
        return tokens.count * model.hidden_size * tokens.width_bytes / tokens.outer
    if recompute is Recompute.selective:
        inner, statistics = inner - tokens.width_bytes * attention_width(model), 0
    return tokens.count * (outer / tokens.outer + (inner + statistics) / tokens.tp)


def _llama_bytes_per_token(model: ModelConfig, width: int) -> tuple[float, float, float]:
    hidden, query = model.hidden_size, attention_width(model)
    keys_and_values = key_value_width(model)
    outer = 4 * hidden * width
    inner = (2 * query + keys_and_values + 4 * feed_forward_width(model)) * width
    if model.num_experts:
        outer += 2 * model.num_experts_per_tok * hidden * width
    return outer, inner, 4 * model.num_attention_heads


def layer_bytes(model: ModelConfig, tokens: MicroBatchTokens, recompute: Recompute) -> float:
    """Return the bytes one layer keeps under flash attention.

    A GPT layer without scores is Korthikanti's `selective` form; nothing further is saved by `selective`.
    """
    if model.family is Family.llama:
        return llama_layer_bytes(model, tokens, recompute)
    kept = Recompute.selective if recompute is Recompute.none else recompute
    return gpt_layer_bytes(model.hidden_size, model.num_attention_heads, tokens, kept)


def fused_savings_bytes(model: ModelConfig, tokens: MicroBatchTokens, *, in_8_bits: bool) -> float:
    """Return what a Llama layer need not keep with Megatron's kernels: SiLU's output, which the fused product
    computes again from its inputs; `in_8_bits`: half of the inputs of the products, kept as they were
    multiplied. Attention keeps its output twice then: wide for itself and narrow for the projection.
    """
    if model.family is not Family.llama:
        return 0.0
    width, hidden, query = tokens.width_bytes, model.hidden_size, attention_width(model)
    outer, inner = 0.0, float(width * feed_forward_width(model))
    if in_8_bits:
        outer = 2 * hidden * (width - 1)
        inner += feed_forward_width(model) * (width - 1) - query
    return tokens.count * (outer / tokens.outer + inner / tokens.tp)


def scores_bytes(model: ModelConfig, tokens: MicroBatchTokens) -> float:
    """Return what a layer keeps of attention's scores where they pass through memory: the softmax, dropout's
    mask and its output (Korthikanti et al., 5·a·s²·b).
    """
    return 5 / 2 * tokens.width_bytes * model.num_attention_heads * tokens.seq_len * tokens.count / tokens.tp
