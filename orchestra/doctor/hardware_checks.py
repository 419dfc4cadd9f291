"""Checks what this host's ranks compute and talk on: GPUs, the cores beside them, and network adapters.

It looks at this machine: on a login node, which may have neither, type it inside of a job (`srun … orchestra
doctor`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launchers.host_network import address_of_interface
from launchers.numa import BindingWish, NodeTopology, as_list, bound, read_topology, visible_gpus
from orchestra.doctor.check import Check, Finding, Mark, Subject, graded

_SYSFS = Path("/sys")
_LIMIT_S = 40.0
# A look-alike of every interface: loopback, container bridges and the ends of virtual cables.
_NO_WAY_OUT = ("lo", "docker", "br-", "veth", "virbr", "cni", "podman")


def _binding(subject: Subject) -> Iterator[Finding]:
    """Show which cores each rank here would run on, and warn where it would float over both sockets."""
    gpus = () if subject.device == "cpu" else visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    yield from binding_findings(read_topology(gpus), sorted(os.sched_getaffinity(0)), subject)


def binding_findings(topology: NodeTopology, allowed: list[int], subject: Subject) -> Iterator[Finding]:
    """Yield one line for each GPU, and what follows for the ranks. Pure."""
    for place, gpu in enumerate(topology.gpus):
        adapter = topology.nearest_adapter(gpu)
        near = f", adapter {adapter}" if adapter else ""
        if gpu.numa_node is None:
            hidden = f"{gpu.name}, NUMA node unknown (sysfs has -1){near}"
            advice = "its rank floats over all cores: firmware or hypervisor hide the node"
            yield Finding(f"gpu {place}", Mark.warning, hidden, advice)
        else:
            cores = as_list(topology.cores_of_numa.get(gpu.numa_node, ()))
            home = f"{gpu.name}, NUMA node {gpu.numa_node}, cores {cores or 'none'}{near}"
            yield Finding(f"gpu {place}", Mark.ok, home)
    on_gpu = bool(topology.gpus)
    ranks = subject.ranks_per_node or len(topology.gpus) or 1
    homes = topology.numa_of(allowed)
    here = f"{len(allowed)} cores of NUMA node{'' if len(homes) == 1 else 's'} {', '.join(map(str, homes))}"
    if subject.numa_binding == "none":
        yield Finding("numa binding", Mark.note, f"{here}; off (cluster.numa_binding=none)")
        return
    wish = BindingWish(subject.numa_binding, ranks, subject.threads_per_rank, owns_cores=True, on_gpu=on_gpu)
    binding = bound(topology, allowed, wish)
    if not binding.cores:
        floats = len(homes) > 1
        advice = "each rank floats over these cores, and its memory with it" if floats else ""
        yield graded(
            "numa binding", f"{here}; no rank is bound: {binding.reason}", is_bad=floats, advice=advice
        )
        return
    each = "; ".join(f"rank {rank}: {as_list(cores)}" for rank, cores in enumerate(binding.cores))
    yield Finding("numa binding", Mark.ok, f"with cores of its own a job has {each}")


@dataclass(frozen=True)
class RdmaPort:
    """The first port of a network adapter, as /sys/class/infiniband has it."""

    adapter: str
    # InfiniBand or Ethernet (RoCE); efa is Amazon's own.
    kind: str
    is_active: bool
    rate: str
    # Of RoCE the entry that holds the routable IPv4 address; None where there is none.
    gid_index: int | None = None


def rdma_ports(sysfs: Path = _SYSFS) -> list[RdmaPort]:
    """Return the adapters that talk without the kernel, by name."""
    ports = []
    for folder in sorted((sysfs / "class/infiniband").glob("*")):
        port = folder / "ports/1"
        kind = "efa" if (folder / "device/driver").resolve().name == "efa" else _text(port / "link_layer")
        is_active = "ACTIVE" in _text(port / "state")
        gid = _routable_gid(port) if kind == "Ethernet" else None
        ports.append(RdmaPort(folder.name, kind, is_active, _text(port / "rate"), gid))
    return ports


def _routable_gid(port: Path) -> int | None:
    for entry in sorted((port / "gid_attrs/types").glob("*"), key=lambda path: int(path.name)):
        # The others are empty, and reading them fails.
        is_ipv4 = _text(port / "gids" / entry.name).startswith("0000:0000:0000:0000:0000:ffff:")
        if is_ipv4 and _text(entry) == "RoCE v2":
            return int(entry.name)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _network(subject: Subject) -> Iterator[Finding]:
    """Name adapters and interfaces, and what NCCL would be told of them."""
    interfaces = {}
    for _, name in socket.if_nameindex():
        if not name.startswith(_NO_WAY_OUT) and (address := address_of_interface(name)) is not None:
            interfaces[name] = address
    yield from network_findings(rdma_ports(), interfaces, subject.interface)


def network_findings(
    ports: list[RdmaPort], interfaces: dict[str, str], chosen: str | None
) -> Iterator[Finding]:
    """Yield what there is, and what to set; `interfaces` have an IPv4 address each. Pure."""
    listed = ", ".join(f"{name} {address}" for name, address in interfaces.items()) or "none with an address"
    yield Finding("interfaces", Mark.ok, listed)
    if len(interfaces) > 1 and chosen is None:
        names = " or ".join(interfaces)
        several = f"several: ranks take the one that leads to the other nodes; NCCL chooses among {names}"
        yield Finding(
            "interfaces", Mark.note, several, f"cluster.network.interface={next(iter(interfaces))} fixes it"
        )
    if not ports:
        yield Finding("adapters", Mark.note, "no RDMA adapter: NCCL uses TCP (docs: Networks)")
        return
    for port in ports:
        down = "look at `ibstat`, or leave it out of NCCL_IB_HCA"
        kind = {"Ethernet": "RoCE", "efa": "EFA"}.get(port.kind, port.kind or "kind unknown")
        state = "active" if port.is_active else "not active"
        gid = "" if port.gid_index is None else f", RoCE v2 address at GID {port.gid_index}"
        found = f"{port.adapter}: {kind}, {port.rate or 'rate unknown'}, {state}{gid}"
        yield graded("adapter", found, is_bad=not port.is_active, advice=down, mark=Mark.note)
    active = [port for port in ports if port.is_active]
    rails = len([port for port in active if port.kind == "InfiniBand"] or active)
    yield Finding("rails", Mark.ok, f"{rails} a node: as many ways to other nodes at a time")
    if words := nccl_settings(active):
        yield Finding("nccl", Mark.ok, f"in cluster.setup: export {' '.join(words)}")


def nccl_settings(ports: list[RdmaPort]) -> list[str]:
    """Return the variables that name these adapters to NCCL. Adapters of InfiniBand are taken before RoCE's:
    the latter are often for storage.
    """
    if any(port.kind == "efa" for port in ports):
        return ["FI_PROVIDER=efa"]
    fast = [port for port in ports if port.kind == "InfiniBand"] or ports
    if not fast:
        return []
    return [f"NCCL_IB_HCA=={','.join(port.adapter for port in fast)}"]


CHECKS = (
    Check("numa binding", _binding, limit_s=_LIMIT_S),
    Check("adapters", _network),
)
