"""Cuts a model over the ranks of a tensor-parallel group: its parameters, and the modules that use them.

The model keeps its parameters' names. It is cut on the meta device, before any value exists: a rank makes and
restores no more than its own part, which the places tell.

A layer's first product is cut by rows of the weights, its second one by columns. Between them every rank
computes on its own heads or its own part of the inner width. In the backward pass the sum of the input's
gradient over the ranks runs while the gradients of the weights are computed.

Shape letters: B batch, S sequence, E hidden size, T tokens (B·S).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import Config, ModelConfig
from orchestra.model.kernels import product, weights_tickets_biases
from orchestra.model.latent_attention import LatentAttention
from orchestra.model.layers import Attention, GeluMLP, Products, SwiGLU, products_of
from orchestra.model.mixture.mixture import Mixture
from orchestra.model.transformer import Transformer
from orchestra.model.weight_gradients import give_products, tickets_of
from orchestra.parallel.mesh import Mesh, OpenGroup
from orchestra.parallel.places import Cut, TensorPlace, cut_of, cut_place, num_sharing_kv, whole_place
from orchestra.parallel.tensor.tensor_collectives import (
    PendingGather,
    PendingScatter,
    TensorGroup,
    entering,
    gather_parts,
    leaving,
    start_sum,
    tensor_group,
)
from orchestra.parallel.tensor.vocabulary import CutEmbedding, CutHead, CutLoss, CutPositions


def split_tensors(model: Transformer, config: Config, mesh: Mesh) -> dict[str, TensorPlace]:
    """Cut the model over `mesh.tp_group` and return where each parameter's part lies. *Collective*.

    The values of parameters that are cut are lost. Without a group nothing changes.
    """
    if mesh.tp_group is None:
        return {name: whole_place(tuple(value.shape)) for name, value in model.named_parameters()}
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
        whole = whole_place(tuple(parameter.shape))
        cut = cut_of(name, model.config, group.size, group.rank)
        if cut is None:
            # Every rank has it and computes the same with it, or the same on its own tokens.
            is_partial = group.is_sequence_parallel or name.split(".")[-2] in _USED_FOR_PARTS
            sum_group = tp_group if is_partial else None
            places[name] = replace(whole, sum_group=sum_group, is_counted=group.rank == 0)
            continue
        is_shared = name.split(".")[-2] in ("k_proj", "v_proj")
        places[name] = _place(whole, cut, sharing if is_shared else None)
        replace_parameter(model, name, places[name].padded)
    model.tie_weights()
    return places


# Modules that every rank has and uses for its own heads, or its own part of the experts' inner width, alone.
_USED_FOR_PARTS = ("gate", "q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm")


def _place(whole: TensorPlace, cut: Cut, sum_group: dist.ProcessGroup | None) -> TensorPlace:
    return replace(
        cut_place(whole, cut),
        sum_group=sum_group,
        is_counted=sum_group is None or sum_group.rank() == 0,
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


def replace_parameter(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Give a parameter another shape, on the meta device."""
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
        elif isinstance(module, LatentAttention):
            # Latents are few: each rank has all of them, and of their products its own heads.
            module.products = RowsProducts(group)
            module.entering = functools.partial(entering, group=group)
            module.o_proj = ColumnsProduct(module.o_proj, group)  # type: ignore[assignment]
        elif isinstance(module, SwiGLU | GeluMLP):
            module.products = RowsProducts(group)
            module.down_proj = ColumnsProduct(module.down_proj, group)  # type: ignore[assignment]
        elif isinstance(module, Mixture):
            # Each rank routes all tokens, through its part of every expert's inner width.
            module.entering = functools.partial(entering, group=group)
            module.leaving = functools.partial(leaving, group=group)
            module.balance.num_alike = group.size
    model.embed_tokens = CutEmbedding(model.embed_tokens, words, group)  # type: ignore[assignment]
    if model.embed_positions is not None and group.is_sequence_parallel:
        model.embed_positions = CutPositions(model.embed_positions, group)  # type: ignore[assignment]
    model.lm_head = CutHead(model.lm_head, model.config.vocab_size, group)  # type: ignore[assignment]
    model.loss = CutLoss(words, group)


class _RowsProducts(torch.autograd.Function):
    """Products of one full input with weights of which this rank has rows, and biases or none."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: TensorGroup, num_products: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights, tickets, biases = weights_tickets_biases(parameters, num_products)
        full = gather_parts(x, group) if group.is_sequence_parallel else x
        ctx.group, ctx.num_products = group, num_products
        ctx.num_tickets, ctx.num_biases = len(tickets), len(biases)
        ctx.save_for_backward(x if group.gathers_again else full, *weights, *tickets)
        return tuple(map(F.linear, [full] * num_products, weights, biases or (None,) * num_products))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, *others = ctx.saved_tensors
        weights = others[: ctx.num_products]
        tickets = others[ctx.num_products :] or (None,) * ctx.num_products
        group: TensorGroup = ctx.group
        gathers = group.is_sequence_parallel and group.gathers_again
        gathering = PendingGather(kept, group) if gathers else None
        flat = [grad.flatten(0, -2) for grad in grads]
        grad_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        pending = PendingScatter(grad_x, group) if group.is_sequence_parallel else start_sum(grad_x, group)
        x_TE = (gathering.wait() if gathering is not None else kept).flatten(0, -2)
        grad_weights = give_products(tickets, flat, x_TE)
        grad_biases = [grad.sum(0) for grad in flat] if ctx.num_biases else []
        arrived = pending.wait()
        total = arrived if isinstance(pending, PendingScatter) else grad_x
        return total, None, None, *grad_weights, *[None] * ctx.num_tickets, *grad_biases


@dataclass(frozen=True)
class RowsProducts:
    """Takes the place of `products_of` where the linear layers have some rows of their weights only."""

    group: TensorGroup
    # Takes the products of the full input in another precision; sums and products then follow each other.
    inner: Products | None = None

    def __call__(self, x_BSE: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Return this rank's outputs [B, S, …] for an input [B, S, E] or this rank's part of one.
        *Collective* in the backward pass, and under sequence parallelism in the forward pass.
        """
        if self.inner is not None:
            return self.inner(entering(x_BSE, self.group), *linears)
        if torch.compiler.is_compiling():
            return products_of(entering(x_BSE, self.group), *linears)
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        found: tuple[Tensor, ...] = _RowsProducts.apply(  # type: ignore[no-untyped-call]
            x_BSE, self.group, len(weights), *weights, *tickets_of(weights), *biases
        )
        return found


class ColumnsProduct(nn.Module):
    """Takes the place of a linear layer that has some columns of its weight only, and the whole bias."""

    def __init__(self, linear: nn.Linear, group: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.group = group
        # The product of this rank's columns; another precision puts its own in this place.
        self.product: Callable[[Tensor, Tensor], Tensor] = product

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over ranks [B, S, E] or this rank's part of it. *Collective*."""
        # Two nodes and not one function: a recomputation that only needs the product's input ends before it.
        # Summing one part of the tokens while the next is multiplied was not faster with gloo.
        total = leaving(self.product(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias
