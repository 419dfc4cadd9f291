"""Where a rank stands in the mesh and how a global batch is shared out. Integers only: no torch, no devices.

Ranks are numbered with `tp` fastest, then `cp`, then `dp`, and `pp` slowest (Megatron's `tp-cp-dp-pp`).
torchrun numbers the ranks of a node consecutively, so the axis that talks most, several times per layer,
stays inside a node; `cp` talks once per layer, `dp` once per step after the backward pass, and `pp`
sends one activation per micro-batch, which the slowest link carries. Expert parallelism (`ep`) divides `dp`:
neighbours on that axis share out the experts, and a rank has the same ones as every `ep`-th of them. ZeRO
shards experts over those of them that it shards all else over.

Ranks of `cp` have parts of the same sequences and the same parameters, so gradients are summed over `dp` ×
`cp`. That product is `replicate` × `shard` too: ZeRO shards over neighbours, those of `cp` first, which with
hybrid sharding are the ranks of a node, and replicates over the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from conf.schema import BatchStage, OptimConfig, ParallelismConfig, TrainConfig
from orchestra.errors import ConfigError

# Warm-up without a configured length: a tenth of the run, at most this many steps (Llama 2 used 2,000).
_WARMUP_SHARE = 10
_MAX_DEFAULT_WARMUP_STEPS = 2000
# Micro-batch without a configured size: enough rows to fill two CPU cores on the smallest presets.
_MAX_DEFAULT_MICRO_BATCH_SIZE = 8
# Sequences of a global batch that nobody configured, before rounding up to what the ranks can share.
_DEFAULT_GLOBAL_BATCH_SIZE = 16
# Trial division ends here, so that a mistyped number cannot keep a command busy (5 ms).
_LARGEST_TRIAL_DIVISOR = 100_000
# Where the search for a micro-batch size to advise begins at the latest.
_LARGEST_ADVISED_MICRO_BATCH_SIZE = 1024


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on each axis of the mesh, counted from 0."""

    dp: int
    tp: int
    pp: int
    cp: int


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes, all resolved to integers. `ep` divides `dp`, `shard` divides `dp` · `cp`.

    `shard` is the number of ranks over which ZeRO shards: 1 without ZeRO, all of `dp` · `cp` unless it is
    hybrid.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    shard: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicate(self) -> int:
        """Number of replicas of each shard over data and context parallelism."""
        return self.dp * self.cp // self.shard

    @property
    def expert_shard(self) -> int:
        """Number of ranks over which ZeRO shards the parameters of experts: those that have the same ones."""
        # A rule sees to it that each shard group has all experts, and as often as `cp` has ranks.
        return 1 if self.shard == 1 else self.shard // self.ep

    def shard_index(self, place: Coordinates) -> int:
        """Return which of the shards the rank at `place` owns."""
        return (place.dp * self.cp + place.cp) % self.shard

    def expert_shard_index(self, place: Coordinates) -> int:
        """Return which of the shards of its experts' parameters the rank at `place` owns."""
        return self._same_experts_index(place) % self.expert_shard

    def _same_experts_index(self, place: Coordinates) -> int:
        """Return which of the ranks with the same experts the rank at `place` is."""
        return place.dp // self.ep * self.cp + place.cp

    def ep_index(self, place: Coordinates) -> int:
        """Return which of the shares of the experts the rank at `place` has."""
        return place.dp % self.ep

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of `rank`; IndexError outside 0 … world size − 1."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in 0 … {self.world_size - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(dp=dp, tp=tp, pp=pp, cp=cp)

    def rank(self, place: Coordinates) -> int:
        """Return the rank at `place` (inverse of `coordinates`); IndexError when an axis is too short."""
        axes = ((place.tp, self.tp), (place.cp, self.cp), (place.dp, self.dp), (place.pp, self.pp))
        if any(not 0 <= index < degree for index, degree in axes):
            raise IndexError(f"{place} is not in {self}")
        return place.tp + self.tp * (place.cp + self.cp * (place.dp + self.dp * place.pp))

    def neighbours(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks, in order, whose places differ from that of `rank` on no other axes than these.

        Axes: tp, pp, and either dp and cp, or the two of which these consist together: replicate and shard;
        or the three of which these consist: ep, and of the ranks that have the same experts expert_replicate
        and expert_shard.
        """
        here = self._split(rank, axes)
        fixed = [(axis, index) for axis, index in here.items() if axis not in axes]
        places = ((other, self._split(other, axes)) for other in range(self.world_size))
        return tuple(other for other, place in places if all(place[axis] == at for axis, at in fixed))

    def _split(self, rank: int, axes: Sequence[str]) -> dict[str, int]:
        """Return a rank's coordinates on all axes of the kind that `axes` are of."""
        place = self.coordinates(rank)
        model = {"tp": place.tp, "pp": place.pp}
        if not {"replicate", "shard"}.isdisjoint(axes):
            replicate = (place.dp * self.cp + place.cp) // self.shard
            return {"replicate": replicate, "shard": self.shard_index(place), **model}
        if not {"ep", "expert_replicate", "expert_shard"}.isdisjoint(axes):
            replicate, shard = divmod(self._same_experts_index(place), self.expert_shard)
            of_experts = {"expert_replicate": replicate, "expert_shard": shard}
            return {**of_experts, "ep": self.ep_index(place), **model}
        return {"dp": place.dp, "cp": place.cp, **model}


def layout(parallelism: ParallelismConfig, world_size: int, num_experts: int | None = None) -> Layout:
    """Resolve `dp=auto` for a world size. Raises ConfigError when the degrees do not multiply out to it.

    `num_experts`: of the model; without it the error may advise more ranks than have an expert.
    """
    problems = list(layout_problems(parallelism, world_size, num_experts))
    if problems:
        raise ConfigError(problems)
    inner = parallelism.tp * parallelism.pp * parallelism.cp
    dp = world_size // inner if isinstance(parallelism.dp, str) else parallelism.dp
    shard = 1 if parallelism.zero == 0 else parallelism.shard_degree or dp * parallelism.cp
    return Layout(dp, parallelism.tp, parallelism.pp, parallelism.cp, parallelism.ep, shard)


def layout_problems(
    parallelism: ParallelismConfig, world_size: int, num_experts: int | None = None
) -> Iterator[str]:
    """Yield what keeps the degrees from giving a layout of so many ranks. `num_experts`: as in `layout`."""
    wrong = list(degree_problems(parallelism))
    yield from wrong
    if wrong:
        return
    inner = parallelism.tp * parallelism.pp * parallelism.cp
    product = f"tp·pp·cp = {parallelism.tp}·{parallelism.pp}·{parallelism.cp} = {inner}"
    ranks = f"the world size {world_size} (cluster.nodes × cluster.gpus_per_node)"
    if world_size % inner:
        advice = f"use a multiple of {inner} ranks or smaller degrees"
        yield f"parallelism: {product} does not divide {ranks}; {advice}"
        return
    dp = world_size // inner
    if parallelism.dp not in ("auto", dp):
        yield f"parallelism.dp={parallelism.dp} × ({product}) is not {ranks}; use parallelism.dp={dp} or auto"
    elif dp % parallelism.ep:
        fitting = listed(expert_degrees(parallelism, dp, num_experts))
        yield f"parallelism.ep={parallelism.ep} does not divide dp={dp}; use {fitting}"
    else:
        yield from sharding_problems(parallelism, dp)


def expert_degrees(parallelism: ParallelismConfig, dp: int, num_experts: int | None) -> list[int]:
    """Return the degrees `ep` of so many data-parallel ranks by which each rank has an expert and each group
    that ZeRO shards over has all of them; 1 is always among them. `num_experts`: None where it is not known.
    """
    is_cut = parallelism.zero > 0 and parallelism.shard_degree is not None
    group = parallelism.shard_degree if is_cut else None
    return [
        ep
        for ep in divisors(dp)
        if ep == 1
        or ((num_experts is None or ep <= num_experts) and (not group or group % (ep * parallelism.cp) == 0))
    ]


def sharding_problems(parallelism: ParallelismConfig, dp: int | None) -> Iterator[str]:
    """Yield what keeps `shard_degree` from being that of a layout; `dp`: None where it is not known."""
    degree, ep, cp = parallelism.shard_degree, parallelism.ep, parallelism.cp
    if parallelism.zero == 0 or degree is None or degree < 1:
        return
    least = ep * cp if ep > 1 else 1
    fitting = nearest_multiples(degree, least)
    if dp is not None:
        fitting = [ranks for ranks in divisors(dp * cp) if ranks % least == 0]
    if degree % least:
        product = f"parallelism.ep={ep}" + ("" if cp == 1 else f" × parallelism.cp={cp}")
        yield (
            f"parallelism.shard_degree={degree} is not a multiple of {product}: the ranks that ZeRO shards "
            f"over have to have all experts; use {listed(fitting)}"
        )
    elif dp is not None and dp * cp % degree:
        product = f"dp={dp}" if cp == 1 else f"dp·cp = {dp}·{cp}"
        yield f"parallelism.shard_degree={degree} does not divide {product}; use {listed(fitting)}"


def degree_problems(parallelism: ParallelismConfig) -> Iterator[str]:
    """Yield which degrees of the axes are none, whatever the number of ranks."""
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        degree = getattr(parallelism, axis)
        if axis == "dp" and degree == "auto":
            continue
        if not isinstance(degree, int) or degree < 1:
            expected = "auto or a whole number" if axis == "dp" else "a whole number"
            yield f"parallelism.{axis}={degree} is not a degree; use {expected} of at least 1"


def node_blocks(mesh: Layout, ranks_per_node: int) -> list[int]:
    """Return how many nodes each kind of group fills whose ranks should lie under one switch: a pipeline
    stage, ZeRO's and the experts' ranks in it, those of context parallelism. The largest first, each a
    multiple of the next; groups that fill no whole number of nodes are left out.
    """
    model = mesh.tp * mesh.cp
    sizes: list[int] = []
    for ranks in sorted((model * mesh.dp, mesh.tp * mesh.shard, model * mesh.ep, model), reverse=True):
        size, rest = divmod(ranks, ranks_per_node)
        if size > 1 and not rest and all(larger % size == 0 and larger > size for larger in sizes[-1:]):
            sizes.append(size)
    return sizes


@dataclass(frozen=True)
class BatchShape:
    """How one optimizer step's sequences are shared out: global = micro · accumulation · dp."""

    global_batch_size: int
    micro_batch_size: int
    accumulation: int
    dp: int
    seq_len: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.global_batch_size * self.seq_len


def batch_shape(train: TrainConfig, dp: int) -> BatchShape:
    """Derive micro-batch and accumulation for `dp` data-parallel ranks.

    Raises ConfigError when no whole accumulation fits. Without a configured micro-batch size it is the
    largest divisor of a rank's share up to 8; `auto` must have been replaced by a number before. Of a ramp it
    is the shape of the last and largest batch: `batch_problems` tells whether the others fit too.
    """
    problems = list(_problems(train, dp, _named_batches(train, dp)[-1:]))
    if problems:
        raise ConfigError(problems)
    if has_open_micro_batch(train):
        raise ConfigError("train.micro_batch_size=auto is for the ranks to find; use a number here")
    size = global_batch_size(train, dp)
    micro = train.micro_batch_size
    if micro is None:
        micro = largest_divisor(rank_share(train, dp), _MAX_DEFAULT_MICRO_BATCH_SIZE)
    return BatchShape(size, int(micro), size // (int(micro) * dp), dp, train.seq_len)


def rank_share(train: TrainConfig, dp: int) -> int:
    """Return the sequences that micro-batches must share out: what a rank's shares of all batches of a run
    have in common. Batches of a ramp that `dp` ranks cannot share, over before there were so many, are left
    out.
    """
    sizes = [_num_sequences(stage, train) for stage in train.batch_ramp]
    return math.gcd(*(size // dp for size in (global_batch_size(train, dp), *sizes) if size % dp == 0))


def global_batch_size(train: TrainConfig, dp: int) -> int:
    """Return the sequences of one optimizer step; a configured number of tokens takes over, and the last
    batch of a ramp over that.

    With neither configured it is 16, rounded up to a multiple of `dp` (times a configured micro-batch).
    """
    if train.batch_ramp:
        return _num_sequences(train.batch_ramp[-1], train)
    if train.global_batch_tokens is not None:
        return train.global_batch_tokens // train.seq_len
    if train.global_batch_size is not None:
        return train.global_batch_size
    micro = train.micro_batch_size
    unit = dp * (micro if isinstance(micro, int) and micro > 0 else 1)
    return -(-_DEFAULT_GLOBAL_BATCH_SIZE // unit) * unit


def has_open_micro_batch(train: TrainConfig) -> bool:
    """Whether the ranks are still to find the size of a micro-batch."""
    return train.micro_batch_size == "auto"


def batch_problems(train: TrainConfig, dp: int, from_step: int = 0) -> Iterator[str]:
    """Yield what keeps GBS = MBS × GA × DP from having a whole GA, with the nearest sizes that work.

    Of a ramp every batch counts, of a run that goes on after `from_step` those that it still trains.
    """
    named = _named_batches(train, dp)
    if train.batch_ramp and from_step > 0 and all(_num_sequences(stage, train) for stage in train.batch_ramp):
        ramp = batch_ramp(train)
        now = ramp.at(from_step + 1)
        named = [named[stage.number] for stage in ramp.stages if stage.first_step >= now.first_step]
    yield from _problems(train, dp, named)


def _named_batches(train: TrainConfig, dp: int) -> list[tuple[str, int]]:
    """Return the global batches, each with the key that says it: in tokens where its name says so."""
    if train.batch_ramp:
        return [
            (f"train.batch_ramp[{number}].global_batch_tokens", stage.global_batch_tokens)
            for number, stage in enumerate(train.batch_ramp)
        ]
    if train.global_batch_tokens is not None:
        return [("train.global_batch_tokens", train.global_batch_tokens)]
    return [("train.global_batch_size", global_batch_size(train, dp))]


def _problems(train: TrainConfig, dp: int, named: Sequence[tuple[str, int]]) -> Iterator[str]:
    micro = 1 if train.micro_batch_size in (None, "auto") else train.micro_batch_size
    if not isinstance(micro, int) or micro < 1:
        yield f"train.micro_batch_size={micro} is not a number of sequences; use 1 or more, or auto"
        return
    for name, found in named:
        yield from _share_problems(train, found, name, micro, dp)


def _share_problems(train: TrainConfig, found: int, name: str, micro: int, dp: int) -> Iterator[str]:
    """Yield what is wrong with one global batch: `found` is in tokens where its name says so."""
    unit = train.seq_len if name.endswith("_tokens") else 1
    size = found // unit
    if size < 1:
        yield "train.global_batch_size must be at least 1 sequence (or give train.global_batch_tokens)"
        return
    if size % (micro * dp) == 0:
        return
    nearest = nearest_multiples(size, micro * dp)
    words = f"{name}={found}" if unit == 1 else f"{name}={found} ({size} sequences)"
    advice = f"use {name.rpartition('.')[2]}={listed([near * unit for near in nearest])}"
    if size % dp == 0:
        fitting = largest_divisor(size // dp, min(micro, _LARGEST_ADVISED_MICRO_BATCH_SIZE))
        advice += f", or micro_batch_size={fitting}"
    product = f"micro_batch_size={micro} × dp={dp}" if micro == train.micro_batch_size else f"dp={dp}"
    yield f"{words} is not a multiple of {product} (GBS = MBS × GA × DP for a whole GA); {advice}"


def _num_sequences(stage: BatchStage, train: TrainConfig) -> int:
    return stage.global_batch_tokens // train.seq_len


@dataclass(frozen=True)
class RampStage:
    """Steps of one global batch: from `first_step` on, before which the run trains on `sequences_before`.
    `number`: which entry of `train.batch_ramp` it is.
    """

    first_step: int
    sequences_before: int
    global_batch_size: int
    number: int = 0


@dataclass(frozen=True)
class BatchRamp:
    """The global batch of each step, which counts from 1, as a function of the configuration alone: what a
    run goes on with does not depend on where it was interrupted.
    """

    stages: tuple[RampStage, ...]

    def at(self, step: int) -> RampStage:
        """Return the stage of a step."""
        return next(stage for stage in reversed(self.stages) if stage.first_step <= max(1, step))

    def sequences_through(self, step: int) -> int:
        """Return how many sequences a run trains on from its beginning through `step` (0: none)."""
        stage = self.at(step)
        return stage.sequences_before + (step - stage.first_step + 1) * stage.global_batch_size

    def steps_through(self, num_sequences: int) -> int:
        """Return the steps that it takes to train on so many sequences, the last one begun counted."""
        stages = (stage for stage in reversed(self.stages) if stage.sequences_before < max(1, num_sequences))
        stage = next(stages)
        return stage.first_step - 1 + -(-(num_sequences - stage.sequences_before) // stage.global_batch_size)

    def num_steps(self, last_step: int) -> list[tuple[RampStage, int]]:
        """Return how many steps a run of `last_step` steps has in each stage that it comes to."""
        ends = [*(stage.first_step for stage in self.stages[1:]), last_step + 1]
        counts = [
            min(end, last_step + 1) - stage.first_step for stage, end in zip(self.stages, ends, strict=True)
        ]
        return [(stage, count) for stage, count in zip(self.stages, counts, strict=True) if count > 0]


def batch_ramp(train: TrainConfig, dp: int = 1) -> BatchRamp:
    """Return the batches of a run; of one without a ramp a single stage, for `dp` data-parallel ranks where
    nothing was configured.

    A step has the batch of the last stage whose tokens were all consumed when the step begins; the step in
    which they are reached is trained whole. A stage that is over before a step begins in it is left out.
    """
    if not train.batch_ramp:
        return BatchRamp((RampStage(1, 0, global_batch_size(train, dp)),))
    stages: list[RampStage] = []
    for number, each in enumerate(train.batch_ramp):
        first, before = 1, 0
        if stages:
            last = stages[-1]
            num_sequences = max(0, -(-each.tokens // train.seq_len) - last.sequences_before)
            count = -(-num_sequences // last.global_batch_size)
            first, before = last.first_step + count, last.sequences_before + count * last.global_batch_size
            if count == 0:
                stages.pop()
        stages.append(RampStage(first, before, _num_sequences(each, train), number))
    return BatchRamp(tuple(stages))


def length_of(train: TrainConfig) -> dict[str, int | None]:
    """Return the last step of a run, and with a ramp, which makes later steps longer, the tokens up to it."""
    if not train.batch_ramp:
        return {"steps": train.steps}
    return {"steps": train.steps, "tokens": batch_ramp(train).sequences_through(train.steps) * train.seq_len}


class StepBatches:
    """The shape of each step's batch on `dp` data-parallel ranks: the micro-batch is the same in all of them.

    `last` is that of the largest batch. Raises ConfigError when no whole accumulation fits into that.
    """

    def __init__(self, train: TrainConfig, dp: int) -> None:
        self.last = batch_shape(train, dp)
        self.ramp = batch_ramp(train, dp)

    def at(self, step: int) -> BatchShape:
        """Return the shape of the batch of `step`."""
        size = self.ramp.at(step).global_batch_size
        accumulation = size // (self.last.micro_batch_size * self.last.dp)
        return replace(self.last, global_batch_size=size, accumulation=accumulation)


def warmup_steps(optim: OptimConfig, train: TrainConfig) -> int:
    """Return the warm-up's length: as configured, else 10 % of the steps, at most 2,000."""
    if optim.warmup_steps is not None:
        return optim.warmup_steps
    return min(train.steps // _WARMUP_SHARE, _MAX_DEFAULT_WARMUP_STEPS)


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number in order; above 10^10, which no size reaches, only those of
    which one factor is at most 10^5.
    """
    end = min(math.isqrt(number), _LARGEST_TRIAL_DIVISOR) + 1
    small = [candidate for candidate in range(1, end) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a positive number that is not above `limit` (at least 1)."""
    return next(part for part in range(min(number, limit), 0, -1) if number % part == 0)


def nearest_multiples(number: int, unit: int) -> list[int]:
    """Return the positive multiples of `unit` just below and above `number`."""
    below = number // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


def listed(numbers: Sequence[int | str]) -> str:
    """Return `1, 2 or 4`, the middle left out of long lists."""
    words = [str(number) for number in numbers]
    if len(words) > 12:
        words = [*words[:6], "…", *words[-5:]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


@lru_cache(maxsize=4096)
def most_nodes(num_ranks: int, stride: int, ranks_per_node: int, world_size: int) -> int:
    """Return over how many nodes that group lies that has most of them, of groups of `num_ranks` ranks that
    are `stride` apart: nodes of 6 ranks cut every second group of 4 neighbours in two.
    """
    if stride >= ranks_per_node:
        return num_ranks
    blocks = range(min(ranks_per_node, max(1, world_size // (num_ranks * stride))))
    # Where on its node a group's first rank can stand. Each further one is on that node or the next.
    first = max(
        (block * num_ranks * stride + begin) % ranks_per_node for block in blocks for begin in range(stride)
    )
    return (first + (num_ranks - 1) * stride) // ranks_per_node + 1


@dataclass(frozen=True)
class AxisLinks:
    """Over how many nodes the ranks of a group of an axis lie, of the group that has most: its messages leave
    a node where it is more than one.
    """

    axis: str
    degree: int
    num_nodes: int


def axis_links(mesh: Layout, ranks_per_node: int) -> list[AxisLinks]:
    """Return which links each axis of more than one rank uses, the innermost first."""
    inner = mesh.tp * mesh.cp
    strides = {"tp": 1, "cp": mesh.tp, "ep": inner, "dp": inner, "pp": inner * mesh.dp}
    found = []
    for axis, stride in strides.items():
        degree = getattr(mesh, axis)
        if degree > 1:
            nodes = most_nodes(degree, stride, ranks_per_node, mesh.world_size)
            found.append(AxisLinks(axis, degree, nodes))
    return found
