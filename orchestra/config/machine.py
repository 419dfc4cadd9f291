"""What a configuration meets: the command, the machine or cluster; and the numbers that follow from them.

Asks this machine for its GPUs, and for its cores and memory only where something is about to start on it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from conf.schema import Config, ContainerConfig, Device, LauncherName
from orchestra.config.plugin_facts import plugin_facts
from orchestra.data.held_out import mapped_paths
from orchestra.errors import ConfigError
from orchestra.plugins import is_plugin
from orchestra.sizes.hardware import detect_gpus
from orchestra.sizes.topology import batch_ramp, global_batch_size, layout
from orchestra.sizes.units import as_slurm_time

# Ranks of a run on CPU when nothing is configured: the fewest that show data parallelism.
_CPU_RANKS = 2
# The memory limit of a container (cgroup version 2, then 1), as seen from inside.
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class Cluster(Protocol):
    """The cluster that a job is meant for (`orchestra.submit.site.Site`)."""

    def numbered(self, config: Config) -> Config:
        """Return the configuration with the cluster's numbers in the place of `auto`."""

    def problems(self, config: Config) -> Iterator[str]:
        """Yield a sentence for each thing that is asked for and that the cluster cannot give."""


@dataclass(frozen=True)
class Situation:
    """The command a configuration is meant for (`run`, `resume`, `submit`, `plan`), and where its ranks
    start: on this machine, or on `cluster`.

    Cores and memory are None where nothing is about to start here: a dry run may be about a larger machine.
    """

    verb: str = "run"
    num_gpus: int = 0
    num_cores: int | None = None
    memory_bytes: int | None = None
    # None: no cluster was asked, and its numbers stay open.
    cluster: Cluster | None = None
    # The step after which a run goes on.
    from_step: int = 0
    # Whether it begins after another run, which may leave what it needs.
    follows: bool = False
    # Whether one run trains by itself, and shares its machine or its nodes with no member of a sweep; on this
    # machine a member that does is started as one such run too, and sees no more than its share.
    is_alone: bool = False

    @property
    def starts_here(self) -> bool:
        """Whether ranks start on this machine, now."""
        return self.memory_bytes is not None


def this_machine(verb: str = "run", *, starts: bool = False, is_alone: bool = False) -> Situation:
    """Return the situation of a command that is typed on this machine; `starts`: ranks start here, now;
    `is_alone`: of one run.
    """
    if not starts:
        return Situation(verb, detect_gpus(), is_alone=is_alone)
    cores = len(os.sched_getaffinity(0))
    return Situation(verb, detect_gpus(), cores, _memory_bytes(), is_alone=is_alone)


def by_itself(config: Config) -> Config:
    """Return what a single run asks of a cluster: a node of it is shared with no member of a sweep, whatever
    a site's file says of those.
    """
    return replace(config, cluster=replace(config.cluster, members_per_node=1))


def _memory_bytes() -> int:
    """Return the memory that this process's container, else the machine, has in total."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (file.read_text().strip() for file in _MEMORY_LIMITS if file.is_file())
    return min([total, *(int(limit) for limit in limits if limit.isdecimal())])


def resolved(config: Config, situation: Situation) -> Config:
    """Put what is known here in the place of what depends on it: the machine's numbers, the global batch
    size and the steps that follow from them, and the working directory. A time limit gets Slurm's form.
    """
    known = _with_absolute_paths(_with_steps(_with_batch_size(_with_machine(config, situation))))
    return _with_plugins(known)


def _with_plugins(config: Config) -> Config:
    """Write down what is asked of plug-ins, where it is not written down yet."""
    model, optim, data = config.model, config.optim, config.data
    # Counted anew: nobody says it, and it changes with the model's sizes.
    counted = None if model.block is None else plugin_facts(config).block_parameters
    if optim.target is not None and optim.state_bytes_per_parameter is None:
        optim = replace(optim, state_bytes_per_parameter=plugin_facts(config).state_bytes)
    if not is_plugin(data.source):
        data = replace(data, source_identity=None)
    elif data.source_identity is None:
        data = replace(data, source_identity=plugin_facts(config).identity)
    return replace(config, model=replace(model, block_parameters=counted), optim=optim, data=data)


def absolute(path: str) -> str:
    """Return a local path from the root, so that a frozen run means the same from any directory; URLs
    stay, and so does what says nothing. Raises RuntimeError where nobody has the name after ~.
    """
    if "://" in path or not path.strip():
        return path
    return os.path.abspath(Path(path).expanduser())  # noqa: PTH100  text, not a file


def _with_container_paths(container: ContainerConfig) -> ContainerConfig:
    """Return a container whose image and mounts name no home as ~, which srun takes for a name.

    What begins with ~ or a point is a path to Pyxis; another image may be a registry's.
    """
    image = container.image
    if image is not None and image.startswith(("~", ".")):
        image = absolute(image)
    # SOURCE:TARGET:FLAGS
    mounts = [":".join(map(os.path.expanduser, mount.split(":"))) for mount in container.mounts]
    return replace(container, image=image, mounts=mounts)


def _with_absolute_paths(config: Config) -> Config:
    data, model, checkpoint = config.data, config.model, config.checkpoint
    cluster = config.cluster
    if cluster.hardware.endswith(".json"):
        cluster = replace(cluster, hardware=absolute(cluster.hardware))
    if cluster.time_limit is not None:
        cluster = replace(cluster, time_limit=as_slurm_time(cluster.time_limit))
    cluster = replace(cluster, container=_with_container_paths(cluster.container))
    blend = [replace(part, path=absolute(part.path)) for part in data.blend]
    data = replace(
        data,
        blend=blend,
        path=data.path and absolute(data.path),
        cache_dir=data.cache_dir and absolute(data.cache_dir),
    )
    return replace(
        config,
        data=data,
        eval=replace(config.eval, data=mapped_paths(config.eval.data, absolute)),
        cluster=cluster,
        model=replace(model, init_from=model.init_from and absolute(model.init_from)),
        checkpoint=replace(
            checkpoint,
            dir=checkpoint.dir and absolute(checkpoint.dir),
            fallback_dir=checkpoint.fallback_dir and absolute(checkpoint.fallback_dir),
        ),
    )


def _with_machine(config: Config, situation: Situation) -> Config:
    """Put the machine's numbers, or the cluster's, in the place of `auto` for device and ranks per node.

    They stay `auto` where the cluster was not asked: a login node's own mean nothing. `cluster.device=cuda`
    without a GPU keeps `gpus_per_node=auto`, for a rule to refuse.
    """
    cluster = config.cluster
    if cluster.launcher is not LauncherName.local:
        return config if situation.cluster is None else situation.cluster.numbered(config)
    device = cluster.device
    if device is Device.auto:
        device = Device.cuda if situation.num_gpus else Device.cpu
    ranks = cluster.gpus_per_node
    if ranks == "auto":
        on_gpu = situation.num_gpus or "auto"
        ranks = _CPU_RANKS if device is Device.cpu else on_gpu
    return replace(config, cluster=replace(cluster, device=device, gpus_per_node=ranks))


def _with_batch_size(config: Config) -> Config:
    """Write down the global batch size that follows from the number of ranks where none was given.

    With a ramp it is its last one. What is not known yet (ranks of a cluster) or wrong stays null; for the
    latter a rule has the words.
    """
    train, dp = config.train, data_parallel(config)
    if train.batch_ramp:
        last = train.batch_ramp[-1].global_batch_tokens
        return replace(config, train=replace(train, global_batch_size=None, global_batch_tokens=last))
    if train.global_batch_size is not None or train.global_batch_tokens is not None or dp is None:
        return config
    try:
        size = global_batch_size(train, dp)
    except ConfigError:
        return config
    return replace(config, train=replace(train, global_batch_size=size))


def world_size(config: Config) -> int | None:
    """Return nodes × ranks per node; None while the ranks per node are not known or not a number."""
    ranks = config.cluster.gpus_per_node
    if not isinstance(ranks, int) or ranks < 1 or config.cluster.nodes < 1:
        return None
    return config.cluster.nodes * ranks


def data_parallel(config: Config) -> int | None:
    """Return the data-parallel degree; None where the ranks are not known, or there is no such layout, which
    a rule says.
    """
    ranks = world_size(config)
    try:
        return None if ranks is None else layout(config.parallelism, ranks).dp
    except ConfigError:
        return None


def tokens_per_step(config: Config) -> int | None:
    """Return the tokens of the global batch, the last one of a ramp; None while its size is not known."""
    train = config.train
    if train.global_batch_tokens is not None:
        return train.global_batch_tokens
    return None if train.global_batch_size is None else train.global_batch_size * train.seq_len


def _with_steps(config: Config) -> Config:
    """Write down the steps that train.tokens takes, the last one begun counted; a rule tells where the batch
    is not known.
    """
    train = config.train
    # A rule tells what a batch may be.
    batches = [tokens_per_step(config) or 0, *(stage.global_batch_tokens for stage in train.batch_ramp)]
    if train.tokens is None or train.seq_len < 1 or min(batches) < train.seq_len:
        return config
    steps = batch_ramp(train).steps_through(-(-train.tokens // train.seq_len))
    return replace(config, train=replace(train, steps=max(1, steps)))


def _name(value: object) -> str:
    """Return an enum member's name. Raises TypeError for any other value."""
    if isinstance(value, Enum):
        return value.name
    raise TypeError(f"{value!r} is not a configuration value")


_HEX_DIGITS = 16
# Who the run is and who watches it; nothing here changes a result.
_IDENTITY = ("run", "wandb")
# Keys of the cluster that say when and where in the network a job runs, never what it computes.
_PLACING = (
    "array_throttle",
    "members_at_once",
    "members_per_node",
    "alternatives",
    "node_order",
    "max_switches",
    "max_switches_wait",
    "segment",
)


def signature(config: Config) -> str:
    """Return 16 hexadecimal digits that are equal for configurations equal but for `run`, `wandb`, how
    many jobs of a sweep run at a time and where in the network they lie.
    """
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in _IDENTITY}
    for name in _PLACING:
        del values["cluster"][name]
    text = json.dumps(values, sort_keys=True, default=_name)
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]
