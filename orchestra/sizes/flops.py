"""How many parameters a model has and how many floating-point operations a token costs; exact integers.

Conventions differ, and one and the same run is printed with utilizations far apart, so each has its name.
N parameters (of a mixture of experts those that a token goes through), V vocabulary, h hidden size, L layers,
s sequence length; in the attention terms h is query heads × head width. FLOPs per token, forward and backward
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

from conf.schema import Family, ModelConfig, Recompute
from orchestra.sizes.topology import divisors


def head_dim(model: ModelConfig) -> int:
    """Return the width of one attention head."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def attention_width(model: ModelConfig) -> int:
    """Return query heads × head width: the hidden size in most models."""
    return model.num_attention_heads * head_dim(model)


def num_parameters(model: ModelConfig) -> int:
    """Return the number of trainable parameters, a tied embedding counted once."""
    num_tables = 1 if model.tie_word_embeddings else 2
    tables = num_tables * model.vocab_size * model.hidden_size + _num_position_parameters(model)
    layers = model.block_parameters
    if layers is None:
        layers = model.num_hidden_layers * num_layer_parameters(model)
    return tables + layers + _num_norm_parameters(model)


def num_layer_parameters(model: ModelConfig) -> int:
    """Return the parameters of one decoder layer: attention, feed-forward or experts, and its two norms. Of
    layers that are a plug-in it is the mean.
    """
    if model.block_parameters is not None:
        return model.block_parameters // model.num_hidden_layers
    return _num_parameters_of_all_tokens(model) + num_expert_parameters(model)


def num_active_layer_parameters(model: ModelConfig) -> int:
    """Return the parameters of one decoder layer that a token goes through: all of them but for experts."""
    if model.block_parameters is not None:
        return num_layer_parameters(model)
    routed = num_expert_parameters(model)
    share = routed // model.num_experts * model.num_experts_per_tok if model.num_experts else 0
    return _num_parameters_of_all_tokens(model) + share


def num_active_parameters(model: ModelConfig) -> int:
    """Return the parameters that a token goes through: all of them but for experts."""
    idle = num_layer_parameters(model) - num_active_layer_parameters(model)
    return num_parameters(model) - model.num_hidden_layers * idle


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
    if not model.num_experts:
        return {"intermediate_size": model.intermediate_size}
    routed = "intermediate_size" if model.moe_intermediate_size is None else "moe_intermediate_size"
    shared = model.shared_expert_intermediate_size
    return {routed: expert_width(model), **({"shared_expert_intermediate_size": shared} if shared else {})}


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
    query, key_value = attention_width(model), model.num_key_value_heads * head_dim(model)
    matrices = 2 * hidden * query + 2 * hidden * key_value
    if model.family is Family.gpt:
        biases = query + 2 * key_value + hidden + wide + hidden
        return matrices + 2 * hidden * wide + biases + 2 * _num_norm_parameters(model)
    if model.num_experts:
        router = hidden * model.num_experts
        matrices += router + 3 * hidden * model.shared_expert_intermediate_size
    else:
        matrices += 3 * hidden * wide
    return matrices + 2 * _num_norm_parameters(model)


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
    model: ModelConfig, seq_len: int, recompute: Recompute | Sequence[Recompute]
) -> int:
    """Return the model's FLOPs plus the forward passes that recomputation runs again.

    `selective` repeats the attention core (4·L·h·s), `full` whole layers (2·(parameters of the layers) +
    4·L·h·s); the output product is never repeated, as in Narayanan et al. (arXiv:2104.04473, equation 3).
    Korthikanti et al. (arXiv:2205.05198) count 12·L·h·s for `selective`, three times what is run again.
    `recompute` is that of all layers, or of each.
    """
    num_layers = model.num_hidden_layers
    kinds = [recompute] * num_layers if isinstance(recompute, Recompute) else recompute
    attention = _attention_forward_flops(model, seq_len) // num_layers
    again = {
        Recompute.none: 0,
        Recompute.selective: attention,
        Recompute.full: attention + 2 * num_active_layer_parameters(model),
    }
    return model_flops_per_token(model, seq_len) + sum(again[kind] for kind in kinds)


def _num_multiplied_parameters(model: ModelConfig) -> int:
    return num_active_parameters(model) - num_embedding_parameters(model)


def _attention_forward_flops(model: ModelConfig, seq_len: int) -> int:
    """Scores and weighted sum, two products of 2·h·s per token and layer."""
    return 4 * model.num_hidden_layers * attention_width(model) * seq_len


def _num_position_parameters(model: ModelConfig) -> int:
    return model.max_position_embeddings * model.hidden_size if model.family is Family.gpt else 0


def _num_norm_parameters(model: ModelConfig) -> int:
    """Gain, and for LayerNorm a bias."""
    return (2 if model.family is Family.gpt else 1) * model.hidden_size
