"""The cluster that a command submits to: asked once, then compared with what a configuration asks of it.

Everything that is wrong is found before anything exists: each problem is a sentence with what there is.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conf.schema import Config, Device
from launchers import LauncherError, SlurmMissing, SlurmRefused
from launchers.slurm import sbatch
from launchers.slurm.cluster import Partition, is_usable, lifts_time_limits, node_states, partitions
from launchers.slurm.commands import DEFAULT_ARRAY_SIZE, array_size, asked_cluster, is_full
from launchers.slurm.sbatch import Estimate
from launchers.slurm.switches import fabric
from orchestra.config.keys import nearest
from orchestra.errors import ConfigError, LaunchError
from orchestra.recovery.excluded_hosts import excluded_folder, shared_folder
from orchestra.sizes.units import first_few, slurm_time_s
from orchestra.submit.container_mounts import mount_problems
from orchestra.submit.hosts_to_avoid import left_out
from orchestra.submit.job import Share
from orchestra.submit.new_run import parent_of_runs

_CPU_RANKS = 2
# What `sbatch --test-only` says of nodes that do not suffice, also where those that are down would: a job
# waits for them.
_NOT_NOW = "node configuration is not available"
_NAMED = 3
# File systems in the memory of one host.
_OF_ONE_HOST = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
# What was found out about nodes that failed before serves for so long.
_ASK_AGAIN_S = 300.0


def note(text: str) -> None:
    """Tell the user something beside the result, on standard error."""
    sys.stderr.write(f"note: {text}\n")


@dataclass(frozen=True)
class Site:
    """What a cluster has, as it answered a command. The cluster of a `Situation`."""

    # None where Slurm did not answer.
    partitions: tuple[Partition, ...] | None
    # Why it did not.
    silence: LauncherError | None = None
    # Without an answer a dry run goes on.
    is_dry: bool = False
    # Where the run lies that goes on; None: in run.dir.
    folder: Path | None = None
    # What works without Slurm, for whoever has none.
    instead: str = "train here with `orchestra run`"

    def require(self) -> None:
        """Raise ConfigError where there is no Slurm, LaunchError where it is silent. A dry run, which needs
        no answer, says that nothing was checked.
        """
        if self.silence is None:
            return
        if self.is_dry:
            note(f"{self.silence}: what the cluster has was not checked")
        elif isinstance(self.silence, SlurmMissing):
            raise ConfigError(f"{self.silence}, or {self.instead}") from self.silence
        else:
            raise LaunchError(f"{self.silence}; nothing was submitted") from self.silence

    def numbered(self, config: Config) -> Config:
        """Return the configuration with the cluster's own numbers in the place of `auto`: GPUs where the
        partition's nodes have them, all that its best node has.
        """
        if self.partitions is None:
            return config
        cluster = config.cluster
        gpus = max((partition.most_gpus for partition in chosen(config, self.partitions)), default=0)
        device, ranks = cluster.device, cluster.gpus_per_node
        if device is Device.auto:
            device = Device.cuda if gpus else Device.cpu
        if ranks == "auto" and (gpus or device is Device.cpu):
            ranks = gpus if device is Device.cuda else _CPU_RANKS
        return replace(config, cluster=replace(cluster, device=device, gpus_per_node=ranks))

    def problems(self, config: Config) -> Iterator[str]:
        """Yield what the nodes cannot share and what the cluster cannot give."""
        try:
            folder = self.folder or parent_of_runs(config)
        except ConfigError as error:
            yield from error.problems
        else:
            yield from folder_problems(folder, _mounts())
            yield from mount_problems(config, folder)
        if self.silence is not None and not self.is_dry:
            # Of a Slurm that is silent `require` tells.
            if isinstance(self.silence, SlurmMissing):
                yield f"{self.silence}, or {self.instead}"
            return
        problems = [] if self.partitions is None else list(site_problems(config, self.partitions))
        yield from problems
        if self.partitions is not None and config.cluster.segment is not None:
            yield from _segment_problems(config.cluster.segment)
        if config.cluster.gpus_per_node == "auto" and not problems:
            yield "cluster.gpus_per_node=auto: what the nodes have is not known; give a number"

    def with_gpu_type(self, config: Config) -> Config:
        """Return the configuration with the site's word for its GPUs where cluster.hardware=auto."""
        if config.cluster.hardware != "auto" or self.partitions is None:
            return config
        name = gpu_type(config, self.partitions)
        return config if name is None else replace(config, cluster=replace(config.cluster, hardware=name))

    def gpus_and_cpus(self, config: Config) -> tuple[int, int]:
        """Return how many of both the nodes with the most GPUs have, the fewest cores of them; 0 and 0 where
        that is not known.
        """
        kinds = [kind for partition in chosen(config, self.partitions or ()) for kind in partition.kinds]
        most = max((kind.num_gpus for kind in kinds), default=0)
        return most, min((kind.num_cpus for kind in kinds if kind.num_gpus == most), default=0)

    def share(self, config: Config) -> Share:
        """Return what the cluster adds where the configuration leaves it open; tell which nodes a job does
        not get because they failed before.
        """
        share = self.share_of_nodes(config)
        if self.partitions is None:
            return share
        own = config.cluster
        without: tuple[str, ...] = ()
        if config.recovery.exclude_hours > 0:
            runs = shared_folder(parent_of_runs(config))
            recent = int(time.monotonic() / _ASK_AGAIN_S)
            wanted = own.nodes + own.spare_nodes
            without = hosts_left_out(runs, own.partition, wanted, tuple(own.exclude), recent)
        return replace(share, without=without)

    def share_of_nodes(self, config: Config) -> Share:
        """Return what of a node goes with the GPUs that a job takes of it, whichever nodes it gets."""
        if self.partitions is None:
            return Share(is_asked=False)
        config, gpus = _as_one_job(config, self.partitions)
        cpus = cpus_of_share(config, self.partitions)
        return Share(cpus, has_whole_nodes=has_whole_nodes(config, self.partitions), gpus=gpus)

    def array_size(self) -> int:
        """Ask how many tasks an array may have. Raises ConfigError where the site takes no arrays."""
        if self.partitions is None:
            return DEFAULT_ARRAY_SIZE
        try:
            size = array_size()
        except LauncherError as error:
            raise LaunchError(f"{error}; nothing was submitted") from error
        if size < 1:
            raise ConfigError(
                "this cluster takes no job arrays (MaxArraySize=0), which sweeps are submitted as; ask its "
                "administrator, or submit the runs one by one"
            )
        return size

    def tested(self, script: str) -> Estimate | None:
        """Let Slurm judge a script; None where it was not asked, is silent, or has too many jobs already:
        the submission itself will tell. Raises ConfigError where it refuses the job.
        """
        if self.partitions is None:
            return None
        try:
            estimate = sbatch.tested(script)
            if problem := sbatch.srun_refuses(script):
                note(f"srun of this machine: {problem}; the job fails unless srun on its nodes knows it")
            return estimate
        except SlurmRefused as error:
            if is_full(str(error)):
                return None
            if _NOT_NOW in str(error) and (out := _out_of_service(script)):
                named = first_few(out, _NAMED)
                note(f"Slurm cannot start it now: out of service are {named}; the job waits for them")
                return None
            raise ConfigError(f"Slurm refuses the job: {error}") from error
        except LauncherError as error:
            note(f"the job was not tested beforehand: {error}")
            return None


def ask(*, is_dry: bool = False, folder: Path | None = None) -> Site:
    """Ask the cluster of this machine what it has; `folder` is where a run lies that goes on."""
    try:
        return Site(partitions(), is_dry=is_dry, folder=folder)
    except LauncherError as error:
        return Site(None, error, is_dry, folder)


def _out_of_service(script: str) -> list[str]:
    """Return the nodes that a script's partition lacks now; none where Slurm does not say."""
    partition = re.search(r"^#SBATCH --partition=(\S+)$", script, re.MULTILINE)
    try:
        states = node_states(partition and partition[1])
    except LauncherError:
        return []
    return [name for name, state in states.items() if not is_usable(state)]


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""


# The members of a sweep ask one by one for the same.
@functools.lru_cache(maxsize=64)
def hosts_left_out(
    runs: Path, partition: str | None, wanted: int, own: tuple[str, ...], _: int
) -> tuple[str, ...]:
    """Return the hosts on the list that such a job does not get beside its `own`, and tell the user why.

    The last argument is the time in units of 5 minutes, for the cache.
    """
    if not excluded_folder(runs).exists():
        return ()
    listed = left_out(runs, asked_cluster(), partition, wanted, own)
    for text in listed.notes:
        note(text)
    if listed.hosts:
        note("recovery.exclude_hours=0 uses them all the same; `orchestra doctor` lists them")
    return listed.hosts


def chosen(config: Config, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions that the job may run in; none where a name is unknown or no default exists."""
    wanted = config.cluster.partition
    if wanted is None:
        return [partition for partition in partitions if partition.is_default]
    names = wanted.split(",")
    named = [partition for partition in partitions if partition.name in names]
    return named if len(named) == len(set(names)) else []


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


def _as_one_job(config: Config, partitions: Sequence[Partition]) -> tuple[Config, int | None]:
    """Return what members that share a node take of it together, as the configuration of one job, and their
    GPUs (None where each member has a node of its own).
    """
    cluster, most = config.cluster, max((each.most_gpus for each in chosen(config, partitions)), default=0)
    members, ranks = cluster.members_per_node, cluster.gpus_per_node
    if not isinstance(members, int) or members < 2 or not isinstance(ranks, int) or not most:
        return config, None
    gpus = min(members * ranks, most)
    return replace(config, cluster=replace(cluster, gpus_per_node=gpus)), gpus


def has_whole_nodes(config: Config, partitions: Sequence[Partition]) -> bool:
    """Whether a job takes all GPUs of each node that it could get."""
    ranks = config.cluster.gpus_per_node
    counts = {kind.num_gpus for partition in chosen(config, partitions) for kind in partition.kinds}
    return isinstance(ranks, int) and {count for count in counts if count >= ranks} == {ranks}


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


def _segment_problems(segment: int) -> Iterator[str]:
    """Yield why a job cannot be put into blocks here; nothing where Slurm does not tell."""
    try:
        has_option, network = sbatch.has_option("segment"), fabric()
    except LauncherError:
        return
    if not has_option:
        yield (
            f"cluster.segment={segment}: sbatch of this cluster has no --segment, which came with blocks in "
            "newer versions of Slurm; leave it out, or use cluster.max_switches where there is a switch tree"
        )
    elif network is None or not network.is_block:
        known = "no topology" if network is None else network.words
        yield f"cluster.segment={segment}: the site has no blocks ({known}); leave it out"


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
    elif ranks > 1 and isinstance(members := cluster.members_per_node, int) and members * ranks > best > 0:
        yield (
            f"cluster.members_per_node={members} members × {ranks} GPUs, but the nodes of partition {named} "
            f"have {_count(best, 'GPU')} each, and only members of one rank share a GPU; use at most "
            f"{best // ranks}"
        )
    elif min(cluster.nodes, most) > with_gpus:
        yield (
            f"cluster.nodes={cluster.nodes} with cluster.gpus_per_node={ranks}: only "
            f"{_count(with_gpus, 'node')} of partition {named} have as many GPUs"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _time_problems(config: Config, allowed: Sequence[Partition]) -> Iterator[str]:
    """Slurm itself takes a job with too long a limit, on most sites, and lets it wait for ever."""
    limit = config.cluster.time_limit
    wanted = None if limit is None else _seconds(limit)
    limits = [_seconds(partition.time_limit) for partition in allowed]
    known = [limit for limit in limits if limit is not None]
    if wanted is None or len(known) < len(limits) or wanted <= max(known) or _may_be_longer(config):
        return
    shown = ", ".join(f"{partition.name} {partition.time_limit}" for partition in allowed)
    yield f"cluster.time_limit={limit} is above the limit of {shown}; lower it"


def _may_be_longer(config: Config) -> bool:
    """Whether the job's QOS takes the place of the partition's limit. Where nobody can say Slurm judges."""
    qos = config.cluster.qos
    if qos is None:
        return False
    try:
        return lifts_time_limits(qos)
    except LauncherError:
        return True


def _seconds(text: str) -> float | None:
    """Return the seconds of a limit, infinite where there is none; None where it cannot be read."""
    try:
        seconds = slurm_time_s(text)
    except ValueError:
        return None
    return math.inf if seconds is None else seconds


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
