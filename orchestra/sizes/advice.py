"""What would make a configuration need less memory: the one list of changes, and which of them help.

Three users ask, each with its own judge of a changed configuration: `orchestra submit` and `orchestra plan`
where a configuration does not fit, the search where no layout fits, and a rank that ran out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from conf.schema import Config, Device, Offload, PrecisionName, Recompute
from orchestra.errors import ConfigError
from orchestra.sizes import hardware
from orchestra.sizes.flops import tensor_splits
from orchestra.sizes.topology import batch_shape, divisors, has_open_micro_batch, layout

# More than this many times the nodes helps nobody.
_MOST_TIMES_THE_NODES = 64
# Sequences are not advised to become shorter than this, unless they are already.
_SHORTEST_SEQUENCE = 512
_LONGEST_CHUNK_ADVISED = 1024
# Changes that save a smaller share of the memory are not worth a line.
_LEAST_SAVING = 0.01

Changes = Mapping[str, int | str | bool]
"""Values by their keys, `section.name`."""


@dataclass(frozen=True)
class WayToSave:
    """One kind of change. `changes` returns its values for a configuration on a number of ranks, from the
    smallest change to the largest. `is_gradual`: each value costs more than the one before, so that the next
    one is advised and not the last.
    """

    changes: Callable[[Config, int], list[Changes]]
    why: str
    is_gradual: bool = False
    note: str = ""


@dataclass(frozen=True)
class MemoryNeed:
    """What a changed configuration needs on its fullest rank, and whether that fits."""

    peak_bytes: float
    fits: bool


@dataclass(frozen=True)
class Remedy:
    """Changes that help, and the bytes that the fullest rank then needs."""

    changes: Changes
    peak_bytes: float
    way: WayToSave

    @property
    def overrides(self) -> str:
        """The changes as they are typed."""
        return " ".join(f"{_typed_key(key)}={_typed(value)}" for key, value in self.changes.items())


Judge = Callable[[Config], MemoryNeed | None]
"""What a configuration comes to; None where it is not allowed or cannot be counted."""


def what_helps(config: Config, num_ranks: int, judge: Judge, ways: Sequence[WayToSave]) -> list[Remedy]:
    """Return of each way the smallest change that fits by itself; where none does, as few ways together as
    will do (one remedy), or nothing.
    """
    alone = what_fits(config, num_ranks, judge, ways)
    if alone:
        return alone
    together = _together(config, num_ranks, judge, ways)
    return [] if together is None else [together]


def what_fits(config: Config, num_ranks: int, judge: Judge, ways: Sequence[WayToSave]) -> list[Remedy]:
    """Return of each way the smallest change that fits by itself."""
    found = (_first_fitting(config, way.changes(config, num_ranks), judge, way) for way in ways)
    return [remedy for remedy in found if remedy is not None]


def what_saves_most(
    config: Config, num_ranks: int, judge: Judge, ways: Sequence[WayToSave], top: int
) -> list[Remedy]:
    """Return the changes after which the fullest rank needs least, at most `top`, each taken by itself; of
    each way one.
    """
    now = judge(config)
    remedies = []
    for way in ways:
        judged = [(changes, judge(changed(config, changes))) for changes in way.changes(config, num_ranks)]
        legal = [
            Remedy(changes, outcome.peak_bytes, way) for changes, outcome in judged if outcome is not None
        ]
        remedies += legal[:1] if way.is_gradual else legal[-1:]
    enough = 0.0 if now is None else (1 - _LEAST_SAVING) * now.peak_bytes
    saving = [remedy for remedy in remedies if remedy.peak_bytes <= enough]
    return sorted(saving, key=lambda remedy: remedy.peak_bytes)[:top]


def changed(config: Config, changes: Changes) -> Config:
    """Return the configuration with other values."""
    for key, value in changes.items():
        section, name = key.split(".")
        kind = _ENUMS.get(key)
        typed = value if kind is None else kind[str(value)]
        config = replace(config, **{section: replace(getattr(config, section), **{name: typed})})
    return config


_ENUMS = {
    "train.recompute": Recompute,
    "parallelism.offload": Offload,
    "precision.name": PrecisionName,
}


def _typed_key(key: str) -> str:
    return "precision" if key == "precision.name" else key


def _typed(value: int | str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _together(config: Config, num_ranks: int, judge: Judge, ways: Sequence[WayToSave]) -> Remedy | None:
    """Return the first that fits, of one way after the other on top of the strongest of those before."""
    base: Changes = {}
    for way in ways:
        on_top = [{**base, **changes} for changes in way.changes(changed(config, base), num_ranks)]
        remedy = _first_fitting(config, on_top, judge, way)
        if remedy is not None:
            return remedy
        legal = [changes for changes in on_top if judge(changed(config, changes)) is not None]
        base = legal[-1] if legal else base
    return None


def _first_fitting(config: Config, choices: Sequence[Changes], judge: Judge, way: WayToSave) -> Remedy | None:
    for changes in choices:
        outcome = judge(changed(config, changes))
        if outcome is not None and outcome.fits:
            return Remedy(changes, outcome.peak_bytes, way)
    return None


# The changes of each way. `num_ranks` is the number of ranks of the whole job.


def _recompute(config: Config, _: int) -> list[Changes]:
    if config.train.recompute_budget_gib is not None:
        return []
    everywhere: Changes = {} if config.train.recompute_every == 1 else {"train.recompute_every": 1}
    kinds = list(Recompute)
    later = kinds[kinds.index(config.train.recompute) + 1 :]
    return [{"train.recompute": kind.value, **everywhere} for kind in later]


def _micro_batch(config: Config, num_ranks: int) -> list[Changes]:
    if has_open_micro_batch(config.train):
        return []
    now = batch_shape(config.train, layout(config.parallelism, num_ranks).dp).micro_batch_size
    smaller = [size for size in divisors(now) if size < now]
    return [{"train.micro_batch_size": size} for size in reversed(smaller)]


def _zero(config: Config, _: int) -> list[Changes]:
    return [{"parallelism.zero": stage} for stage in range(config.parallelism.zero + 1, 4)]


def _tensor(config: Config, num_ranks: int) -> list[Changes]:
    """Degrees inside a node by which the layers can be divided, with sequence parallelism."""
    given, per_node = config.parallelism, config.cluster.gpus_per_node
    inside = min(num_ranks, per_node) if isinstance(per_node, int) else num_ranks
    possible = [
        degree
        for degree in tensor_splits(config.model)
        if degree > given.tp and degree % given.tp == 0 and inside % degree == 0
    ]
    any_dp: Changes = {} if given.dp == "auto" else {"parallelism.dp": "auto"}
    return [
        {"parallelism.tp": degree, "parallelism.sequence_parallel": True, **any_dp} for degree in possible
    ]


def _nodes(config: Config, _: int) -> list[Changes]:
    times = [2**power for power in range(1, _MOST_TIMES_THE_NODES.bit_length())]
    return [{"cluster.nodes": config.cluster.nodes * more} for more in times]


def _offload(config: Config, _: int) -> list[Changes]:
    if config.parallelism.offload is not Offload.none or config.cluster.device is Device.cpu:
        return []
    sharded: Changes = {} if config.parallelism.zero == 3 else {"parallelism.zero": 3}
    return [{"parallelism.offload": "optimizer"}, {"parallelism.offload": "all", **sharded}]


def _loss_chunk(config: Config, num_ranks: int) -> list[Changes]:
    degrees = layout(config.parallelism, num_ranks)
    batch = batch_shape(config.train, degrees.dp)
    now = config.train.loss_chunk_tokens or _LONGEST_CHUNK_ADVISED
    half = min(batch.micro_batch_size * batch.seq_len // degrees.cp, now) // 2
    return [{"train.loss_chunk_tokens": half}] if half else []


def _sequence(config: Config, _: int) -> list[Changes]:
    found: list[Changes] = []
    seq_len, least = config.train.seq_len, min(_SHORTEST_SEQUENCE, config.train.seq_len // 2)
    while seq_len % 2 == 0 and seq_len // 2 >= max(1, least):
        seq_len //= 2
        found.append({"train.seq_len": seq_len})
    return found


def _precision(config: Config, _: int) -> list[Changes]:
    wide = (PrecisionName.fp32, PrecisionName.bf16_fp32_grad, PrecisionName.fp8)
    return [{"precision.name": PrecisionName.bf16.value}] if config.precision.name in wide else []


def _devices(config: Config, _: int) -> list[Changes]:
    """Devices of the table with more memory, the smallest first; nothing for a device that is not in it."""
    memory = hardware.row(config.cluster.hardware).memory_bytes
    sizes = {row.name: row.memory_bytes for row in hardware.TABLE if row.memory_bytes is not None}
    larger = [name for name, size in sizes.items() if memory is not None and size > memory]
    return [{"cluster.hardware": name} for name in sorted(larger, key=sizes.__getitem__)]


RECOMPUTE = WayToSave(_recompute, "fewer activations kept")
MICRO_BATCH = WayToSave(
    _micro_batch, "fewer sequences at once", is_gradual=True, note="or auto; the global batch stays"
)
ZERO = WayToSave(_zero, "the state divided over data-parallel ranks")
TENSOR = WayToSave(_tensor, "layers divided over ranks", is_gradual=True)
NODES = WayToSave(_nodes, "shared out among more")
OFFLOAD = WayToSave(_offload, "the optimizer's state in host memory", is_gradual=True)
LOSS_CHUNK = WayToSave(_loss_chunk, "fewer logits at once", is_gradual=True)
SEQUENCE = WayToSave(_sequence, "shorter", is_gradual=True)
PRECISION = WayToSave(_precision, "fewer bytes a number")
DEVICES = WayToSave(_devices, "more memory each")

# For a job that is not submitted yet: what trains the same on devices like these.
BEFORE_SUBMIT = (RECOMPUTE, MICRO_BATCH, ZERO, TENSOR, NODES)
# Where a search has tried every layout.
AFTER_SEARCH = (PRECISION, OFFLOAD, DEVICES, NODES, SEQUENCE)
# For a job on the nodes that it has.
SAME_NODES = (MICRO_BATCH, RECOMPUTE, ZERO, OFFLOAD, TENSOR, LOSS_CHUNK, SEQUENCE)


def unless_refused(count: Callable[[Config], MemoryNeed | None]) -> Judge:
    """Return a judge that takes a ConfigError of `count` for a configuration that is not allowed."""

    def judge(config: Config) -> MemoryNeed | None:
        try:
            return count(config)
        except ConfigError:
            return None

    return judge
