"""Hugging Face's config.json and our ModelConfig, in both directions. It reads no files.

transformers 5 writes `rope_parameters` and `dtype`; older ones `rope_theta`, `rope_scaling` and
`torch_dtype`. Both are read; the older names are written, which all versions read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conf.schema import Family, ModelConfig, MoeBalance, RopeScaling, ScoringFunc
from orchestra.errors import DataError
from orchestra.run.events import is_number
from orchestra.sizes.flops import expert_width, head_dim

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Sizes beyond it are no model's, nor are so many experts.
_LARGEST = 2**31 - 1
_MOST_EXPERTS = 1 << 16
# A group of experts is judged by its two best.
_FEWEST_IN_GROUP = 2
_SCALING_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor")
# DeepSeek's widths of heads, which have the same names here.
_LATENT_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Architecture:
    """One of transformers' architectures that is also ours: how people call it, and its names there.

    `absent`: what transformers takes where a key is absent. `fixed`: what ours does; a config.json that says
    otherwise is another model. `experts`: the key that says how many there are, None where there are none.
    """

    title: str
    model_type: str
    class_name: str
    absent: Mapping[str, Any]
    fixed: Mapping[str, Any]
    experts: str | None = None


_OF_ALL: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_OF_QWEN3 = {**_OF_ALL, "vocab_size": 151936, "max_position_embeddings": 32768}
_SILU: Mapping[str, Any] = {"hidden_act": "silu"}
_NO_BIAS: Mapping[str, Any] = {**_SILU, "attention_bias": False}

LLAMA = Architecture(
    title="Llama",
    model_type="llama",
    class_name="LlamaForCausalLM",
    absent={**_OF_ALL, "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    fixed={**_NO_BIAS, "mlp_bias": False},
)
MIXTRAL = Architecture(
    title="Mixtral",
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    absent={
        **_OF_ALL,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    fixed={**_SILU, "sliding_window": None},
    experts="num_local_experts",
)
QWEN3 = Architecture(
    title="Qwen3",
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    absent={**_OF_QWEN3, "intermediate_size": 22016, "head_dim": 128},
    fixed={**_NO_BIAS, "use_sliding_window": False},
)
QWEN3_MOE = Architecture(
    title="Qwen3-MoE",
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    absent={
        **_OF_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    fixed={**_NO_BIAS, "use_sliding_window": False, "decoder_sparse_step": 1},
    experts="num_experts",
)
DEEPSEEK_V3 = Architecture(
    title="DeepSeek-V3",
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    absent={
        **_OF_ALL,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    fixed={
        **_NO_BIAS,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    experts="n_routed_experts",
)
ARCHITECTURES = (LLAMA, MIXTRAL, QWEN3, QWEN3_MOE, DEEPSEEK_V3)
# One number by the names of several versions.
_NAMES_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def architecture_of(model: ModelConfig) -> Architecture:
    """Return the architecture that has all of a model and no more.

    Raises DataError where transformers has none such, with what would have to be otherwise.
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
    if model.kv_lora_rank is not None:
        kind = DEEPSEEK_V3
    elif model.num_experts:
        kind = QWEN3_MOE if model.qk_norm else MIXTRAL
    else:
        kind = QWEN3 if model.qk_norm else LLAMA
    unlike = list(_unlike(model, kind))
    if unlike:
        raise DataError(
            f"the model has no Hugging Face form: the nearest is {kind.title}, whose models have "
            + ", ".join(f"{expected} (here {key}={value})" for key, value, expected in unlike)
        )
    return kind


def _unlike(model: ModelConfig, kind: Architecture) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and what it would have to be, for what keeps a mixture from being of a kind."""
    if kind.experts is None:
        return
    is_deepseek = kind is DEEPSEEK_V3
    shared, width = model.shared_expert_intermediate_size, expert_width(model)
    if not model.num_experts:
        yield "model.num_experts", 0, "experts beside latent attention"
    elif is_deepseek and (shared == 0 or shared % width):
        expected = f"model.shared_expert_intermediate_size a multiple of the experts' width {width}"
        yield "model.shared_expert_intermediate_size", shared, expected
    scoring = ScoringFunc.sigmoid if is_deepseek else ScoringFunc.softmax
    if model.scoring_func is not scoring:
        yield "model.scoring_func", model.scoring_func.name, f"model.scoring_func={scoring.name}"
    if is_deepseek:
        return
    only: dict[str, Any] = {
        "shared_expert_intermediate_size": 0,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }
    if kind is MIXTRAL:
        only |= {"norm_topk_prob": True, "first_k_dense_replace": 0}
    for key, value in only.items():
        if getattr(model, key) != value:
            yield f"model.{key}", getattr(model, key), f"model.{key}={value}"
    if model.moe_balance is MoeBalance.bias:
        yield (
            "model.moe_balance",
            "bias",
            "no bias by which experts are chosen: model.moe_balance=aux or none",
        )


def config_document(model: ModelConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """Return config.json for weights of safetensors' type `dtype`.

    `end_of_text` is the token that ends a document.

    Raises DataError for a model that transformers does not have.
    """
    kind = architecture_of(model)
    refused = list(_not_loaded(model, kind))
    if refused:
        raise DataError(f"transformers loads or runs no {kind.title} with {', '.join(refused)}")
    return {
        "architectures": [kind.class_name],
        "model_type": kind.model_type,
        "hidden_size": model.hidden_size,
        "intermediate_size": expert_width(model) if kind is MIXTRAL else model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        **(_latent_document(model) if kind is DEEPSEEK_V3 else {"head_dim": head_dim(model)}),
        **(_experts_document(model, kind) if kind.experts is not None else {}),
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": _scaling_document(model.rope_scaling),
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        # Of what is trained already; transformers takes no more.
        "initializer_range": min(model.init_std, 1.0),
        **kind.fixed,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "use_cache": True,
        # Their own defaults (1 and 2, or 0 and 1) would be two of our ordinary tokens.
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "torch_dtype": _DTYPES[dtype],
    }


def _latent_document(model: ModelConfig) -> dict[str, Any]:
    return {key: getattr(model, key) for key in ("q_lora_rank", *_LATENT_WIDTHS)}


def _experts_document(model: ModelConfig, kind: Architecture) -> dict[str, Any]:
    assert kind.experts is not None
    document = {kind.experts: model.num_experts, "num_experts_per_tok": model.num_experts_per_tok}
    if kind is MIXTRAL:
        return document
    document |= {"moe_intermediate_size": expert_width(model), "norm_topk_prob": model.norm_topk_prob}
    if kind is QWEN3_MOE:
        return {**document, "mlp_only_layers": list(range(model.first_k_dense_replace))}
    keys = ("first_k_dense_replace", "routed_scaling_factor")
    num_groups, num_chosen = groups_that_count(model)
    groups = {"n_group": num_groups, "topk_group": num_chosen}
    num_shared = model.shared_expert_intermediate_size // expert_width(model)
    # No layer that predicts further tokens.
    alone = {"n_shared_experts": num_shared, "num_nextn_predict_layers": 0}
    return {**document, **{key: getattr(model, key) for key in keys}, **groups, **alone}


def groups_that_count(model: ModelConfig) -> tuple[int, int]:
    """Return the groups of experts and how many of them are chosen; one where a token may choose all."""
    return (1, 1) if model.n_group == model.topk_group else (model.n_group, model.topk_group)


def _not_loaded(model: ModelConfig, kind: Architecture) -> Iterator[str]:
    """Yield what ours has and transformers 5 says no to, though the architecture has it."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    if kind is LLAMA and hidden % heads:
        yield f"model.hidden_size={hidden}, which is no multiple of model.num_attention_heads={heads}"
    if kind is DEEPSEEK_V3 and model.num_experts // groups_that_count(model)[0] < _FEWEST_IN_GROUP:
        yield f"model.num_experts={model.num_experts} in {model.n_group} groups: it wants two in each"


def _scaling_document(scaling: RopeScaling) -> dict[str, Any] | None:
    if not scaling.enabled:
        return None
    numbers = {name: getattr(scaling, name) for name in _SCALING_NUMBERS}
    longest = scaling.original_max_position_embeddings
    return {"rope_type": "llama3", **numbers, "original_max_position_embeddings": longest}


def model_of(document: Any, source: str, name: str) -> ModelConfig:
    """Return the model that config.json describes; `source` is what errors call the file.

    Raises DataError where it is of no architecture of ours, or one with parts that ours does not have.
    """
    if not isinstance(document, dict):
        raise DataError(f"{source}: expected a JSON object, found {type(document).__name__}")
    kind = _kind_of(document, source)
    given = {key: value for key, value in document.items() if value is not None}
    values = {**kind.absent, **given}
    rope = _rope(document)
    heads = _whole(values, "num_attention_heads", source)
    hidden = _whole(values, "hidden_size", source)
    kv_heads = _whole({"num_key_value_heads": heads, **values}, "num_key_value_heads", source)
    if heads % kv_heads:
        raise DataError(
            f"{source}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
        )
    model = ModelConfig(
        name=name,
        family=Family.llama,
        hidden_size=hidden,
        intermediate_size=_whole(values, "intermediate_size", source),
        num_hidden_layers=_whole(values, "num_hidden_layers", source),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=_whole(values, "vocab_size", source),
        max_position_embeddings=_whole(values, "max_position_embeddings", source),
        rope_theta=_number({**values, **rope}, "rope_theta", source),
        rope_scaling=_rope_scaling(rope, source),
        norm_eps=_number(values, "rms_norm_eps", source),
        tie_word_embeddings=_flag(values, "tie_word_embeddings", source),
        qk_norm=kind in (QWEN3, QWEN3_MOE),
        init_std=_number(values, "initializer_range", source),
    )
    changes = (
        _latents(document, values, model, source) if kind is DEEPSEEK_V3 else _heads(values, model, source)
    )
    if kind.experts is not None:
        changes |= _mixture(values, kind, model.num_hidden_layers, source)
    return dataclasses.replace(model, **changes)


def _heads(values: Mapping[str, Any], model: ModelConfig, source: str) -> dict[str, Any]:
    heads, hidden = model.num_attention_heads, model.hidden_size
    width = None if values.get("head_dim") is None else _whole(values, "head_dim", source)
    if width is None and hidden % heads:
        raise DataError(f"{source}: num_attention_heads={heads} does not divide hidden_size={hidden}")
    # The usual width is left to follow from the two numbers above, as presets do.
    return {"head_dim": None if width is None or width * heads == hidden else width}


def _latents(
    document: Mapping[str, Any], values: Mapping[str, Any], model: ModelConfig, source: str
) -> dict[str, Any]:
    if model.num_key_value_heads != model.num_attention_heads:
        raise DataError(
            f"{source}: num_key_value_heads={model.num_key_value_heads}, but latent attention has keys and "
            f"values for each of its num_attention_heads={model.num_attention_heads}"
        )
    # Unlike other keys, null says something else than no key.
    has_none = "q_lora_rank" in document and document["q_lora_rank"] is None
    widths: dict[str, Any] = {key: _whole(values, key, source) for key in _LATENT_WIDTHS}
    if widths["qk_rope_head_dim"] % 2:
        raise DataError(f"{source}: qk_rope_head_dim={widths['qk_rope_head_dim']} is odd, expected pairs")
    return {**widths, "q_lora_rank": None if has_none else _whole(values, "q_lora_rank", source)}


def _mixture(values: Mapping[str, Any], kind: Architecture, num_layers: int, source: str) -> dict[str, Any]:
    assert kind.experts is not None
    key = next((name for name in _NAMES_OF_EXPERTS if name != kind.experts and name in values), kind.experts)
    num, chosen = _whole(values, key, source), _whole(values, "num_experts_per_tok", source)
    if num > _MOST_EXPERTS or chosen > num:
        raise DataError(
            f"{source}: {key}={num} with num_experts_per_tok={chosen}; expected at most {_MOST_EXPERTS} "
            "experts, and as many as a token chooses"
        )
    changes: dict[str, Any] = {"num_experts": num, "num_experts_per_tok": chosen}
    # How it was trained is not told; a bias is a tensor of its own, which only one architecture has.
    changes["moe_balance"] = MoeBalance.bias if kind is DEEPSEEK_V3 else MoeBalance.aux
    if kind is MIXTRAL:
        return changes
    width = _whole(values, "moe_intermediate_size", source)
    changes |= {"moe_intermediate_size": width, "norm_topk_prob": _flag(values, "norm_topk_prob", source)}
    dense = values.get("first_k_dense_replace")
    if kind is QWEN3_MOE:
        listed = values.get("mlp_only_layers", [])
        dense = len(listed) if isinstance(listed, list) else None
        if listed != list(range(dense or 0)):
            raise DataError(
                f"{source}: mlp_only_layers={listed!r}, but orchestra's {kind.title} has dense layers only "
                "before all mixtures: [0, 1, …]"
            )
    if type(dense) is not int or not 0 <= dense < num_layers:
        raise DataError(
            f"{source}: the first {dense!r} layers are dense, expected a whole number from 0 to "
            f"{num_layers - 1}: of num_hidden_layers={num_layers} at least one is a mixture"
        )
    changes["first_k_dense_replace"] = dense
    if kind is DEEPSEEK_V3:
        changes |= _groups(values, num, source)
        changes["shared_expert_intermediate_size"] = width * _whole(values, "n_shared_experts", source)
        changes["scoring_func"] = ScoringFunc.sigmoid
        changes["routed_scaling_factor"] = _number(values, "routed_scaling_factor", source)
    return changes


def _groups(values: Mapping[str, Any], num_experts: int, source: str) -> dict[str, Any]:
    groups, chosen = _whole(values, "n_group", source), _whole(values, "topk_group", source)
    if num_experts % groups or chosen > groups:
        raise DataError(
            f"{source}: n_group={groups} and topk_group={chosen} of {num_experts} experts; expected groups "
            "of equal sizes, of which some are chosen"
        )
    return {"n_group": groups, "topk_group": chosen}


def _kind_of(document: Mapping[str, Any], source: str) -> Architecture:
    found = document.get("model_type")
    kind = next((each for each in ARCHITECTURES if each.model_type == found), None)
    architectures = document.get("architectures") or [kind.class_name if kind else None]
    if kind is None or kind.class_name not in architectures:
        listed = ", ".join(map(str, architectures)) if isinstance(architectures, list) else architectures
        known = ", ".join(f"{each.class_name} ({each.model_type})" for each in ARCHITECTURES)
        raise DataError(
            f"{source}: model_type={found!r} ({listed}) is another architecture; orchestra reads {known}"
        )
    for key, expected in kind.fixed.items():
        value = document.get(key)
        if value is not None and value != expected:
            raise DataError(
                f"{source}: {key}={value!r}, but orchestra's {kind.title} has {key}={expected!r} only"
            )
    of_layers = document.get("layer_types") or []
    if not isinstance(of_layers, list) or any(each != "full_attention" for each in of_layers):
        raise DataError(f"{source}: layer_types={of_layers!r}; orchestra has 'full_attention' only")
    if document.get("quantization_config") is not None:
        raise DataError(
            f"{source}: the weights are quantized (quantization_config); get the model in bf16, fp16 or fp32"
        )
    return kind


def _rope(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings under one set of names, whichever version wrote them."""
    # Of both, transformers takes all of the older one: people add it to a file by hand.
    given = document.get("rope_scaling") or document.get("rope_parameters")
    given = given if isinstance(given, dict) else {}
    rope = {key: value for key, value in given.items() if value is not None}
    longest = "original_max_position_embeddings"
    if document.get(longest) is not None:
        rope[longest] = document[longest]
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
