"""What one attempt is started with on each node: module, environment, and the address where the nodes meet.

Called by the node agents, and by commands that print what would be started.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import orchestra
from conf.schema import Config, Device, LauncherName, NetworkConfig, NumaBinding
from launchers import LauncherError
from launchers.host_network import address_towards, interface_of, reachable_address
from launchers.numa import BindingWish, RankBinding, bound, read_topology, visible_gpus
from launchers.slurm.this_job import JobTask
from launchers.torchrun import LaunchPlace, LaunchSpec
from orchestra.errors import LaunchError
from orchestra.run.paths import RunDir
from orchestra.run.rank_cores import cores_environment

# The environment variables of torchrun and the workers follow from the configuration alone: one that the
# user's shell happens to hold is replaced, since no environment variable beats an explicit setting.


# glibc gives large freed blocks back to the kernel, which clears them again page by page when the next step
# asks. Kept instead: half the system time of a step on CPU (benchmarks/RESULTS.md).
_KEEP_FREED_MEMORY = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=100000000000"
_LOOPBACK = "127.0.0.1"
# What lets NCCL 2.30 take several ranks on one GPU; few blocks each, since they wait there for each other.
_SHARED_DEVICES = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
# Seconds that torchrun gives workers after its own closing signal before it kills them.
_SHUTDOWN_TIMEOUT_S = 5
# torch's own name and limit.
_COMPILERS, _MOST_COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS", 32


def source_root() -> Path:
    """Return the folder that `orchestra`, `conf` and `launchers` are imported from."""
    return Path(orchestra.__file__).resolve().parent.parent


def usable_cores() -> int:
    """Return the number of processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(config: Config, ranks_per_node: int, cores: int) -> int:
    """Return the threads one rank computes with: as configured, or its share of the cores (at least 1)."""
    return config.cluster.threads_per_rank or max(1, cores // ranks_per_node)


def binding_wish(config: Config, environment: Mapping[str, str]) -> BindingWish:
    """Return what cluster.numa_binding asks for the ranks of one node, in a process with this environment."""
    cluster = config.cluster
    # Where Slurm gives a job part of a node but does not keep it there (TaskPlugin), others use these cores.
    given = environment.get("SLURM_CPUS_ON_NODE", "")
    return BindingWish(
        cluster.numa_binding.value,
        int(cluster.gpus_per_node),
        cluster.threads_per_rank,
        owns_cores=given.isdecimal() and usable_cores() <= int(given),
        on_gpu=cluster.device is not Device.cpu,
    )


def binding_here(config: Config) -> RankBinding:
    """Return where this node's ranks run. *The node agent*; it may take seconds, the first time."""
    return _binding(binding_wish(config, os.environ), os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _binding(wish: BindingWish, visible_devices: str | None) -> RankBinding:
    if wish.kind == NumaBinding.none.value:
        return RankBinding(reason="cluster.numa_binding=none")
    gpus = visible_gpus(visible_devices) if wish.on_gpu else ()
    return bound(read_topology(gpus), os.sched_getaffinity(0), wish)


def worker_environment(
    config: Config,
    ranks_per_node: int,
    *,
    cores: int | None = None,
    search_path: Sequence[str] = (),
    binding: RankBinding | None = None,
) -> dict[str, str]:
    """Return what is added to the environment of torchrun and the workers of one node.

    `cores` are the node's (default: those usable here). `search_path` follows the packages' own folder in
    PYTHONPATH. `binding`: the cores of each rank; None: nobody is bound.
    """
    cores = usable_cores() if cores is None else cores
    threads = threads_per_rank(config, ranks_per_node, cores)
    binding = binding or RankBinding()
    threads = binding.threads or threads
    return {
        **cores_environment(binding.cores),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Keeps a `conf` or `orchestra` in the working directory from shadowing the real ones.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(source_root()), *search_path])),
        "PYTHONUNBUFFERED": "1",
        "GLIBC_TUNABLES": _KEEP_FREED_MEMORY,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_TIMEOUT_S),
        **_compilers(cores // ranks_per_node),
        **_network(config),
        **(_SHARED_DEVICES if config.cluster.share_devices else {}),
    }


def _compilers(cores_per_rank: int) -> dict[str, str]:
    """Share the node's cores out among the processes that compile: torch takes as many for each rank as all
    ranks have cores, 32 at most.
    """
    if _COMPILERS in os.environ:
        return {}
    return {_COMPILERS: str(max(1, min(_MOST_COMPILERS, cores_per_rank)))}


def _network(config: Config) -> dict[str, str]:
    interface = config.cluster.network.interface
    if interface is not None:
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if config.cluster.launcher is LauncherName.local and Path("/sys/class/net/lo").exists():
        # gloo looks up the host's name otherwise, which fails or hangs where no name server knows it.
        return {"GLOO_SOCKET_IFNAME": "lo"}
    return {}


WORKER_MODULE = "orchestra.train"


def launch_spec(
    config: Config,
    run: RunDir,
    attempt: int,
    search_path: Sequence[str] = (),
    binding: RankBinding | None = None,
) -> LaunchSpec:
    """Return what starts `attempt` of `run`: the same worker module on every rank.

    `config` is resolved: `cluster.gpus_per_node` is a number. `search_path` follows the packages' own folder
    in PYTHONPATH. `binding`: the cores of each of the node's ranks.
    """
    ranks_per_node = int(config.cluster.gpus_per_node)
    return LaunchSpec(
        module=WORKER_MODULE,
        arguments=(str(run.path), "--attempt", str(attempt)),
        environment=worker_environment(config, ranks_per_node, search_path=search_path, binding=binding),
        ranks_per_node=ranks_per_node,
        node_logs=tuple(run.node_log(attempt, node) for node in range(config.cluster.nodes)),
    )


def own_address(network: NetworkConfig, task: JobTask) -> str:
    """Return the address at which this node of a job meets the others. Raises LaunchError without one."""
    if task.num_nodes == 1:
        return _LOOPBACK
    try:
        return reachable_address(network.interface, task.host, task.launch_address)
    except LauncherError as error:
        raise LaunchError(f"{error} (cluster.network.interface)") from error


def placed(
    spec: LaunchSpec, node: int, address: str, port: int, meeting_id: str
) -> tuple[LaunchSpec, LaunchPlace]:
    """Return the place of the attempt's `node`-th node, and the spec with the interface that leads to the
    others, who meet at `address`.
    """
    if spec.num_nodes == 1:
        address = _LOOPBACK
    local = _LOOPBACK if spec.num_nodes == 1 else address_towards(address)
    interface = None if local is None else interface_of(local)
    if interface is not None and "GLOO_SOCKET_IFNAME" not in spec.environment:
        # gloo takes what this host's name means, which may be an address that nobody else reaches.
        spec = dataclasses.replace(spec, environment={**spec.environment, "GLOO_SOCKET_IFNAME": interface})
    return spec, LaunchPlace(node, address, port, local_address=local, meeting_id=meeting_id)
