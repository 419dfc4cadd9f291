"""Which cores the ranks of one node run on: those beside their GPUs, as sysfs and nvidia-smi tell.

`read_topology` and `visible_gpus` describe the node, `bound` is pure. A rank whose cores are of one NUMA
node has its memory there too: Linux takes a page from the node of the core that first touches it, so that no
memory policy is set. Called by the node agents and by `orchestra doctor`.
"""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SYSFS = Path("/sys")
# nvidia-smi takes some seconds where the driver is not kept loaded.
_NVIDIA_SMI_S = 20.0
NODE, EXCLUSIVE = "node", "exclusive"


@dataclass(frozen=True)
class PciDevice:
    """A GPU or a network adapter. `numa_node` is None where sysfs says -1: the firmware does not tell."""

    # Of a GPU its PCI address, 0000:1b:00.0; of an adapter its name, mlx5_0.
    name: str
    numa_node: int | None
    # PCI addresses from the root complex down to the device.
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeTopology:
    """The processor of one node and what hangs on it."""

    # Cores (in sysfs's words logical CPUs) of each NUMA node by its number.
    cores_of_numa: Mapping[int, tuple[int, ...]]
    # First of the threads of the same physical core, for each.
    first_sibling: Mapping[int, int]
    # In the order of the ranks' devices.
    gpus: tuple[PciDevice, ...] = ()
    adapters: tuple[PciDevice, ...] = ()

    def numa_of(self, cores: Collection[int]) -> tuple[int, ...]:
        """Return the NUMA nodes that these cores are of."""
        return tuple(node for node, own in self.cores_of_numa.items() if not set(own).isdisjoint(cores))

    def nearest_adapter(self, gpu: PciDevice) -> str | None:
        """Return the network adapter that shares most of a GPU's way to the processor; None without one on
        the same root complex.
        """
        shared = {adapter.name: _num_shared(adapter.path, gpu.path) for adapter in self.adapters}
        most = max(shared.values(), default=0)
        # The switch beside a GPU has one adapter; under a root complex alone there may be several.
        return next((name for name, count in shared.items() if count == most), None) if most else None


def _num_shared(path: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(path, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class BindingWish:
    """What is asked for: `kind` is auto, node or exclusive, as torchrun's --numa-binding has them."""

    kind: str
    num_ranks: int
    # Threads that each rank must have; None: as many as its share of the cores.
    threads: int | None
    # Whether the cores are this job's alone.
    owns_cores: bool
    on_gpu: bool


@dataclass(frozen=True)
class RankBinding:
    """The cores of each rank by its local rank; or none, and why not."""

    cores: tuple[tuple[int, ...], ...] = ()
    # Threads that a rank can compute with, all ranks alike; None: as if nobody was bound.
    threads: int | None = None
    reason: str = ""


def bound(topology: NodeTopology, allowed: Collection[int], wish: BindingWish) -> RankBinding:
    """Return where the ranks run within the `allowed` cores. All are bound, or none is.

    `node`: all cores of the NUMA node that has a rank's GPU; CPU ranks are dealt out to the nodes in order.
    `exclusive`: these are cut among the ranks of the node. `auto`: exclusive where the cores are the job's
    alone, else node; CPU ranks only where there are several NUMA nodes.
    """
    homes = {node: cores for node, own in topology.cores_of_numa.items() if (cores := _within(own, allowed))}
    if not homes:
        return RankBinding(reason="sysfs does not tell which NUMA node the cores are of")
    kind = wish.kind
    if kind == "auto":
        if not wish.on_gpu and len(homes) < 2:
            return RankBinding(reason="all cores are of one NUMA node")
        kind = EXCLUSIVE if wish.owns_cores else NODE
    if not wish.on_gpu and kind == EXCLUSIVE:
        order = [core for cores in homes.values() for core in _siblings_together(cores, topology)]
        return _checked(_cut(order, wish.num_ranks), len(allowed), wish)
    nodes = _numa_of_gpus(topology, wish) if wish.on_gpu else _dealt_out(homes, wish.num_ranks)
    if isinstance(nodes, str):
        return RankBinding(reason=nodes)
    if missing := [(rank, node) for rank, node in enumerate(nodes) if node not in homes]:
        rank, node = missing[0]
        return RankBinding(
            reason=f"rank {rank}'s GPU is on NUMA node {node}, of which this job has no cores; ask for cores "
            "of both, or for whole nodes"
        )
    parts: dict[int, list[tuple[int, ...]]] = {}
    counts = Counter(nodes)
    for node, count in counts.items():
        order = _siblings_together(homes[node], topology)
        parts[node] = _cut(order, count) if kind == EXCLUSIVE else [tuple(sorted(order))] * count
    shares = [len(homes[node]) // count for node, count in counts.items()]
    return _checked([parts[node].pop(0) for node in nodes], len(allowed), wish, min(shares))


def _within(cores: Collection[int], allowed: Collection[int]) -> tuple[int, ...]:
    return tuple(core for core in cores if core in allowed)


def _siblings_together(cores: Collection[int], topology: NodeTopology) -> list[int]:
    """Return cores so that the threads of a physical core follow each other, and a cut leaves them so."""
    return sorted(cores, key=lambda core: (topology.first_sibling.get(core, core), core))


def _cut(order: Sequence[int], number: int) -> list[tuple[int, ...]]:
    ends = [len(order) * part // number for part in range(number + 1)]
    return [tuple(sorted(order[begin:end])) for begin, end in itertools.pairwise(ends)]


def _dealt_out(homes: Mapping[int, tuple[int, ...]], number: int) -> list[int]:
    names = list(homes)
    return [names[rank * len(names) // number] for rank in range(number)]


def _numa_of_gpus(topology: NodeTopology, wish: BindingWish) -> list[int] | str:
    """Return the NUMA node of each rank's GPU, or why that is not known."""
    if not topology.gpus:
        return "nvidia-smi does not tell where the GPUs are"
    nodes = []
    for rank in range(wish.num_ranks):
        gpu = topology.gpus[rank % len(topology.gpus)]
        if gpu.numa_node is None:
            return f"GPU {gpu.name} does not say its NUMA node (sysfs has -1, as on many virtual machines)"
        nodes.append(gpu.numa_node)
    return nodes


def _checked(
    cores: list[tuple[int, ...]], num_allowed: int, wish: BindingWish, share: int | None = None
) -> RankBinding:
    """Return the binding if each rank has the cores that it asks for; `share`: what is each one's own."""
    least = min(map(len, cores)) if share is None else share
    fair = max(1, num_allowed // wish.num_ranks)
    # A GPU's rank computes little on the CPU, and is better off near its GPU with fewer threads.
    needed = wish.threads or (1 if wish.on_gpu else fair)
    if least < needed:
        return RankBinding(
            reason=f"a rank would have {least} cores of its own and needs {needed}"
            + (" (cluster.threads_per_rank)" if wish.threads else "")
        )
    return RankBinding(tuple(cores), wish.threads or min(fair, least))


def read_topology(gpu_addresses: Sequence[str] = (), sysfs: Path = _SYSFS) -> NodeTopology:
    """Return this node's topology with the GPUs at these PCI addresses. What sysfs does not tell is left out;
    without NUMA nodes all cores are node 0's.
    """
    folders = sorted((sysfs / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    homes = {int(folder.name[4:]): parsed_cores(_text(folder / "cpulist")) for folder in folders}
    homes = {node: cores for node, cores in homes.items() if cores}
    processor = sysfs / "devices/system/cpu"
    homes = homes or {0: parsed_cores(_text(processor / "online"))}
    siblings = {}
    for core in itertools.chain(*homes.values()):
        threads = parsed_cores(_text(processor / f"cpu{core}/topology/thread_siblings_list"))
        siblings[core] = min(threads, default=core)
    gpus = tuple(_device(address, sysfs / "bus/pci/devices" / address) for address in gpu_addresses)
    links = sorted((sysfs / "class/infiniband").glob("*/device"), key=lambda link: _natural(link.parent.name))
    adapters = tuple(_device(link.parent.name, link) for link in links)
    return NodeTopology(homes, siblings, gpus, adapters)


def _natural(name: str) -> tuple[str, int]:
    word = name.rstrip("0123456789")
    return word, int(name[len(word) :] or 0)


def _device(name: str, link: Path) -> PciDevice:
    number = _text(link / "numa_node")
    node = int(number) if number.isdecimal() else None
    place = link.resolve()
    # /sys/devices/pci0000:15/0000:15:01.0/…: the root complex first.
    path = tuple(part for part in place.parts if ":" in part)
    return PciDevice(name, node, path)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def parsed_cores(text: str) -> tuple[int, ...]:
    """Return the cores of a list in the kernel's form, such as 0-55,112-167; none where it is not one."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last.isdecimal() or not last):
            cores.extend(range(int(first), int(last or first) + 1))
    return tuple(sorted(set(cores)))


def as_list(cores: Collection[int]) -> str:
    """Return cores in the kernel's form."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and spans[-1][1] == core - 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def visible_gpus(visible_devices: str | None) -> tuple[str, ...]:
    """Return the PCI addresses of the GPUs that a process here sees, in CUDA's order; none where nvidia-smi
    is not there or does not answer. `visible_devices` is CUDA_VISIBLE_DEVICES.

    CUDA orders unlike GPUs by their speed unless CUDA_DEVICE_ORDER says PCI_BUS_ID; alike ones stand in the
    order of their addresses, as all do for nvidia-smi.
    """
    words = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    quiet = subprocess.DEVNULL
    try:
        with tempfile.TemporaryFile("w+") as output:
            asked = subprocess.Popen(words, stdin=quiet, stdout=output, stderr=quiet)
            try:
                code = asked.wait(_NVIDIA_SMI_S)
            except subprocess.TimeoutExpired:
                # One that hangs in the kernel does not die of it, and is not waited for.
                asked.kill()
                return ()
            output.seek(0)
            return addresses_in(output.read(), visible_devices) if code == 0 else ()
    except OSError:
        return ()


def addresses_in(answer: str, visible_devices: str | None) -> tuple[str, ...]:
    """Return the PCI addresses in nvidia-smi's answer, of the GPUs that CUDA_VISIBLE_DEVICES leaves; none
    where it names what the answer does not hold, such as slices of a GPU (MIG).
    """
    rows = [[field.strip() for field in line.split(",")] for line in answer.splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[0].isdecimal()]
    # nvidia-smi writes eight digits of the domain, sysfs four.
    by_index = {row[0]: row[2].lower()[-12:] for row in rows}
    if visible_devices is None:
        return tuple(by_index.values())
    addresses = []
    for entry in (part.strip() for part in visible_devices.split(",")):
        named = [row[0] for row in rows if entry.startswith("GPU-") and row[1].startswith(entry)]
        index = named[0] if len(named) == 1 else entry
        if index not in by_index:
            return ()
        addresses.append(by_index[index])
    return tuple(addresses)
