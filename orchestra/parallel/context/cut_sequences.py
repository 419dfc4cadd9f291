"""Cuts sequences over the ranks of a context-parallel group: what a model has of them, and its attention.

Parameters stay as they are, so a checkpoint knows nothing of it.
"""

from __future__ import annotations

import dataclasses

from conf.schema import Config, ContextMethod, Recompute
from orchestra.model.latent_attention import LatentAttention
from orchestra.model.layers import Attention
from orchestra.model.transformer import Transformer
from orchestra.parallel.context.exchanged_heads import ExchangedHeads
from orchestra.parallel.context.gathered_attention import GatheredAttention
from orchestra.parallel.context.gathered_latents import GatheredLatents, OwnQueriesAttention
from orchestra.parallel.context.sequence_parts import HeadAndTail, PositionsOfPart
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.tensor.tensor_collectives import tensor_group
from orchestra.sizes.activations import kinds_of_layers


def cut_sequences(model: Transformer, config: Config, mesh: Mesh) -> None:
    """Let the model compute on this rank's part of each sequence. *Any rank*, after tensors are cut.

    Without a group nothing changes. Raises ConfigError where a budget for activations is too small.
    """
    if mesh.cp_group is None:
        return
    group = tensor_group(mesh.cp_group, mesh.traffic)
    exchanges = config.parallelism.cp_method is ContextMethod.ulysses
    part = HeadAndTail(group.size, group.rank, has_whole_attention=exchanges)
    model.sequences = part
    if model.embed_positions is not None:
        model.embed_positions = PositionsOfPart(model.embed_positions, part)  # type: ignore[assignment]
    gathered = GatheredAttention(group)
    keeping = dataclasses.replace(gathered, gathers_again=False)
    kinds = kinds_of_layers(config, mesh.layout.dp, is_gpu=mesh.is_gpu)
    for layer, kind in zip(model.layers, kinds, strict=True):
        attention = layer.self_attn
        if isinstance(attention, LatentAttention):
            attention.whole_keys = GatheredLatents(group)
            attention.attend = OwnQueriesAttention(part)
            continue
        assert isinstance(attention, Attention)
        # What a recomputed block keeps is gone before the next block's backward pass.
        attend = gathered if kind is Recompute.none else keeping
        attention.attend = ExchangedHeads(group) if exchanges else attend
