"""What a configuration meets: the command, the machine; and the numbers that follow from both.

It asks the machine for nothing but the number of its GPUs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from conf.schema import Config, Device, LauncherName
from orchestra.hardware import detect_gpus

# Ranks of a run on CPU when nothing is configured: the fewest that show data parallelism.
_CPU_RANKS = 2


@dataclass(frozen=True)
class Situation:
    """The command a configuration is meant for (`run`, `submit`, `plan`) and the GPUs of this machine."""

    verb: str = "run"
    num_gpus: int = 0


def this_machine(verb: str = "run") -> Situation:
    """Return the situation of a command that is typed on this machine."""
    return Situation(verb, detect_gpus())


def resolved(config: Config, situation: Situation) -> Config:
    """Put what is known here in the place of what depends on it: the machine's numbers and the
    working directory.
    """
    return _with_absolute_paths(_with_machine(config, situation))


def absolute(path: str) -> str:
    """Return a local path from the root, so that a frozen run means the same from any directory; URLs
    stay.
    """
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))  # noqa: PTH100,PTH111  text, not files


def _with_absolute_paths(config: Config) -> Config:
    data, model = config.data, config.model
    blend = [replace(part, path=absolute(part.path)) for part in data.blend]
    data = replace(
        data,
        blend=blend,
        path=data.path and absolute(data.path),
        cache_dir=data.cache_dir and absolute(data.cache_dir),
    )
    return replace(
        config, data=data, model=replace(model, init_from=model.init_from and absolute(model.init_from))
    )


def _with_machine(config: Config, situation: Situation) -> Config:
    """Put the machine's numbers in the place of `auto` for device and ranks per node.

    On a cluster they stay `auto`: a login node cannot know them. `cluster.device=cuda` without a GPU keeps
    `gpus_per_node=auto`, for a rule to refuse.
    """
    cluster = config.cluster
    if cluster.launcher is not LauncherName.local:
        return config
    device = cluster.device
    if device is Device.auto:
        device = Device.cuda if situation.num_gpus else Device.cpu
    ranks = cluster.gpus_per_node
    if ranks == "auto":
        on_gpu = situation.num_gpus or "auto"
        ranks = _CPU_RANKS if device is Device.cpu else on_gpu
    return replace(config, cluster=replace(cluster, device=device, gpus_per_node=ranks))


def world_size(config: Config) -> int | None:
    """Return nodes × ranks per node; None while the ranks per node are not known or not a number."""
    ranks = config.cluster.gpus_per_node
    if not isinstance(ranks, int) or ranks < 1 or config.cluster.nodes < 1:
        return None
    return config.cluster.nodes * ranks
