"""Cuts a model over the ranks of a tensor-parallel group: its parameters, and the modules that use them.

The model keeps its parameters' names. It is cut on the meta device, before any value exists: a rank makes and
restores no more than its own part, which the places tell.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.schema import Config, ModelConfig
from orchestra.model.layers import Attention, GeluMLP, SwiGLU
from orchestra.model.transformer import Transformer
from orchestra.parallel.mesh import Mesh, OpenGroup
from orchestra.parallel.places import TensorPlace, whole_place, whole_places
from orchestra.parallel.tensor.cuts import Cut, cut_of, num_sharing_kv
from orchestra.parallel.tensor.parallel_layers import (
    ColumnsProduct,
    CutEmbedding,
    CutHead,
    CutPositions,
    RowsProducts,
)
from orchestra.parallel.tensor.tensor_collectives import TensorGroup, tensor_group
from orchestra.parallel.tensor.vocabulary_loss import CutLoss


def split_tensors(model: Transformer, config: Config, mesh: Mesh) -> dict[str, TensorPlace]:
    """Cut the model over `mesh.tp_group` and return where each parameter's part lies. *Collective*.

    The values of parameters that are cut are lost. Without a group nothing changes.
    """
    if mesh.tp_group is None:
        return whole_places(model)
    is_sequence_parallel = config.parallelism.sequence_parallel
    group = tensor_group(
        mesh.tp_group,
        mesh.traffic,
        is_sequence_parallel=is_sequence_parallel,
        # A GPU gathers again after a product, for less memory; on CPU a gather is not hidden by anything.
        gathers_again=is_sequence_parallel and mesh.is_gpu,
    )
    places = _cut_parameters(model, group, mesh.tp_group, mesh.open_group)
    _replace_modules(model, group)
    return places


def _cut_parameters(
    model: Transformer, group: TensorGroup, tp_group: dist.ProcessGroup, open_group: OpenGroup
) -> dict[str, TensorPlace]:
    sharing = _sharing_group(model.config, group, tp_group, open_group)
    places: dict[str, TensorPlace] = {}
    for name, parameter in list(model.named_parameters()):
        cut = cut_of(name, model.config, group.size, group.rank)
        if cut is None:
            places[name] = _place_of_whole(parameter, group, tp_group)
            continue
        is_shared = sharing is not None and name.split(".")[-2] in ("k_proj", "v_proj")
        places[name] = _place(parameter, cut, sharing if is_shared else None)
        _replace_parameter(model, name, places[name].padded)
    model.tie_weights()
    return places


def _place_of_whole(parameter: Tensor, group: TensorGroup, tp_group: dist.ProcessGroup) -> TensorPlace:
    """Every rank has it and computes the same with it, or the same on its own tokens."""
    sum_group = tp_group if group.is_sequence_parallel else None
    place = whole_place(tuple(parameter.shape))
    return TensorPlace(place.shape, place.offsets, place.local, place.padded, sum_group, group.rank == 0)


def _place(parameter: Tensor, cut: Cut, sum_group: dist.ProcessGroup | None) -> TensorPlace:
    shape = tuple(parameter.shape)

    def with_cut(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
        return (*sizes[: cut.dim], size, *sizes[cut.dim + 1 :])

    is_counted = sum_group is None or sum_group.rank() == 0
    zeros = (0,) * len(shape)
    return TensorPlace(
        shape,
        with_cut(zeros, cut.begin),
        with_cut(shape, cut.size),
        with_cut(shape, cut.padded),
        sum_group,
        is_counted,
    )


def _sharing_group(
    model: ModelConfig, group: TensorGroup, tp_group: dist.ProcessGroup, open_group: OpenGroup
) -> dist.ProcessGroup | None:
    """Return the neighbours that have the same key-value heads as this rank; None where nobody shares."""
    sharing = num_sharing_kv(model, group.size)
    if sharing == 1:
        return None
    if sharing == group.size:
        return tp_group
    first = group.rank // sharing * sharing
    ranks = dist.get_process_group_ranks(tp_group)[first : first + sharing]
    # Only its members make it: other tensor-parallel groups do so at the same time.
    return open_group(ranks)


def _replace_parameter(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    owner, _, kind = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, kind)
    setattr(module, kind, nn.Parameter(torch.empty(shape, dtype=old.dtype, device=old.device)))


def _replace_modules(model: Transformer, group: TensorGroup) -> None:
    words = cut_of("embed_tokens.weight", model.config, group.size, group.rank)
    assert words is not None
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.products = RowsProducts(group)
            module.o_proj = ColumnsProduct(module.o_proj, group)  # type: ignore[assignment]
        elif isinstance(module, SwiGLU | GeluMLP):
            module.products = RowsProducts(group)
            module.down_proj = ColumnsProduct(module.down_proj, group)  # type: ignore[assignment]
    model.embed_tokens = CutEmbedding(model.embed_tokens, words, group)  # type: ignore[assignment]
    if model.embed_positions is not None and group.is_sequence_parallel:
        model.embed_positions = CutPositions(model.embed_positions, group)  # type: ignore[assignment]
    model.lm_head = CutHead(model.lm_head, model.config.vocab_size, group)  # type: ignore[assignment]
    model.loss = CutLoss(words, group)
