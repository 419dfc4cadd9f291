"""From a configuration to the description of the Slurm job that trains it. Reads nothing but which folders a
container must be given.
"""

from __future__ import annotations

import re
import secrets
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from conf.schema import ClusterConfig, Config, Device, Requeue
from launchers.slurm.batch_script import BatchJob
from orchestra.config.rules.place_rules import warning_lead_s
from orchestra.plugins import named_in
from orchestra.run.paths import RunDir, SweepDir
from orchestra.sizes.units import as_slurm_time
from orchestra.submit.container_mounts import image_mounts, prefix_variable

NODE_MODULE = "orchestra.agents"
_SRUN_FAILED_MODULE = "orchestra.agents.srun_failed"
_SRUN_WATCH_MODULE = "orchestra.agents.srun_watch"
_SETUP_FAILED_MODULE = "orchestra.agents.setup_failed"
# Keeps several members of a sweep at work on one node.
PACK_MODULE = "orchestra.agents.pack"
_ALTERNATIVES_MODULE = "orchestra.agents.alternatives"
_FOLLOW_MODULE = "orchestra.agents.follow"
_TOKEN_BYTES = 8
_GPU_OPTIONS = ("gpus", "gpus_per_task", "gpus_per_socket")
_GRES_OPTIONS = ("gres", "tres_per_node", "tres_per_task")
# What a gres is called that is a GPU or a part of one; another, such as a disk, comes beside them.
_GPUS_BY_GRES = re.compile(r"\b(gpu|shard|mps)\b")
# Slurm takes no cores of a task beside them.
_CORE_OPTIONS = ("cpus_per_gpu",)
_MEMORY_OPTIONS = ("mem", "mem_per_cpu", "mem_per_gpu")
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
    # Whether the job takes all GPUs of each node that it could get.
    has_whole_nodes: bool = False
    # Whether the cluster could be asked.
    is_asked: bool = True
    # GPUs that members which share a node have together; None: each has its own.
    gpus: int | None = None


def batch_job(
    config: Config,
    run: RunDir,
    token: str,
    share: Share | None = None,
    *,
    alternative: int | None = None,
    follows: bool = False,
) -> BatchJob:
    """Return the job that trains `run`; `config` says the ranks per node and the device. `alternative`: its
    number, where the run has several and the first that starts trains. `follows`: it begins after others.
    """
    job = _job(config, run, (str(run.path),), token, share)
    if follows:
        return replace(job, before_all=(sys.executable, "-u", "-m", _FOLLOW_MODULE, str(run.path)))
    if alternative is None:
        return job
    first = (sys.executable, "-u", "-m", _ALTERNATIVES_MODULE, str(run.path), str(alternative))
    return replace(job, before_all=first)


def array_job(
    config: Config, sweep: SweepDir, token: str, first: int, tasks: str, share: Share | None = None
) -> BatchJob:
    """Return the array that trains members of a sweep which all need what `config` says of the machines.

    Task t trains the member with index `first` + t; `tasks` are their numbers in sbatch's form.
    """
    arguments = (str(sweep.path), "--first", str(first))
    return replace(_job(config, sweep, arguments, token, share), array=tasks)


def packed_job(config: Config, sweep: SweepDir, share: Share | None = None) -> BatchJob:
    """Return the array whose tasks each train several members of a sweep on one node, as `config` says; its
    number, tasks and token are filled in later.
    """
    members, ranks = int(config.cluster.members_per_node), int(config.cluster.gpus_per_node)
    share = share or Share()
    together = ranks * members if share.gpus is None else share.gpus
    arguments = (str(sweep.path), "--at-once", str(members), "--array", "0")
    job = _job(config, sweep, arguments, "", share)
    threads, on_cpu = config.cluster.threads_per_rank, config.cluster.device is Device.cpu
    counts_cores = job.cpus_per_task is not None and bool(threads or on_cpu)
    return replace(
        job,
        array="0",
        command=(_python(config), "-u", "-m", PACK_MODULE, *arguments),
        # A job on one node ends with it, and Slurm queues it again: nobody has to watch over srun.
        beside_step=(),
        after_failure=(),
        survives_nodes=False,
        gpus_per_node=None if job.gpus_per_node is None else together,
        # Of what Slurm gives with the GPUs `share` knows.
        cpus_per_task=ranks * members * (threads or 1) if counts_cores else job.cpus_per_task,
    )


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
        "switches": _switches(cluster),
        "segment": cluster.segment,
        "exclude": list(dict.fromkeys([*cluster.exclude, *share.without])) or None,
        **cluster.slurm_extra,
    }
    cpus = None if _names_any(options, _CORE_OPTIONS) else _cpus(config, ranks, share)
    on_gpus = cluster.device is not Device.cpu
    lacks_cpus = cpus is None and not _names_any(options, _CORE_OPTIONS)
    says_memory = _names_any(options, _MEMORY_OPTIONS)
    if on_gpus and not says_memory and (share.has_whole_nodes or options.get("exclusive") is True):
        # Slurm gives what a site's default says, which may be little, and the rest to nobody.
        options["mem"] = 0
        says_memory = True
    prefix, srun_options, exports = _container(config, place)
    return BatchJob(
        name=place.name,
        num_nodes=_num_nodes(config),
        survives_nodes=True,
        command=(_python(config), "-u", "-m", NODE_MODULE, *arguments),
        prefix=prefix,
        # On the first node itself, where a container's interpreter is not.
        beside_step=(sys.executable, "-m", _SRUN_WATCH_MODULE, *arguments),
        after_failure=(sys.executable, "-u", "-m", _SRUN_FAILED_MODULE, *arguments),
        log_folder=place.job_logs,
        directory=place.path,
        comment=token,
        exports={"PYTHONPATH": _search_path(config, place), "PYTHONSAFEPATH": "1", **exports},
        warning_lead_s=warning_lead_s(config),
        requeue=cluster.requeue is Requeue.requeue,
        # In a site's own words GPUs are asked for once: Slurm takes no second ones beside them.
        gpus_per_node=ranks if on_gpus and not _asks_for_gpus(options) else None,
        cpus_per_task=cpus,
        setup=tuple(cluster.setup),
        setup_failed=()
        if cluster.setup_may_fail
        else (sys.executable, "-u", "-m", _SETUP_FAILED_MODULE, *arguments),
        notes=() if share.is_asked or not on_gpus else _missing(lacks_cpus, not says_memory),
        srun_options=srun_options,
        srun_extra=cluster.srun_extra,
        options=options,
    )


def _num_nodes(config: Config) -> int | str:
    """Return how many nodes the job is given: a number, or a range as sbatch writes it."""
    cluster = config.cluster
    most = cluster.nodes + cluster.spare_nodes
    fewest = most if cluster.min_nodes is None else cluster.min_nodes + cluster.spare_nodes
    return most if fewest == most else f"{fewest}-{most}"


def _switches(cluster: ClusterConfig) -> str | None:
    """Return sbatch's words for the most leaf switches: 2, or 2@2:00:00 with a wait."""
    if cluster.max_switches is None:
        return None
    wait = cluster.max_switches_wait
    return f"{cluster.max_switches}{'' if wait is None else f'@{as_slurm_time(wait)}'}"


def _names_any(options: Iterable[str], names: tuple[str, ...]) -> bool:
    """Whether the site's own options say one of these."""
    return any(name.removeprefix("--").replace("-", "_") in names for name in options)


def _asks_for_gpus(options: Mapping[str, object]) -> bool:
    """Whether the site's own options ask for GPUs."""
    gres = [value for name, value in options.items() if _names_any((name,), _GRES_OPTIONS)]
    return _names_any(options, _GPU_OPTIONS) or any(_GPUS_BY_GRES.search(str(value)) for value in gres)


def _missing(lacks_cpus: bool, lacks_memory: bool) -> tuple[str, ...]:
    """Return what a script says of the lines that it would have if Slurm had told what the nodes have."""
    lines = []
    if lacks_cpus:
        lines.append("  --cpus-per-task  cores that go with the GPUs; cluster.threads_per_rank=N says them")
    if lacks_memory:
        lines.append("  --mem            all memory of whole nodes; cluster.slurm_extra.mem=0 says so")
    return ("Missing, since Slurm could not be asked what the nodes have:", *lines) if lines else ()


def _cpus(config: Config, ranks: int, share: Share) -> int | None:
    """Cores of the one task per node: for the threads that are configured, else the node's fair share."""
    threads = config.cluster.threads_per_rank
    if threads is not None:
        return ranks * threads
    return ranks if config.cluster.device is Device.cpu else share.cpus


def _python(config: Config) -> str:
    """The interpreter of this machine is not the container's."""
    container = config.cluster.container
    return "python3" if container.image or container.prefix else sys.executable


def _search_path(config: Config, place: RunDir | SweepDir) -> str:
    # The copies of plug-ins come before what PYTHONPATH has of them. Of a sweep any member may have some.
    has_copies = isinstance(place, SweepDir) or named_in(config)
    return f"{place.code}:{place.plugins}" if has_copies else str(place.code)


def _container(
    config: Config, place: RunDir | SweepDir
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Return the words before the command, the options of srun (Pyxis) and the variables that put it into a
    container which shows what the ranks need.
    """
    container, parent = config.cluster.container, place.path.parent
    if container.image is None and container.prefix is None:
        return (), (), {}
    # Said again inside: an image's own variables may be stronger than the job's.
    inside = ("env", f"PYTHONPATH={_search_path(config, place)}", "PYTHONSAFEPATH=1")
    words = (*shlex.split(container.prefix or ""), *inside)
    if container.image is None:
        variable = prefix_variable(config, parent)
        return words, (), dict([variable] if variable else [])
    mounts = ",".join(image_mounts(config, parent))
    return words, (f"--container-image={container.image}", f"--container-mounts={mounts}"), {}
