"""Rules about single values: what is a size, a rate, a share, a name."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import unicodedata
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from conf.schema import Config, MupConfig, Parametrization
from orchestra.config.keys import nearest, shown
from orchestra.config.machine import Situation, tokens_per_step, world_size
from orchestra.data.held_out import held_out_data
from orchestra.errors import ConfigError
from orchestra.run.metrics_file import NUMBER_KEYS, eval_column, is_eval_column
from orchestra.sizes import hardware
from orchestra.sizes.compilation import AUTO
from orchestra.sizes.units import slurm_time_s

# Smallest and largest number of each key, null where there is none; where the schema allows null, it passes.
# The largest are far beyond any run, and well below what overflows or never ends.
_BOUNDS: dict[str, tuple[int | None, int | None]] = {
    "model.hidden_size": (1, 2**20),
    "model.intermediate_size": (1, 2**24),
    "model.num_hidden_layers": (1, 2**16),
    "model.num_attention_heads": (1, 2**16),
    "model.num_key_value_heads": (1, 2**16),
    "model.head_dim": (1, 2**16),
    "model.num_experts": (0, 2**16),
    "model.num_experts_per_tok": (1, 2**16),
    "model.moe_intermediate_size": (1, 2**24),
    "model.shared_expert_intermediate_size": (0, 2**24),
    "model.first_k_dense_replace": (0, 2**16),
    "model.n_group": (1, 2**16),
    "model.topk_group": (1, 2**16),
    "model.kv_lora_rank": (1, 2**20),
    "model.q_lora_rank": (1, 2**20),
    "model.qk_nope_head_dim": (1, 2**16),
    "model.qk_rope_head_dim": (2, 2**16),
    "model.v_head_dim": (1, 2**16),
    "parallelism.virtual_stages": (1, 2**16),
    # Token ids have 32 bits.
    "model.vocab_size": (2, 2**31 - 1),
    "model.max_position_embeddings": (1, 2**30),
    "model.norm_eps": (None, 1),
    "model.init_std": (None, 100),
    "model.rope_scaling.original_max_position_embeddings": (1, None),
    "parallelism.shard_degree": (1, None),
    "parallelism.bucket_mib": (None, 2**20),
    "precision.loss_scale.initial": (1, 2**24),
    "precision.loss_scale.growth_steps": (1, None),
    "precision.fp8_bf16_blocks": (0, None),
    "data.prefetch_batches": (1, 2**16),
    "eval.every_steps": (1, None),
    "eval.steps": (1, 2**40),
    "optim.warmup_steps": (0, None),
    "optim.mup.base_hidden": (1, 2**20),
    "optim.mup.base_layers": (1, 2**16),
    "optim.mup.base_head_dim": (1, 2**16),
    # Nothing is trained with more, and 1e20 is a slip.
    "optim.lr": (None, 100),
    "optim.eps": (None, 1),
    "optim.weight_decay": (None, 100),
    "train.steps": (1, 10**12),
    "train.tokens": (1, None),
    "train.seq_len": (1, 2**30),
    "train.global_batch_tokens": (1, 2**40),
    "train.log_every": (1, None),
    "train.noise_scale_every": (1, None),
    "train.seed": (0, None),
    "train.max_nonfinite_steps": (1, None),
    "train.loss_chunk_tokens": (1, None),
    "train.recompute_every": (1, None),
    "train.global_batch_size": (None, 2**30),
    "train.micro_batch_size": (None, 2**20),
    "checkpoint.every_steps": (1, None),
    "checkpoint.every_s": (None, 10**7),
    "checkpoint.keep_last": (1, None),
    "checkpoint.keep_every_steps": (1, None),
    "checkpoint.keep_best": (0, None),
    # About four months.
    "checkpoint.timeout_s": (None, 10**7),
    "checkpoint.last_save_patience_s": (None, 10**7),
    "checkpoint.restore_patience_s": (None, 10**7),
    "cluster.nodes": (1, 2**20),
    "cluster.min_nodes": (1, None),
    "cluster.threads_per_rank": (1, 4096),
    "cluster.spare_nodes": (0, None),
    "cluster.max_switches": (1, None),
    "cluster.segment": (1, None),
    # In TFLOP/s, bytes/s and bytes/s: 989e12 and 50 are slips of the unit.
    "cluster.peak_tflops": (None, 10**6),
    "cluster.network.intra_node_bytes_per_s": (10**4, 10**15),
    "cluster.network.inter_node_bytes_per_s": (10**4, 10**15),
    "cluster.disk_bytes_per_s": (10**4, 10**15),
    "cluster.gpus_per_node": (None, 1024),
    "recovery.max_restarts": (0, 10**6),
    "recovery.min_nodes": (1, None),
    "recovery.memory_copy_every_steps": (1, None),
    "recovery.straggler_every_steps": (1, None),
    "recovery.straggler_windows": (1, 10**4),
    "recovery.loss_spike.window": (8, 10**4),
    "recovery.roll_back.steps_before": (1, 10**9),
    "recovery.roll_back.skip_steps": (1, 10**9),
    "recovery.roll_back.max_in_a_row": (1, 10**6),
    "recovery.replay_every_steps": (1, None),
    "recovery.heartbeat_timeout_s": (None, 10**7),
    "recovery.setup_timeout_s": (None, 10**7),
    "recovery.agent_timeout_s": (None, 10**7),
    "recovery.backoff_s": (None, 10**7),
    "recovery.resize_every_s": (None, 10**7),
    # Ten years.
    "recovery.exclude_hours": (None, 87600),
    "recovery.collective_timeout_s": (None, 10**7),
    "recovery.stop_timeout_s": (None, 10**7),
    "recovery.straggler_factor": (None, 1000),
    "recovery.replay_tolerance": (None, 1),
    "wandb.finish_timeout_s": (None, 10**7),
}
# Numbers that must be finite and larger than zero.
_POSITIVE = (
    "model.rope_theta",
    "model.rope_scaling.factor",
    "model.rope_scaling.low_freq_factor",
    "model.rope_scaling.high_freq_factor",
    "model.norm_eps",
    "model.init_std",
    "model.routed_scaling_factor",
    "model.moe_bias_update_rate",
    "model.moe_capacity_factor",
    "parallelism.bucket_mib",
    "optim.lr",
    "optim.eps",
    "optim.clip_norm",
    "optim.mup.embedding_rate",
    "train.recompute_budget_gib",
    "cluster.peak_tflops",
    "cluster.mtbf_device_hours",
    "cluster.disk_bytes_per_s",
    "cluster.network.intra_node_bytes_per_s",
    "cluster.network.inter_node_bytes_per_s",
    "checkpoint.timeout_s",
    "checkpoint.every_s",
    "recovery.heartbeat_timeout_s",
    "recovery.setup_timeout_s",
    "recovery.agent_timeout_s",
    "recovery.collective_timeout_s",
    "recovery.loss_spike.factor",
    "recovery.replay_tolerance",
)
# Numbers that must be finite and may be zero.
_NOT_NEGATIVE = (
    "model.router_aux_loss_coef",
    "model.router_z_loss_coef",
    "optim.min_lr",
    "optim.weight_decay",
    "optim.state_bytes_per_parameter",
    "cluster.price_per_gpu_hour",
    "cluster.network.intra_node_latency_s",
    "cluster.network.inter_node_latency_s",
    "checkpoint.last_save_patience_s",
    "checkpoint.restore_patience_s",
    "recovery.stop_timeout_s",
    "recovery.backoff_s",
    "recovery.resize_every_s",
    "recovery.exclude_hours",
    "wandb.finish_timeout_s",
)
# Texts that must say something where they are given.
_NOT_EMPTY = (
    "cluster.currency",
    "model.name",
    "model.init_from",
    "data.path",
    "data.cache_dir",
    "checkpoint.dir",
    "checkpoint.fallback_dir",
    "run.dir",
    "wandb.project",
    "cluster.account",
    "cluster.qos",
    "cluster.constraint",
    "cluster.network.interface",
    "cluster.container.image",
    "cluster.container.prefix",
)
# What reaches batch scripts: options, and folders that a container is given.
_SECTIONS_OF_SCRIPTS = ("cluster", "run", "data", "model", "checkpoint")
# What torch and the data files count with.
_LARGEST_INTEGER = 2**63 - 1
LONGEST_RUN_NAME = 100
_RUN_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_RUN_NAME - 1}}}")


def rule_compile(config: Config, _: Situation) -> Iterator[str]:
    chosen = config.train.compile
    if isinstance(chosen, str) and chosen != AUTO:
        yield f"train.compile={chosen!r} is no choice; use auto, true or false, without quotes"


def rule_sizes(config: Config, _: Situation) -> Iterator[str]:
    for name, (least, most) in _BOUNDS.items():
        value = attrgetter(name)(config)
        if not isinstance(value, (int, float)):
            continue
        # What is not above 0 where it must be rule_numbers tells.
        if least is not None and value < least and not (name in _POSITIVE and value <= 0):
            yield f"{name}={value} is too small; use {least} or more"
        limit = _LARGEST_INTEGER if most is None else most
        # Infinity is no number of any size; rule_numbers says so.
        if limit < value < math.inf:
            yield f"{name}={value} is too large; use at most {limit}"


def rule_numbers(config: Config, _: Situation) -> Iterator[str]:
    for name in _POSITIVE:
        value = attrgetter(name)(config)
        if value is not None and not (math.isfinite(value) and value > 0):
            yield f"{name}={value} is not a positive number; use one above 0"
    for name in _NOT_NEGATIVE:
        value = attrgetter(name)(config)
        if value is not None and not (math.isfinite(value) and value >= 0):
            yield f"{name}={value} is not a number of at least 0; use 0 or more"


def rule_texts(config: Config, _: Situation) -> Iterator[str]:
    for name in _NOT_EMPTY:
        value = attrgetter(name)(config)
        if value is not None and not value.strip():
            yield f"{name} is empty; give a text or leave it out"


def rule_control_characters(config: Config, _: Situation) -> Iterator[str]:
    """Words of a batch script end with the line: what follows a newline would be another one's."""
    sections = {name: getattr(config, name) for name in _SECTIONS_OF_SCRIPTS}
    texts = [text for name, section in sections.items() for text in _texts(name, dataclasses.asdict(section))]
    # A relative folder lies below the working directory.
    texts.append(("run.dir", os.path.abspath(config.run.dir)))  # noqa: PTH100  text, not a file
    for name, text in texts:
        # A set-up line may be a block of several.
        allowed = "\n\t" if name.startswith("cluster.setup[") else ""
        if any(unicodedata.category(sign) == "Cc" and sign not in allowed for sign in text):
            yield f"{name}={text!r} holds a control character, such as a line break; leave it out"
            return


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each text at any depth of a value, and each key of a mapping, with the name of its place."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield name, str(key)
            yield from _texts(f"{name}.{key}", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts(f"{name}[{number}]", item)


def rule_zero_stage(config: Config, _: Situation) -> Iterator[str]:
    if config.parallelism.zero not in (0, 1, 2, 3):
        yield f"parallelism.zero={config.parallelism.zero} is no stage of ZeRO; use 0, 1, 2 or 3"


def rule_loss_scale(config: Config, _: Situation) -> Iterator[str]:
    initial = config.precision.loss_scale.initial
    if initial >= 1 and initial & (initial - 1):
        below = 1 << (initial.bit_length() - 1)
        yield (
            f"precision.loss_scale.initial={initial} is not a power of two, and would round every gradient; "
            f"use {below} or {2 * below}"
        )


def rule_betas(config: Config, _: Situation) -> Iterator[str]:
    betas = config.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"optim.betas={shown(betas)} are not two numbers from 0 to below 1; use e.g. [0.9,0.95]"


def rule_learning_rates(config: Config, _: Situation) -> Iterator[str]:
    low, high = config.optim.min_lr, config.optim.lr
    if low is not None and low > high:
        yield f"optim.min_lr={low} is above optim.lr={high}; use at most {high}, or null for a tenth of it"


def rule_parametrization(config: Config, _: Situation) -> Iterator[str]:
    optim, model = config.optim, config.model
    if optim.parametrization is Parametrization.standard:
        if optim.mup != MupConfig():
            given = [f.name for f in dataclasses.fields(MupConfig) if getattr(optim.mup, f.name) != f.default]
            yield (
                f"optim.mup.{given[0]} without optim.parametrization=mup: nothing is counted from it; use "
                "optim.parametrization=mup, or leave it out"
            )
        return
    if model.tie_word_embeddings:
        yield (
            "optim.parametrization=mup with model.tie_word_embeddings=true: embedding and output matrix need "
            "rates of their own; use model.tie_word_embeddings=false"
        )
    if optim.target is not None:
        yield (
            f"optim.parametrization=mup with optim.target={optim.target}: its rates are those of AdamW; use "
            "optim.target=null"
        )
    if model.block is not None:
        yield (
            f"optim.parametrization=mup with model.block={model.block}: nobody knows the widths of its "
            "parameters; use model.block=null"
        )


def rule_schedule(config: Config, _: Situation) -> Iterator[str]:
    warmup, steps = config.optim.warmup_steps, config.train.steps
    if warmup is not None and warmup > steps:
        yield (
            f"optim.warmup_steps={warmup} is longer than the run, train.steps={steps}; use at most {steps}, "
            f"or null for 10 % of the steps"
        )
    share = config.optim.wsd_decay_fraction
    if not 0 < share <= 1:
        yield f"optim.wsd_decay_fraction={share} is not a share of the steps; use one above 0 and up to 1"


def rule_tokens(config: Config, _: Situation) -> Iterator[str]:
    """Where a layout is impossible, its own rule tells; here the ranks are not known yet."""
    tokens = config.train.tokens
    if tokens is not None and tokens_per_step(config) is None and world_size(config) is None:
        yield (
            f"train.tokens={tokens}: the steps follow from the global batch, and that from the ranks, not "
            f"known here; give train.global_batch_tokens (or cluster.gpus_per_node), or train.steps instead"
        )


def rule_profile(config: Config, _: Situation) -> Iterator[str]:
    profile, steps = config.train.profile, config.train.steps
    if len(profile.steps) != 2:
        yield f"train.profile.steps={shown(profile.steps)} is not a first and a last step; use e.g. [5,7]"
    elif profile.enabled and profile.steps[0] > profile.steps[1]:
        yield (
            f"train.profile.steps={shown(profile.steps)}: the first step comes after the last; use "
            f"[{profile.steps[1]},{profile.steps[0]}]"
        )
    elif profile.enabled and not 1 <= profile.steps[0] <= profile.steps[1] <= steps:
        first, last = max(1, min(profile.steps[0], steps)), max(1, min(profile.steps[1], steps))
        yield (
            f"train.profile.steps={shown(profile.steps)} does not lie inside the run, steps 1 to {steps}; "
            f"use e.g. train.profile.steps=[{min(first, last)},{last}]"
        )


def rule_rope_scaling(config: Config, _: Situation) -> Iterator[str]:
    scaling = config.model.rope_scaling
    if scaling.enabled and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield (
            f"model.rope_scaling.low_freq_factor={scaling.low_freq_factor} is not below "
            f"high_freq_factor={scaling.high_freq_factor}; Llama 3 uses 1 and 4"
        )


def rule_hardware_name(config: Config, _: Situation) -> Iterator[str]:
    name, names = config.cluster.hardware, ["auto", *(row.name for row in hardware.TABLE)]
    # A file that the planner writes of what runs measured: orchestra plan --calibrate.
    if name not in names and not name.endswith(".json"):
        meant = nearest(name.lower(), names)
        hint = f"did you mean {meant}? There are" if meant else "there are"
        yield f"cluster.hardware={name}: no such hardware; {hint} {', '.join(names)}"


def rule_time_limit(config: Config, _: Situation) -> Iterator[str]:
    limit = config.cluster.time_limit
    if limit is None:
        return
    try:
        slurm_time_s(limit)
    except ValueError:
        yield f"cluster.time_limit={limit} is no time limit; use minutes, H:MM:SS, D-HH:MM:SS or e.g. 4h"


def rule_stragglers(config: Config, _: Situation) -> Iterator[str]:
    factor = config.recovery.straggler_factor
    if not (math.isfinite(factor) and factor > 1):
        yield f"recovery.straggler_factor={factor}: a slow rank needs more than the others; use e.g. 1.3"


def rule_run_name(config: Config, _: Situation) -> Iterator[str]:
    if config.run.name is not None:
        yield from run_name_problems(config.run.name)


def rule_metric(config: Config, _: Situation) -> Iterator[str]:
    metric = config.run.metric
    if is_eval_column(metric) and config.eval.every_steps is None:
        yield f"run.metric={metric}: nothing is evaluated; set eval.every_steps, e.g. eval.every_steps=100"
        return
    try:
        held_out = [] if config.eval.every_steps is None else [*held_out_data(config)]
    except ConfigError:
        return
    columns = [*NUMBER_KEYS, *map(eval_column, held_out)]
    if metric not in columns:
        meant = nearest(metric, columns)
        hint = f"did you mean {meant}? There are" if meant else "there are"
        yield f"run.metric={metric}: metrics.jsonl has no such number; {hint} {', '.join(columns)}"


def run_name_problems(name: str) -> Iterator[str]:
    """Yield what keeps `name` from naming a run."""
    if not name.strip():
        yield "run.name is empty; give a name, or leave it out to have one made"
    elif not _RUN_NAME.fullmatch(name):
        yield (
            f"run.name={name} cannot name a directory everywhere; use up to {LONGEST_RUN_NAME} letters "
            f"(A to Z, a to z), digits, dots, dashes and underscores, the first a letter or digit"
        )
