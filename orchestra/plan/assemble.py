"""Builds the case to predict from a checked configuration, and the overrides that a plan starts from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from conf.schema import Config, Device, NetworkConfig
from orchestra.errors import ConfigError
from orchestra.plan import devices
from orchestra.plan.case import PlanCase
from orchestra.plan.devices import Accelerator, Network, device
from orchestra.plan.frameworks import NANOTRON, Framework, framework
from orchestra.plan.profiles import Profile, cpu_device, is_profile, read_profile, with_profile
from orchestra.sizes.hardware import detect_gpus
from orchestra.sizes.topology import layout
from orchestra.sizes.training_shape import TrainingShape, training_shape
from orchestra.sizes.units import TERA

# Gradients shard over all data-parallel ranks unless a configuration says fewer.
_USUAL_FRAMEWORK = "orchestra"
_GB = 1e9
# Overrides that say which machines are planned for.
_CHOOSING = ("cluster=", "+cluster=", "cluster.launcher=", "cluster.device=cpu", "experiment=")
_OPEN_RANKS = "cluster.gpus_per_node=auto: the planner needs a number; use cluster.gpus_per_node=8"


def case_of(
    config: Config, framework_name: str = _USUAL_FRAMEWORK, profile: Profile | None = None
) -> PlanCase:
    """Return the case of a configuration; `profile` takes the place of what it says of the hardware.

    Raises ConfigError where the device's figures or the number of ranks are not known.
    """
    cluster = config.cluster
    ranks = cluster.gpus_per_node
    fitted = profile or profile_of(config)
    problems = []
    if not isinstance(ranks, int):
        problems.append(_OPEN_RANKS)
    if cluster.hardware == "auto" and fitted is None:
        problems.append(
            "cluster.hardware=auto: the planner needs the device's name; use cluster.hardware=h100"
        )
    if problems or not isinstance(ranks, int):
        raise ConfigError(problems)
    accelerator = _device(config, ranks, fitted)
    if cluster.peak_tflops is not None:
        accelerator = replace(accelerator, peak_flops=cluster.peak_tflops * TERA)
    trainer = framework(framework_name)
    network = _as_configured(network_of(trainer, accelerator.name), cluster.network)
    if cluster.network.intra_node_bytes_per_s is not None and fitted is None:
        accelerator, network = _inside(accelerator, network, cluster.network.intra_node_bytes_per_s)
    shape = shape_of(config)
    case = PlanCase(
        **{field.name: getattr(shape, field.name) for field in fields(shape)},
        device=accelerator,
        devices_per_node=ranks,
        network=network,
        framework=trainer,
    )
    return case if fitted is None else with_profile(case, fitted, threads_of(config, fitted))


def shape_of(config: Config) -> TrainingShape:
    """Return what a configuration trains and how it is divided, on whatever device.

    Raises ConfigError where the number of ranks is not known.
    """
    cluster = config.cluster
    if not isinstance(cluster.gpus_per_node, int):
        raise ConfigError(_OPEN_RANKS)
    degrees = layout(config.parallelism, cluster.nodes * cluster.gpus_per_node)
    return training_shape(config, degrees, is_gpu=cluster.device is not Device.cpu)


def profile_of(config: Config) -> Profile | None:
    """Return the profile that a configuration names; None for a device of the table.

    Raises ConfigError where the profile cannot be read, and for CPUs without one: there is no table of them.
    """
    if is_profile(config.cluster.hardware):
        return read_profile(Path(config.cluster.hardware))
    if config.cluster.device is Device.cpu:
        raise ConfigError(
            "cluster.device=cpu: the planner has no figures of this machine's CPU; train two or more short "
            "runs of different sizes on it, fit a profile to them with orchestra plan --calibrate RUN RUN "
            "--output cpu.json, and plan with cluster.hardware=cpu.json"
        )
    return None


def threads_of(config: Config, profile: Profile) -> int:
    """Return the threads of a rank on CPUs: as configured, or its share of a node's cores (at least 1)."""
    ranks = config.cluster.gpus_per_node
    share = (profile.cores or 1) // ranks if isinstance(ranks, int) else 1
    return config.cluster.threads_per_rank or max(1, share)


def _device(config: Config, ranks: int, fitted: Profile | None) -> Accelerator:
    precision = config.precision.name
    if fitted is not None and fitted.is_cpu:
        return cpu_device(fitted, ranks, threads_of(config, fitted), precision)
    own = device(config.cluster.hardware if fitted is None else fitted.device, precision)
    if not config.cluster.share_devices:
        return own
    # Without a GPU here, one that all ranks share. Times stay those of ranks with a device of their own.
    sharing = math.ceil(ranks / max(1, detect_gpus()))
    return replace(own, memory_bytes=own.memory_bytes / sharing)


def network_of(profile: Framework, device_name: str) -> Network:
    """Return the network that a trainer's figures were measured on, else the device's usual one."""
    if profile.name == NANOTRON.name:
        return devices.EFA_H100
    return devices.INFINIBAND_200 if device_name.startswith("a100") else devices.INFINIBAND_400


def _as_configured(network: Network, given: NetworkConfig) -> Network:
    """Let what a configuration says of the network take the place of the profile's figures."""
    if given.inter_node_bytes_per_s is not None:
        rate = f"{given.inter_node_bytes_per_s / _GB:.3g} GB/s per device between nodes"
        network = devices.reached_network(given.inter_node_bytes_per_s, f"measured or given: {rate}")
    if given.intra_node_latency_s is not None:
        network = replace(network, inside_latency_s=given.intra_node_latency_s)
    if given.inter_node_latency_s is not None:
        network = replace(network, between_latency_s=given.inter_node_latency_s)
    return network


def _inside(accelerator: Accelerator, network: Network, bytes_per_s: float) -> tuple[Accelerator, Network]:
    """Let the bus bandwidth that all-reduces reach inside a node take the place of a share of the links'."""
    gathers = network.inside_all_gather / network.inside_all_reduce
    reached = replace(network, inside_all_reduce=1.0, inside_all_gather=gathers)
    return replace(accelerator, link_bytes_per_s=bytes_per_s), reached


def chooses_cluster(overrides: Sequence[str]) -> bool:
    """Whether overrides say which machines are planned for; else `for_planning` assumes usual ones."""
    return any(each.startswith(_CHOOSING) for each in overrides)


def for_planning(overrides: Sequence[str]) -> list[str]:
    """Return overrides that plan for nodes of GPUs where they choose neither a cluster nor a CPU's profile,
    and that need no data where they name none: what is trained on changes nothing here.
    """
    ours = [] if chooses_cluster(overrides) else ["cluster=slurm"]
    if ours and any(each.startswith("cluster.hardware=") and is_profile(each) for each in overrides):
        ours = _for_profile(overrides)
    usual = {"cluster.device": Device.cuda.value, "cluster.gpus_per_node": "8", "cluster.hardware": "h100"}
    given = {each.partition("=")[0] for each in overrides}
    if ours == ["cluster=slurm"]:
        ours += [f"{key}={value}" for key, value in usual.items() if key not in given]
    if not any(each.lstrip("+").startswith("data") for each in given):
        ours.append("data=stdlib")
    return [*ours, *overrides]


def _for_profile(overrides: Sequence[str]) -> list[str]:
    """Return the usual cluster of a profile's device: ranks of this machine for CPUs, else nodes on Slurm."""
    name = next(each.partition("=")[2] for each in overrides if each.startswith("cluster.hardware="))
    return ["cluster.device=cpu"] if read_profile(Path(name)).is_cpu else ["cluster=slurm"]
