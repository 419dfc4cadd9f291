"""What a configuration asks of a cluster against what the cluster has. It asks nothing itself: facts go in.

Everything that is wrong is found before anything exists: each problem is a sentence with what there is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conf.schema import Config, Device
from launchers.launch_errors import LauncherError
from launchers.slurm.cluster import Partition, is_usable, node_names, node_states
from orchestra.config.keys import nearest
from orchestra.recovery.excluded_hosts import ExcludeList, Listed, shared_folder
from orchestra.run.paths import RunDir
from orchestra.sizes.units import slurm_time_s

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


# Which hosts a job is submitted without: those of the configuration, and those on the cluster's list.
#
# The list is beside the runs (`orchestra.recovery.excluded_hosts`). Its hosts go into the batch script and
# not into the frozen configuration: whatever is submitted later asks the list again.


@dataclass(frozen=True)
class LeftOut:
    """Whom a job does not get because of the list, and what is to be told about that."""

    entries: tuple[Listed, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(entry.host for entry in self.entries)


@dataclass(frozen=True)
class Elsewhere:
    """Whom the next job of a run does not get, and whom it gets though it should not."""

    # Empty where the job's own script says enough.
    exclude: tuple[str, ...] = ()
    # Hosts that failed just now, that Slurm still gives to jobs, and that too few others are there without.
    missed: tuple[str, ...] = ()


def left_out(
    runs: Path, cluster: str | None, partition: str | None, wanted: int, without: Iterable[str] = ()
) -> LeftOut:
    """Return whom a job of `wanted` nodes is submitted without, and why; `runs` is the folder of the runs.
    `without`: hosts that it does not get anyway.

    Asks Slurm only where somebody is on the list: names that it does not know any more it would refuse, and
    so many that too few nodes remain would make the job wait for ever.
    """
    entries = ExcludeList(runs, cluster).entries(time.time())
    if not entries:
        return LeftOut()
    try:
        names = node_names(partition)
    except LauncherError as error:
        return LeftOut((), (f"nodes that failed before are not left out: {error}",))
    return chosen_to_leave_out(entries, names.difference(without), wanted)


def hosts_without(config: Config, run: RunDir, cluster: str | None) -> tuple[str, ...]:
    """Return all hosts that the next job of a run is submitted without, by its configuration and by the list;
    none where the list adds nobody, since the script says the configuration's.
    """
    if config.recovery.exclude_hours <= 0:
        return ()
    own = config.cluster
    runs, wanted = shared_folder(run.path.parent), own.nodes + own.spare_nodes
    found = left_out(runs, cluster, own.partition, wanted, own.exclude)
    return tuple(dict.fromkeys([*own.exclude, *found.hosts])) if found.hosts else ()


def elsewhere(
    config: Config, run: RunDir, cluster: str | None, failed: Sequence[str], of_run: Iterable[str]
) -> Elsewhere:
    """Return whom the next job of a run is submitted without: `failed` just now, then `of_run`, which failed
    it before, then those on the list. Where Slurm cannot be asked about its nodes: `failed` alone.
    """
    own, listed = config.cluster, []
    if config.recovery.exclude_hours > 0:
        listed = ExcludeList(shared_folder(run.path.parent), cluster).entries(time.time())
    before = [*of_run, *(entry.host for entry in listed)]
    if not failed and not before:
        return Elsewhere()
    try:
        states = node_states(own.partition)
    except LauncherError:
        found = Elsewhere(tuple(dict.fromkeys(failed)))
    else:
        others = {name: state for name, state in states.items() if name not in own.exclude}
        found = bounded(failed, before, others, own.nodes + own.spare_nodes)
    # What is said to sbatch takes the place of what the script says.
    exclude = tuple(dict.fromkeys([*own.exclude, *found.exclude])) if found.exclude else ()
    return Elsewhere(exclude, found.missed)


def bounded(
    failed: Iterable[str], before: Iterable[str], states: Mapping[str, str], wanted: int
) -> Elsewhere:
    """Return whom a job of `wanted` nodes is submitted without, `failed` first, so that as many nodes remain
    which Slurm can give it. `states`: Slurm's words for the nodes it may have. A pure function.

    Slurm lets a job fail that too few nodes are left for, and one that needs a node which is down waits for
    it: only where there are enough without them nobody is missed who may come back.
    """
    failed = tuple(dict.fromkeys(failed))
    usable = {name for name, state in states.items() if is_usable(state)}
    room = len(usable) - wanted
    exclude: list[str] = []
    for host in dict.fromkeys([*failed, *before]) if room >= 0 else ():
        if host in states and (host not in usable or room > 0):
            exclude.append(host)
            room -= host in usable
    return Elsewhere(tuple(exclude), tuple(host for host in failed if host in usable - set(exclude)))


def chosen_to_leave_out(entries: Sequence[Listed], names: frozenset[str], wanted: int) -> LeftOut:
    """Return those that Slurm knows, the newest first, as long as `wanted` of the nodes remain. A pure
    function.
    """
    known = [entry for entry in entries if entry.host in names]
    room = max(0, len(names) - wanted)
    notes = [f"without {entry.host}: {words(entry)}" for entry in known[:room]]
    if len(known) > room:
        hosts = ", ".join(entry.host for entry in known[room:])
        notes.append(f"{hosts} failed before, and may be used: too few other nodes are there")
    return LeftOut(tuple(known[:room]), tuple(notes))


def words(entry: Listed) -> str:
    """Return in a line why a host is on the list, and for how long."""
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.expires))
    return f"{entry.reason} (run {Path(entry.run).name}; until {until})"
