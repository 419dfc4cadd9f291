"""A Llama's parameters as other trainers call them, and how their matrices become Hugging Face's.

Shapes and names alone. `orchestra checkpoint import --from dcp` uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from conf.schema import Family, ModelConfig
from orchestra.errors import DataError
from orchestra.huggingface.export import STORED
from orchestra.huggingface.hub_names import hugging_face_name, is_superfluous, parameter_shapes
from orchestra.sizes.flops import head_dim
from orchestra.sizes.units import first_few

_NUM_LISTED = 4
_OF_A_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# torchtitan's, which are those of Meta's own Llama.
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
_OUTSIDE = {"tok_embeddings.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
# The rotation's angles, which some versions save as a buffer.
_ANGLES = "freqs_cis"


def renames(
    tensors: Mapping[str, Sequence[Any]], model: ModelConfig, source: str
) -> dict[str, dict[str, Any]]:
    """Return for each tensor (dtype and shape by name) that is a parameter of `model` its name here (`to`),
    and where its rows lie in another order, `split` and `order`: `view(split).permute(order)`, flattened.

    Meta's rotation turns neighbouring rows of a head (2i, 2i + 1), Hugging Face's row i and row i + half.
    Raises DataError unless the tensors are this model's, all of them.
    """
    if model.family is not Family.llama:
        raise DataError(f"model.family={model.family.name}: only a llama can be imported")
    if model.num_experts or model.kv_lora_rank is not None:
        raise DataError(f"model.name={model.name}: only a model without experts or latents can be imported")
    expected = parameter_shapes(model)
    found: dict[str, dict[str, Any]] = {}
    strangers = []
    for name, (dtype, shape) in tensors.items():
        parameter = _parameter(name)
        if parameter not in expected:
            if name != _ANGLES and not is_superfluous(parameter, model):
                strangers.append(name)
            continue
        if tuple(shape) != expected[parameter]:
            raise DataError(
                f"{source}: {name} has shape {list(shape)}, the model has {list(expected[parameter])}; give "
                "the model that was trained: model=PRESET and model.KEY=VALUE"
            )
        if dtype not in STORED:
            raise DataError(f"{source}: {name} is {dtype}, expected one of {', '.join(STORED)}")
        found[name] = {"to": parameter}
        if name.endswith((".attention.wq.weight", ".attention.wk.weight")):
            rows, columns = shape
            width = head_dim(model)
            found[name] |= {"split": [rows // width, width // 2, 2, columns], "order": [0, 2, 1, 3]}
    taken = [rename["to"] for rename in found.values()]
    missing = [name for name in expected if name not in taken]
    if missing or strangers or len(taken) != len(expected):
        raise DataError(_unlike(source, missing, strangers))
    return found


def _parameter(name: str) -> str:
    """Return our name of what torchtitan or Hugging Face calls `name`; anything else stays what it is."""
    match = _OF_A_LAYER.fullmatch(name)
    if match is not None:
        return f"layers.{match[1]}.{_IN_LAYER.get(match[2], match[2])}"
    known = _OUTSIDE.get(name, name)
    inner = known.removeprefix("model.")
    return inner if hugging_face_name(inner) == known else known


def _unlike(source: str, missing: Sequence[str], strangers: Sequence[str]) -> str:
    lacks = f"lacks {first_few(missing, _NUM_LISTED)}" if missing else ""
    has = f"has {first_few(strangers, _NUM_LISTED)} beside them" if strangers else ""
    what = ", and ".join(filter(None, (lacks, has))) or "has some of them under two names"
    return (
        f"{source}: its tensors are not this Llama's: it {what}; the names of torchtitan and Hugging Face "
        "are known. Give the model that was trained: model=PRESET and model.KEY=VALUE"
    )
