"""One thing to predict: a model, a layout, a batch, a device and a trainer. It computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import ModelConfig, Offload, PrecisionName, Recompute
from orchestra.plan.cases.devices import Device
from orchestra.plan.cases.frameworks import OWN, Framework
from orchestra.plan.cases.networks import Group, Network
from orchestra.plan.cases.stages import Stage, stages
from orchestra.topology import Layout

_WHOLE_ZERO = 3


@dataclass(frozen=True)
class Choices:
    """What a configuration of orchestra's own trainer says besides; its defaults are the schema's.

    `moment_bytes`: of each of the optimizer's two moments. `reduce_bytes`: of gradients on their way, None:
    as they accumulate. `activation_bytes`: the budget that decides what is recomputed, None: `recompute`
    does, in each `recompute_every`-th layer. `loss_chunk_tokens`: None: chosen from the vocabulary.
    `keeps_fp8_inputs`: of fp8 products the rounded inputs are kept. `saves`: images of the state are staged
    in host memory while training goes on.
    """

    moment_bytes: int = 4
    reduce_bytes: int | None = None
    bucket_bytes: float = 25 * 2**20
    recompute_every: int = 1
    activation_bytes: float | None = None
    loss_chunk_tokens: int | None = None
    keeps_fp8_inputs: bool = True
    offload: Offload = Offload.none
    saves: bool = False
    is_gpu: bool = True


@dataclass(frozen=True)
class Tokens:
    """What one micro-batch brings to a rank: sequences, the length of each that this rank holds (a context
    parallel rank holds a part), and how tensor parallelism divides what comes of them.
    """

    num_sequences: int
    seq_len: float
    tp: int = 1
    sequence_parallel: bool = False
    width_bytes: int = 2

    @property
    def count(self) -> float:
        """Tokens of one micro-batch on one rank."""
        return self.num_sequences * self.seq_len

    @property
    def outer(self) -> int:
        """What divides the tensors between the tensor-parallel regions."""
        return self.tp if self.sequence_parallel else 1


@dataclass(frozen=True)
class Case:
    """Everything a prediction depends on, in sequences and tokens; `num_shards` ranks share ZeRO's part."""

    model: ModelConfig
    layout: Layout
    seq_len: int
    micro_batch_size: int
    accumulation: int
    zero: int
    num_shards: int
    sequence_parallel: bool
    recompute: Recompute
    precision: PrecisionName
    device: Device
    devices_per_node: int
    network: Network
    framework: Framework
    choices: Choices = Choices()

    @property
    def tokens(self) -> Tokens:
        """What a micro-batch brings to one rank."""
        layout, width = self.layout, 4 if self.precision is PrecisionName.fp32 else 2
        return Tokens(
            self.micro_batch_size, self.seq_len / layout.cp, layout.tp, self.sequence_parallel, width
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.seq_len * self.micro_batch_size * self.accumulation * self.layout.dp

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks fill."""
        return -(-self.layout.world_size // self.devices_per_node)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline stages as this trainer cuts them."""
        return stages(self.model, self.layout.pp, by_cost=self.framework.cuts_by_cost)

    @property
    def is_counted_in_full(self) -> bool:
        """Whether memory is counted as the trainer allocates it: orchestra's own, which has no experts."""
        return self.framework.name == OWN and not self.model.num_experts

    @property
    def kept_zero(self) -> int:
        """ZeRO's stage by what a rank keeps from one micro-batch to the next."""
        is_kept = self.zero == _WHOLE_ZERO and self.framework.gathers_once and self.layout.pp > 1
        return 1 if is_kept else self.zero

    @property
    def num_expert_shards(self) -> int:
        """Ranks that share ZeRO's part of the same experts."""
        return max(1, self.num_shards // self.layout.ep)

    def group(self, num_ranks: int, stride: int) -> Group:
        """Return the group of `num_ranks` ranks that are `stride` apart: tp 1, cp tp, data-parallel tp."""
        return Group(num_ranks, min(num_ranks, -(-num_ranks * stride // self.devices_per_node)))


def num_chunks(case: Case) -> int:
    """Return how many parts of the model each pipeline rank holds: as usual, at most one a layer, and one
    where the stages do not divide the micro-batches, as interleaving demands (Megatron-LM).
    """
    if case.layout.pp == 1 or case.accumulation % case.layout.pp:
        return 1
    return max(1, min(case.framework.pipeline_chunks, case.model.num_hidden_layers // case.layout.pp))
