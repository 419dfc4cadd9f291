"""Small trainings of mixtures of experts whose routers take the choices that one process has written down.

Two experts whose scores are all but equal may be chosen differently where sums are taken in another order;
from there on two trainings have nothing in common. Run by ranks and by tests.

Shape letters: B sequences of the global batch, S tokens of each, K experts of a token, T tokens of a pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from small_trainings import SEQUENCE, GradientsOfStep, Trained, config_of, mesh_of, take_steps
from torch import Tensor

from checkpointing.shards import Shard
from conf.schema import Config, ModelConfig, PipelineSchedule, Recompute
from orchestra.parallel.context.sequence_parts import HeadAndTail
from orchestra.parallel.expert_balance import mixtures_of
from orchestra.parallel.experts.placed_experts import MovedExperts
from orchestra.parallel.mesh import Mesh
from orchestra.run.heartbeat import Phase
from orchestra.sizes.topology import layout
from orchestra.train.build import Training, build_training
from orchestra.train.hooks import StepHook, StepHooks
from orchestra.train.state import TensorState

# One dense layer, and a shared expert. Six experts on four ranks are uneven.
MIXTURE = ModelConfig(
    hidden_size=16,
    intermediate_size=36,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
    first_k_dense_replace=1,
    router_aux_loss_coef=0.01,
    router_z_loss_coef=0.001,
    init_std=0.2,
)
NUM_SEQUENCES = 8
# By step and layer: the choices [B, S, K] of the global batch.
Choices = Mapping[tuple[int, int], Tensor]


def mixed(
    model: ModelConfig = MIXTURE,
    *,
    dp: int = 1,
    accumulation: int = 1,
    num_sequences: int = NUM_SEQUENCES,
    recompute: str = "none",
    precision: str = "fp32",
    schedule: str = "1f1b",
    **parallelism: Any,
) -> Config:
    """Return a configuration of `dp` data-parallel ranks."""
    train = {
        "global_batch_size": num_sequences,
        "micro_batch_size": num_sequences // accumulation // dp,
        "recompute": Recompute(recompute),
    }
    parallelism = {"dp": dp, "schedule": PipelineSchedule[schedule], **parallelism}
    return config_of(model, precision, train=train, **parallelism)


@dataclass
class _Passes(StepHook):
    """Knows which micro-batch is computed, and with `choices` gives routers what was chosen there before, or
    only compares; without, writes down what they choose.
    """

    choices: Choices | None
    replays: bool = True
    training: Training | None = None
    mesh: Mesh | None = None
    written: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    step: int = 0
    micro_batch: int = 0
    num_choices: int = 0
    num_flips: int = 0

    def enter(self, phase: Phase, step: int, micro_batch: int, turn: int) -> None:  # noqa: ARG002
        if phase in (Phase.forward, Phase.backward):
            self.step, self.micro_batch = step, micro_batch

    def attach(self, training: Training, mesh: Mesh) -> None:
        self.training, self.mesh = training, mesh
        for number, mixture in mixtures_of(training.parallelized.model).items():
            mixture.gate.replay = functools.partial(self._chosen, number)

    def _chosen(self, layer: int, choice_TK: Tensor) -> Tensor:
        assert self.training is not None
        assert self.mesh is not None
        if self.choices is None:
            # One process computes a step in one pass.
            self.written[self.step, layer] = choice_TK.unflatten(0, (-1, SEQUENCE))
            return choice_TK
        size = self.training.batch.micro_batch_size
        begin = (self.micro_batch * self.training.batch.dp + self.mesh.coordinates.dp) * size
        own_BSK = self.choices[self.step, layer][begin : begin + size]
        if self.mesh.layout.cp > 1:
            own_BSK = HeadAndTail(self.mesh.layout.cp, self.mesh.coordinates.cp).cut(own_BSK)
        written_TK = own_BSK.flatten(0, 1)
        self.num_choices += choice_TK.numel()
        self.num_flips += int((choice_TK.sort(dim=1).values != written_TK.sort(dim=1).values).sum())
        return written_TK if self.replays else choice_TK


@dataclass(frozen=True)
class MixtureTrained(Trained):
    """With the gradients of the first step that this rank owns, the choices, and how many came out otherwise
    than they were given.
    """

    gradients: list[Shard]
    choices: Choices
    num_choices: int
    num_flips: int
    # Tokens of each expert in the last step, and dropped ones, by layer.
    loads: list[tuple[list[int], int]]
    bytes_sent: dict[str, int]
    moved: MovedExperts | None


def trained_mixture(
    rank: int,
    world: int,
    config: Config,
    choices: Choices | None,
    steps: int,
    *,
    replays: bool = True,
    moves_after: int | None = None,
) -> MixtureTrained:
    """Train from the start; after one of the steps experts move. *Collective* over the pool."""
    passes, gradients = _Passes(choices, replays), GradientsOfStep()
    mesh = mesh_of(rank, layout(config.parallelism, world))
    gradients.training = training = build_training(config, mesh, StepHooks((passes, gradients)))
    passes.attach(training, mesh)
    rows = take_steps(config, training, mesh, [1])
    gradients.training = None
    state = TensorState(training.parallelized, training.optimizer, mesh)
    rows += take_steps(config, training, mesh, range(2, (moves_after or steps) + 1))
    moved = None
    if moves_after is not None:
        assert state.experts is not None
        state.experts.plan()
        moved = state.move_experts()
        rows += take_steps(config, training, mesh, range(moves_after + 1, steps + 1))
    balance = training.parallelized.expert_balance
    assert balance is not None
    loads = [(load.tokens_per_expert, load.dropped) for load in balance.loads().values()]
    shards = [shard for shard in state.snapshot() if not shard.name.startswith("rng.")]
    training.parallelized.stage.settle()
    training.parallelized.stage.close()
    return MixtureTrained(
        rows,
        shards,
        gradients.shards,
        passes.written,
        passes.num_choices,
        passes.num_flips,
        loads,
        dict(mesh.traffic.bytes_sent),
        moved,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, as the ranks do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def trained_alone(config: Config, steps: int, choices: Choices | None = None) -> MixtureTrained:
    """Train in this process, each batch in one pass."""
    with one_thread():
        return trained_mixture(0, 1, config, choices, steps)


def constant_choices(experts: list[int], steps: int, model: ModelConfig = MIXTURE) -> Choices:
    """Return choices of the same experts for every token."""
    chosen = torch.tensor(experts).expand(NUM_SEQUENCES, SEQUENCE, len(experts)).contiguous()
    layers = range(model.first_k_dense_replace, model.num_hidden_layers)
    return {(step, layer): chosen for step in range(1, steps + 1) for layer in layers}
