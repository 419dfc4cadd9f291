"""Rules about how model, layout and batch fit together: everything that must divide something."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from conf.schema import (
    Config,
    ContextMethod,
    Device,
    DType,
    Family,
    MoeAuxScope,
    Offload,
    PrecisionName,
    RampRate,
    Recompute,
    Scaling,
)
from orchestra.config.machine import Situation, data_parallel, world_size
from orchestra.errors import ConfigError
from orchestra.sizes.activations import budget_problems, layer_activations
from orchestra.sizes.flops import head_dim, inner_widths, value_width
from orchestra.sizes.pipeline_schedule import pipeline_shape, shape_problem, splits_backward
from orchestra.sizes.stage_cut import stages_problems
from orchestra.sizes.topology import (
    batch_problems,
    batch_shape,
    degree_problems,
    divisors,
    has_open_micro_batch,
    layout_problems,
    listed,
    nearest_multiples,
    rank_share,
    sharding_problems,
)
from orchestra.sizes.training_shape import FP8_MULTIPLE, fp8_tokens, open_micro_batch_sizes


def rule_heads(config: Config, _: Situation) -> Iterator[str]:
    model = config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if not _positive(model.hidden_size, heads):
        return
    if model.head_dim is None and model.kv_lora_rank is None and model.hidden_size % heads:
        yield (
            f"model.num_attention_heads={heads} does not divide model.hidden_size={model.hidden_size}; use "
            f"{listed(divisors(model.hidden_size))} heads, or set model.head_dim"
        )
    elif model.family is Family.llama and model.kv_lora_rank is None and head_dim(model) % 2:
        yield (
            f"a head of {head_dim(model)} numbers is odd and rotary positions turn pairs; choose "
            f"model.num_attention_heads so that hidden_size / heads is even, or set model.head_dim"
        )
    if _positive(kv_heads) and heads % kv_heads:
        yield (
            f"model.num_key_value_heads={kv_heads} does not divide model.num_attention_heads={heads}; use "
            f"{listed(divisors(heads))}"
        )


def rule_positions(config: Config, _: Situation) -> Iterator[str]:
    model, seq_len = config.model, config.train.seq_len
    longest = model.max_position_embeddings
    if model.family is Family.gpt and seq_len > longest:
        yield (
            f"train.seq_len={seq_len} is longer than the {longest} learned positions of the model; use at "
            f"most {longest}, or raise model.max_position_embeddings"
        )


def rule_tensor_parallel(config: Config, _: Situation) -> Iterator[str]:
    model, tp = config.model, config.parallelism.tp
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if not _positive(tp, heads, kv_heads, model.intermediate_size):
        return
    sizes = {"num_attention_heads": heads, **inner_widths(model)}
    for name, size in sizes.items():
        if size > 0 and size % tp:
            # Beyond 64 nobody splits a layer.
            fitting = listed([degree for degree in divisors(size) if degree <= 64])
            yield f"parallelism.tp={tp} does not divide model.{name}={size}; use {fitting}"
    if kv_heads % tp and tp % kv_heads:
        degrees = [degree for degree in divisors(heads) if kv_heads % degree == 0 or degree % kv_heads == 0]
        yield (
            f"parallelism.tp={tp} and model.num_key_value_heads={kv_heads}: neither divides the other; use "
            f"tp={listed(degrees)}"
        )


def rule_sequence_parallel(config: Config, _: Situation) -> Iterator[str]:
    parallelism, seq_len = config.parallelism, config.train.seq_len
    tp = parallelism.tp
    if not parallelism.sequence_parallel or not _positive(tp, seq_len):
        return
    if tp == 1:
        yield (
            "parallelism.sequence_parallel=true needs parallelism.tp of 2 or more; set "
            "parallelism.sequence_parallel=false or choose tp"
        )
    elif seq_len % tp and config.parallelism.cp == 1:
        yield (
            f"train.seq_len={seq_len} is not divisible by parallelism.tp={tp}, as sequence_parallel=true "
            f"needs; use {listed(nearest_multiples(seq_len, tp))}"
        )


def rule_context_parallel(config: Config, _: Situation) -> Iterator[str]:
    """Each rank has two pieces of a sequence, and tp cuts the two together again."""
    parallelism, seq_len = config.parallelism, config.train.seq_len
    cp, tp = parallelism.cp, parallelism.tp
    if not _positive(cp, tp, seq_len) or cp == 1:
        return
    unit, why = 2 * cp, f"2·cp pieces (parallelism.cp={cp})"
    if parallelism.sequence_parallel and (tp_unit := cp * math.lcm(2, tp)) != unit:
        unit, why = tp_unit, f"{why}, and each rank's two by parallelism.tp={tp} again"
    if seq_len % unit:
        yield (
            f"train.seq_len={seq_len} cannot be cut into {why}; use "
            f"{listed(nearest_multiples(seq_len, unit))}"
        )


def rule_context_method(config: Config, _: Situation) -> Iterator[str]:
    model, parallelism = config.model, config.parallelism
    cp, tp = parallelism.cp, parallelism.tp
    heads = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
    }
    if parallelism.cp_method is not ContextMethod.ulysses or not _positive(cp, tp, *heads.values()):
        return
    if cp == 1:
        return
    for name, number in heads.items():
        if number % (tp * cp):
            yield (
                f"parallelism.cp_method=ulysses shares out heads over tp·cp = {tp}·{cp} ranks, and that does "
                f"not divide model.{name}={number}; use parallelism.cp_method=all_gather"
            )


def rule_pipeline(config: Config, _: Situation) -> Iterator[str]:
    """Stages that the schedule can order, each with a layer of its own, of which a cut by hand has all."""
    parallelism, layers = config.parallelism, config.model.num_hidden_layers
    pp, each = parallelism.pp, parallelism.virtual_stages
    if not _positive(pp, layers, each):
        return
    if pp == 1 and each > 1:
        yield (
            f"parallelism.virtual_stages={each} with parallelism.pp=1, which is no pipeline; use "
            "virtual_stages=1, or a larger pp"
        )
        return
    shape = pipeline_shape(parallelism)
    if pp > 1 and (problem := shape_problem(parallelism.schedule, shape, each)):
        yield problem
    elif pp > layers:
        yield f"parallelism.pp={pp} is more than model.num_hidden_layers={layers}; use at most {layers}"
    elif shape.num_stages > layers:
        yield (
            f"parallelism.pp={pp} with {shape.num_chunks} stages on each rank are {shape.num_stages} stages, "
            f"more than model.num_hidden_layers={layers}; use fewer of either, or another "
            "parallelism.schedule"
        )
    elif parallelism.stages is not None:
        yield from stages_problems(parallelism.stages, shape, layers)


def rule_in_pipeline(config: Config, _: Situation) -> Iterator[str]:
    """What a rank cannot do that has some stages of the model only."""
    if config.parallelism.pp == 1:
        return
    found = f"with parallelism.pp={config.parallelism.pp}"
    if config.recovery.replay_every_steps is not None:
        yield (
            f"recovery.replay_every_steps={config.recovery.replay_every_steps} {found}: a micro-batch goes "
            "through all ranks of a pipeline, and no other one could compute it again; use null"
        )
    if config.precision.fp8_delayed_scaling:
        yield (
            f"precision.fp8_delayed_scaling=true {found}: stages of unequal lengths do not share their "
            "history of sizes; use false"
        )
    if config.train.recompute_budget_gib is not None:
        yield (
            f"train.recompute_budget_gib={config.train.recompute_budget_gib:g} {found}: each rank keeps the "
            "activations of another number of micro-batches; use train.recompute=selective or full, with "
            "train.recompute_every if some layers suffice"
        )


def rule_layout(config: Config, _: Situation) -> Iterator[str]:
    """World size ≠ nodes × gpus_per_node; where ranks per node are unknown, only what is wrong anyway."""
    parallelism = config.parallelism
    ranks = world_size(config)
    if ranks is not None:
        yield from layout_problems(parallelism, ranks, config.model.num_experts)
    else:
        yield from degree_problems(parallelism)


def rule_sharding(config: Config, _: Situation) -> Iterator[str]:
    """Where ranks are known `rule_layout` says what is wrong with the degree on so many."""
    parallelism, degree = config.parallelism, config.parallelism.shard_degree
    if parallelism.zero == 0 and degree is not None and degree >= 1:
        yield f"parallelism.shard_degree={degree} needs parallelism.zero=1, 2 or 3; set it, or use null"
    if world_size(config) is None and not any(degree_problems(parallelism)):
        yield from sharding_problems(parallelism, None)


def rule_offload(config: Config, _: Situation) -> Iterator[str]:
    parallelism, dp = config.parallelism, data_parallel(config)
    if parallelism.offload is not Offload.all:
        return
    if parallelism.zero != 3:
        yield (
            f"parallelism.offload=all needs parallelism.zero=3, not {parallelism.zero}: other stages keep "
            "whole parameters on each GPU; set it, or use parallelism.offload=optimizer"
        )
    elif parallelism.shard_degree == 1 or (dp == 1 and parallelism.cp == 1):
        yield (
            "parallelism.offload=all with one rank to shard over: all parameters are its own and on its GPU; "
            "use parallelism.offload=optimizer"
        )


def rule_fp8(config: Config, _: Situation) -> Iterator[str]:
    """cuBLAS takes fp8 matrices whose sizes 16 divides."""
    precision, model, tp = config.precision, config.model, config.parallelism.tp
    heads, kv_heads, seq_len = model.num_attention_heads, model.num_key_value_heads, config.train.seq_len
    if precision.name is not PrecisionName.fp8 or not _positive(
        heads, kv_heads, tp, model.hidden_size, seq_len
    ):
        return
    if 2 * precision.fp8_bf16_blocks >= model.num_hidden_layers:
        yield (
            f"precision.fp8_bf16_blocks={precision.fp8_bf16_blocks} at each end leaves no block of "
            f"model.num_hidden_layers={model.num_hidden_layers} in fp8; use fewer, or precision=bf16"
        )
    sizes = {
        "model.hidden_size": model.hidden_size,
        **{f"model.{key} / parallelism.tp": width // tp for key, width in inner_widths(model).items()},
        "the heads' width / parallelism.tp": head_dim(model) * heads // tp,
        **_fp8_keys(config),
        **_fp8_tokens(config),
        **_fp8_output(config),
    }
    for name, size in sizes.items():
        if size > 0 and size % FP8_MULTIPLE:
            yield (
                f"precision=fp8 takes products of sizes that {FP8_MULTIPLE} divides, and {name} = {size} is "
                f"not one; use {listed(nearest_multiples(size, FP8_MULTIPLE))}, or precision=bf16"
            )
    yield from _fp8_open(config)


def rule_fp8_choices(config: Config, _: Situation) -> Iterator[str]:
    """A row of tokens is another one in the next micro-batch, and has no largest number of the last step."""
    precision = config.precision
    keys = {"fp8_delayed_scaling": precision.fp8_delayed_scaling, "fp8_output": precision.fp8_output}
    if precision.name is not PrecisionName.fp8:
        for key in (key for key, is_chosen in keys.items() if is_chosen):
            yield (
                f"precision.{key}=true with precision={precision.name.name}, which has no products in fp8; "
                f"use precision=fp8, or precision.{key}=false"
            )
    elif precision.fp8_delayed_scaling and precision.fp8_scaling is Scaling.row:
        yield (
            "precision.fp8_delayed_scaling=true with precision.fp8_scaling=row: rows of tokens have no "
            "largest number of the last step; use precision.fp8_scaling=tensor, or "
            "precision.fp8_delayed_scaling=false"
        )


def _fp8_keys(config: Config) -> dict[str, int]:
    """Return the sizes of the products that make keys and values, and the latents of latent attention."""
    model, tp = config.model, config.parallelism.tp
    latent, heads = model.kv_lora_rank, model.num_attention_heads
    if latent is None:
        width = head_dim(model) * max(1, model.num_key_value_heads // tp)
        return {"the key-value heads' width / parallelism.tp": width}
    both = model.qk_nope_head_dim + model.v_head_dim
    return {
        **({} if model.q_lora_rank is None else {"model.q_lora_rank": model.q_lora_rank}),
        "model.kv_lora_rank": latent,
        "model.kv_lora_rank + model.qk_rope_head_dim": latent + model.qk_rope_head_dim,
        "heads × (model.qk_nope_head_dim + model.v_head_dim) / parallelism.tp": heads * both // tp,
        "heads × model.v_head_dim / parallelism.tp": value_width(model) // tp,
    }


def _fp8_tokens(config: Config) -> dict[str, int]:
    dp = data_parallel(config)
    if dp is None or has_open_micro_batch(config.train):
        return {}
    try:
        batch = batch_shape(config.train, dp)
    except ConfigError:
        return {}
    return fp8_tokens(config, batch.micro_batch_size)


def _fp8_open(config: Config) -> Iterator[str]:
    """Of the sizes that the ranks choose from one at least must do."""
    dp = data_parallel(config)
    if dp is None or not has_open_micro_batch(config.train):
        return
    try:
        batch_shape(replace(config.train, micro_batch_size=1), dp)
    except ConfigError:
        # Of a batch that the ranks cannot share out another rule tells.
        return
    if not open_micro_batch_sizes(config, dp):
        share, names = rank_share(config.train, dp), list(fp8_tokens(config, 1))
        yield (
            f"precision=fp8 with train.micro_batch_size=auto: {FP8_MULTIPLE} divides {names[-1]} for none of "
            f"the sizes that divide a rank's {share} sequence(s); use a larger global batch, a train.seq_len "
            f"with more factors of 2, or precision=bf16"
        )


def _fp8_output(config: Config) -> dict[str, int]:
    """Return the sizes of the output product: words of a rank, and tokens whose logits exist at once."""
    if not config.precision.fp8_output:
        return {}
    words, chunk = -(-config.model.vocab_size // config.parallelism.tp), config.train.loss_chunk_tokens
    sizes = {"model.vocab_size / parallelism.tp": words}
    return sizes if chunk is None else {**sizes, "train.loss_chunk_tokens": chunk}


def rule_reduce_dtype(config: Config, _: Situation) -> Iterator[str]:
    """fp16 holds nothing below 6e-8: without loss scaling most gradients would vanish on their way."""
    precision = config.precision
    if precision.reduce_dtype is DType.fp16 and precision.name is not PrecisionName.fp16:
        yield (
            f"precision.reduce_dtype=fp16 with precision={precision.name.name}, which does not scale its "
            "loss: gradients would vanish; use bf16, fp32 or null"
        )


def rule_batch(config: Config, situation: Situation) -> Iterator[str]:
    """GBS = MBS × GA × DP for a whole GA, in each batch that is still trained."""
    train = config.train
    if not _positive(train.seq_len):
        return
    named = {"train.global_batch_tokens": train.global_batch_tokens}
    if train.batch_ramp:
        named = {
            f"train.batch_ramp[{number}].global_batch_tokens": stage.global_batch_tokens
            for number, stage in enumerate(train.batch_ramp)
        }
    parts = {name: tokens for name, tokens in named.items() if tokens is not None and tokens % train.seq_len}
    for name, tokens in parts.items():
        if tokens >= 1:
            yield (
                f"{name}={tokens} is not a whole number of sequences of "
                f"train.seq_len={train.seq_len}; use {listed(nearest_multiples(tokens, train.seq_len))}"
            )
    if parts or any(tokens is not None and tokens < 1 for tokens in named.values()):
        return
    # Where the layout is not known or itself wrong, what must hold for any is checked.
    yield from batch_problems(train, data_parallel(config) or 1, situation.from_step)


def rule_batch_ramp(config: Config, _: Situation) -> Iterator[str]:
    ramp = config.train.batch_ramp
    if not ramp:
        if config.optim.batch_ramp_lr is not RampRate.none:
            yield (
                f"optim.batch_ramp_lr={config.optim.batch_ramp_lr.name} without train.batch_ramp: the batch "
                "does not change; give a ramp, or use optim.batch_ramp_lr=none"
            )
        return
    if ramp[0].tokens != 0:
        yield f"train.batch_ramp[0].tokens={ramp[0].tokens}: a run begins at 0 tokens; use tokens: 0"
    for number, (before, stage) in enumerate(itertools.pairwise(ramp), 1):
        for name in ("tokens", "global_batch_tokens"):
            low, found = getattr(before, name), getattr(stage, name)
            if found <= low:
                yield (
                    f"train.batch_ramp[{number}].{name}={found} is not above the {low} of the batch before; "
                    "use one that is larger, or leave that batch out"
                )
    for number, stage in enumerate(ramp):
        if stage.global_batch_tokens < 1:
            name = f"train.batch_ramp[{number}].global_batch_tokens"
            yield f"{name}={stage.global_batch_tokens} is too small; use 1 or more"


def rule_noise_scale(config: Config, _: Situation) -> Iterator[str]:
    """A small batch is a rank's first micro-batch: whole sequences, all of whose gradients are there."""
    train, parallelism = config.train, config.parallelism
    every = train.noise_scale_every
    if every is None or train.seq_len < 1:
        return
    if config.model.num_experts and config.model.moe_aux_scope is MoeAuxScope.batch:
        yield (
            f"train.noise_scale_every={every} with model.moe_aux_scope=batch: each rank's gradients have all "
            "ranks' choices in them; use moe_aux_scope=sequence, or train.noise_scale_every=null"
        )
    for axis in ("cp", "ep"):
        degree = getattr(parallelism, axis)
        if degree > 1:
            yield (
                f"train.noise_scale_every={every} with parallelism.{axis}={degree}: no rank "
                f"has a gradient of its own sequences alone; use parallelism.{axis}=1 or "
                "train.noise_scale_every=null"
            )
    if parallelism.pp > 1 and (config.model.tie_word_embeddings or splits_backward(parallelism.schedule)):
        yield (
            f"train.noise_scale_every={every} with parallelism.pp={parallelism.pp}: the output matrix has no "
            "gradient of one micro-batch with a tied embedding or a schedule that splits the backward pass; "
            "use parallelism.schedule=1f1b and model.tie_word_embeddings=false, or leave it out"
        )
    dp = data_parallel(config)
    if dp is None or has_open_micro_batch(train):
        return
    try:
        batch = batch_shape(train, dp)
    except ConfigError:
        return
    if batch.global_batch_size == batch.micro_batch_size:
        yield (
            f"train.noise_scale_every={every}: the global batch is one micro-batch of "
            f"{batch.micro_batch_size}, and two sizes are compared; use a smaller train.micro_batch_size"
        )


def rule_recompute(config: Config, _: Situation) -> Iterator[str]:
    train = config.train
    if train.recompute is Recompute.none and train.recompute_every > 1:
        yield (
            f"train.recompute_every={train.recompute_every} says which layers to recompute, and "
            "train.recompute=none says not to; use train.recompute=selective or full"
        )
    if train.recompute_budget_gib is None:
        return
    others = [f"train.recompute={train.recompute.name}"] if train.recompute is not Recompute.none else []
    others += [f"train.recompute_every={train.recompute_every}"] if train.recompute_every > 1 else []
    if others:
        yield (
            f"train.recompute_budget_gib={train.recompute_budget_gib:g} chooses what is recomputed, and so "
            f"do{'' if len(others) > 1 else 'es'} {' with '.join(others)}; leave out one or the other"
        )
    yield from _budget_problems(config, train.recompute_budget_gib)


def _budget_problems(config: Config, budget_gib: float) -> Iterator[str]:
    """What no rank could hold; without a known layout or micro-batch the ranks say it when they begin."""
    model, parallelism, dp = config.model, config.parallelism, data_parallel(config)
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    sizes = (model.hidden_size, heads, kv_heads, config.train.seq_len, parallelism.tp)
    if dp is None or config.train.micro_batch_size == "auto" or not _positive(*sizes):
        return
    try:
        layer = layer_activations(config, dp, is_gpu=config.cluster.device is not Device.cpu)
    except ConfigError:
        return
    yield from budget_problems(layer, model.num_hidden_layers, budget_gib)


def rule_profiled_ranks(config: Config, _: Situation) -> Iterator[str]:
    profile, ranks = config.train.profile, world_size(config)
    if not profile.enabled:
        return
    if not profile.ranks:
        yield "train.profile.enabled=true and train.profile.ranks=[]: nothing would be traced; use e.g. [0]"
    strangers = [rank for rank in profile.ranks if rank < 0 or (ranks is not None and rank >= ranks)]
    if strangers:
        within = f"0 to {ranks - 1}" if ranks is not None else "0 and above"
        yield f"train.profile.ranks: no rank {listed(strangers)} in this run; use {within}"


def _positive(*numbers: int) -> bool:
    return all(number > 0 for number in numbers)
