"""The ordered list of what is done to a single-device model to train it on a mesh. A feature is one more
line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conf.schema import Config
from orchestra.model.transformer import Transformer
from orchestra.optim.adamw import Trained
from orchestra.parallel.blocks import (
    compile_blocks,
    direct_weights,
    gathered_in_fp8,
    keep_history,
    keep_rounded,
    recompute_blocks,
    set_products,
)
from orchestra.parallel.context.cut_sequences import cut_sequences
from orchestra.parallel.expert_balance import ExpertBalance, set_up_mixtures
from orchestra.parallel.experts.placed_experts import PlacedExperts, place_experts
from orchestra.parallel.experts.share_experts import share_experts
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.pipeline.own_stages import keep_own_stages
from orchestra.parallel.pipeline.passes import Pipeline
from orchestra.parallel.places import TensorPlace
from orchestra.parallel.tensor.split import split_tensors
from orchestra.parallel.zero.buffers import Units, place_units
from orchestra.parallel.zero.stages import Rounding, Stage, make_stage
from orchestra.precision.policies import policy
from orchestra.precision.scale_history import ScaleHistory


@dataclass(frozen=True)
class Parallelized:
    """A model ready to train.

    `trained` is what the optimizer updates, for every parameter in the model's order; `places` says where
    this rank's part of each lies in the whole one; `units` are the flat buffers that hold them; `stage` keeps
    gradients and parameters over the ranks; `scale_history` is delayed scaling's, None without. `shapes` are
    those of all parameters of the model, whichever rank has them, and `pipeline` runs the passes where the
    model is cut into stages. `expert_balance` follows how mixtures are loaded; None without any.
    `placed_experts` moves experts between ranks; None where they stay.
    """

    model: Transformer
    trained: list[Trained]
    places: Mapping[str, TensorPlace]
    units: Units
    stage: Stage
    shapes: Mapping[str, tuple[int, ...]]
    scale_history: ScaleHistory | None = None
    pipeline: Pipeline | None = None
    expert_balance: ExpertBalance | None = None
    placed_experts: PlacedExperts | None = None


def parallelize(model: Transformer, config: Config, mesh: Mesh) -> Parallelized:
    """Give a model on the meta device its values, this rank's part of them, and make it train. *Collective*.

    The order matters: tensors are cut, and those of other stages dropped, before they exist, so that no rank
    ever makes what it does not hold;
    masters are made with the parameters; blocks are compiled in their final dtype and with what they
    recompute; the hooks of ZeRO stand around the compiled blocks, and so come last.
    """
    precision = policy(config.precision)
    places = split_tensors(model, config, mesh)
    places = share_experts(model, places, config, mesh)
    cut_sequences(model, config, mesh)
    shapes = {name: place.shape for name, place in places.items()}
    places = keep_own_stages(model, places, config, mesh)
    history = set_products(model, config, mesh.device)
    units = place_units(model, places, precision, config, mesh)
    balance = set_up_mixtures(model, config, mesh)
    recompute_blocks(model, config, mesh)
    compile_blocks(model, config)
    direct = direct_weights(model, config, mesh)
    in_fp8 = gathered_in_fp8(model, config)
    stage = make_stage(model, units, places, precision, direct, config, mesh, in_fp8)
    # Gathered parameters share their memory with those of other blocks: nothing is kept beside them.
    rounded = None if units.is_split else keep_rounded(model, config)
    if rounded is not None:
        stage = Rounding(stage, rounded)
    if history is not None:
        keep_history(history, model, config)
    pipeline = Pipeline(model, stage, config, mesh) if mesh.layout.pp > 1 else None
    placed = place_experts(model, places, units, balance, config, mesh)
    return Parallelized(
        model, units.trained, places, units, stage, shapes, history, pipeline, balance, placed
    )
