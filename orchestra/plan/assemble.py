"""Builds the case to predict from a checked configuration. It composes nothing and asks no machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conf.schema import Config, Device, NetworkConfig
from orchestra.errors import ConfigError
from orchestra.plan import networks
from orchestra.plan.case import Case
from orchestra.plan.devices import device
from orchestra.plan.frameworks import NANOTRON, Framework, framework
from orchestra.plan.networks import Network
from orchestra.topology import batch_shape, layout
from orchestra.units import TERA

# Gradients shard over all data-parallel ranks unless a configuration says fewer.
_USUAL_FRAMEWORK = "orchestra"


def case_of(config: Config, framework_name: str = _USUAL_FRAMEWORK) -> Case:
    """Return the case of a configuration. Raises ConfigError where the device's figures or the number of
    ranks are not known.
    """
    cluster, parallelism = config.cluster, config.parallelism
    ranks = cluster.gpus_per_node
    problems = []
    if not isinstance(ranks, int):
        problems.append("cluster.gpus_per_node=auto: the planner needs a number; use cluster.gpus_per_node=8")
    if cluster.hardware == "auto":
        problems.append(
            "cluster.hardware=auto: the planner needs the device's name; use cluster.hardware=h100"
        )
    if problems or not isinstance(ranks, int):
        raise ConfigError(problems)
    accelerator = device(cluster.hardware, config.precision.name)
    if cluster.peak_tflops is not None:
        accelerator = replace(accelerator, peak_flops=cluster.peak_tflops * TERA)
    profile = framework(framework_name)
    mesh = layout(parallelism, cluster.nodes * ranks)
    batch = batch_shape(config.train, mesh.dp)
    return Case(
        model=config.model,
        layout=mesh,
        seq_len=config.train.seq_len,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        zero=parallelism.zero,
        num_shards=parallelism.shard_degree or mesh.dp * mesh.cp,
        sequence_parallel=parallelism.sequence_parallel,
        recompute=config.train.recompute,
        precision=config.precision.name,
        device=accelerator,
        devices_per_node=ranks,
        network=_as_configured(network_of(profile, accelerator.name), cluster.network),
        framework=profile,
    )


def network_of(profile: Framework, device_name: str) -> Network:
    """Return the network that a trainer's figures were measured on, else the device's usual one."""
    if profile.name == NANOTRON.name:
        return networks.EFA_H100
    return networks.INFINIBAND_200 if device_name.startswith("a100") else networks.INFINIBAND_400


def _as_configured(network: Network, given: NetworkConfig) -> Network:
    """Let what a configuration says of the network take the place of the profile's figures."""
    if given.inter_node_bytes_per_s is not None:
        network = networks.data_sheet_network(given.inter_node_bytes_per_s)
    if given.intra_node_latency_s is not None:
        network = replace(network, inside_latency_s=given.intra_node_latency_s)
    if given.inter_node_latency_s is not None:
        network = replace(network, between_latency_s=given.inter_node_latency_s)
    return network


def for_planning(overrides: Sequence[str]) -> list[str]:
    """Return overrides that plan for nodes of GPUs where they choose no cluster of their own, and that need
    no data where they name none: what is trained on changes nothing here.
    """
    chosen = ("cluster=", "+cluster=", "cluster.launcher=", "experiment=")
    ours = [] if any(each.startswith(chosen) for each in overrides) else ["cluster=slurm"]
    usual = {"cluster.device": Device.cuda.value, "cluster.gpus_per_node": "8", "cluster.hardware": "h100"}
    said = {each.partition("=")[0] for each in overrides}
    if ours:
        ours += [f"{key}={value}" for key, value in usual.items() if key not in said]
    if not any(each.lstrip("+").startswith("data") for each in said):
        ours.append("data=stdlib")
    return [*ours, *overrides]
