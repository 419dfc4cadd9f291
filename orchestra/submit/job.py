"""From a configuration to the description of the Slurm job that trains it: pure functions."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from conf.schema import Config, ContainerConfig, Device, Requeue
from launchers.slurm.batch_script import BatchJob
from orchestra.config.rules.place_rules import warning_lead_s
from orchestra.run.paths import RunDir, SweepDir

NODE_MODULE = "orchestra.agents"
_SRUN_FAILED_MODULE = "orchestra.agents.srun_failed"
_SRUN_WATCH_MODULE = "orchestra.agents.srun_watch"
_TOKEN_BYTES = 8
_GPU_OPTIONS = ("gres", "gpus", "gpus_per_task", "gpus_per_socket")
_TOKEN_PREFIX = "orchestra:"


def new_token() -> str:
    """Return what a job carries in its comment, so that it is found again; no two are the same."""
    return _TOKEN_PREFIX + secrets.token_hex(_TOKEN_BYTES)


@dataclass(frozen=True)
class Share:
    """What the cluster adds where the configuration leaves it open."""

    # Processor cores that one node gives a job; None: unknown.
    cpus: int | None = None
    # Hosts on the cluster's list of those that failed.
    without: tuple[str, ...] = ()


def batch_job(config: Config, run: RunDir, token: str, share: Share | None = None) -> BatchJob:
    """Return the job that trains `run`; `config` says the ranks per node and the device."""
    return _job(config, run, (str(run.path),), token, share)


def array_job(
    config: Config, sweep: SweepDir, token: str, first: int, tasks: str, share: Share | None = None
) -> BatchJob:
    """Return the array that trains members of a sweep which all need what `config` says of the machines.

    Task t trains the member with index `first` + t; `tasks` are their numbers in sbatch's form.
    """
    arguments = (str(sweep.path), "--first", str(first))
    return replace(_job(config, sweep, arguments, token, share), array=tasks)


def _job(
    config: Config, place: RunDir | SweepDir, arguments: tuple[str, ...], token: str, share: Share | None
) -> BatchJob:
    """Return the job; `arguments` are what the node's entry point is told."""
    cluster, share = config.cluster, share or Share()
    ranks = int(cluster.gpus_per_node)
    options = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": cluster.time_limit,
        "constraint": cluster.constraint,
        "exclude": list(dict.fromkeys([*cluster.exclude, *share.without])) or None,
        **cluster.slurm_extra,
    }
    prefix, srun_options = _container(cluster.container, place)
    return BatchJob(
        name=place.name,
        num_nodes=cluster.nodes + cluster.spare_nodes,
        survives_nodes=True,
        command=(*prefix, _python(cluster.container), "-u", "-m", NODE_MODULE, *arguments),
        # On the first node itself, where a container's interpreter is not.
        beside_step=(sys.executable, "-m", _SRUN_WATCH_MODULE, *arguments),
        after_failure=(sys.executable, "-u", "-m", _SRUN_FAILED_MODULE, *arguments),
        log_folder=place.job_logs,
        directory=place.path,
        comment=token,
        exports={"PYTHONPATH": str(place.code), "PYTHONSAFEPATH": "1"},
        warning_lead_s=warning_lead_s(config),
        requeue=cluster.requeue is Requeue.requeue,
        gpus_per_node=None if cluster.device is Device.cpu or _asks_for_gpus(options) else ranks,
        cpus_per_task=_cpus(config, ranks, share),
        setup=tuple(cluster.setup),
        srun_options=srun_options,
        options=options,
    )


def _asks_for_gpus(options: Mapping[str, object]) -> bool:
    """Whether GPUs are asked for in a site's own words, beside which Slurm takes no second ones."""
    return any(name.removeprefix("--").replace("-", "_") in _GPU_OPTIONS for name in options)


def _cpus(config: Config, ranks: int, share: Share) -> int | None:
    """Cores of the one task per node: for the threads that are configured, else the node's fair share."""
    threads = config.cluster.threads_per_rank
    if threads is not None:
        return ranks * threads
    return ranks if config.cluster.device is Device.cpu else share.cpus


def _python(container: ContainerConfig) -> str:
    """The interpreter of this machine is not the container's."""
    return "python3" if container.image or container.prefix else sys.executable


def _container(
    container: ContainerConfig, place: RunDir | SweepDir
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words before the command, and the options of srun (Pyxis), that put it into a container."""
    if container.image is None and container.prefix is None:
        return (), ()
    # Said again inside: an image's own variables may be stronger than the job's.
    inside = ("env", f"PYTHONPATH={place.code}", "PYTHONSAFEPATH=1")
    words = (*shlex.split(container.prefix or ""), *inside)
    if container.image is None:
        return words, ()
    parent = place.path.parent
    mounts = ",".join([f"{parent}:{parent}", *container.mounts])
    return words, (f"--container-image={container.image}", f"--container-mounts={mounts}")
