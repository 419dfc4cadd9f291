"""What a configuration asks of a cluster against what the cluster has. It asks nothing itself: facts go in.

Everything that is wrong is found before anything exists: each problem is a sentence with what there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from conf.schema import Config, Device
from launchers.slurm.site import Partition
from orchestra.config.keys import nearest
from orchestra.units import slurm_time_s

_CPU_RANKS = 2
# File systems in the memory of one host.
_OF_ONE_HOST = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


def chosen(config: Config, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions that the job may run in; none where a name is unknown or no default exists."""
    wanted = config.cluster.partition
    if wanted is None:
        return [partition for partition in partitions if partition.is_default]
    names = wanted.split(",")
    found = [partition for partition in partitions if partition.name in names]
    return found if len(found) == len(set(names)) else []


def numbers_for_auto(config: Config, partitions: Sequence[Partition]) -> list[str]:
    """Return overrides that put the cluster's own numbers in the place of `auto`, where that stands.

    GPUs are taken where the chosen partition's nodes have them, all that its best node has.
    """
    device, ranks = _for_auto(config, partitions)
    overrides = [] if device is None else [f"cluster.device={device.value}"]
    return overrides if ranks is None else [*overrides, f"cluster.gpus_per_node={ranks}"]


def with_numbers(config: Config, partitions: Sequence[Partition]) -> Config:
    """Return the configuration with the cluster's own numbers in the place of `auto`; it is to be resolved
    and checked again.
    """
    device, ranks = _for_auto(config, partitions)
    cluster = config.cluster
    numbers = (
        cluster.device if device is None else device,
        cluster.gpus_per_node if ranks is None else ranks,
    )
    return replace(config, cluster=replace(cluster, device=numbers[0], gpus_per_node=numbers[1]))


def _for_auto(config: Config, partitions: Sequence[Partition]) -> tuple[Device | None, int | None]:
    """Return device and ranks per node, each None where it is given or not known."""
    cluster = config.cluster
    gpus = max((partition.most_gpus for partition in chosen(config, partitions)), default=0)
    device, ranks = cluster.device, None
    if device is Device.auto:
        device = Device.cuda if gpus else Device.cpu
    if cluster.gpus_per_node == "auto" and (gpus or device is Device.cpu):
        ranks = gpus if device is Device.cuda else _CPU_RANKS
    return (device if cluster.device is Device.auto else None), ranks


def gpu_type(config: Config, partitions: Sequence[Partition]) -> str | None:
    """Return the site's word for the GPUs of every node that the job could get; None where there are several
    or none.
    """
    ranks = config.cluster.gpus_per_node
    kinds = [kind for partition in chosen(config, partitions) for kind in partition.kinds]
    fitting = {kind.gpu_types for kind in kinds if isinstance(ranks, int) and kind.num_gpus >= ranks}
    types = fitting.pop() if len(fitting) == 1 else frozenset()
    return next(iter(types)) if len(types) == 1 else None


def cpus_of_share(config: Config, partitions: Sequence[Partition]) -> int | None:
    """Return the cores that go with the GPUs that a job takes of each node; None where that is not known."""
    kinds = [kind for partition in chosen(config, partitions) for kind in partition.kinds if kind.num_gpus]
    ranks = config.cluster.gpus_per_node
    fitting = [kind for kind in kinds if isinstance(ranks, int) and kind.num_gpus >= ranks]
    if not fitting or not isinstance(ranks, int):
        return None
    return max(1, min(kind.num_cpus * ranks // kind.num_gpus for kind in fitting))


def site_problems(config: Config, partitions: Sequence[Partition]) -> Iterator[str]:
    """Yield what the cluster cannot give: partition, nodes, GPUs, time."""
    allowed = chosen(config, partitions)
    if not allowed:
        yield _no_partition(config, partitions)
        return
    yield from _size_problems(config, allowed)
    yield from _time_problems(config, allowed)
    closed = [partition.name for partition in allowed if not partition.is_up]
    if len(closed) == len(allowed):
        yield f"cluster.partition={','.join(closed)} takes no jobs now (it is not up); name another one"


def _no_partition(config: Config, partitions: Sequence[Partition]) -> str:
    names = [partition.name for partition in partitions]
    listed = ", ".join(
        f"{name}*" if it.is_default else name for name, it in zip(names, partitions, strict=True)
    )
    wanted = config.cluster.partition
    if wanted is None:
        return f"cluster.partition is not given, and there is no default one; there are {listed or 'none'}"
    meant = nearest(wanted, names)
    hint = f"did you mean {meant}? There are" if meant else "there are"
    return f"cluster.partition={wanted}: this cluster has no such partition; {hint} {listed or 'none'}"


def _size_problems(config: Config, allowed: Sequence[Partition]) -> Iterator[str]:
    cluster = config.cluster
    named = ",".join(partition.name for partition in allowed)
    most = max(partition.num_nodes() for partition in allowed)
    if cluster.nodes > most:
        has = f"partition {named} has {_count(most, 'node')}"
        yield f"cluster.nodes={cluster.nodes}, but {has}; use at most that"
    ranks = cluster.gpus_per_node
    if cluster.device is not Device.cuda or not isinstance(ranks, int):
        return
    with_gpus = max(partition.num_nodes(ranks) for partition in allowed)
    best = max(partition.most_gpus for partition in allowed)
    if best == 0:
        yield f"cluster.device=cuda, but no node of partition {named} has GPUs; use cluster.device=cpu"
    elif ranks > best:
        yield (
            f"cluster.gpus_per_node={ranks}, but the nodes of partition {named} have {_count(best, 'GPU')} "
            f"each; use at most that"
        )
    elif min(cluster.nodes, most) > with_gpus:
        yield (
            f"cluster.nodes={cluster.nodes} with cluster.gpus_per_node={ranks}: only "
            f"{_count(with_gpus, 'node')} of partition {named} have as many GPUs"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _time_problems(config: Config, allowed: Sequence[Partition]) -> Iterator[str]:
    wanted = _seconds(config.cluster.time_limit)
    limits = [_seconds(partition.time_limit) for partition in allowed]
    if wanted is None or any(limit is None for limit in limits):
        return
    if wanted > max(limit for limit in limits if limit is not None):
        shown = ", ".join(f"{partition.name} {partition.time_limit}" for partition in allowed)
        yield f"cluster.time_limit={config.cluster.time_limit} is above the limit of {shown}; lower it"


def _seconds(text: str | None) -> int | None:
    """Return the seconds of a limit; None where there is none, or it cannot be read."""
    try:
        return None if text is None else slurm_time_s(text)
    except ValueError:
        return None


def folder_problems(folder: Path, mounts: str) -> Iterator[str]:
    """Yield why the nodes cannot share `folder`; `mounts` is the text of /proc/self/mountinfo."""
    kind = file_system_of(folder, mounts)
    if kind in _OF_ONE_HOST:
        yield (
            f"run.dir={folder} lies in this machine's memory ({kind}), which the nodes do not share; use a "
            f"folder on a file system that all of them mount, such as your home"
        )


def file_system_of(folder: Path, mounts: str) -> str | None:
    """Return the kind of file system that holds a folder, existing or not; None where none is found."""
    path = folder.resolve()
    best, kind = -1, None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = Path(fields[4].encode().decode("unicode_escape"))
        # Later mounts lie over earlier ones.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    return kind
