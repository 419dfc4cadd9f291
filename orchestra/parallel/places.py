"""Which part of each parameter this rank has under tensor parallelism, and where that lies in the whole one.

A place is a value that the layers above read: what flat buffers hold, what a checkpoint calls it, whose
gradient counts. Nothing is cut or moved here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import ModelConfig
from orchestra.model.initial import global_flat_index
from orchestra.sizes.flops import head_dim


@dataclass(frozen=True)
class TensorPlace:
    """This rank's part of one parameter.

    `shape` is that of the whole parameter and `offsets` where this rank's part begins in it. The parameter
    itself has the shape `padded`; what counts of it is `local`, its first rows and columns: the rest is
    padding (rows beyond the vocabulary), stays zero and is in no checkpoint. `padded` is the same on all
    ranks of the tensor-parallel group.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: tuple[int, ...]
    padded: tuple[int, ...]
    # Ranks over which the gradient is still a partial sum beyond data parallelism; None mostly.
    sum_group: dist.ProcessGroup | None = None
    # Whether this rank's copy counts in the norm over all ranks: of replicas over tp exactly one does.
    is_counted: bool = True


def whole_place(shape: tuple[int, ...]) -> TensorPlace:
    """Return the place of a parameter that this rank has as a whole."""
    return TensorPlace(shape, (0,) * len(shape), shape, shape)


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
            begin = tuple(first + offset for first, offset in zip(place.offsets, offsets, strict=True))
            yield LocalBox(begin, box[tuple(slice(length) for length in counted)])
        position += size


def global_index(place: TensorPlace, start: int, stop: int, device: torch.device) -> Tensor:
    """Return the flat indices in the whole parameter (int64) of the elements [start, stop) of its local part.

    Padding gets indices too, which mean nothing.
    """
    local = torch.arange(start, stop, device=device)
    return global_flat_index(local, place.shape, place.offsets, place.padded)


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
