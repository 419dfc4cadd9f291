"""Hugging Face's config.json of a Llama and our ModelConfig, in both directions. It reads no files.

transformers 5 writes `rope_parameters` and `dtype`; older ones `rope_theta`, `rope_scaling` and
`torch_dtype`. Both are read; the older names are written, which all versions read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from conf.schema import Family, ModelConfig, RopeScaling
from orchestra.errors import DataError
from orchestra.run.events import is_number
from orchestra.sizes.flops import head_dim

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# What transformers' LlamaConfig takes where a key is absent.
_WHERE_ABSENT: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
# What our Llama does; a config.json that says otherwise is another model.
_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# Sizes beyond it are no model's.
_LARGEST = 2**31 - 1
_SCALING_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor")


def config_document(model: ModelConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """Return config.json for weights of safetensors' type `dtype`.

    `end_of_text` is the token that ends a document.

    Raises DataError for a model that is no Llama.
    """
    if model.block is not None:
        raise DataError(
            f"model.block={model.block} has no Hugging Face form: only the layers of model.family=llama are "
            "exported"
        )
    if model.family is not Family.llama:
        raise DataError(
            f"model.family={model.family.name} has no Hugging Face form here: only llama is exported"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": head_dim(model),
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": _scaling_document(model.rope_scaling),
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.init_std,
        **_FIXED,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "use_cache": True,
        # Llama's own defaults (1 and 2) would be two of our ordinary tokens.
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "torch_dtype": _DTYPES[dtype],
    }


def _scaling_document(scaling: RopeScaling) -> dict[str, Any] | None:
    if not scaling.enabled:
        return None
    numbers = {name: getattr(scaling, name) for name in _SCALING_NUMBERS}
    longest = scaling.original_max_position_embeddings
    return {"rope_type": "llama3", **numbers, "original_max_position_embeddings": longest}


def model_of(document: Any, source: str, name: str) -> ModelConfig:
    """Return the model that config.json describes; `source` is what errors call the file.

    Raises DataError where it is no Llama, or one with parts that orchestra's Llama does not have.
    """
    if not isinstance(document, dict):
        raise DataError(f"{source}: expected a JSON object, found {type(document).__name__}")
    _refuse_strangers(document, source)
    given = {key: document.get(key) for key in document}
    values = {**_WHERE_ABSENT, **{key: value for key, value in given.items() if value is not None}}
    rope = _rope(document)
    heads = _whole(values, "num_attention_heads", source)
    hidden = _whole(values, "hidden_size", source)
    kv_heads = _whole({"num_key_value_heads": heads, **values}, "num_key_value_heads", source)
    width = None if values.get("head_dim") is None else _whole(values, "head_dim", source)
    if width is None and hidden % heads:
        raise DataError(f"{source}: num_attention_heads={heads} does not divide hidden_size={hidden}")
    if heads % kv_heads:
        raise DataError(
            f"{source}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
        )
    return ModelConfig(
        name=name,
        family=Family.llama,
        hidden_size=hidden,
        intermediate_size=_whole(values, "intermediate_size", source),
        num_hidden_layers=_whole(values, "num_hidden_layers", source),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        # The usual width is left to follow from the two numbers above, as presets do.
        head_dim=None if width is None or width * heads == hidden else width,
        vocab_size=_whole(values, "vocab_size", source),
        max_position_embeddings=_whole(values, "max_position_embeddings", source),
        rope_theta=_number({**values, **rope}, "rope_theta", source),
        rope_scaling=_rope_scaling(rope, source),
        norm_eps=_number(values, "rms_norm_eps", source),
        tie_word_embeddings=_flag(values, "tie_word_embeddings", source),
        init_std=_number(values, "initializer_range", source),
    )


def _refuse_strangers(document: Mapping[str, Any], source: str) -> None:
    found = document.get("model_type")
    architectures = document.get("architectures") or ["LlamaForCausalLM"]
    if found != "llama" or "LlamaForCausalLM" not in architectures:
        listed = ", ".join(map(str, architectures)) if isinstance(architectures, list) else architectures
        raise DataError(
            f"{source}: model_type={found!r} ({listed}) is another architecture; orchestra reads Llama: "
            "model_type 'llama' with LlamaForCausalLM"
        )
    for key, expected in _FIXED.items():
        value = document.get(key)
        if value is not None and value != expected:
            raise DataError(f"{source}: {key}={value!r}, but orchestra's Llama has {key}={expected!r} only")
    if document.get("quantization_config") is not None:
        raise DataError(
            f"{source}: the weights are quantized (quantization_config); get the model in bf16, fp16 or fp32"
        )


def _rope(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings under one set of names, whichever version wrote them."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = document.get(key)
        if isinstance(value, dict):
            rope.update({inner: number for inner, number in value.items() if number is not None})
    # `type` is the name that the first Llama configurations used.
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope


def _rope_scaling(rope: Mapping[str, Any], source: str) -> RopeScaling:
    if rope["rope_type"] == "default":
        return RopeScaling()
    if rope["rope_type"] != "llama3":
        raise DataError(f"{source}: rope_type={rope['rope_type']!r}; orchestra has 'default' and 'llama3'")
    numbers = {name: _number(rope, name, source) for name in _SCALING_NUMBERS}
    longest = _whole(rope, "original_max_position_embeddings", source)
    return RopeScaling(enabled=True, original_max_position_embeddings=longest, **numbers)


def _whole(values: Mapping[str, Any], key: str, source: str) -> int:
    value = values.get(key)
    if type(value) is not int or not 0 < value <= _LARGEST:
        raise DataError(f"{source}: {key} is {value!r}, expected a whole number from 1 to {_LARGEST}")
    return value


def _number(values: Mapping[str, Any], key: str, source: str) -> float:
    value = values.get(key)
    if not is_number(value) or not 0 < value < math.inf:
        raise DataError(f"{source}: {key} is {value!r}, expected a number above 0")
    return float(value)


def _flag(values: Mapping[str, Any], key: str, source: str) -> bool:
    value = values.get(key)
    if type(value) is not bool:
        raise DataError(f"{source}: {key} is {value!r}, expected true or false")
    return value
