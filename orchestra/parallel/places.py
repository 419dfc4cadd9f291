"""Which part of each parameter this rank has under tensor parallelism, and where that lies in the whole one.

A place is a value that the layers above read: what flat buffers hold, what a checkpoint calls it, whose
gradient counts. Nothing is cut or moved here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import ModelConfig
from orchestra.model.initial import global_flat_index
from orchestra.sizes.flops import head_dim

_OF_EXPERTS = re.compile(r"layers\.(\d+)\.mlp\.experts\.")


@dataclass(frozen=True)
class TensorPlace:
    """This rank's part of one parameter.

    `shape` is that of the whole parameter and `offsets` where this rank's part begins in it. The parameter
    itself has the shape `padded`; what counts of it is `local`, its first rows and columns: the rest is
    padding (rows beyond the vocabulary, experts that another rank has one more of), stays zero and is in no
    checkpoint. `padded` is the same on all ranks of the groups that share out the parameter. `rows` are the
    local rows' places in the whole parameter where they are no neighbours there.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: tuple[int, ...]
    padded: tuple[int, ...]
    # Ranks over which the gradient is still a partial sum beyond data parallelism; None mostly.
    sum_group: dist.ProcessGroup | None = None
    # Whether this rank's copy counts in the norm over all ranks: of replicas over tp exactly one does.
    is_counted: bool = True
    rows: tuple[int, ...] | None = None


def whole_place(shape: tuple[int, ...]) -> TensorPlace:
    """Return the place of a parameter that this rank has as a whole."""
    return TensorPlace(shape, (0,) * len(shape), shape, shape)


def cut_place(place: TensorPlace, cut: Cut) -> TensorPlace:
    """Return the place of a part of what lies at `place`, which has all of the dim that is cut."""

    def with_cut(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
        return (*sizes[: cut.dim], size, *sizes[cut.dim + 1 :])

    return replace(
        place,
        offsets=with_cut(place.offsets, cut.begin),
        local=with_cut(place.local, cut.size),
        padded=with_cut(place.padded, cut.padded),
    )


def is_of_experts(name: str) -> bool:
    """Whether a parameter is one of all experts of a layer, stacked."""
    return layer_of_experts(name) is not None


def layer_of_experts(name: str) -> int | None:
    """Return the number of the layer whose experts, stacked, a parameter is of; None for any other one."""
    match = _OF_EXPERTS.match(name)
    return None if match is None else int(match.group(1))


@dataclass(frozen=True)
class LocalBox:
    """A box of a parameter: the memory on this rank that holds it, and where it begins in the whole one."""

    offsets: tuple[int, ...]
    tensor: Tensor


def parts_of(flat: Tensor, place: TensorPlace, start: int) -> Iterator[LocalBox]:
    """Yield the boxes, as views, that make up `flat`: the elements from `start` on of a parameter's local
    part, as it lies in memory. Padding is left out.
    """
    position = 0
    for offsets, sizes in boxes(place.padded, start, start + flat.numel()):
        size = math.prod(sizes)
        counted = [
            max(0, min(length, limit - offset))
            for offset, length, limit in zip(offsets, sizes, place.local, strict=True)
        ]
        if math.prod(counted):
            box = flat[position : position + size].view(sizes)
            yield from _in_whole(place, offsets, box[tuple(slice(length) for length in counted)])
        position += size


def _in_whole(place: TensorPlace, offsets: tuple[int, ...], box: Tensor) -> Iterator[LocalBox]:
    """Yield where a box of the local part, which begins there at `offsets`, lies in the whole parameter."""
    begin = tuple(first + offset for first, offset in zip(place.offsets, offsets, strict=True))
    if place.rows is None:
        yield LocalBox(begin, box)
        return
    rows = place.rows[offsets[0] : offsets[0] + len(box)]
    first = 0
    for last in range(len(rows)):
        if last + 1 == len(rows) or rows[last + 1] != rows[last] + 1:
            yield LocalBox((rows[first], *begin[1:]), box[first : last + 1])
            first = last + 1


def global_index(place: TensorPlace, start: int, stop: int, device: torch.device) -> Tensor:
    """Return the flat indices in the whole parameter (int64) of the elements [start, stop) of its local part.

    Padding gets indices too, which mean nothing.
    """
    local = torch.arange(start, stop, device=device)
    if place.rows is None:
        return global_flat_index(local, place.shape, place.offsets, place.padded)
    row, whole_row = math.prod(place.padded[1:]), math.prod(place.shape[1:])
    rows = torch.tensor([*place.rows, *[0] * (place.padded[0] - len(place.rows))], device=device)
    inside = global_flat_index(local % row, place.shape[1:], place.offsets[1:], place.padded[1:])
    return rows[local // row] * whole_row + inside


def boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the flat range [start, stop) of a tensor of `shape` into boxes, each as (offsets, shape), in order.

    Of a matrix these are at most three: the end of a row, whole rows, the begin of a row.
    """
    if start >= stop:
        return []
    if len(shape) == 0:
        return [((), ())]
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        return _in_row(shape, last, start - last * row, stop - last * row)
    parts = _in_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else []
    if first < last:
        rest = (0,) * (len(shape) - 1)
        parts.append(((first, *rest), (last - first, *shape[1:])))
    return parts + (_in_row(shape, last, 0, stop - last * row) if last * row < stop else [])


def _in_row(
    shape: Sequence[int], index: int, start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], start, stop)]


# Integers only, from the model's shape and a rank. The attention is cut by heads (rows of q, k and v, columns
# of o), the feed-forward layer by its inner width (rows of gate and up, columns of down), the embedding and
# the output matrix by words of the vocabulary. All else every rank has as a whole.


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
    if is_of_experts(name):
        width = model.moe_intermediate_size or model.intermediate_size
        return even_cut(2 if kind == "down_proj" else 1, width, tp, rank)
    if layer in ("q_proj", "q_b_proj"):
        return _of_heads(0, model.num_attention_heads, query_width(model), tp, rank)
    if layer == "kv_b_proj":
        width = model.qk_nope_head_dim + model.v_head_dim
        return _of_heads(0, model.num_attention_heads, width, tp, rank)
    if layer in ("k_proj", "v_proj"):
        sharing = num_sharing_kv(model, tp)
        return _of_heads(0, model.num_key_value_heads, head_dim(model), tp // sharing, rank // sharing)
    if kind == "weight" and layer == "o_proj":
        is_latent = model.kv_lora_rank is not None
        width = model.v_head_dim if is_latent else head_dim(model)
        return _of_heads(1, model.num_attention_heads, width, tp, rank)
    return _of_inner_width(module, layer, kind, model, tp, rank)


def _of_inner_width(module: str, layer: str, kind: str, model: ModelConfig, tp: int, rank: int) -> Cut | None:
    is_shared = module.rpartition(".")[0].endswith(".shared_experts")
    width = model.shared_expert_intermediate_size if is_shared else model.intermediate_size
    if layer in ("gate_proj", "up_proj"):
        return even_cut(0, width, tp, rank)
    if kind == "weight" and layer == "down_proj":
        return even_cut(1, width, tp, rank)
    return None


def query_width(model: ModelConfig) -> int:
    """Return the numbers of one head's query."""
    if model.kv_lora_rank is None:
        return head_dim(model)
    return model.qk_nope_head_dim + model.qk_rope_head_dim


def _of_heads(dim: int, num_heads: int, width: int, num_parts: int, part: int) -> Cut:
    # The rules have refused degrees that do not divide.
    heads = num_heads // num_parts
    return Cut(dim, part * heads * width, heads * width, heads * width)
