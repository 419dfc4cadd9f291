"""Which tensors of a Hugging Face folder hold which parts of our parameters. Integers and text.

Most of ours are one of theirs. Experts are stacked here, [X, F, E]; on disk each expert has tensors of its
own, as `transformers` writes them by default, or they are stacked there too, gate and up in one tensor
(`save_pretrained(save_original_format=False)`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from checkpointing.box import Box
from conf.schema import ModelConfig, MoeBalance
from orchestra.sizes.flops import attention_width, expert_width, head_dim

# What a checkpoint calls the parameters of the model: this and the parameter's own name.
CHECKPOINT_PREFIX = "model."
OUTPUT = "lm_head.weight"
_EXPERTS = "mlp.experts."
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
# The tensor in which transformers has gate and up of all experts of a layer, if it is asked to.
GATE_AND_UP = f"{_EXPERTS}gate_up_proj"
# Mixtral's own words for what a layer has.
_MIXTRAL_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MIXTRAL_LAYER = "block_sparse_moe"


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return each parameter's shape, in our model's own order; a tied output matrix is left out."""
    hidden = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (model.vocab_size, hidden)}
    attention = _attention_shapes(model) if model.kv_lora_rank is None else _latent_shapes(model)
    for layer in range(model.num_hidden_layers):
        of_layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        of_layer |= {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
        of_layer["post_attention_layernorm.weight"] = (hidden,)
        if has_experts(model, layer):
            of_layer |= _mixture_shapes(model)
        else:
            of_layer |= _swiglu_shapes("mlp", hidden, model.intermediate_size)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes["norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        shapes[OUTPUT] = (model.vocab_size, hidden)
    return shapes


def bias_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of what routers add to scores where experts are chosen; it is no parameter."""
    if model.moe_balance is not MoeBalance.bias:
        return {}
    layers = [layer for layer in range(model.num_hidden_layers) if has_experts(model, layer)]
    return {f"layers.{layer}.{ROUTER_BIAS}": (model.num_experts,) for layer in layers}


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Whether a layer is a mixture."""
    return bool(model.num_experts) and layer >= model.first_k_dense_replace


def _attention_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, width = model.hidden_size, head_dim(model)
    query, key_value = attention_width(model), model.num_key_value_heads * width
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj": (query, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, query),
    }
    return shapes | ({"q_norm": (width,), "k_norm": (width,)} if model.qk_norm else {})


def _latent_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    assert model.kv_lora_rank is not None
    hidden, heads, latent = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    query = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (query, hidden)}
    if model.q_lora_rank is not None:
        shapes = {
            "q_a_proj": (model.q_lora_rank, hidden),
            "q_a_layernorm": (model.q_lora_rank,),
            "q_b_proj": (query, model.q_lora_rank),
        }
    return shapes | {
        "kv_a_proj_with_mqa": (latent + model.qk_rope_head_dim, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (model.qk_nope_head_dim + model.v_head_dim), latent),
        "o_proj": (hidden, heads * model.v_head_dim),
    }


def _swiglu_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }


def _mixture_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    num, hidden, width = model.num_experts, model.hidden_size, expert_width(model)
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (num, hidden),
        f"{_EXPERTS}gate_proj": (num, width, hidden),
        f"{_EXPERTS}up_proj": (num, width, hidden),
        f"{_EXPERTS}down_proj": (num, hidden, width),
    }
    if model.shared_expert_intermediate_size:
        shapes |= _swiglu_shapes("mlp.shared_experts", hidden, model.shared_expert_intermediate_size)
    return shapes


def hugging_face_name(parameter: str) -> str:
    """Return what Hugging Face calls a parameter: the output matrix lies outside of `model`."""
    return parameter if parameter == OUTPUT else f"model.{parameter}"


def is_superfluous(name: str, model: ModelConfig) -> bool:
    """Whether a folder may hold this tensor although the model has no such parameter: the output matrix that
    is tied, the frequencies that old versions stored, and DeepSeek-V3's layers after the last one, which
    predict further tokens.
    """
    parts = name.split(".")
    if model.kv_lora_rank is not None and parts[:2] == ["model", "layers"] and parts[2:3]:
        return parts[2].isdecimal() and int(parts[2]) >= model.num_hidden_layers
    return name.endswith(".rotary_emb.inv_freq") or (model.tie_word_embeddings and name == OUTPUT)


@dataclass(frozen=True)
class StoredPart:
    """Elements of a Hugging Face tensor, side by side from element `begin` on, that are a box of one of our
    parameters.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    parameter: str
    box: Box


def stored_parts(model: ModelConfig, *, is_mixtral: bool, is_stacked: bool = False) -> Iterator[StoredPart]:
    """Yield what holds the parameters and the biases of routers, in the order of `parameter_shapes`;
    `is_mixtral`: by Mixtral's names, `is_stacked`: where experts are stacked on disk.
    """
    for name, shape in {**parameter_shapes(model), **bias_shapes(model)}.items():
        layer, _, inner = name.partition(f".{_EXPERTS}")
        if not inner:
            theirs = hugging_face_name(name)
            if is_mixtral and not is_stacked:
                theirs = theirs.replace(".mlp.gate.", f".{_MIXTRAL_LAYER}.gate.")
            yield StoredPart(theirs, shape, 0, name, Box.whole(shape))
        elif is_stacked:
            yield from _stacked(f"model.{layer}", name, shape)
        else:
            words = f"mlp.experts.{{}}.{inner}.weight"
            if is_mixtral:
                words = f"{_MIXTRAL_LAYER}.experts.{{}}.{_MIXTRAL_EXPERT[inner]}.weight"
            for expert in range(shape[0]):
                box = Box((expert, 0, 0), (1, *shape[1:]))
                yield StoredPart(f"model.{layer}.{words.format(expert)}", shape[1:], 0, name, box)


def _stacked(layer: str, name: str, shape: tuple[int, ...]) -> Iterator[StoredPart]:
    if name.endswith("down_proj"):
        yield StoredPart(f"{layer}.{_EXPERTS}down_proj", shape, 0, name, Box.whole(shape))
        return
    num, width, hidden = shape
    one = math.prod(shape[1:])
    for expert in range(num):
        begin = 2 * expert * one + (one if name.endswith("up_proj") else 0)
        box = Box((expert, 0, 0), (1, width, hidden))
        yield StoredPart(f"{layer}.{GATE_AND_UP}", (num, 2 * width, hidden), begin, name, box)
