"""Builds model, optimizer, step and loader of one rank from the configuration: one function for each.

Called by the trainer, and without data and checkpoints by the dry build, the search for a micro-batch size,
tests and benchmarks.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Config
from orchestra.data.loader import Loader
from orchestra.data.source import open_source, separator_of
from orchestra.errors import ConfigError, DataError
from orchestra.model.initial import NoTorchInit, is_fake
from orchestra.model.parametrization import share_of
from orchestra.model.plugged_loss import PluggedLoss
from orchestra.model.transformer import MakeBlock, Transformer, own_block
from orchestra.optim.adamw import AdamW, Trained
from orchestra.optim.plugged import Gather, Optimizer, PluggedOptimizer, gather_nothing
from orchestra.parallel.apply import Parallelized, parallelize
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.places import global_index
from orchestra.parallel.shared_devices import GLOO, compiled_over_gloo
from orchestra.parallel.zero.whole_matrices import WholeMatrices
from orchestra.plugins import load, loaded, named_in, names_taken
from orchestra.precision.policies import ScaleState, make_loss_scale
from orchestra.run.events import EventWriter
from orchestra.run.files import to_log
from orchestra.run.rollback import Stretch
from orchestra.sizes.compilation import (
    CompileTools,
    advice,
    is_wanted,
    lacking_tools,
    refusal,
    tools_here,
)
from orchestra.sizes.topology import BatchShape, StepBatches
from orchestra.sizes.training_shape import end_optimizer_bytes, optimizer_bytes
from orchestra.train.hooks import StepHooks
from orchestra.train.step import TrainingStep
from orchestra.train.watch.bad_losses import make_loss_spikes
from orchestra.train.watch.callbacks import Callbacks, made


def with_compilation(config: Config, mesh: Mesh, events: EventWriter) -> Config:
    """Return the configuration with true or false where train.compile says auto. *Collective*: all ranks
    compile, or none does.

    Where `auto` would compile and a node lacks what that needs, or gloo has to carry what it lacks, rank 0
    records and prints it. Raises ConfigError, on all ranks, where train.compile=true and a node lacks it.
    """
    chosen, device_type = config.train.compile, mesh.device.type
    cause = None
    if is_compiled := is_wanted(chosen, device_type):
        lacking = _lacking_on_any_rank(device_type, mesh.world_size)
        if lacking and chosen is True:
            raise ConfigError(refusal(lacking))
        if lacking:
            cause = advice(lacking)
        elif mesh.is_gpu and mesh.backend == GLOO:
            cause = compiled_over_gloo(config)
    if cause is not None and mesh.rank == 0:
        events.write("compile_off", cause=cause)
        to_log(f"train.compile=auto: training without torch.compile: {cause}\n")
    return replace(config, train=replace(config.train, compile=is_compiled and cause is None))


def _lacking_on_any_rank(device_type: str, num_ranks: int) -> tuple[str, ...]:
    """Return what torch.compile needs and some rank does not find. *Collective*."""
    everything = lacking_tools(device_type, CompileTools(*[False] * len(fields(CompileTools))))
    here = lacking_tools(device_type, tools_here())
    lacks = torch.tensor([int(name in here) for name in everything])
    if num_ranks > 1:
        dist.all_reduce(lacks, op=dist.ReduceOp.MAX)
    return tuple(name for name, is_lacking in zip(everything, lacks.tolist(), strict=True) if is_lacking)


@dataclass(frozen=True)
class BuiltModel:
    """What is trained on one rank: its part of the model, the optimizer, and the shapes of global batches."""

    parallelized: Parallelized
    optimizer: Optimizer
    batches: StepBatches

    @property
    def batch(self) -> BatchShape:
        """Shape of the largest global batch."""
        return self.batches.last


@dataclass(frozen=True)
class Training(BuiltModel):
    """What is trained on one rank, how a step of it is taken, and whether steps are computed again."""

    step: TrainingStep
    replays: bool = False


def build_training(config: Config, mesh: Mesh, hooks: StepHooks | None = None) -> Training:
    """Build model, optimizer and step for one rank, of a run that begins. *Collective*."""
    built = build_model_and_optimizer(config, mesh)
    step = build_step(config, mesh, built, hooks or StepHooks())
    replays = config.recovery.replay_every_steps is not None and mesh.layout.dp > 1
    return Training(built.parallelized, built.optimizer, built.batches, step, replays)


def build_model_and_optimizer(config: Config, mesh: Mesh) -> BuiltModel:
    """Build this rank's part of the model, its values from the seed, and the optimizer. *Collective*.

    Raises DataError where documents are to be masked and nobody knows what ends them.
    """
    parallelized = parallelize(meta_model(config), config, mesh)
    batches = StepBatches(config.train, mesh.layout.dp)
    return BuiltModel(parallelized, build_optimizer(config, parallelized, mesh), batches)


def build_step(
    config: Config,
    mesh: Mesh,
    built: BuiltModel,
    hooks: StepHooks,
    loss_scale: ScaleState | None = None,
    recent_losses: Sequence[float] = (),
    fp8_sizes: Mapping[str, float] | None = None,
) -> TrainingStep:
    """Build the optimizer step. A run that goes on has the state of the loss's factor, the last losses, and
    the sizes of delayed scaling.
    """
    if built.parallelized.scale_history is not None and fp8_sizes:
        built.parallelized.scale_history.restore(fp8_sizes)
    return TrainingStep(
        built.parallelized,
        built.optimizer,
        config,
        mesh,
        built.batches,
        hooks,
        make_loss_scale(config.precision, mesh.device, loss_scale),
        make_loss_spikes(config.recovery.loss_spike, mesh.device, mesh.tp_group, recent_losses),
    )


def build_optimizer(config: Config, parallelized: Parallelized, mesh: Mesh) -> Optimizer:
    """Build the optimizer of what this rank trains. *Collective*.

    Raises ConfigError where optim.target is nothing that can be used.
    """
    if config.optim.target is not None:
        return _plugged(config, parallelized, mesh)
    places = parallelized.places

    def index(item: Trained, start: int, stop: int) -> Tensor:
        return global_index(places[item.name], start, stop, item.master.device)

    is_compiled = config.train.compile is True and parallelized.trained[0].master.is_cuda
    trained = parallelized.trained
    names = parallelized.shapes
    share = share_of(config.model, config.optim)
    rates = {item.name: share(item.name).rate for item in trained}
    return AdamW(
        trained, config.optim, config.train.seed, index, is_compiled=is_compiled, names=names, rates=rates
    )


def _plugged(config: Config, parallelized: Parallelized, mesh: Mesh) -> PluggedOptimizer:
    called = loaded(next(plugin for plugin in named_in(config) if plugin.key == "optim.target"))
    of_layers, of_ends = optimizer_bytes(config.optim), end_optimizer_bytes(config.optim)
    optimizer = PluggedOptimizer(
        parallelized.trained,
        config.optim,
        called,
        is_whole=mesh.tp_group is None and mesh.shard_group is None and mesh.ep_group is None,
        fake_bytes=lambda name: of_layers if name.startswith("layers.") else of_ends,
    )
    if is_fake(parallelized.trained[0].master):
        return optimizer

    def gather(names: set[str]) -> Gather:
        if mesh.shard_group is None:
            return gather_nothing
        groups = mesh.shard_group, mesh.expert_shard_group
        return WholeMatrices(parallelized.units, frozenset(names), *groups, mesh.traffic)

    optimizer.prepare(gather, functools.partial(_of_all_ranks, mesh))
    return optimizer


def _of_all_ranks(mesh: Mesh, value: Any) -> list[Any]:
    """Return the ranks' values (JSON), by rank. *Collective*."""
    if mesh.world_size == 1:
        return [value]
    text = json.dumps(value).encode()
    size = torch.tensor(len(text), device=mesh.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    # JSON may end with spaces.
    own = torch.tensor(list(text.ljust(int(size))), dtype=torch.uint8, device=mesh.device)
    of_ranks = [torch.empty_like(own) for _ in range(mesh.world_size)]
    dist.all_gather(of_ranks, own)
    return [json.loads(bytes(each.tolist())) for each in of_ranks]


def meta_model(config: Config) -> Transformer:
    """Return the model with the loss it is trained by, on the meta device: no values and no memory yet.

    Raises DataError where documents are to be masked and nobody knows what ends them, ConfigError for a loss
    or a layer that cannot be had.
    """
    separator_id = separator_of(config.data, config.train.seq_len) if config.data.document_masks else None
    with torch.device("meta"), NoTorchInit():
        model = Transformer(config.model, config.train.loss_chunk_tokens, separator_id, make_block(config))
    model.share_of = share_of(config.model, config.optim)
    for plugin in named_in(config):
        if plugin.key == "train.loss":
            model.loss = PluggedLoss(loaded(plugin))
    return model


def make_block(config: Config) -> MakeBlock:
    """Return what makes the layers. Raises ConfigError for a plug-in that cannot be had."""
    plugin = next((each for each in named_in(config) if each.key == "model.block"), None)
    if plugin is None:
        return own_block
    make, takes_number = loaded(plugin), "layer_number" in names_taken(load(plugin))
    return lambda model, number: make(model, **({"layer_number": number} if takes_number else {}))


def build_callbacks(config: Config, states: Mapping[str, Any]) -> Callbacks:
    """Make the callbacks, each with its state in `states` if it is there. *Rank 0 only*."""
    plugins = [plugin for plugin in named_in(config) if plugin.key == "train.callbacks"]
    return Callbacks([made(plugin.target, loaded(plugin)) for plugin in plugins], states)


def build_loader(
    config: Config,
    mesh: Mesh,
    batches: StepBatches,
    step: int,
    position: int,
    left_out: Sequence[Stretch] = (),
) -> Loader:
    """Open the data and start to prefetch this rank's share of each global batch after `step`.

    `position` is the number of samples that the run consumed, or left out, before; `left_out` is what it
    leaves out from now on too.
    """
    source = open_source(config.data, config.train.seq_len)
    if source.vocab_size > config.model.vocab_size:
        # Where the index is a local file, the rules have checked this before anything started.
        raise DataError(
            f"the data has {source.vocab_size} tokens in its vocabulary, the model model.vocab_size="
            f"{config.model.vocab_size}; use at least model.vocab_size={source.vocab_size}"
        )
    return Loader(
        source,
        batches,
        mesh.coordinates.dp,
        seed=config.train.seed,
        step=step,
        position=position,
        left_out=left_out,
        prefetch_batches=config.data.prefetch_batches,
        pin_memory=mesh.device.type == "cuda",
    )


def set_numerics(config: Config, device: torch.device) -> None:
    """Set torch's process-wide numeric switches, once, before anything is built."""
    torch.manual_seed(config.train.seed)
    if device.type == "cpu" and "OMP_NUM_THREADS" in os.environ:
        # The agent has divided the cores among the node's ranks; an MKL_NUM_THREADS of the shell must not
        # undo it.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Full-precision products for fp32, not TF32: a run that asks for fp32 gets it.
    torch.set_float32_matmul_precision("highest")
    if config.train.deterministic:
        # cuBLAS needs its workspace fixed before the first product (torch's note on reproducibility).
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
