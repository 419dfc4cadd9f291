"""Rules about mixtures of experts and latent attention: their sizes, and what does not go with them."""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import (
    CheckpointConfig,
    Config,
    ContextMethod,
    ExpertPlacement,
    Family,
    ModelConfig,
    MoeBalance,
)
from orchestra.config.keys import shown
from orchestra.config.machine import Situation, data_parallel
from orchestra.sizes.topology import divisors, expert_degrees, listed

# Keys of the model that say something of experts alone.
_OF_EXPERTS = (
    *("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("first_k_dense_replace", "scoring_func", "norm_topk_prob", "routed_scaling_factor"),
    *("n_group", "topk_group", "moe_balance", "moe_bias_update_rate", "router_aux_loss_coef"),
    *("moe_aux_scope", "router_z_loss_coef", "moe_capacity_factor"),
)


def rule_experts(config: Config, situation: Situation) -> Iterator[str]:
    model, ep, num_experts = config.model, config.parallelism.ep, config.model.num_experts
    if num_experts <= 0:
        if ep > 1:
            yield (
                f"parallelism.ep={ep} shares out experts and model.num_experts={num_experts}; use "
                "parallelism.ep=1, or a model with experts such as model=mixtral_8x7b"
            )
        if not situation.from_step and situation.verb != "resume":
            # A run that goes on trains as it did, and its model cannot change.
            yield from _without_experts(model)
        return
    if model.family is not Family.llama:
        yield (
            f"model.num_experts={num_experts} with model.family={model.family.name}; experts are of the "
            "family llama: set that, or use model.num_experts=0"
        )
    if model.block is not None:
        yield (
            f"model.num_experts={num_experts} with model.block={model.block}: layers of a plug-in bring "
            "their own feed-forward; use model.num_experts=0, or model.block=null"
        )
    if model.num_experts_per_tok > num_experts:
        yield (
            f"model.num_experts_per_tok={model.num_experts_per_tok} is more than "
            f"model.num_experts={num_experts}; use at most {num_experts}"
        )
    if ep > num_experts:
        dp = data_parallel(config)
        fitting = (
            f"at most {num_experts}"
            if dp is None
            else listed(expert_degrees(config.parallelism, dp, num_experts))
        )
        yield (
            f"parallelism.ep={ep} is more than model.num_experts={num_experts}, and some ranks would have no "
            f"expert; use {fitting}"
        )
    if model.first_k_dense_replace >= model.num_hidden_layers > 0:
        yield (
            f"model.first_k_dense_replace={model.first_k_dense_replace} leaves no mixture among "
            f"model.num_hidden_layers={model.num_hidden_layers}; use fewer, or model.num_experts=0"
        )


def _without_experts(model: ModelConfig) -> Iterator[str]:
    usual = ModelConfig()
    given = [key for key in _OF_EXPERTS if getattr(model, key) != getattr(usual, key)]
    if given:
        yield (
            f"{_words(model, given)} with model.num_experts={model.num_experts}: without experts nothing "
            f"comes of it; give model.num_experts, or use {_words(usual, given)}"
        )


def _words(model: ModelConfig, keys: list[str]) -> str:
    return " ".join(f"model.{key}={shown(getattr(model, key))}" for key in keys)


def rule_expert_placement(config: Config, _: Situation) -> Iterator[str]:
    """Experts move between ranks that share them out, at saves."""
    if config.parallelism.expert_placement is not ExpertPlacement.auto:
        return
    checkpoint, ep = config.checkpoint, config.parallelism.ep
    if ep <= 1:
        yield (
            f"parallelism.expert_placement=auto with parallelism.ep={ep}: each rank has all experts and none "
            "can move; use expert_placement=fixed, or a mixture with parallelism.ep=2 or more"
        )
    if checkpoint.every_steps is None and checkpoint.every_s is None:
        yield (
            "parallelism.expert_placement=auto with checkpoint.every_steps=null: experts move at saves, and "
            f"there are none; give checkpoint.every_steps, such as {CheckpointConfig.every_steps}, or use "
            "parallelism.expert_placement=fixed"
        )


def rule_expert_groups(config: Config, _: Situation) -> Iterator[str]:
    """A token's experts come from some groups of equal sizes."""
    model = config.model
    if model.num_experts <= 0 or model.n_group < 1 or model.topk_group < 1:
        return
    if model.num_experts % model.n_group:
        yield (
            f"model.n_group={model.n_group} does not divide model.num_experts={model.num_experts}; use "
            f"{listed(divisors(model.num_experts))}"
        )
    elif model.topk_group > model.n_group:
        yield f"model.topk_group={model.topk_group} is more than model.n_group={model.n_group}; use fewer"
    elif (left := model.topk_group * (model.num_experts // model.n_group)) < model.num_experts_per_tok:
        yield (
            f"model.topk_group={model.topk_group} of model.n_group={model.n_group} groups have {left} "
            f"experts, fewer than model.num_experts_per_tok={model.num_experts_per_tok}; use a larger one"
        )


def rule_expert_balance(config: Config, _: Situation) -> Iterator[str]:
    model = config.model
    coef = model.router_aux_loss_coef
    if model.moe_balance is MoeBalance.none and coef:
        yield (
            f"model.router_aux_loss_coef={coef} with model.moe_balance=none, which has no loss of balance; "
            "use model.moe_balance=aux, or bias for both"
        )
    if model.moe_balance is MoeBalance.aux and coef == 0:
        yield (
            "model.router_aux_loss_coef=0 with model.moe_balance=aux: nothing would balance; use "
            "model.moe_balance=none if that is meant"
        )


def rule_latent_attention(config: Config, _: Situation) -> Iterator[str]:
    model = config.model
    if model.kv_lora_rank is None:
        if model.q_lora_rank is not None:
            yield (
                f"model.q_lora_rank={model.q_lora_rank} without model.kv_lora_rank: queries have a latent "
                "only beside keys and values; give model.kv_lora_rank, or use model.q_lora_rank=null"
            )
        return
    found = f"model.kv_lora_rank={model.kv_lora_rank}"
    if model.family is not Family.llama:
        yield f"{found} with model.family={model.family.name}; latent attention is of the family llama"
    if model.num_key_value_heads != model.num_attention_heads:
        yield (
            f"{found}: each head has keys and values of its own; use "
            f"model.num_key_value_heads={model.num_attention_heads}, as model.num_attention_heads is"
        )
    if model.head_dim is not None:
        yield (
            f"{found} with model.head_dim={model.head_dim}: its heads have the widths "
            "model.qk_nope_head_dim + qk_rope_head_dim and v_head_dim; use model.head_dim=null"
        )
    if model.qk_rope_head_dim % 2:
        yield (
            f"model.qk_rope_head_dim={model.qk_rope_head_dim} is odd and rotary positions turn pairs; use an "
            "even number"
        )
    if model.block is not None:
        yield f"{found} with model.block={model.block}: layers of a plug-in bring their own attention"
    if config.parallelism.cp > 1 and config.parallelism.cp_method is not ContextMethod.all_gather:
        yield (
            f"parallelism.cp_method={config.parallelism.cp_method.name} with {found}: what keys are made "
            "of is small and is gathered; use parallelism.cp_method=all_gather"
        )


def rule_head_norms(config: Config, _: Situation) -> Iterator[str]:
    model = config.model
    if model.qk_norm and (model.family is not Family.llama or model.kv_lora_rank is not None):
        yield ("model.qk_norm=true is for heads of the family llama without latents; use model.qk_norm=false")
