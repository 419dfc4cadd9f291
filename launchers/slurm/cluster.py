"""What a cluster has: partitions, and in each the kinds of nodes. By one call of sinfo."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launchers.slurm.commands import output_of

_UNUSABLE = ("down", "drain", "fail", "error", "unknown", "maint", "future", "inval")
# Nobody is to wait for what only a long time limit asks for.
_QOS_TIMEOUT_S = 5.0
_FORMAT = "%P|%a|%l|%D|%c|%T|%G"
# Type and count of a gres: gpu:4, gpu:h100:8(S:0-1).
_GPUS = re.compile(r"(?:^|,)gpu:(?:([^,:()]+):)?(\d+)")


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    num_nodes: int
    num_cpus: int
    num_gpus: int
    # Slurm's word, such as idle or down*.
    state: str
    # The site's words for its GPUs, such as h100; none where they have no type.
    gpu_types: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Partition:
    """One partition; its time limit as Slurm writes it, such as 1-00:00:00 or infinite."""

    name: str
    is_default: bool
    is_up: bool
    time_limit: str
    kinds: tuple[NodeKind, ...]

    def num_nodes(self, gpus: int = 0) -> int:
        """Return how many of its nodes have at least so many GPUs, whatever their state."""
        return sum(kind.num_nodes for kind in self.kinds if kind.num_gpus >= gpus)

    @property
    def most_gpus(self) -> int:
        """The GPUs of its best nodes."""
        return max((kind.num_gpus for kind in self.kinds), default=0)


def partitions() -> tuple[Partition, ...]:
    """Return the cluster's partitions. Raises SlurmMissing, SlurmRefused and SlurmSilent."""
    return parsed(output_of(("sinfo", "--noheader", "--exact", f"--format={_FORMAT}")))


def lifts_time_limits(qos: str) -> bool:
    """Return whether a QOS takes the place of the partitions' time limits (its flag PartitionTimeLimit).

    Raises SlurmMissing, SlurmRefused and SlurmSilent.
    """
    flags = output_of(("sacctmgr", "-nP", "show", "qos", qos, "format=flags"), timeout_s=_QOS_TIMEOUT_S)
    return "partitiontimelimit" in flags.lower().replace("|", ",").replace("\n", ",").split(",")


def node_states(partition: str | None = None) -> dict[str, str]:
    """Return Slurm's word (idle, down*) for each node of a partition; None: of the default one where there is
    one, else of all.

    `partition` may be several, with commas between. Raises SlurmMissing, SlurmRefused and SlurmSilent.
    """
    chosen = () if partition is None else (f"--partition={partition}",)
    text = output_of(("sinfo", "--noheader", "--Node", "--format=%N|%P|%T", *chosen))
    lines = [[part.strip() for part in (*line.split("|", 2), "", "")] for line in text.splitlines()]
    default = {name: state for name, of, state, *_ in lines if of.endswith("*")}
    return default if default and partition is None else {name: state for name, _, state, *_ in lines}


def is_usable(state: str) -> bool:
    """Whether Slurm gives a node in this state to jobs, now or when others have ended."""
    # With a star: it does not answer.
    return not state.endswith("*") and not state.startswith(_UNUSABLE)


def parsed(text: str) -> tuple[Partition, ...]:
    """Return the partitions in what sinfo printed; lines that say something else are passed over."""
    lines_of: dict[str, list[tuple[bool, str, NodeKind]]] = {}
    defaults = set()
    for line in text.splitlines():
        parts = line.strip().split("|", 6)
        if len(parts) != 7 or not parts[3].isdecimal():
            continue
        name, available, limit, count, cpus, state, gres = parts
        if name.endswith("*"):
            name = name.removesuffix("*")
            defaults.add(name)
        gpus = _GPUS.findall(gres)
        types = frozenset(name for name, _ in gpus if name)
        num_gpus = sum(int(number) for _, number in gpus)
        kind = NodeKind(int(count), int(cpus.rstrip("+") or 0), num_gpus, state, types)
        lines_of.setdefault(name, []).append((available == "up", limit, kind))
    return tuple(
        Partition(name, name in defaults, lines[0][0], lines[0][1], tuple(kind for _, _, kind in lines))
        for name, lines in lines_of.items()
    )
