"""Which part of each parameter a tensor-parallel rank has: integers only, from the model's shape and a rank.

The attention is cut by heads (rows of q, k and v, columns of o), the feed-forward layer by its inner width
(rows of gate and up, columns of down), the embedding and the output matrix by words of the vocabulary. All
else every rank has as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import ModelConfig
from orchestra.sizes.flops import head_dim


@dataclass(frozen=True)
class Cut:
    """The part [begin, begin + size) of dim `dim`; the parameter has room for `padded` of them."""

    dim: int
    begin: int
    size: int
    padded: int


def even_cut(dim: int, size: int, num_parts: int, part: int) -> Cut:
    """Return one of equal parts: the last ones are short, or empty, where `num_parts` does not divide."""
    each = -(-size // num_parts)
    begin = min(part * each, size)
    return Cut(dim, begin, min(each, size - begin), each)


def num_sharing_kv(model: ModelConfig, tp: int) -> int:
    """Return how many neighbouring ranks have the same key-value heads, where there are fewer than ranks."""
    return max(1, tp // model.num_key_value_heads)


def cut_of(name: str, model: ModelConfig, tp: int, rank: int) -> Cut | None:
    """Return the part of parameter `name` that tensor-parallel rank `rank` of `tp` has; None: all of it."""
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    if layer in ("embed_tokens", "lm_head"):
        return even_cut(0, model.vocab_size, tp, rank)
    if layer == "q_proj":
        return _of_heads(0, model.num_attention_heads, head_dim(model), tp, rank)
    if layer in ("k_proj", "v_proj"):
        sharing = num_sharing_kv(model, tp)
        return _of_heads(0, model.num_key_value_heads, head_dim(model), tp // sharing, rank // sharing)
    if layer in ("gate_proj", "up_proj"):
        return even_cut(0, model.intermediate_size, tp, rank)
    if kind == "weight" and layer == "o_proj":
        return _of_heads(1, model.num_attention_heads, head_dim(model), tp, rank)
    if kind == "weight" and layer == "down_proj":
        return even_cut(1, model.intermediate_size, tp, rank)
    return None


def _of_heads(dim: int, num_heads: int, width: int, num_parts: int, part: int) -> Cut:
    # The rules have refused degrees that do not divide.
    heads = num_heads // num_parts
    return Cut(dim, part * heads * width, heads * width, heads * width)
