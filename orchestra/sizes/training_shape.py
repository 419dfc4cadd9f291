"""What one configuration trains and how it is divided: everything that the memory of a rank depends on.

Integers and names only, no device: `orchestra.sizes.memory` counts bytes of it, and the planner's `PlanCase`
adds the device, the network and the trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from conf.schema import (
    Config,
    ContextMethod,
    DType,
    Family,
    ModelConfig,
    Offload,
    OptimConfig,
    PipelineSchedule,
    PrecisionName,
    Recompute,
    Scaling,
    StateDType,
)
from orchestra.sizes.compilation import is_wanted
from orchestra.sizes.flops import (
    attention_width,
    expert_width,
    head_dim,
    num_dense_layers,
    num_parameters,
    value_width,
    without_experts,
)
from orchestra.sizes.pipeline_schedule import (
    PipelineShape,
    pipeline_shape,
    shape_of_pipeline,
    splits_backward,
)
from orchestra.sizes.stage_cut import cut_layers, ranges_of
from orchestra.sizes.topology import Layout, batch_shape, divisors, rank_share
from orchestra.sizes.units import GIB, MIB

# Assumed of a node's own disk: one NVMe drive (a cloud's read 2.8e9 and took 3 to 6e9, measured past the page
# cache in pieces of 256 MiB).
_DISK_BYTES_PER_S = 2.5e9
# Copies of a rank's state in memory: two complete ones and one that is being written. Ranks are never a whole
# copy apart: one that begins to write copy n has had gradients of the others for the step before it, so they
# have ended copy n − 2 at least and it still has that one.
NUM_SLOTS = 3
# Two moments in fp32.
_ADAM_BYTES = 8.0
# What optim=muon names: AdamW trains what stands outside of the layers.
_MUON = "orchestra.optim.muon:Muon"
# What cuBLAS wants of each size of an fp8 product.
FP8_MULTIPLE = 16


def fp8_tokens(config: Config, micro_batch_size: int) -> dict[str, int]:
    """Return the tokens that a rank's fp8 products take of a micro-batch, by how they are counted."""
    parallelism, name = config.parallelism, "train.micro_batch_size × train.seq_len"
    num_tokens = micro_batch_size * config.train.seq_len // parallelism.cp
    if parallelism.cp > 1:
        name = f"{name} / parallelism.cp"
    sizes = {name: num_tokens}
    if config.model.kv_lora_rank is not None and parallelism.sequence_parallel:
        # Latents are made of a rank's own part of the tokens.
        sizes[f"{name} / parallelism.tp"] = num_tokens // parallelism.tp
    return sizes


def open_micro_batch_sizes(config: Config, dp: int) -> list[int]:
    """Return what train.micro_batch_size=auto chooses from, ascending: the sizes that divide a rank's share
    of each global batch. None where fp8 has products of none of them.
    """
    train, parallelism = config.train, config.parallelism
    share, is_fp8 = rank_share(train, dp), config.precision.name is PrecisionName.fp8
    sizes = [
        size
        for size in divisors(share)
        if not is_fp8 or not any(number % FP8_MULTIPLE for number in fp8_tokens(config, size).values())
    ]
    # A pipeline whose ranks wait for most of a step is no choice, whatever fits.
    least = 2 * pipeline_shape(parallelism).num_stages if parallelism.pp > 1 else 1
    if train.noise_scale_every is not None and dp == 1:
        # Nor is one that leaves the noise of gradients nothing to compare a micro-batch with.
        least = max(least, 2)
    return [size for size in sizes if share // size >= least] or sizes[:1]


@dataclass(frozen=True)
class PipelineStage:
    """What one rank of a pipeline has: layers, and whether token embedding and output product are among it.

    `chunks`: which layers, of each of its stages, as orchestra's trainer cuts them; empty for other trainers.
    """

    index: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    chunks: tuple[range, ...] = ()

    def num_of_first(self, count: int) -> int:
        """Return how many of the model's first layers are among its own."""
        if self.chunks:
            return sum(max(0, min(layers.stop, count) - layers.start) for layers in self.chunks)
        return min(count, self.num_layers) if self.index == 0 else 0


def even_stages(num_layers: int, pp: int) -> tuple[PipelineStage, ...]:
    """Return `pp` stages of as many layers each as possible. Layers left over go to the middle: the ends have
    embedding and output product besides. More stages than layers leave some without any.
    """
    least, rest = divmod(num_layers, pp)
    first = max(0, (pp - rest) // 2)
    return tuple(
        PipelineStage(
            index,
            least + (first <= index < first + rest),
            has_embedding=index == 0,
            has_head=index == pp - 1,
        )
        for index in range(pp)
    )


@dataclass(frozen=True)
class RankParameters:
    """Elements of one tensor-parallel rank, padding of a cut vocabulary counted: what stands before the
    layers, each layer, and what stands after them. Experts are counted apart: other ranks share them.

    `of_experts` are those that the rank has of each layer, but for the first `num_dense` ones: these have
    `of_dense` instead of `of_layer`.
    """

    before: int
    layer: int
    after: int
    # The single tensors of a layer, in the model's order.
    of_layer: tuple[int, ...]
    of_experts: tuple[int, ...] = ()
    of_dense: tuple[int, ...] = ()
    num_dense: int = 0

    def of(self, stage: PipelineStage) -> int:
        """Return the elements of a pipeline stage, experts left out."""
        return self.ends_of(stage) + sum(self.layer_sizes_of(stage))

    def ends_of(self, stage: PipelineStage) -> int:
        """Return the elements of a stage that are in no layer."""
        return self.before * stage.has_embedding + self.after * stage.has_head

    def experts_of(self, stage: PipelineStage) -> int:
        """Return the elements of experts of a pipeline stage."""
        return self.num_mixtures_of(stage) * sum(self.of_experts)

    def num_mixtures_of(self, stage: PipelineStage) -> int:
        """Return how many layers of a stage have experts."""
        return stage.num_layers - stage.num_of_first(self.num_dense) if self.of_experts else 0

    def layer_sizes_of(self, stage: PipelineStage) -> list[int]:
        """Return the elements of each layer of a stage, in the model's order, experts left out."""
        num_dense = stage.num_of_first(self.num_dense)
        return [sum(self.of_dense)] * num_dense + [sum(self.of_layer)] * (stage.num_layers - num_dense)

    def layers_of(self, stage: PipelineStage) -> tuple[tuple[int, ...], ...]:
        """Return the tensors of each layer of a stage, in the model's order, experts left out."""
        num_dense = stage.num_of_first(self.num_dense)
        return (self.of_dense,) * num_dense + (self.of_layer,) * (stage.num_layers - num_dense)


def rank_parameters(
    model: ModelConfig, tp: int, ep: int = 1, *, has_both_ends: bool = True
) -> RankParameters:
    """Return what one of `tp` ranks has, and of `ep` that share out experts: heads, inner width and words are
    cut, norms, latents, routers and the biases of sums are whole, and a rank has at least one key-value head.
    A tied table stands once where both ends are on one stage.
    """
    hidden = model.hidden_size
    table = math.ceil(model.vocab_size / tp) * hidden
    norm = (hidden, hidden) if model.family is Family.gpt else (hidden,)
    positions = model.max_position_embeddings * hidden if model.family is Family.gpt else 0
    tensors = (*norm, *_attention_tensors(model, tp), *norm, *_feed_forward_tensors(model, tp))
    if model.block_parameters is not None:
        tensors = (model.block_parameters // model.num_hidden_layers,)
    head = 0 if model.tie_word_embeddings and has_both_ends else table
    dense = without_experts(model)
    num_dense = num_dense_layers(model)
    of_dense = (*norm, *_attention_tensors(model, tp), *norm, *_feed_forward_tensors(dense, tp))
    expert = math.ceil(model.num_experts / ep) * hidden * math.ceil(expert_width(model) / tp)
    return RankParameters(
        before=table + positions,
        layer=sum(tensors),
        after=sum(norm) + head,
        of_layer=tensors,
        of_experts=(expert,) * 3 if model.num_experts else (),
        of_dense=of_dense if num_dense else (),
        num_dense=num_dense,
    )


def rounded_elements(model: ModelConfig, tp: int, ep: int, *, has_experts: bool) -> int:
    """Return the elements of a rank's matrices of one layer that products in fp8 round: no router."""
    shaped = model if has_experts else without_experts(model)
    hidden, is_gpt = model.hidden_size, model.family is Family.gpt
    vectors = 2 * head_dim(model) if model.qk_norm else 0
    if model.kv_lora_rank is not None:
        vectors = model.kv_lora_rank + (model.q_lora_rank or 0)
    if is_gpt:
        kv = head_dim(model) * max(model.num_key_value_heads // tp, 1)
        vectors = attention_width(model) // tp + 2 * kv + math.ceil(model.intermediate_size / tp) + 2 * hidden
    tensors = sum(_attention_tensors(model, tp)) + sum(_feed_forward_tensors(shaped, tp))
    experts = sum(rank_parameters(shaped, tp, ep).of_experts)
    return tensors - vectors - shaped.num_experts * hidden + experts


def _attention_tensors(model: ModelConfig, tp: int) -> tuple[int, ...]:
    hidden, query = model.hidden_size, attention_width(model) // tp
    if model.kv_lora_rank is not None:
        latent, rank = model.kv_lora_rank, model.q_lora_rank
        queries = (hidden * query,) if rank is None else (hidden * rank, rank, rank * query)
        both = model.num_attention_heads // tp * (model.qk_nope_head_dim + model.v_head_dim)
        keys = (hidden * (latent + model.qk_rope_head_dim), latent, latent * both)
        return (*queries, *keys, value_width(model) // tp * hidden)
    kv = head_dim(model) * max(model.num_key_value_heads // tp, 1)
    if model.family is Family.gpt:
        return (hidden * query, query, hidden * kv, kv, hidden * kv, kv, hidden * query, hidden)
    matrices = (hidden * query, hidden * kv, hidden * kv, hidden * query)
    return matrices + ((head_dim(model),) * 2 if model.qk_norm else ())


def _feed_forward_tensors(model: ModelConfig, tp: int) -> tuple[int, ...]:
    """What every rank has of a feed-forward or a mixture: of the latter router and shared expert."""
    hidden, wide = model.hidden_size, math.ceil(model.intermediate_size / tp)
    if model.family is Family.gpt:
        return (hidden * wide, wide, hidden * wide, hidden)
    if not model.num_experts:
        return (hidden * wide,) * 3
    shared = model.shared_expert_intermediate_size
    return (model.num_experts * hidden, *((hidden * math.ceil(shared / tp),) * 3 if shared else ()))


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element as this trainer keeps it. `masters`: 0 where they are the parameters."""

    parameters: int
    gradients: int
    masters: int


_WIDTHS = {
    PrecisionName.fp32: ElementBytes(4, 4, 0),
    PrecisionName.bf16: ElementBytes(2, 2, 4),
    PrecisionName.bf16_fp32_grad: ElementBytes(2, 4, 4),
    PrecisionName.fp16: ElementBytes(2, 2, 4),
    # Rounded weights are counted apart.
    PrecisionName.fp8: ElementBytes(2, 2, 4),
}


def widths(precision: PrecisionName) -> ElementBytes:
    """Return the widths of a precision policy."""
    return _WIDTHS[precision]


@dataclass(frozen=True)
class TrainerOptions:
    """What only orchestra's own trainer can be told; the defaults are the schema's.

    `moment_bytes`: of an element of each of the optimizer's two moments, or half of what another one keeps;
    `is_plugged`: it is another one, and takes all gradients in fp32. `more_at_ends`: what it keeps more of an
    element outside of the layers. `reduce_bytes`: of an element of the
    gradients while they are summed over ranks, None: as they accumulate. `activation_bytes`: the budget that
    decides what is recomputed, None: `recompute` decides, in each `recompute_every`-th layer.
    `loss_chunk_tokens`: None: chosen from the vocabulary. `keeps_fp8_inputs`: of fp8 products the rounded
    inputs are kept. `saves`: images of the state are staged in host memory while training continues;
    `copies`: it is copied there every few steps (`recovery.memory_copy_every_steps`).
    `is_compiled`: blocks and loss. `fp8_scaling` and the two after it are precision=fp8's.
    `disk_bytes_per_s`: what a node's disk reads and writes, for state that lies there. `replays`: other
    ranks' micro-batches are computed again. `cp_method`: what context parallelism sends.
    """

    moment_bytes: float = 4
    is_plugged: bool = False
    more_at_ends: float = 0
    reduce_bytes: int | None = None
    bucket_bytes: float = 25 * MIB
    recompute_every: int = 1
    activation_bytes: float | None = None
    loss_chunk_tokens: int | None = None
    keeps_fp8_inputs: bool = True
    fp8_bf16_blocks: int = 0
    offload: Offload = Offload.none
    saves: bool = False
    copies: bool = False
    is_gpu: bool = True
    is_compiled: bool = True
    fp8_scaling: Scaling = Scaling.tensor
    fp8_delayed_scaling: bool = False
    fp8_output: bool = False
    disk_bytes_per_s: float = _DISK_BYTES_PER_S
    replays: bool = False
    cp_method: ContextMethod = ContextMethod.all_gather


@dataclass(frozen=True)
class MicroBatchTokens:
    """The tokens of one micro-batch on one rank: sequences, the part of each sequence that this rank holds
    (context parallelism divides sequences), and how tensor parallelism divides what is computed from them.
    `width_bytes` is of one element of an activation.
    """

    num_sequences: int
    seq_len: float
    tp: int = 1
    sequence_parallel: bool = False
    width_bytes: int = 2

    @property
    def count(self) -> float:
        """Tokens of one micro-batch on one rank."""
        return self.num_sequences * self.seq_len

    @property
    def outer(self) -> int:
        """What divides tensors between tensor-parallel regions: tp with sequence parallelism, else 1."""
        return self.tp if self.sequence_parallel else 1


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """A model, a layout and a batch. Sizes in sequences and tokens; `num_shards` ranks share ZeRO's part.

    What follows from it and is asked for again and again is kept: a search looks at thousands of them.
    """

    model: ModelConfig
    layout: Layout
    seq_len: int
    micro_batch_size: int
    accumulation: int
    zero: int
    num_shards: int
    sequence_parallel: bool
    recompute: Recompute
    precision: PrecisionName
    options: TrainerOptions = TrainerOptions()
    # Of a pipeline; `cut`: layers of each stage, None: by their cost.
    schedule: PipelineSchedule = PipelineSchedule["1f1b"]
    virtual_stages: int = 1
    cut: tuple[int, ...] | None = None

    @cached_property
    def tokens(self) -> MicroBatchTokens:
        """The tokens of one micro-batch on one rank."""
        layout, width = self.layout, 4 if self.precision is PrecisionName.fp32 else 2
        return MicroBatchTokens(
            self.micro_batch_size, self.seq_len / layout.cp, layout.tp, self.sequence_parallel, width
        )

    @property
    def num_expert_shards(self) -> int:
        """Ranks that share ZeRO's part of the same experts."""
        return max(1, self.num_shards // self.layout.ep)

    @property
    def layers_in_fp8(self) -> range:
        """The layers of the model whose products are in fp8."""
        first = self.options.fp8_bf16_blocks
        is_fp8 = self.precision is PrecisionName.fp8
        return range(first, self.model.num_hidden_layers - first if is_fp8 else first)

    @property
    def gathers_fp8(self) -> bool:
        """Whether ZeRO-3 gathers the matrices of products in fp8 as their numbers of one byte."""
        options = self.options
        is_split = self.zero == 3 and self.num_shards > 1
        is_rounded = self.precision is PrecisionName.fp8 and options.fp8_scaling is Scaling.tensor
        return is_split and is_rounded and options.offload is Offload.none

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.seq_len * self.micro_batch_size * self.accumulation * self.layout.dp

    @property
    def makes_gradients_late(self) -> bool:
        """Whether each gradient is there from the first backward pass of a step to its update only, and some
        are not when a rank holds most: that of a rank whose parameters no other one has, with nothing kept in
        another type or on a host, and one micro-batch or a pipeline of them.
        """
        is_alone = self.layout.dp * self.layout.cp == 1 and (self.layout.pp > 1 or self.accumulation == 1)
        width = widths(self.precision)
        return is_alone and width.gradients == width.parameters and self.options.offload is Offload.none

    @cached_property
    def pipeline(self) -> PipelineShape:
        """Which rank of the pipeline has which stages."""
        return shape_of_pipeline(self.schedule, self.layout.pp, self.virtual_stages)

    @property
    def has_table_apart(self) -> bool:
        """Whether ranks of a pipeline have a table that is a unit by itself, tied or with gradients of
        weights that are taken later: its gradients accumulate in full until the step ends.
        """
        return self.layout.pp > 1 and (self.model.tie_word_embeddings or splits_backward(self.schedule))

    def table_apart(self, stage: PipelineStage) -> int:
        """Return the elements of that table on a rank; 0 where there is none."""
        is_here = stage.has_head or (stage.has_embedding and self.model.tie_word_embeddings)
        table = math.ceil(self.model.vocab_size / self.layout.tp) * self.model.hidden_size
        return table if self.has_table_apart and is_here else 0

    def without_table_apart(self, stage: PipelineStage, parts: RankParameters) -> RankParameters:
        """Return what else a rank of a stage has."""
        table = self.table_apart(stage)
        if stage.has_embedding and self.model.tie_word_embeddings:
            return replace(parts, before=parts.before - table)
        return replace(parts, after=parts.after - table)

    @cached_property
    def stages(self) -> tuple[PipelineStage, ...]:
        """What each rank of the pipeline has in orchestra's trainer."""
        cut = self.cut or cut_layers(self.model, self.seq_len, self.recompute, self.pipeline.num_stages)
        return _stages_of_ranks(self.pipeline, cut)


@lru_cache(maxsize=4096)
def _stages_of_ranks(shape: PipelineShape, cut: tuple[int, ...]) -> tuple[PipelineStage, ...]:
    layers, last = ranges_of(cut), shape.num_stages - 1
    own = [shape.stages_of(rank) for rank in range(shape.num_ranks)]
    return tuple(
        PipelineStage(
            rank,
            sum(len(layers[stage]) for stage in stages),
            has_embedding=0 in stages,
            has_head=last in stages,
            chunks=tuple(layers[stage] for stage in stages),
        )
        for rank, stages in enumerate(own)
    )


def gradient_units(
    shape: TrainingShape, stage: PipelineStage, parts: RankParameters, gradient_bytes: int
) -> tuple[float, ...]:
    """Return the sizes of the units that gradients are summed in, from the model's end: whole blocks where
    ZeRO-3 gathers them, else buckets of at least so many bytes; experts, whose units are their own, first.
    Without those that no other rank has. `gradient_bytes`: of an element of the gradients.
    """
    has_own_experts = shape.num_expert_shards == 1 and shape.layout.ep > 1
    mixtures = 0 if has_own_experts else parts.num_mixtures_of(stage)
    if shape.zero == 3 and shape.num_shards > 1:
        ends = (parts.after * stage.has_head, parts.before * stage.has_embedding)
        experts = (sum(parts.of_experts),) * min(2, mixtures)
        largest = sorted(parts.layer_sizes_of(stage))[-2:]
        return (*experts, ends[0], *largest, ends[1])
    return _units_of_buckets(stage, parts, mixtures, shape.options.bucket_bytes / gradient_bytes)


def largest_owned(
    shape: TrainingShape, stage: PipelineStage, parts: RankParameters, gradient_bytes: int
) -> float:
    """Return the elements of the largest range of a unit that a rank owns, which is updated in one go.
    `gradient_bytes`: of an element of the gradients.
    """
    shards, of_experts = (shape.num_shards, shape.num_expert_shards) if shape.zero else (1, 1)
    others = gradient_units(shape, stage, replace(parts, of_experts=()), gradient_bytes)
    experts = parts.of_experts * parts.num_mixtures_of(stage)
    if shape.zero == 3 and shape.num_shards > 1:
        units: tuple[float, ...] = (sum(parts.of_experts),) if experts else ()
    else:
        units = buckets(experts, shape.options.bucket_bytes / gradient_bytes)
    return max(max(others, default=0.0) / max(1, shards), max(units, default=0.0) / max(1, of_experts))


@lru_cache(maxsize=1024)
def _units_of_buckets(
    stage: PipelineStage, parts: RankParameters, num_mixtures: int, least: float
) -> tuple[float, ...]:
    ends = (parts.after * stage.has_head, parts.before * stage.has_embedding)
    of_experts = buckets(parts.of_experts * num_mixtures, least)
    layers = parts.layers_of(stage)
    others = (ends[0], *(each for tensors in layers[::-1] for each in tensors[::-1]), ends[1])
    return (*of_experts, *buckets(others, least))


@lru_cache(maxsize=1024)
def buckets(tensors: tuple[int, ...], least: float) -> tuple[float, ...]:
    """Return the elements of units that tensors fill one after the other, each with at least so many but the
    last one.
    """
    sizes, filling = [], 0.0
    for size in tensors:
        filling += size
        if filling >= least:
            sizes.append(filling)
            filling = 0.0
    return (*sizes, filling) if filling else tuple(sizes)


def training_shape(config: Config, degrees: Layout, *, is_gpu: bool) -> TrainingShape:
    """Return the shape of a configuration on a layout. Raises ConfigError where the batch does not divide."""
    batch, parallelism = batch_shape(config.train, degrees.dp), config.parallelism
    return TrainingShape(
        model=config.model,
        layout=degrees,
        seq_len=config.train.seq_len,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        zero=parallelism.zero,
        num_shards=parallelism.shard_degree or degrees.dp * degrees.cp,
        sequence_parallel=parallelism.sequence_parallel,
        recompute=config.train.recompute,
        precision=config.precision.name,
        options=trainer_options(config, is_gpu=is_gpu),
        schedule=parallelism.schedule,
        virtual_stages=parallelism.virtual_stages,
        cut=None if parallelism.stages is None else tuple(parallelism.stages),
    )


def optimizer_bytes(optim: OptimConfig) -> float:
    """Return the bytes of state that the optimizer keeps for a parameter of a layer, beside its master."""
    if optim.target is not None:
        given = optim.state_bytes_per_parameter
        return _ADAM_BYTES if given is None else given
    return _ADAM_BYTES / 2 if optim.state_dtype is StateDType.bf16 else _ADAM_BYTES


def end_optimizer_bytes(optim: OptimConfig) -> float:
    """Return the same of a parameter outside of the layers: the tables and the last norm."""
    return _ADAM_BYTES if optim.target == _MUON else optimizer_bytes(optim)


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of one checkpoint's parameters, fp32 masters that they are, and optimizer state."""
    model, each = config.model, optimizer_bytes(config.optim)
    more = end_optimizer_bytes(config.optim) - each
    parts = rank_parameters(model, 1) if more else None
    at_ends = 0.0 if parts is None else (parts.before + parts.after) * more
    return round(num_parameters(model) * (4 + each) + at_ends)


def saved_bytes_per_parameter(config: Config) -> float:
    """Return the bytes of a parameter's fp32 master and of its optimizer's state, in the mean."""
    return checkpoint_bytes(config) / max(1, num_parameters(config.model))


def trainer_options(config: Config, *, is_gpu: bool) -> TrainerOptions:
    """Return what a configuration says that only orchestra's own trainer has."""
    train, precision = config.train, config.precision
    budget, reduce = train.recompute_budget_gib, precision.reduce_dtype
    every = config.checkpoint.every_steps
    # A save at the last step alone has no training beside it.
    is_saved = every is not None and (isinstance(every, str) or every < train.steps)
    return TrainerOptions(
        moment_bytes=optimizer_bytes(config.optim) / 2,
        is_plugged=config.optim.target is not None,
        more_at_ends=end_optimizer_bytes(config.optim) - optimizer_bytes(config.optim),
        reduce_bytes=None if reduce is None else 4 if reduce is DType.fp32 else 2,
        bucket_bytes=config.parallelism.bucket_mib * MIB,
        recompute_every=train.recompute_every,
        activation_bytes=None if budget is None else budget * GIB,
        loss_chunk_tokens=train.loss_chunk_tokens,
        keeps_fp8_inputs=precision.fp8_scaling is Scaling.tensor,
        fp8_bf16_blocks=precision.fp8_bf16_blocks,
        offload=config.parallelism.offload,
        saves=config.checkpoint.async_save and is_saved,
        copies=config.recovery.memory_copy_every_steps is not None,
        is_gpu=is_gpu,
        is_compiled=is_wanted(train.compile, "cuda" if is_gpu else "cpu"),
        fp8_scaling=precision.fp8_scaling,
        fp8_delayed_scaling=precision.fp8_delayed_scaling,
        fp8_output=precision.fp8_output,
        disk_bytes_per_s=config.cluster.disk_bytes_per_s or _DISK_BYTES_PER_S,
        replays=config.recovery.replay_every_steps is not None,
        cp_method=config.parallelism.cp_method,
    )
