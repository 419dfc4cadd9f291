"""Leaves a rank the stages of the model that are its own, before any parameter exists.

Stages are numbered over the whole model, `orchestra.sizes.pipeline_schedule` says which rank has which. A
rank's parts of the model are its stages in this order; parameters keep their names, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from conf.schema import Config
from orchestra.model.transformer import ModelPart, Transformer
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.places import TensorPlace
from orchestra.sizes.pipeline_schedule import pipeline_shape
from orchestra.sizes.stage_cut import stage_layers


def keep_own_stages(
    model: Transformer, places: Mapping[str, TensorPlace], config: Config, mesh: Mesh
) -> dict[str, TensorPlace]:
    """Drop what other ranks of the pipeline have, on the meta device; return the places of what is left.
    *Collective*, where the first and the last stage share a matrix.
    """
    if mesh.layout.pp == 1:
        return dict(places)
    shape = pipeline_shape(config.parallelism)
    layers = stage_layers(config)
    last = shape.num_stages - 1
    model.keep_only(
        [
            ModelPart(layers[stage], is_first=stage == 0, is_last=stage == last)
            for stage in shape.stages_of(mesh.coordinates.pp)
        ]
    )
    kept = {name: places[name] for name, _ in model.named_parameters()}
    ends = sorted({shape.rank_of(0), shape.rank_of(last)})
    if not config.model.tie_word_embeddings or len(ends) == 1:
        return kept
    is_end = mesh.coordinates.pp in ends
    # All ranks of the pipeline make a group, see `links`; that of the others has themselves alone.
    group = mesh.open_group([mesh.rank_on("pp", end) for end in ends] if is_end else [mesh.rank])
    if not is_end:
        return kept
    # The two ranks have the same range of it, since it is a unit of its own: they sum its gradients, and one
    # of them counts it in the norm.
    name = "embed_tokens.weight"
    is_counted = kept[name].is_counted and mesh.coordinates.pp == ends[0]
    return {**kept, name: replace(kept[name], sum_group=group, is_counted=is_counted)}
