"""Whether a folder of weights fits a configured model, and which overrides make a model that it fits.

Whatever changes a parameter's shape or what the weights mean must agree; how long the training context is
and how fresh weights would be made may differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from conf.schema import Config, ModelConfig
from orchestra.errors import DataError
from orchestra.huggingface.folder import CONFIG, Folder, open_folder
from orchestra.sizes.flops import attention_width

# In the order in which people say them.
_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "norm_eps",
    "tie_word_embeddings",
)
_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Agreement that is not asked for, but is worth saying where a new run is made.
_OTHER_KEYS = ("max_position_embeddings",)
# What Hydra reads without quotes.
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]+")


def init_from_problems(config: Config) -> Iterator[str]:
    """Yield what keeps a run from starting with the weights of `model.init_from`; nothing where it is null.

    Reads config.json and the headers of the files, no weights.
    """
    place = config.model.init_from
    if place is None or not place.strip():
        return
    try:
        folder = open_folder(place)
    except DataError as error:
        yield f"model.init_from: {error}"
        return
    yield from problems_of_folder(config.model, folder)


def problems_of_folder(model: ModelConfig, folder: Folder) -> Iterator[str]:
    """Yield what keeps a model from starting with a folder's weights, and the overrides that would help."""
    different = differences(model, folder.model)
    if different:
        found = ", ".join(f"{key}={shown(its)} (configured {shown(ours)})" for key, ours, its in different)
        overrides = " ".join(f"{key}={shown(its)}" for key, _, its in different)
        yield (
            f"model.init_from={folder.place}: its weights are of another model: {found}; add {overrides}, "
            f"or change {CONFIG} in a copy of the folder where that is what you mean"
        )


def differences(ours: ModelConfig, its: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Return (key, our value, its value) for whatever must agree between a model and given weights."""
    found = [] if ours.family is its.family else [("model.family", ours.family, its.family)]
    for key in _KEYS:
        if key == "head_dim" and ours.num_attention_heads and attention_width(ours) == attention_width(its):
            # A null that means the same number; where heads differ that is said by itself.
            continue
        if getattr(ours, key) != getattr(its, key):
            found.append((f"model.{key}", getattr(ours, key), getattr(its, key)))
    return found + _scaling_differences(ours, its)


def _scaling_differences(ours: ModelConfig, its: ModelConfig) -> list[tuple[str, Any, Any]]:
    mine, other = ours.rope_scaling, its.rope_scaling
    keys = (
        *(("enabled",) if mine.enabled != other.enabled else ()),
        *(_SCALING_KEYS if other.enabled else ()),
    )
    return [
        (f"model.rope_scaling.{key}", getattr(mine, key), getattr(other, key))
        for key in keys
        if getattr(mine, key) != getattr(other, key)
    ]


def overrides_for(folder: Folder) -> list[str]:
    """Return the overrides with which `orchestra run` starts from a folder, the default model given."""
    default = ModelConfig()
    overrides = [f"model.init_from={shown(folder.place)}"]
    if _PLAIN.fullmatch(folder.name):
        overrides.append(f"model.name={folder.name}")
    overrides += [f"{key}={shown(its)}" for key, _, its in differences(default, folder.model)]
    for key in _OTHER_KEYS:
        its = getattr(folder.model, key)
        if its != getattr(default, key):
            overrides.append(f"model.{key}={shown(its)}")
    return overrides


def shown(value: Any) -> str:
    """Return a value as Hydra reads it in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
