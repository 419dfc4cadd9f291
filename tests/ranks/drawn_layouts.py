"""Models and ways to train them on a few ranks, drawn at random: combinations that nobody thought of.

A draw is a function of its number, on every machine. What the rules of configurations refuse is drawn anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from small_trainings import config_of

from conf.schema import (
    Config,
    ContextMethod,
    Device,
    DType,
    Family,
    ModelConfig,
    MoeAuxScope,
    MoeBalance,
    ParallelismConfig,
    PipelineSchedule,
    Recompute,
    ScoringFunc,
    StateDType,
)
from orchestra.config.machine import Situation
from orchestra.config.rules.all_rules import problems_of

# Random tokens are all of a small vocabulary; this rule is about the standard library's.
_OF_DATA = "model.vocab_size="
# Separators of documents are then among the tokens.
_WITH_SEPARATOR = 257
_HERE = Situation("run")


@dataclass(frozen=True)
class Draw:
    """A training in fp32 on `world` ranks; the same `alone`, in one pass of one process; it `kept` in other
    precisions, and on `other_world` ranks as `other`.
    """

    world: int
    config: Config
    alone: Config
    kept: Config
    other_world: int
    other: Config


def draw(number: int) -> Draw:
    """Return draw `number`, which all rules allow."""
    random = Random(number)
    while True:
        found = _try(random)
        if found is not None:
            return found


def _try(random: Random) -> Draw | None:
    """Return a draw, None where it does not fit together."""
    model, world, num_sequences = _model(random), random.choice([2, 3, 4, 4]), random.choice([6, 8, 12])
    ways = {"train": _train(random), "optim": _optim(random)}
    accumulation = random.choice([1, 1, 2, 3, 4])
    if model.moe_aux_scope is MoeAuxScope.batch and _has_aux(model):
        # Then the loss of balance is one of micro-batches.
        accumulation = 1
    masks = random.random() < 0.2
    model = replace(model, vocab_size=_WITH_SEPARATOR) if masks else model

    def shared_out(ranks: int, precision: dict[str, Any], accumulation: int) -> Config | None:
        layout = _layout(random, model, ranks)
        if num_sequences % (layout["dp"] * accumulation):
            return None
        size = num_sequences // layout["dp"] // accumulation
        train = {**ways["train"], "global_batch_size": num_sequences, "micro_batch_size": size}
        optim = {**ways["optim"], **precision.pop("optim", {})}
        config = config_of(model, train=train, optim=optim, **precision, **layout)
        config = replace(config, data=replace(config.data, document_masks=masks))
        return config if _is_allowed(config, ranks) else None

    config = shared_out(world, {}, accumulation)
    precision, other_world = _precision(random), random.choice([1, 2, 3, 4])
    other = shared_out(other_world, dict(precision), 1)
    if config is None or other is None:
        return None
    kept = _eager(replace(config, precision=other.precision, optim=other.optim))
    one_pass = replace(
        config.train,
        micro_batch_size=num_sequences,
        recompute=Recompute.none,
        recompute_every=1,
        recompute_budget_gib=None,
        loss_chunk_tokens=None,
        compile=False,
    )
    alone = replace(config, parallelism=ParallelismConfig(dp=1), train=one_pass)
    if not _is_allowed(kept, world):
        return None
    return Draw(world, config, alone, kept, other_world, _eager(other))


def _eager(config: Config) -> Config:
    return replace(config, train=replace(config.train, compile=False))


def _is_allowed(config: Config, ranks: int) -> bool:
    here = replace(config, cluster=replace(config.cluster, gpus_per_node=ranks, device=Device.cpu))
    return all(problem.startswith(_OF_DATA) for problem in problems_of(here, _HERE))


def _has_aux(model: ModelConfig) -> bool:
    return model.moe_balance is MoeBalance.aux or bool(model.router_aux_loss_coef)


def _model(random: Random) -> ModelConfig:
    heads = random.choice([2, 3, 4, 4, 6])
    model = ModelConfig(
        hidden_size=heads * random.choice([2, 4, 4, 6]),
        intermediate_size=random.choice([24, 36, 37, 48]),
        num_hidden_layers=random.choice([2, 3, 4, 5]),
        num_attention_heads=heads,
        num_key_value_heads=_divisor(random, heads),
        vocab_size=random.choice([59, 61, 64]),
        tie_word_embeddings=random.random() < 0.3,
        init_std=random.choice([0.02, 0.2]),
    )
    kind = random.random()
    if kind < 0.2:
        places = random.choice([16, 40])
        return replace(model, family=Family.gpt, max_position_embeddings=places, num_key_value_heads=heads)
    if kind < 0.65:
        model = _with_experts(random, model)
    if random.random() < 0.25:
        return replace(
            model,
            num_key_value_heads=heads,
            kv_lora_rank=random.choice([6, 8]),
            q_lora_rank=random.choice([None, 8]),
            qk_nope_head_dim=random.choice([4, 6]),
            qk_rope_head_dim=random.choice([2, 4]),
            v_head_dim=random.choice([4, 5, 6]),
        )
    head_dim = random.choice([None, None, None, 4, 6, 8])
    return replace(model, qk_norm=random.random() < 0.3, head_dim=head_dim)


def _with_experts(random: Random, model: ModelConfig) -> ModelConfig:
    number = random.choice([4, 6, 8])
    groups = random.choice([1, 1, 2])
    return replace(
        model,
        num_experts=number,
        num_experts_per_tok=random.choice([1, 2, 3]),
        moe_intermediate_size=random.choice([8, 12, 13]),
        shared_expert_intermediate_size=random.choice([0, 0, 20]),
        first_k_dense_replace=random.choice([0, 0, 1]),
        moe_balance=random.choice(list(MoeBalance)),
        moe_aux_scope=random.choice(list(MoeAuxScope)),
        router_aux_loss_coef=random.choice([None, None, 0.01]),
        router_z_loss_coef=random.choice([0.0, 0.001]),
        scoring_func=random.choice(list(ScoringFunc)),
        norm_topk_prob=random.random() < 0.7,
        routed_scaling_factor=random.choice([1.0, 2.5]),
        moe_capacity_factor=random.choice([None, None, None, 1.0, 1.5]),
        n_group=groups,
        topk_group=random.choice([1, groups]),
    )


def _layout(random: Random, model: ModelConfig, ranks: int) -> dict[str, Any]:
    left, degrees = ranks, {}
    for axis, choices in (("tp", [1, 1, 2, 4]), ("pp", [1, 1, 1, 2, 4]), ("cp", [1, 1, 1, 2, 4])):
        degree = random.choice(choices)
        degrees[axis] = degree if left % degree == 0 else 1
        left //= degrees[axis]
    schedule = random.choice(list(PipelineSchedule))
    stages = 2 if schedule is PipelineSchedule.interleaved and degrees["pp"] > 1 else 1
    return {
        **degrees,
        "dp": left,
        "zero": random.choice([0, 1, 2, 3]),
        "sequence_parallel": degrees["tp"] > 1 and random.random() < 0.5,
        "schedule": schedule if degrees["pp"] > 1 else PipelineSchedule["1f1b"],
        "virtual_stages": stages,
        "cp_method": random.choice(list(ContextMethod)),
        "ep": _divisor(random, left) if model.num_experts else 1,
        "shard_degree": random.choice([None, None, None, 1, 2, 4]),
        "bucket_mib": random.choice([0.001, 0.01, 25.0]),
    }


def _train(random: Random) -> dict[str, Any]:
    recompute = random.choice([Recompute.none, Recompute.none, Recompute.selective, Recompute.full])
    is_none = recompute is Recompute.none
    return {
        "recompute": recompute,
        "recompute_every": 1 if is_none else random.choice([1, 1, 2]),
        "recompute_budget_gib": random.choice([None] * 6 + [1e-5, 1e-4]) if is_none else None,
        "loss_chunk_tokens": random.choice([None, None, 1, 5, 16, 24]),
        "compile": random.random() < 0.2,
    }


def _optim(random: Random) -> dict[str, Any]:
    return {
        "clip_norm": random.choice([None, 0.5, 0.5, 0.5]),
        "betas": random.choice([[0.9, 0.95], [0.8, 0.99]]),
        "warmup_steps": random.choice([0, 2]),
    }


def _precision(random: Random) -> dict[str, Any]:
    name = random.choice(["fp32", "bf16", "bf16_fp32_grad", "fp16"])
    wide = {"reduce_dtype": DType.fp32} if name == "bf16" and random.random() < 0.5 else {}
    moments = {"optim": {"state_dtype": StateDType.bf16}} if random.random() < 0.3 else {}
    return {"precision": name, **wide, **moments}


def _divisor(random: Random, number: int) -> int:
    return random.choice([divisor for divisor in range(1, number + 1) if number % divisor == 0])


def told(config: Config) -> str:
    """Return what a drawn configuration has that is not usual, in one line."""
    parts: Sequence[Any] = (config.model, config.parallelism, config.train, config.optim, config.precision)
    words = []
    for part in parts:
        usual = type(part)()
        words += [f"{name}={value}" for name, value in vars(part).items() if value != getattr(usual, name)]
    return " ".join(words)
