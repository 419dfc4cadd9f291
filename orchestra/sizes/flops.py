"""How many parameters a model has and how many floating-point operations a token costs; exact integers.

Conventions differ, and one and the same run is printed with utilizations far apart, so each has its name.
N parameters (of a mixture of experts those that a token goes through), V vocabulary, h hidden size, L layers,
s sequence length; in the attention terms h is query heads × head width (of latent attention, whose values are
narrower than its queries and keys, the mean of both). FLOPs per token, forward and backward
together:

    6·(N − lookup) + 12·L·h·s   PaLM (arXiv:2204.02311, appendix B), torchtitan since 2025, Megatron-LM's
                                Llama examples; here `model_flops_per_token`
    6·(N − lookup) + 6·L·h·s    causal: NVIDIA Megatron-Bridge; here `model_flops_per_token_causal`
    … + repeated forwards       hardware FLOPs; here `hardware_flops_per_token`
    6·N + 12·L·h·s              MosaicML llm-foundry, torchtitan in 2024; not used
    6·(N + V·h) + 12·L·h·s      nanotron's playbook for tied models under pipeline parallelism; not used

The lookup is the tables that are only read: input embeddings and learned positions. A tied embedding is also
the matrix of the output product and is counted as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from conf.schema import Family, ModelConfig, Recompute
from orchestra.sizes.topology import divisors


def head_dim(model: ModelConfig) -> int:
    """Return the width of one attention head's queries and keys."""
    if model.kv_lora_rank is not None:
        return model.qk_nope_head_dim + model.qk_rope_head_dim
    return model.head_dim or model.hidden_size // model.num_attention_heads


def value_dim(model: ModelConfig) -> int:
    """Return the width of one attention head's values."""
    return head_dim(model) if model.kv_lora_rank is None else model.v_head_dim


def attention_width(model: ModelConfig) -> int:
    """Return query heads × head width: the hidden size in most models."""
    return model.num_attention_heads * head_dim(model)


def value_width(model: ModelConfig) -> int:
    """Return heads × width of their values: what attention gives to its output product."""
    return model.num_attention_heads * value_dim(model)


def key_value_width(model: ModelConfig) -> int:
    """Return the width of the keys and values of all heads together, as attention takes them."""
    return model.num_key_value_heads * (head_dim(model) + value_dim(model))


def core_width(model: ModelConfig) -> float:
    """Return the h of 4·h·s, the operations of attention's two products: the mean of queries' and values'."""
    return (attention_width(model) + value_width(model)) / 2


def num_parameters(model: ModelConfig) -> int:
    """Return the number of trainable parameters, a tied embedding counted once."""
    num_tables = 1 if model.tie_word_embeddings else 2
    tables = num_tables * model.vocab_size * model.hidden_size + _num_position_parameters(model)
    layers = model.block_parameters
    if layers is None:
        num_dense = num_dense_layers(model)
        layers = num_dense * num_layer_parameters(without_experts(model))
        layers += (model.num_hidden_layers - num_dense) * num_layer_parameters(model)
    return tables + layers + _num_norm_parameters(model)


def num_dense_layers(model: ModelConfig) -> int:
    """Return how many layers of a model with experts have none all the same: the first ones."""
    return min(model.first_k_dense_replace, model.num_hidden_layers) if model.num_experts else 0


@lru_cache(maxsize=256)
def without_experts(model: ModelConfig) -> ModelConfig:
    """Return a model all of whose layers are as the dense ones of this one."""
    return replace(model, num_experts=0) if model.num_experts else model


def num_layer_parameters(model: ModelConfig) -> int:
    """Return the parameters of one decoder layer, with experts where the model has them: attention,
    feed-forward or mixture, and its two norms. Of layers that are a plug-in it is the mean.
    """
    if model.block_parameters is not None:
        return model.block_parameters // model.num_hidden_layers
    return _num_parameters_of_all_tokens(model) + num_expert_parameters(model)


def num_active_layer_parameters(model: ModelConfig) -> int:
    """Return the parameters of one such layer that a token goes through: all of them but for experts."""
    if model.block_parameters is not None:
        return num_layer_parameters(model)
    routed = num_expert_parameters(model)
    share = routed // model.num_experts * model.num_experts_per_tok if model.num_experts else 0
    return _num_parameters_of_all_tokens(model) + share


def num_active_parameters(model: ModelConfig) -> int:
    """Return the parameters that a token goes through: all of them but for experts."""
    idle = num_layer_parameters(model) - num_active_layer_parameters(model)
    return num_parameters(model) - (model.num_hidden_layers - num_dense_layers(model)) * idle


def num_attention_parameters(model: ModelConfig) -> int:
    """Return the parameters of one layer's attention in the family llama: its matrices, and its own norms."""
    hidden, heads, latent = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    query = attention_width(model)
    if latent is None:
        matrices = 2 * hidden * query + hidden * key_value_width(model)
        return matrices + (2 * head_dim(model) if model.qk_norm else 0)
    rank = model.q_lora_rank
    queries = hidden * query if rank is None else hidden * rank + rank + rank * query
    keys_and_values = hidden * (latent + model.qk_rope_head_dim) + latent
    keys_and_values += latent * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return queries + keys_and_values + value_width(model) * hidden


def num_expert_parameters(model: ModelConfig) -> int:
    """Return the parameters of all experts of one layer that tokens are routed to; 0 in a dense model."""
    return model.num_experts * 3 * model.hidden_size * expert_width(model)


def expert_width(model: ModelConfig) -> int:
    """Return the inner width of one expert."""
    return model.moe_intermediate_size or model.intermediate_size


def feed_forward_width(model: ModelConfig) -> int:
    """Return the inner width that a token meets in one layer: of a mixture, of all its experts together."""
    if not model.num_experts:
        return model.intermediate_size
    return model.num_experts_per_tok * expert_width(model) + model.shared_expert_intermediate_size


def inner_widths(model: ModelConfig) -> dict[str, int]:
    """Return the inner widths that a model's layers have, which tensor parallelism cuts, by their keys."""
    dense = {"intermediate_size": model.intermediate_size}
    if not model.num_experts:
        return dense
    routed = "intermediate_size" if model.moe_intermediate_size is None else "moe_intermediate_size"
    shared = model.shared_expert_intermediate_size
    return {
        **(dense if model.first_k_dense_replace else {}),
        routed: expert_width(model),
        **({"shared_expert_intermediate_size": shared} if shared else {}),
    }


def head_splits(model: ModelConfig) -> list[int]:
    """Return the degrees of tensor parallelism by which a model's heads can be divided; layers that are a
    plug-in are not cut.
    """
    if model.block is not None:
        return [1]
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    return [tp for tp in divisors(heads) if kv_heads % tp == 0 or tp % kv_heads == 0]


def tensor_splits(model: ModelConfig) -> list[int]:
    """Return the degrees of tensor parallelism by which all of a model's layers can be divided."""
    widths = inner_widths(model).values()
    return [tp for tp in head_splits(model) if not any(width % tp for width in widths)]


def _num_parameters_of_all_tokens(model: ModelConfig) -> int:
    """Attention, norms, and the feed-forward or, in a mixture, the router and the shared expert."""
    hidden, wide = model.hidden_size, model.intermediate_size
    norms = 2 * _num_norm_parameters(model)
    if model.family is Family.gpt:
        query, key_value = attention_width(model), key_value_width(model)
        matrices = 2 * hidden * query + hidden * key_value
        biases = query + key_value + hidden + wide + hidden
        return matrices + 2 * hidden * wide + biases + norms
    if model.num_experts:
        router = hidden * model.num_experts
        feed_forward = router + 3 * hidden * model.shared_expert_intermediate_size
    else:
        feed_forward = 3 * hidden * wide
    return num_attention_parameters(model) + feed_forward + norms


def num_embedding_parameters(model: ModelConfig) -> int:
    """Return the parameters that are only looked up and multiply nothing.

    A tied embedding is not among them: the same matrix makes the output product.
    """
    num_tokens = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return num_tokens + _num_position_parameters(model)


def model_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Return 6·(N − lookup) + 12·L·h·s: forward and backward, attention in full (PaLM, appendix B)."""
    return 6 * _num_multiplied_parameters(model) + 3 * _attention_forward_flops(model, seq_len)


def model_flops_per_token_causal(model: ModelConfig, seq_len: int) -> int:
    """Return 6·(N − lookup) + 6·L·h·s: attention counted only where the causal mask leaves it (half)."""
    return 6 * _num_multiplied_parameters(model) + 3 * _attention_forward_flops(model, seq_len) // 2


def hardware_flops_per_token(
    model: ModelConfig,
    seq_len: int,
    recompute: Recompute | Sequence[Recompute],
    *,
    keeps_attention: bool = False,
) -> int:
    """Return the model's FLOPs plus the forward passes that recomputation runs again.

    `selective` repeats the attention core (4·L·h·s) unless `keeps_attention`, `full` whole layers
    (2·(parameters of the layers) + 4·L·h·s); the output product is never repeated, as in Narayanan et al.
    (arXiv:2104.04473, equation 3). Korthikanti et al. (arXiv:2205.05198) count 12·L·h·s for `selective`,
    three times what they run again. `recompute` is that of all layers, or of each.
    """
    num_layers = model.num_hidden_layers
    kinds = [recompute] * num_layers if isinstance(recompute, Recompute) else recompute
    attention = _attention_forward_flops(model, seq_len) // num_layers
    again = {
        Recompute.none: 0,
        Recompute.selective: 0 if keeps_attention else attention,
        Recompute.full: attention + 2 * num_active_layer_parameters(model),
    }
    dense = {
        **again,
        Recompute.full: attention + 2 * num_active_layer_parameters(without_experts(model)),
    }
    num_dense = num_dense_layers(model)
    repeated = sum(dense[kind] for kind in kinds[:num_dense]) + sum(again[kind] for kind in kinds[num_dense:])
    return model_flops_per_token(model, seq_len) + repeated


def _num_multiplied_parameters(model: ModelConfig) -> int:
    return num_active_parameters(model) - num_embedding_parameters(model)


def _attention_forward_flops(model: ModelConfig, seq_len: int) -> int:
    """Scores and weighted sum, two products of 2·h·s per token and layer."""
    return 2 * model.num_hidden_layers * (attention_width(model) + value_width(model)) * seq_len


def _num_position_parameters(model: ModelConfig) -> int:
    return model.max_position_embeddings * model.hidden_size if model.family is Family.gpt else 0


def _num_norm_parameters(model: ModelConfig) -> int:
    """Gain, and for LayerNorm a bias."""
    return (2 if model.family is Family.gpt else 1) * model.hidden_size
