"""What a cluster has and takes, asked and checked for the commands that submit. It submits nothing itself."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.config.machine import Situation
from orchestra.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from conf.schema import Config
    from launchers.slurm.cluster import Partition
    from launchers.slurm.sbatch import Estimate
    from orchestra.submit.job import Share

# Whatever this machine is: a login node has neither the GPUs nor the cores of the nodes.
SITUATION = Situation("submit")
# What was found out about nodes that failed before serves for so long.
_ASK_AGAIN_S = 300.0


def note(text: str) -> None:
    """Tell something beside the result."""
    print(f"note: {text}", file=sys.stderr)


def with_cluster(overrides: Sequence[str]) -> list[str]:
    """Return overrides with cluster=slurm before them where they choose no cluster."""
    chosen = ("cluster=", "+cluster=", "cluster.launcher=", "experiment=")
    if any(override.startswith(chosen) for override in overrides):
        return list(overrides)
    return ["cluster=slurm", *overrides]


def partitions_or_none(*, is_needed: bool) -> tuple[Partition, ...] | None:
    """Ask the cluster what it has; None on a machine without Slurm where nothing is to be submitted."""
    from launchers.launch_errors import LauncherError, SlurmMissing
    from launchers.slurm.cluster import partitions

    try:
        return partitions()
    except SlurmMissing as error:
        if is_needed:
            raise ConfigError(f"{error}, or train here with `orchestra run`") from error
        note(f"{error}: what the cluster has was not checked")
    except LauncherError as error:
        if is_needed:
            raise LaunchError(f"{error}; nothing was submitted") from error
        note(f"{error}: what the cluster has was not checked")
    return None


def on_site(
    config: Config, partitions: tuple[Partition, ...] | None, situation: Situation = SITUATION
) -> tuple[Config, list[str]]:
    """Return the configuration with the cluster's numbers in the place of `auto`, and what the cluster cannot
    give.
    """
    from orchestra.config.machine import resolved
    from orchestra.config.rules.all_rules import problems_of
    from orchestra.submit.site import site_problems, with_numbers

    problems: list[str] = []
    if partitions is not None:
        numbered = resolved(with_numbers(config, partitions), situation)
        if numbered != config:
            config = numbered
            problems += problems_of(config, situation)
        problems += site_problems(config, partitions)
    if config.cluster.gpus_per_node == "auto" and not problems:
        problems.append("cluster.gpus_per_node=auto: what the nodes have is not known; give a number")
    return config, problems


def memory_problems(config: Config, partitions: tuple[Partition, ...] | None) -> list[str]:
    """Return why the devices' memory does not suffice, where the configuration or Slurm names the device."""
    from orchestra.submit.memory_check import memory_problems as problems_with
    from orchestra.submit.site import gpu_type

    if config.cluster.hardware == "auto" and partitions is not None:
        name = gpu_type(config, partitions)
        if name is not None:
            config = replace(config, cluster=replace(config.cluster, hardware=name))
    return list(problems_with(config, SITUATION))


def place_problems(folder: Path) -> Iterator[str]:
    """Yield why the nodes cannot share a folder."""
    from orchestra.submit.site import folder_problems

    return folder_problems(folder, _mounts())


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""


def share_of(config: Config, partitions: tuple[Partition, ...] | None) -> Share:
    """Return what the cluster adds where the configuration leaves it open; say which nodes a job does not get
    because they failed before.
    """
    from orchestra.recovery.excluded_hosts import shared_folder
    from orchestra.submit.job import Share
    from orchestra.submit.new_run import parent_of_runs
    from orchestra.submit.site import cpus_of_share

    if partitions is None:
        return Share()
    own = config.cluster
    without: tuple[str, ...] = ()
    if config.recovery.exclude_hours > 0:
        runs = shared_folder(parent_of_runs(config))
        recent = int(time.monotonic() / _ASK_AGAIN_S)
        wanted = own.nodes + own.spare_nodes
        without = _left_out(runs, own.partition, wanted, tuple(own.exclude), recent)
    return Share(cpus_of_share(config, partitions), without)


# The members of a sweep ask one by one for the same.
@functools.lru_cache(maxsize=64)
def _left_out(
    runs: Path, partition: str | None, wanted: int, own: tuple[str, ...], _: int
) -> tuple[str, ...]:
    """Return the hosts on the list that such a job does not get beside its `own`, and say why."""
    from launchers.slurm.commands import asked_cluster
    from orchestra.recovery.excluded_hosts import excluded_folder
    from orchestra.submit.site import left_out

    if not excluded_folder(runs).exists():
        return ()
    found = left_out(runs, asked_cluster(), partition, wanted, own)
    for text in found.notes:
        note(text)
    if found.hosts:
        note("recovery.exclude_hours=0 uses them all the same; `orchestra doctor` lists them")
    return found.hosts


def tested(script: str) -> Estimate | None:
    """Let Slurm judge a script. Its silence here is no verdict, and a limit on the number of jobs none on
    this one: the submission itself will tell.
    """
    from launchers.launch_errors import LauncherError, SlurmRefused
    from launchers.slurm import sbatch
    from launchers.slurm.commands import is_full

    try:
        return sbatch.tested(script)
    except SlurmRefused as error:
        if is_full(str(error)):
            return None
        raise ConfigError(f"Slurm refuses the job: {error}") from error
    except LauncherError as error:
        note(f"the job was not tested beforehand: {error}")
        return None
