"""The tensors of a training run's state, as shards by name, and how they are taken back from a checkpoint.

model.<parameter>                   the fp32 master; 16-bit parameters are rounded from it again
model.<bias>                        of a mixture's router, by which experts are chosen (fp32, on every rank)
optimizer.exp_avg.<parameter>       AdamW's first moment, and exp_avg_sq its second; another optimizer's state
                                    by the names it gives, cut as the parameter is, or a number
rng.cpu.<coordinates>               torch's generator (uint8) of the rank at these coordinates of the mesh,
rng.cuda.<coordinates>              keyed by place and not by rank, so that no rank gets another one's

`Position` is all of the state that is no tensor, but for the learning rate, which follows from the step, and
`CheckpointContext` says whose state it is. Called by `checkpoints`, `starting_point` and `memory_copies`.
"""

from __future__ import annotations

import itertools
import math
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.manifest import Manifest
from checkpointing.outages import OutagePatience, is_passing
from checkpointing.peers import Peers
from checkpointing.shards import Shard, whole
from conf.schema import CheckpointConfig, Config, DataConfig, Family, Source
from orchestra.data.token_files import TOKENS_FACT, tokens_fact
from orchestra.errors import StorageOutageError, TrainingError, UnusableCheckpointError
from orchestra.optim.adamw import Trained
from orchestra.optim.plugged import Optimizer
from orchestra.parallel.apply import Parallelized
from orchestra.parallel.experts.placed_experts import MovedExperts
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.places import parts_of
from orchestra.precision.policies import MOST, ScaleState
from orchestra.run.events import EventWriter, is_number, is_whole
from orchestra.run.files import to_log
from orchestra.run.paths import RunDir
from orchestra.run.rollback import Stretch, from_lists, to_lists
from orchestra.run.run_lineage import AttemptLineage
from orchestra.sizes.flops import head_dim
from orchestra.train.metrics import Totals
from orchestra.train.watch.bad_losses import NonFiniteSteps

_RNG_PREFIX = "rng."
# Choices that decide what a tensor of the state means, beyond its name and shape.
_SHAPE_KEYS = (
    *("family", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings", "block", "block_options"),
)
# Those of mixtures and of latent attention, where there are some.
_MIXTURE_KEYS = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("first_k_dense_replace", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "n_group"),
    "topk_group",
)
_LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Choices that decide which samples come next: a run keeps them, as `orchestra resume` says too.
_ORDER_KEYS = ("train.seed", "train.seq_len", "data.source", "data.path", "data.source_identity")
# Of a blend: the parts' paths and weights.
_BLEND_KEY = "data.blend"
# Of the standard library: the Python that it is of.
_LIBRARY_KEY = "data.stdlib"
# Of plug-ins: only where there are some.
_PLUGGED_KEYS = ("model.block", "model.block_options", "data.source_identity")
# What the optimizer's moments are kept in: a checkpoint holds their bits.
_STATE_KEY = "optim.state_dtype"
_OTHER_KEYS = ("model.rope_theta", "model.norm_eps", _STATE_KEY)
# So long the record of an event is waited for, where the run directory stands still.
_EVENT_S = 2.0
# How many names an error lists.
_MAX_LISTED = 5


class TensorState:
    """The tensors of one rank's part of the state. The shards are the live tensors: a restore fills them."""

    def __init__(self, parallelized: Parallelized, optimizer: Optimizer, mesh: Mesh) -> None:
        self._parallelized = parallelized
        self._optimizer = optimizer
        self._state_file = parallelized.units.state_file
        self._generators = _generators(mesh)
        self.experts = parallelized.placed_experts
        # By where they lie in the whole tensors now, and where they did when this was made: copies in memory,
        # which hold what is in a place whichever expert that is, keep to the latter.
        self._shards = self._by_slot = self._laid()
        shapes = parallelized.shapes
        self._shapes = {f"model.{name}": shape for name, shape in shapes.items()}
        if (balance := parallelized.expert_balance) is not None:
            self._shapes |= {f"model.{name}": shape for name, shape in balance.shapes.items()}
        for name in shapes:
            for kind, shape in optimizer.kinds[name].items():
                self._shapes[f"optimizer.{kind}.{name}"] = shapes[name] if shape is None else shape

    def _laid(self) -> list[Shard]:
        return [*self._masters(), *self._state_of_optimizer()]

    @property
    def num_updates(self) -> int:
        """Updates of the optimizer so far. Waits for the device."""
        return self._optimizer.num_updates

    @property
    def optimizer_values(self) -> list[dict[str, Any]]:
        """What the optimizer keeps beside its tensors, as JSON."""
        return self._optimizer.values()

    def wanted_masters(self) -> list[Shard]:
        """Return the shards of the parameters alone, to be filled."""
        self._make_writable()
        return self._masters()

    def _masters(self) -> list[Shard]:
        masters = self._shards_of("model", [item.master for item in self._parallelized.trained])
        balance = self._parallelized.expert_balance
        biases = {} if balance is None else balance.biases
        return [*masters, *(whole(f"model.{name}", bias) for name, bias in biases.items())]

    def _state_of_optimizer(self) -> list[Shard]:
        """Return the shards of the optimizer's state: shaped like the masters, or whole."""
        trained, shards = self._parallelized.trained, []
        names = dict.fromkeys(name for kinds in self._optimizer.kinds.values() for name in kinds)
        for name in names:
            having = [item for item in trained if name in self._optimizer.state[item.master]]
            for item in having:
                tensor = self._optimizer.state[item.master][name]
                if self._optimizer.kinds[item.name][name] is None:
                    shards += self._shards_of_one(f"optimizer.{name}", item, tensor)
                else:
                    shards.append(whole(f"optimizer.{name}.{item.name}", tensor))
        return shards

    def _make_writable(self) -> None:
        self._parallelized.stage.await_update()
        if self._state_file is not None:
            self._state_file.reopen()

    def _shards_of(self, prefix: str, tensors: Sequence[Tensor]) -> list[Shard]:
        """Return the boxes of the whole tensors that the masters, or what is shaped like them, consist of."""
        pairs = zip(self._parallelized.trained, tensors, strict=True)
        return [shard for item, tensor in pairs for shard in self._shards_of_one(prefix, item, tensor)]

    def _shards_of_one(self, prefix: str, item: Trained, tensor: Tensor) -> list[Shard]:
        place = self._parallelized.places[item.name]
        return [
            Shard(f"{prefix}.{item.name}", place.shape, part.offsets, part.tensor)
            for part in parts_of(tensor.view(-1), place, item.start)
        ]

    def copy_masters_to_parameters(self) -> None:
        """Compute the model's parameters from masters that were filled. *Collective*."""
        self._parallelized.stage.copy_masters_to_parameters()

    def snapshot(self) -> list[Shard]:
        """Return the shards, with the generators as they are now. *Collective*."""
        self._parallelized.stage.settle()
        if self._state_file is not None:
            self._state_file.verify()
        return self._with_generators(self._shards)

    def held(self) -> list[Shard]:
        """Return the same tensors without waiting for the parameters that are being gathered: none of them
        belongs to this rank's state. Names and offsets stay where experts move. *Any rank*.
        """
        return self._with_generators(self._by_slot)

    def _with_generators(self, shards: Sequence[Shard]) -> list[Shard]:
        self._parallelized.stage.await_update()
        for name, kept in self._generators.items():
            kept.copy_(_generator_state(name))
        return [*shards, *(whole(name, kept) for name, kept in self._generators.items())]

    def move_experts(self) -> MovedExperts:
        """Move the experts that are planned to. Nobody may read the state meanwhile. *Collective*."""
        assert self.experts is not None
        self._parallelized.stage.settle()
        self._make_writable()
        moved = self.experts.move(self._shaped_like_master)
        self.copy_masters_to_parameters()
        self._shards = self._laid()
        return moved

    def _shaped_like_master(self, item: Trained) -> list[Tensor]:
        state = self._optimizer.state[item.master]
        shaped = [name for name, kind in self._optimizer.kinds[item.name].items() if kind is None]
        return [item.master, *(state[name] for name in sorted(shaped) if name in state)]

    def refuse_moved_experts(self, stored: Any) -> None:
        """Raise UnusableCheckpointError where tensors that were saved by their places alone are those of
        experts that had moved, and this run moves none.
        """
        order = stored.get("order") if isinstance(stored, Mapping) else None
        if self.experts is None and order:
            raise UnusableCheckpointError(
                "its experts had moved between ranks, and this run has them in their own order; use "
                "parallelism.expert_placement=auto, or go on from a checkpoint"
            )

    def _place_experts(self, stored: Any) -> None:
        """Take experts to lie where a saved state has them, before they are filled or after."""
        if self.experts is not None:
            self.experts.restore(stored if isinstance(stored, Mapping) else {})
            self._shards = self._laid()

    def wanted(self, manifest: Manifest) -> list[Shard]:
        """Return the shards to fill: all of model and optimizer, and the generators that the checkpoint has.

        Raises UnusableCheckpointError where the checkpoint is that of another model.
        """
        self._refuse_others(manifest)
        self._place_experts(manifest.state.get("experts"))
        self._make_writable()
        kept = [
            whole(name, kept)
            for name, kept in self._generators.items()
            if name in manifest.tensors and manifest.tensors[name].shape == tuple(kept.shape)
        ]
        return [*self._shards, *kept]

    def take_back(self, manifest: Manifest | None, begin: Position) -> None:
        """Compute the rest of the state from shards that were filled: those that a checkpoint has, or with
        None all of them. *Collective*.
        """
        if manifest is None:
            self.refuse_moved_experts(begin.experts)
            self._place_experts(begin.experts)
        self.copy_masters_to_parameters()
        self._optimizer.num_updates = begin.num_updates
        self._optimizer.restored(begin.optimizer_values)
        for name, kept in self._generators.items():
            if manifest is None or name in manifest.tensors:
                _set_generator_state(name, kept)

    def _refuse_others(self, manifest: Manifest) -> None:
        saved = {name: tuple(tensor.shape) for name, tensor in manifest.tensors.items() if not _is_rng(name)}
        if self._shapes != saved:
            differing = self._shapes.items() ^ saved.items()
            if all(name.startswith("optimizer.") for name, _ in differing):
                raise UnusableCheckpointError(
                    f"the checkpoint of step {manifest.step} is that of another optimizer: "
                    f"{_difference(self._shapes, saved)}; use the optim.target and optim.options that wrote "
                    "it, or another checkpoint.dir"
                )
            raise UnusableCheckpointError(
                f"the checkpoint of step {manifest.step} is that of another model: "
                f"{_difference(self._shapes, saved)}; use that run's model.* or another checkpoint.dir"
            )


def digest(manifest: Manifest) -> str:
    """Return the digest of model and optimizer: equal for equal states, whatever the layout.

    The generators are left out: how many there are depends on the layout.
    """
    return manifest.digest_of(name for name in manifest.tensors if not _is_rng(name))


@dataclass(frozen=True)
class CheckpointContext:
    """Whose state is saved and restored, where, and on which of its ranks: the same through an attempt.

    `settings` are those of `checkpoint.*`, `facts` the configuration's values that a checkpoint keeps, and
    `wandb_id` tells the run's checkpoints from those of another one. `score_of`: which loss is their score,
    and what it is measured on.
    """

    settings: CheckpointConfig
    facts: Mapping[str, Any]
    score_of: str
    last_step: int
    run: RunDir
    wandb_id: str | None
    attempt: int
    events: EventWriter
    mesh: Mesh
    peers: Peers
    local_world_size: int
    # The step whose copies in memory are restored; None: the newest checkpoint is.
    from_memory: int | None = None
    # Where saves are put together; None: in host memory.
    staging_dir: str | None = None
    # This run's folder in checkpoint.fallback_dir.
    fallback: str | None = None

    @cached_property
    def lineage(self) -> AttemptLineage:
        """Where the run's attempts began. *Rank 0* asks, the others follow it."""
        return AttemptLineage(self.run, self.attempt)

    @property
    def saves(self) -> bool:
        """Whether checkpoints are saved at all."""
        return self.settings.every_steps is not None

    @property
    def place(self) -> str:
        """The folder or URL of the run's checkpoints."""
        return self.settings.dir or str(self.run.checkpoints)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks; None where there is one."""
        return dist.group.WORLD if self.mesh.world_size > 1 else None

    def record(self, event: str, evidence: Mapping[str, Any]) -> None:
        """Write an event, from any thread; a disk that is full or stands still may take the record, never the
        checkpoint.
        """
        writer = threading.Thread(target=self._write_event, args=[event, dict(evidence)], daemon=True)
        writer.start()
        writer.join(_EVENT_S)

    def _write_event(self, event: str, evidence: Mapping[str, Any]) -> None:
        events = self.events
        try:
            (events.write_surely if event == "checkpoint_committed" else events.write)(event, **evidence)
        except OSError as error:
            to_log(f"event {event} {dict(evidence)} could not be written: {error}\n")

    def answered(self, topic: str, question: Callable[[], Any]) -> Any:
        """Return rank 0's answer to a question (JSON), so that all ranks go the same way. *Collective*.

        Raises TrainingError where the storage did not answer rank 0.
        """
        if self.peers.is_coordinator:
            try:
                self.peers.answer(topic, {"is": question()})
            except (CheckpointError, OSError) as error:
                self.peers.answer(topic, {"failed": str(error)})
        answer = self.peers.await_answer(topic)
        if "failed" in answer:
            raise TrainingError(answer["failed"])
        return answer["is"]

    def answered_in_time(self, topic: str, question: Callable[[], Any], goes_on: Callable[[], None]) -> Any:
        """Return what `answered` does; a storage that does not answer is waited for as in a restore, and
        `goes_on` called before each try. *Collective*. Raises StorageOutageError when the patience is over.
        """
        patience = OutagePatience(self.settings.restore_patience_s, self.record)

        def once() -> dict[str, Any]:
            try:
                return {"is": question()}
            except (CheckpointError, OSError) as error:
                if not is_passing(error):
                    raise
                waits = patience.lasts(str(error))
                return {"waits": waits, "waited_s": patience.waited_s, "why": str(error)}

        for number in itertools.count():
            goes_on()
            answer = self.answered(f"{topic}/{number}", once)
            if "is" in answer:
                return answer["is"]
            if not answer["waits"]:
                waited_s, why = answer["waited_s"], answer["why"]
                raise self.outage(f"the storage did not answer for {waited_s:.0f} s: {why}")
            if self.peers.is_coordinator:
                patience.pause()
        raise AssertionError("unreachable")

    def outage(self, what: str) -> StorageOutageError:
        """Return the error of an attempt that cannot begin because a storage does not answer."""
        return StorageOutageError(
            f"{what} (checkpoint.restore_patience_s). Nothing says that a checkpoint is damaged: see that "
            f"the nodes reach the storage, then `orchestra resume {self.run.name}`; one that can never be "
            "read again is left out once its folder is moved away"
        )


def facts(config: Config) -> dict[str, Any]:
    """Return the configuration's values that a checkpoint keeps, as JSON by dotted key."""
    model = config.model
    shape_keys = (
        *_SHAPE_KEYS,
        *(_MIXTURE_KEYS if model.num_experts else ()),
        *(_LATENT_KEYS if model.kv_lora_rank is not None else ()),
        *(("qk_norm",) if model.qk_norm else ()),
    )
    keys = [*(f"model.{key}" for key in shape_keys), *_ORDER_KEYS, *_OTHER_KEYS]
    if model.family is Family.gpt:
        keys.append("model.max_position_embeddings")
    values = {key: attrgetter(key)(config) for key in keys}
    values = {key: value for key, value in values.items() if value or key not in _PLUGGED_KEYS}
    named = {key: value.name if isinstance(value, Enum) else value for key, value in values.items()}
    others: dict[str, Any] = {
        "model.head_dim": head_dim(config.model),
        "precision": config.precision.name.name,
    }
    if config.data.blend:
        others[_BLEND_KEY] = [[part.path, part.weight] for part in config.data.blend]
    return {**named, **others, **_of_data(config.data)}


def _of_data(data: DataConfig) -> dict[str, Any]:
    """Return what tells token files, or a library, from others that take their place."""
    if data.source == Source.stdlib:
        return {_LIBRARY_KEY: f"Python {platform.python_version()}"}
    tokens = tokens_fact(data)
    return {} if tokens is None else {TOKENS_FACT: tokens}


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what differs between two configurations' facts: by key the saved value and today's.

    Raises UnusableCheckpointError where the model's shape does, since its tensors would mean something else,
    and where another order of samples would follow, some of which would come twice or never.
    """
    differing = {
        key: [saved[key], value] for key, value in now.items() if key in saved and saved[key] != value
    }
    shapes = [
        key
        for key in differing
        if key.removeprefix("model.") in (*_SHAPE_KEYS, *_MIXTURE_KEYS, *_LATENT_KEYS, "qk_norm", "head_dim")
    ]
    if shapes:
        written = ", ".join(f"{key}={saved[key]}" for key in shapes)
        expected = ", ".join(f"{key}={now[key]}" for key in shapes)
        raise UnusableCheckpointError(
            f"the checkpoint was written with {written}, this run has {expected}; use the same values, or "
            "another checkpoint.dir"
        )
    if _STATE_KEY in differing:
        raise UnusableCheckpointError(
            f"the checkpoint was written with {_STATE_KEY}={saved[_STATE_KEY]}, this run has "
            f"{now[_STATE_KEY]}; moments are not converted: use the same value, or another checkpoint.dir"
        )
    order = [
        f"{key}={saved[key]} (this run has {now[key]})"
        for key in (*_ORDER_KEYS, _BLEND_KEY, TOKENS_FACT, _LIBRARY_KEY)
        if key in differing
    ]
    if order:
        back = "put the old values back into the run's config.yaml"
        if TOKENS_FACT in differing:
            back = "bring back the token files that lay there"
        elif _LIBRARY_KEY in differing:
            back = "go on with that Python"
        raise UnusableCheckpointError(
            f"the checkpoint was written with {', '.join(order)}: other samples would come next, some twice "
            f"or never; {back}, or begin a new run with a checkpoint.dir of its own"
        )
    return differing


def _generators(mesh: Mesh) -> dict[str, Tensor]:
    """Return a tensor for the state of each generator of this rank, by its name in checkpoints."""
    devices = ["cpu", "cuda"] if mesh.device.type == "cuda" else ["cpu"]
    at = mesh.coordinates
    place = f"pp{at.pp}-dp{at.dp}-cp{at.cp}-tp{at.tp}"
    names = [f"{_RNG_PREFIX}{device}.{place}" for device in devices]
    return {name: _generator_state(name).clone() for name in names}


def _is_rng(name: str) -> bool:
    return name.startswith(_RNG_PREFIX)


def _generator_state(name: str) -> Tensor:
    return torch.cuda.get_rng_state() if name.startswith(f"{_RNG_PREFIX}cuda.") else torch.get_rng_state()


def _set_generator_state(name: str, state: Tensor) -> None:
    if name.startswith(f"{_RNG_PREFIX}cuda."):
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _difference(expected: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> str:
    shapes = [
        f"{name} is {list(saved[name])} there and {list(shape)} here"
        for name, shape in expected.items()
        if name in saved and saved[name] != shape
    ]
    missing = [f"{name} is not in it" for name in expected if name not in saved]
    unknown = [f"{name} is unknown here" for name in saved if name not in expected]
    differences = [*shapes, *missing, *unknown]
    more = len(differences) - _MAX_LISTED
    return "; ".join(differences[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Position:
    """Where a run stands between two steps: the last step that was trained, and the samples that the whole
    run consumed, or left out, up to it.

    `num_updates` counts the optimizer's updates (skipped steps left out). `score` is the last loss, None
    where it was not finite. `totals` is None before the first step, and on ranks that keep none.
    `loss_scale` is None where the loss is not scaled. `recent_losses` are what spikes are judged by,
    `fp8_sizes` what delayed scaling scales by, and `left_out` the data that no step trains on.
    """

    step: int = 0
    samples: int = 0
    num_updates: int = 0
    nonfinite: NonFiniteSteps = field(default_factory=NonFiniteSteps)
    totals: Totals | None = None
    score: float | None = None
    loss_scale: ScaleState | None = None
    recent_losses: tuple[float, ...] = ()
    fp8_sizes: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[Stretch, ...] = ()
    # What an optimizer of optim.target keeps beside its tensors, by group of parameters.
    optimizer_values: tuple[Mapping[str, Any], ...] = ()
    # The states of train.callbacks by their targets, rank 0's.
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    # What the noise of gradients was measured at since the last row, rank 0's: pairs.
    noise: Sequence[Sequence[float]] = ()
    # Which ranks have which experts, and their tokens (`PlacedExperts.state`).
    experts: Mapping[str, Any] = field(default_factory=dict)


def position_to_json(position: Position) -> dict[str, Any]:
    """Return a position with its totals as a checkpoint's manifest holds it."""
    assert position.totals is not None
    totals = asdict(position.totals)
    others: dict[str, Any] = {}
    groups = {"groups": list(position.optimizer_values)} if position.optimizer_values else {}
    if position.loss_scale is not None:
        others["loss_scale"] = asdict(position.loss_scale)
    if position.fp8_sizes:
        others["fp8_sizes"] = dict(position.fp8_sizes)
    if position.callbacks:
        others["callbacks"] = dict(position.callbacks)
    if position.noise:
        others["noise"] = [list(pair) for pair in position.noise]
    if position.experts:
        others["experts"] = dict(position.experts)
    if position.left_out:
        others["left_out"] = to_lists(position.left_out)
    return {
        "step": position.step,
        "samples": position.samples,
        "tokens": totals.pop("tokens"),
        "optimizer": {"step": position.num_updates, **groups},
        "nonfinite": asdict(position.nonfinite),
        "metrics": totals,
        "score": position.score,
        "recent_losses": list(position.recent_losses),
        **others,
    }


def position_from_json(state: Mapping[str, Any]) -> Position:
    """Return the position that a manifest holds. Raises UnusableCheckpointError where it holds none."""
    nonfinite, metrics = _Reader(state, "nonfinite"), _Reader(state, "metrics")
    top = _Reader(state)
    score, losses = state.get("score"), state.get("recent_losses")
    # None where the run that saved had no watch for spikes.
    has_losses = isinstance(losses, list) and all(is_number(loss) for loss in losses)
    return Position(
        step=top.whole("step"),
        samples=top.whole("samples"),
        num_updates=_Reader(state, "optimizer").whole("step"),
        nonfinite=NonFiniteSteps(nonfinite.whole("num_skipped"), nonfinite.whole("num_in_a_row")),
        totals=Totals(metrics.number("started_at"), top.whole("tokens"), metrics.number("productive_s")),
        score=score if is_number(score) else None,
        loss_scale=_loss_scale(state),
        recent_losses=tuple(map(float, losses)) if has_losses and losses else (),
        fp8_sizes=_fp8_sizes(state),
        left_out=from_lists(state.get("left_out")),
        optimizer_values=_optimizer_values(state),
        callbacks=state["callbacks"] if isinstance(state.get("callbacks"), Mapping) else {},
        noise=_noise(state),
        experts=state["experts"] if isinstance(state.get("experts"), Mapping) else {},
    )


def _noise(state: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    """Return what was measured before the save; nothing where it is damaged: a few points of a curve."""
    pairs = state.get("noise", [])
    is_good = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair)) for pair in pairs
    )
    return tuple((float(pair[0]), float(pair[1])) for pair in pairs) if is_good else ()


def _optimizer_values(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    optimizer = state.get("optimizer")
    groups = optimizer.get("groups", []) if isinstance(optimizer, Mapping) else []
    is_good = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
    return tuple(groups) if is_good else ()


def _loss_scale(state: Mapping[str, Any]) -> ScaleState | None:
    """Return the state of the loss's factor; None where the run that saved had none."""
    if "loss_scale" not in state:
        return None
    values = _Reader(state, "loss_scale")
    return ScaleState(
        values.power_of_two("scale", MOST), values.whole("num_good_steps"), values.whole("num_overflows")
    )


def _fp8_sizes(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the sizes of delayed scaling; none where the run that saved had none."""
    values = _Reader(state, "fp8_sizes")
    return {name: values.size(name) for name in _Reader(state).names("fp8_sizes")}


class _Reader:
    """Reads checked values from a section of the state."""

    def __init__(self, state: Mapping[str, Any], section: str | None = None) -> None:
        values = state if section is None else state.get(section)
        self._values: Mapping[str, Any] = values if isinstance(values, Mapping) else {}
        self._prefix = "" if section is None else f"{section}."

    def whole(self, key: str) -> int:
        value = self._values.get(key)
        if not is_whole(value) or value < 0:
            raise self._wrong(key, value)
        return value

    def number(self, key: str) -> float:
        value = self._values.get(key)
        if not is_number(value):
            raise self._wrong(key, value)
        return float(value)

    def names(self, key: str) -> list[str]:
        """Return the names in a section that may be missing."""
        value = self._values.get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value)
        return list(value)

    def size(self, key: str) -> float:
        """Return a number of 0 or more."""
        value = self.number(key)
        if value < 0:
            raise self._wrong(key, value)
        return value

    def power_of_two(self, key: str, most: float) -> float:
        """Return a power of two from 1 to `most`."""
        value = self.number(key)
        if not (1.0 <= value <= most and value == 2.0 ** round(math.log2(value))):
            raise self._wrong(key, value)
        return value

    def _wrong(self, key: str, value: object) -> UnusableCheckpointError:
        return UnusableCheckpointError(
            f"the checkpoint's state has {self._prefix}{key}={value!r}: it was not written by this trainer; "
            "choose the folder of a run's checkpoints (checkpoint.dir)"
        )
