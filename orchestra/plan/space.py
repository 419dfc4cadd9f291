"""Which layouts there are for a model, a number of devices and a global batch.

A layout here is a mesh (dp × tp × pp × cp), ZeRO's stage and the ranks that it shards over (all, or without
cp those of one node: hybrid sharding), how the batch is shared out, whether norms are sequence parallel, and
what is recomputed. What must hold: tp divides heads and feed-forward width, and divides or is divided by the
key-value heads; a stage of a pipeline has a layer at least; cp and, with sequence parallelism, tp divide the
sequence; ep divides dp, leaves each rank an expert (of other trainers the same number on each) and is 1
without any; dp divides the global batch, which is met exactly; parameters in host memory need ZeRO 3.

A pipeline's schedule is not searched but given; `other_schedules` has what others make of a layout.

Two limits hold unless a space is `wide`: tp stays inside a node, and cp leaves each rank 4,096 tokens of a
sequence. Beyond them there is next to nothing measured, and predictions are too good: products are taken to
reach the same rate whatever their size, and rings of small blocks to hide behind attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from conf.schema import Config, ContextMethod, Offload, PipelineSchedule, Recompute, TrainConfig
from orchestra.plan.assemble import case_of
from orchestra.plan.case import PlanCase
from orchestra.plan.frameworks import OWN
from orchestra.sizes.flops import head_splits, tensor_splits
from orchestra.sizes.pipeline_schedule import shape_of_pipeline, shape_problem
from orchestra.sizes.topology import Layout, divisors, most_nodes, rank_share

ZERO_STAGES = (0, 1, 2, 3)
# What a search turns, by its key in a configuration. Data parallelism takes what the other axes leave.
KEYS = {
    "tp": "parallelism.tp",
    "sequence_parallel": "parallelism.sequence_parallel",
    "pp": "parallelism.pp",
    "cp": "parallelism.cp",
    "ep": "parallelism.ep",
    "zero": "parallelism.zero",
    "shard_degree": "parallelism.shard_degree",
    "micro_batch_size": "train.micro_batch_size",
    "recompute": "train.recompute",
}
DP_KEY = "parallelism.dp"
# The shortest sequences in the runs that the planner's constants are fitted on.
_LEAST_TOKENS = 4096
# Matrices of a gated feed-forward: three of width 8/3·h are as large as a GPT's two of 4·h.
_GATES = 3
# What is tried, with the stages on each rank. All forward, all backward is as fast as 1f1b and holds more.
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1), ("zbv", 2))
# By what they leave in memory, the least first.
RECOMPUTES = (Recompute.full, Recompute.selective, Recompute.none)


Value = int | bool | Recompute | None


class MeshDegrees(NamedTuple):
    """Degrees of the axes; ranks are the product of all but ep, which lies inside dp."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int = 1


class LayoutChoice(NamedTuple):
    """Everything that a search chooses."""

    mesh: MeshDegrees
    zero: int
    sequence_parallel: bool
    recompute: Recompute
    micro_batch_size: int
    # Data-parallel ranks that ZeRO shards over; None: all that hold the same parameters.
    shard_degree: int | None = None

    def value(self, knob: str) -> Value:
        """Return the value of a knob, or of dp."""
        value: Value = getattr(self.mesh if knob in MeshDegrees._fields else self, knob)
        return value


@dataclass(frozen=True)
class Fixed:
    """Values that a search keeps as they are; None: it chooses. The names are those of the schema."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    zero: int | None = None
    # Of layouts whose ranks it divides, with a stage of ZeRO.
    shard_degree: int | None = None
    sequence_parallel: bool | None = None
    recompute: Recompute | None = None
    micro_batch_size: int | None = None


@dataclass(frozen=True)
class Space:
    """All layouts of one model on one cluster. `base` says everything that no search changes; its own layout
    only gives the number of ranks. A step has `num_sequences`.
    """

    base: PlanCase
    num_sequences: int
    fixed: Fixed = Fixed()
    # Whether tp may leave the node, and cp cut sequences into any length.
    wide: bool = False
    # What the batches of other steps have in common with it, which layouts share out too: 0 without a ramp.
    common_sequences: int = 0

    @property
    def shared_sequences(self) -> int:
        """The sequences that dp × micro-batch divides."""
        return math.gcd(self.num_sequences, self.common_sequences)

    def meshes(self) -> Iterator[MeshDegrees]:
        """Yield every mesh that fills the devices, shares out the batch and has a stage of ZeRO."""
        base, fixed = self.base, self.fixed
        ranks = base.layout.world_size
        most_stages = base.model.num_hidden_layers
        for tp in self._degrees(fixed.tp, self._tensor_degrees(ranks)):
            for pp in self._degrees(fixed.pp, divisors(ranks // tp)):
                shape = shape_of_pipeline(base.schedule, pp, base.virtual_stages)
                is_refused = pp > 1 and shape_problem(base.schedule, shape, base.virtual_stages)
                if is_refused or shape.num_stages > most_stages:
                    continue
                for cp in self._degrees(fixed.cp, self._context_degrees(ranks // tp // pp, tp)):
                    dp = ranks // tp // pp // cp
                    mesh = MeshDegrees(dp, tp, pp, cp)
                    if self.shared_sequences % dp == 0 and fixed.dp in (None, dp) and self.zero_stages(mesh):
                        # The fewest experts on a rank, and so the least memory, come last.
                        expert_degrees = self._degrees(fixed.ep, _expert_degrees(base, dp))
                        yield from (mesh._replace(ep=ep) for ep in expert_degrees)

    def _degrees(self, kept: int | None, possible: list[int]) -> list[int]:
        return possible if kept is None else [degree for degree in possible if degree == kept]

    def _tensor_degrees(self, ranks: int) -> list[int]:
        is_any, per_node = self.wide or self.fixed.tp is not None, self.base.devices_per_node
        return [
            tp
            for tp in tensor_splits(self.base.model)
            if ranks % tp == 0 and (is_any or most_nodes(tp, 1, per_node, ranks) == 1)
        ]

    def _context_degrees(self, ranks: int, tp: int) -> list[int]:
        seq_len = self.base.seq_len
        most = seq_len if self.wide or self.fixed.cp is not None else max(1, seq_len // _LEAST_TOKENS)
        return [cp for cp in divisors(ranks) if cp <= most and seq_len % cp == 0 and self._can_cut(cp, tp)]

    def _can_cut(self, cp: int, tp: int) -> bool:
        """Whether orchestra's trainer can give ranks heads and tails of sequences, or exchange heads."""
        model = self.base.model
        if cp == 1 or self.base.framework.name != OWN:
            return True
        exchanges = self.base.options.cp_method is ContextMethod.ulysses
        heads = (model.num_attention_heads, model.num_key_value_heads) if exchanges else ()
        return self.base.seq_len % (2 * cp) == 0 and not any(number % (tp * cp) for number in heads)

    def zero_stages(self, mesh: MeshDegrees) -> list[int]:
        """Return the stages that differ: all are the same where nobody holds the same parameters.

        Parameters in host memory need the last one and ranks to shard over.
        """
        kept, degree, ranks = self.fixed.zero, self.fixed.shard_degree, mesh.dp * mesh.cp
        possible: tuple[int, ...]
        if self.base.options.offload is Offload.all:
            possible = ZERO_STAGES[-1:] if ranks > 1 and degree != 1 else ()
        elif kept is not None:
            possible = (kept,)
        else:
            possible = ZERO_STAGES if ranks > 1 else ZERO_STAGES[:1]
        if degree is not None:
            # Nothing is sharded without a stage, and the trainer takes no degree there.
            fits = degree == ranks or within(degree, mesh) is not None
            possible = tuple(zero for zero in possible if zero > 0) if fits else ()
        return [zero for zero in possible if kept in (None, zero)]

    def shard_degrees(self, mesh: MeshDegrees, zero: int) -> list[int | None]:
        """Return the data-parallel ranks that a stage of ZeRO can shard over; None: all. The one that takes
        the least memory comes first.
        """
        if zero == 0:
            return [None]
        if self.fixed.shard_degree is not None:
            return [within(self.fixed.shard_degree, mesh)]
        inside = self.base.devices_per_node // mesh.tp
        is_hybrid = inside > 1 and mesh.cp == 1 and within(inside, mesh) is not None
        return [None, inside] if is_hybrid else [None]

    def kinds(self, mesh: MeshDegrees) -> Iterator[tuple[bool, Recompute]]:
        """Yield what else changes activations: sequence parallelism, and what is recomputed."""
        fixed = self.fixed
        # Each rank of a sequence has two pieces of it in orchestra's trainer.
        is_halved = mesh.cp > 1 and self.base.framework.name == OWN
        pieces = mesh.cp * (math.lcm(2, mesh.tp) if is_halved else mesh.tp)
        can_split = mesh.tp > 1 and self.base.seq_len % pieces == 0
        for split in (False, True) if can_split else (False,):
            for recompute in RECOMPUTES:
                if fixed.sequence_parallel in (None, split) and fixed.recompute in (None, recompute):
                    yield split, recompute

    def micro_batch_sizes(self, mesh: MeshDegrees) -> list[int]:
        """Return what divides the share of a data-parallel rank, the smallest first."""
        kept = self.fixed.micro_batch_size
        return [size for size in divisors(self.shared_sequences // mesh.dp) if kept in (None, size)]

    def kinds_of_mesh(self, mesh: MeshDegrees) -> Iterator[LayoutChoice]:
        """Yield the layouts on a mesh with a micro-batch of one sequence."""
        for zero in self.zero_stages(mesh):
            for degree in self.shard_degrees(mesh, zero):
                for split, recompute in self.kinds(mesh):
                    yield LayoutChoice(mesh, zero, split, recompute, 1, degree)

    def choices(self) -> Iterator[LayoutChoice]:
        """Yield every layout."""
        for mesh in self.meshes():
            for smallest in self.kinds_of_mesh(mesh):
                for size in self.micro_batch_sizes(mesh):
                    yield smallest._replace(micro_batch_size=size)

    def case(self, choice: LayoutChoice) -> PlanCase:
        """Return the case of a choice."""
        mesh, zero, degree = choice.mesh, choice.zero, choice.shard_degree
        shard = 1 if zero == 0 else degree or mesh.dp * mesh.cp
        return replace(
            self.base,
            layout=Layout(*mesh, shard=shard),
            micro_batch_size=choice.micro_batch_size,
            accumulation=self.num_sequences // mesh.dp // choice.micro_batch_size,
            zero=zero,
            num_shards=degree or mesh.dp * mesh.cp,
            sequence_parallel=choice.sequence_parallel,
            recompute=choice.recompute,
        )


def other_schedules(case: PlanCase) -> Iterator[PlanCase]:
    """Yield a pipeline of orchestra's trainer with each other schedule, and with more stages on each rank."""
    if case.layout.pp == 1 or case.framework.name != OWN:
        return
    here = case.schedule, case.pipeline.num_chunks
    for name, chunks in _SCHEDULES:
        kind = PipelineSchedule[name]
        is_possible = case.layout.pp * chunks <= case.model.num_hidden_layers
        if is_possible and (kind, chunks) != here:
            yield replace(case, schedule=kind, virtual_stages=chunks, cut=None)


def within(degree: int | None, mesh: MeshDegrees) -> int | None:
    """Return a shard degree as it is on a mesh: None, all ranks, where it does not divide them or is all, or
    where its ranks would not have all experts.
    """
    ranks, least = mesh.dp * mesh.cp, mesh.ep * mesh.cp if mesh.ep > 1 else 1
    return None if degree is None or ranks % degree or degree >= ranks or degree % least else degree


def space_of(config: Config, framework_name: str, num_sequences: int, fixed: Fixed) -> Space:
    """Return the space of a configuration, of whose layout and batch only what is fixed counts.

    Raises ConfigError where the device's figures or the number of ranks are not known.
    """
    given = config.parallelism
    whole = replace(given, dp="auto", tp=1, pp=1, cp=1, ep=1, zero=0, shard_degree=None, stages=None)
    train = replace(config.train, global_batch_size=None, global_batch_tokens=None, batch_ramp=[])
    train = replace(train, micro_batch_size=1)
    # What is recomputed is chosen for all layers alike.
    train = replace(train, recompute_budget_gib=None, recompute_every=1)
    base = case_of(replace(config, parallelism=whole, train=train), framework_name)
    return Space(base, num_sequences, fixed, common_sequences=common_sequences(config.train))


def common_sequences(train: TrainConfig) -> int:
    """Return what the batches of a ramp have in common, which dp × micro-batch divides; 0 without one."""
    return rank_share(train, 1) if train.batch_ramp else 0


def values_of(space: Space) -> dict[str, list[Value]]:
    """Return for each knob, and for dp, the values that occur in a space, in order."""
    occurring: dict[str, set[Value]] = {knob: set() for knob in (*KEYS, "dp")}
    for mesh in space.meshes():
        for axis in MeshDegrees._fields:
            occurring[axis].add(getattr(mesh, axis))
        occurring["micro_batch_size"].update(space.micro_batch_sizes(mesh))
        for zero in space.zero_stages(mesh):
            occurring["zero"].add(zero)
            occurring["shard_degree"].update(space.shard_degrees(mesh, zero))
        for split, recompute in space.kinds(mesh):
            occurring["sequence_parallel"].add(split)
            occurring["recompute"].add(recompute)
    return {knob: sorted(values, key=_place) for knob, values in occurring.items()}


def _place(value: Value) -> float:
    """Return where a value stands among those of its knob: all ranks stand last."""
    if isinstance(value, Recompute):
        return RECOMPUTES.index(value)
    return float("inf") if value is None else value


def _expert_degrees(case: PlanCase, dp: int) -> list[int]:
    """Return over how many of `dp` ranks experts can be shared out: orchestra's trainer takes uneven counts
    too.
    """
    num_experts = case.model.num_experts or 1
    is_own = case.framework.name == OWN
    return [ep for ep in divisors(dp) if (ep <= num_experts if is_own else num_experts % ep == 0)]


def is_possible(case: PlanCase) -> bool:
    """Whether the degrees of a case divide what they split, as `plan` demands of a configuration."""
    mesh, seq_len = case.layout, case.seq_len
    parts = [mesh.cp, *([mesh.tp] if case.sequence_parallel else [])]
    model = case.model
    if mesh.pp > model.num_hidden_layers or mesh.ep not in _expert_degrees(case, mesh.dp):
        return False
    # A GPT's feed-forward stands in tables as a gated one of the same size, whose width means nothing.
    stands_for_gpt = (
        abs(3 * model.intermediate_size - 8 * model.hidden_size) < _GATES and not model.num_experts
    )
    splits = head_splits(model) if stands_for_gpt and case.framework.name != OWN else tensor_splits(model)
    return mesh.tp in splits and not any(seq_len % part for part in parts)


def choice_of(case: PlanCase) -> LayoutChoice:
    """Return what a case chose."""
    mesh = MeshDegrees(*(getattr(case.layout, axis) for axis in MeshDegrees._fields))
    split = case.sequence_parallel and mesh.tp > 1
    degree = within(case.num_shards, mesh) if case.zero else None
    return LayoutChoice(mesh, case.zero, split, case.recompute, case.micro_batch_size, degree)


def turns(space: Space, case: PlanCase) -> Iterator[tuple[str, PlanCase]]:
    """Yield the layouts that differ in one knob, whether they fit or not, with the knob's name.

    Where an axis of the mesh grows or shrinks, data parallelism takes up the rest.
    """
    here = choice_of(case)
    for knob in KEYS:
        for other in _turned(space, here, knob):
            if other != here:
                yield knob, space.case(other)


def _turned(space: Space, here: LayoutChoice, knob: str) -> Iterator[LayoutChoice]:
    if knob in ("tp", "pp", "cp", "ep"):
        yield from _other_meshes(space, here, knob)
    elif knob == "zero":
        for zero in space.zero_stages(here.mesh):
            yield here._replace(zero=zero, shard_degree=here.shard_degree if zero else None)
    elif knob == "shard_degree":
        degrees = space.shard_degrees(here.mesh, here.zero)
        yield from (here._replace(shard_degree=degree) for degree in degrees)
    elif knob == "micro_batch_size":
        sizes = space.micro_batch_sizes(here.mesh)
        yield from (here._replace(micro_batch_size=size) for size in sizes)
    else:
        for split, recompute in space.kinds(here.mesh):
            other = here._replace(sequence_parallel=split, recompute=recompute)
            rest = "recompute" if knob == "sequence_parallel" else "sequence_parallel"
            if getattr(other, rest) == getattr(here, rest):
                yield other


def _other_meshes(space: Space, here: LayoutChoice, axis: str) -> Iterator[LayoutChoice]:
    """Meshes in which only this axis and data parallelism differ, everything else as it is or as near."""
    for mesh in space.meshes():
        if mesh._replace(**{axis: 0, "dp": 0}) != here.mesh._replace(**{axis: 0, "dp": 0}):
            continue
        sizes = [size for size in space.micro_batch_sizes(mesh) if size <= here.micro_batch_size]
        kinds = [split for split, recompute in space.kinds(mesh) if recompute is here.recompute]
        if not sizes or not kinds:
            continue
        # Sequence parallelism as it is; where there was no tp before, as is usual: on.
        wanted = here.sequence_parallel or here.mesh.tp == 1
        split = wanted if wanted in kinds else kinds[0]
        stages = space.zero_stages(mesh)
        if not stages:
            continue
        zero = here.zero if here.zero in stages else stages[-1]
        degree = within(here.shard_degree, mesh) if zero else None
        yield LayoutChoice(mesh, zero, split, here.recompute, sizes[-1], degree)
