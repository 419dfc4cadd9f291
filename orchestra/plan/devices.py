"""The figures of an accelerator that predictions need (`orchestra.sizes.hardware`), and how fast collectives
are: bus bandwidth by the number of nodes, and the latency of a ring's steps. None is guessed.

Bus bandwidth is nccl-tests' figure: bytes · (n − 1)/n ÷ time for all-gather and reduce-scatter, twice that
for all-reduce. Callers say how many bytes and which ranks.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from conf.schema import PrecisionName
from orchestra.errors import ConfigError
from orchestra.sizes import hardware
from orchestra.sizes.memory.rank_memory import USABLE_SHARE
from orchestra.sizes.units import GIB


@dataclass(frozen=True)
class PeakShares:
    """Shares of the peak that kernels reach: of the data type's in large matrix products, of the bf16 one in
    causal flash attention, forward and backward together; and where these constants come from.
    """

    products: float
    attention: float
    source: str
    # How much faster the vendor's own attention is (cuDNN's, from Hopper on).
    vendor_attention: float = 1.0


# FlashAttention-2 was written for Ampere (arXiv:2307.08691) and reaches less of a later device's peak
# (arXiv:2407.08608); attention's shares are set so that rows of 8,192 tokens and more meet torchtitan's and
# llm-foundry's tables. The vendor's on an H100: 5.28e13 FLOPs of a traced step of orchestra's took 138 ms
# (8 layers of Llama 3 8B, RESULTS.md, 2026-11-26); an H200's was timed by itself. By the beginning of a row's
# name.
_REACHED = {
    "a100": PeakShares(0.85, 0.50, "set on llm-foundry's published A100 runs"),
    "h100": PeakShares(0.757, 0.28, "fitted on the Ultra-Scale Playbook's H100 runs", 1.38),
    "a800": PeakShares(0.85, 0.50, "the A100's, whose processor it has"),
    "h800": PeakShares(0.757, 0.28, "the H100's, whose processor it has", 1.38),
    "h200": PeakShares(0.757, 0.28, "the H100's; they meet torchtitan's H200 runs", 1.5),
    "b200": PeakShares(0.66, 0.28, "products: GB200's, whose processor it has; attention: H200's", 1.5),
    "gb200": PeakShares(0.66, 0.25, "set on published GB200 runs (DGX Cloud, Megatron Bridge)", 1.5),
    "gh200": PeakShares(0.757, 0.28, "the H100's, whose processor it has", 1.38),
    "b300": PeakShares(0.66, 0.28, "the B200's, of the same generation", 1.5),
    "gb300": PeakShares(0.66, 0.25, "the GB200's, of the same generation", 1.5),
    # MI250, four modules: per module 73 to 80 % of an A100's rate in llm-foundry, 1.13 times that with
    # FlashAttention-2 (databricks.com/blog/amd-mi250 and /training-llms-scale-amd-mi250-gpus, 2023): 0.55.
    # Megatron-DeepSpeed's runs on LUMI (github.com/spyysalo/lumi-llm-scaling) meet 0.45.
    "mi250": PeakShares(0.50, 0.30, "set between Databricks' MI250 ratios and LUMI's runs"),
    # 620 of 1,307 TFLOP/s in bf16 products, 990 of 2,615 in fp8 (SemiAnalysis, "MI300X vs H100 vs H200
    # Benchmark", December 2024). Attention: assumed to reach as many FLOP/s as on an H100.
    "mi300x": PeakShares(0.47, 0.21, "products measured by SemiAnalysis, attention assumed"),
    "mi325x": PeakShares(0.47, 0.21, "the MI300X's, whose processor it has"),
}


@dataclass(frozen=True)
class Accelerator:
    """One accelerator. Rates per second; the link is one direction of all links inside a node."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    # Achieved in large matrix products, and in causal flash attention (bf16, whatever the products are in).
    product_flops: float
    attention_flops: float
    # How much faster the vendor's own attention is.
    vendor_attention: float = 1.0
    # Streaming multiprocessors or compute units: as many tiles of a product are worked on at a time.
    num_processors: int | None = None
    # Where peak, memory and links come from, and where the shares that are reached.
    data_sheet: str = ""
    reached: str = ""

    @property
    def usable_bytes(self) -> float:
        """The memory that tensors can fill."""
        return USABLE_SHARE * self.memory_bytes


def device(name: str, precision: PrecisionName, memory_gib: float | None = None) -> Accelerator:
    """Return a device by its row in `orchestra.sizes.hardware`. Raises ConfigError, with the names that would
    do, where a figure is missing.
    """
    row = hardware.row(name)
    peak = hardware.peak_flops(name, precision.value)
    memory = row.memory_bytes if memory_gib is None else memory_gib * GIB
    if peak is None or memory is None or row.memory_bytes_per_s is None or row.link_bytes_per_s is None:
        names = [each.name for each in hardware.TABLE]
        known = [each for each in names if hardware.peak_flops(each, precision.value) is not None]
        raise ConfigError(
            f"cluster.hardware={name}: its figures for {precision.value} are not known;"
            f" use {', '.join(known)}"
        )
    reached = _REACHED[next(name for name in _REACHED if row.name.startswith(name))]
    attention = min(peak, row.peak_flops.get("bf16", peak))
    return Accelerator(
        name=row.name,
        peak_flops=peak,
        memory_bytes=memory,
        memory_bytes_per_s=row.memory_bytes_per_s,
        link_bytes_per_s=row.link_bytes_per_s,
        product_flops=peak * reached.products,
        attention_flops=attention * reached.attention,
        vendor_attention=reached.vendor_attention,
        num_processors=row.num_processors,
        data_sheet=row.source,
        reached=reached.source,
    )


_ADAPTERS_PER_NODE = 8

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CollectiveGroup:
    """The ranks of one collective: how many, and over how many nodes they lie."""

    num_ranks: int
    num_nodes: int

    @property
    def per_node(self) -> float:
        """Ranks on each node."""
        return self.num_ranks / self.num_nodes


@dataclass(frozen=True)
class Network:
    """Bus bandwidths in bytes per second. Inside a node they follow the device's links; between nodes they
    are measured points (nodes, bandwidth), met by a power law between and beyond them.
    """

    name: str
    # Shares of the device's link rate that collectives reach inside a node.
    inside_all_reduce: float
    inside_all_gather: float
    between_all_reduce: Points
    between_all_gather: Points
    # What one device's adapter carries, where that and not the whole node is the limit; None: no such limit.
    adapter_bytes_per_s: float | None
    # A collective inside a node, and one step of one that leaves it.
    inside_latency_s: float
    between_latency_s: float
    # Whether that is paid once per rank, as measured on EFA, or per level of a tree.
    steps_by_rank: bool
    source: str

    def all_reduce_s(self, num_bytes: float, group: CollectiveGroup, link_bytes_per_s: float) -> float:
        """Return the seconds to sum `num_bytes` over a group."""
        inside = self.inside_all_reduce * link_bytes_per_s
        rate = self._rate(inside, self.between_all_reduce, group)
        share = (group.num_ranks - 1) / group.num_ranks
        return 2 * num_bytes * share / rate + 2 * self._latency(group)

    def all_gather_s(self, num_bytes: float, group: CollectiveGroup, link_bytes_per_s: float) -> float:
        """Return the seconds to gather, or to reduce and scatter, `num_bytes` (the size of the whole)."""
        inside = self.inside_all_gather * link_bytes_per_s
        rate = self._rate(inside, self.between_all_gather, group)
        return num_bytes * (group.num_ranks - 1) / group.num_ranks / rate + self._latency(group)

    def all_to_all_s(self, num_bytes: float, group: CollectiveGroup, link_bytes_per_s: float) -> float:
        """Return the seconds in which each rank sends every other one its part of `num_bytes`. What leaves a
        node takes the rank's own share of the node's adapters, as its neighbours use theirs.
        """
        inside = num_bytes * (group.per_node - 1) / group.num_ranks
        seconds = inside / (self.inside_all_gather * link_bytes_per_s)
        if group.num_nodes > 1:
            leaving = num_bytes - num_bytes * group.per_node / group.num_ranks
            rate = _interpolated(self.between_all_gather, group.num_nodes) / _ADAPTERS_PER_NODE
            seconds = max(seconds, leaving / min(rate, self.inside_all_gather * link_bytes_per_s))
        return seconds + self._latency(group)

    def _rate(self, inside: float, between: Points, group: CollectiveGroup) -> float:
        if group.num_nodes <= 1:
            return inside
        rate = min(inside, _interpolated(between, group.num_nodes))
        if self.adapter_bytes_per_s is not None:
            rate = min(rate, self.adapter_bytes_per_s * group.per_node)
        return rate

    def _latency(self, group: CollectiveGroup) -> float:
        if group.num_nodes <= 1:
            return self.inside_latency_s
        steps = group.num_ranks - 1 if self.steps_by_rank else 2 * math.log2(group.num_ranks)
        return self.between_latency_s * steps


def _interpolated(points: Points, num_nodes: int) -> float:
    """Straight in the logarithms of both; beyond the ends the outer slope goes on."""
    pairs = list(itertools.pairwise(points))
    (low, below), (high, above) = next((pair for pair in pairs if num_nodes <= pair[1][0]), pairs[-1])
    share = math.log(num_nodes / low) / math.log(high / low)
    return float(below * (above / below) ** share)


# AWS EFA between H100 nodes as the Ultra-Scale Playbook measured it (256 MB messages, mean of all ranks;
# playbook, figure pp_comm_bandwidth). The latency is fitted on the same playbook's runs with tp = 16 and 32.
EFA_H100 = Network(
    name="efa",
    inside_all_reduce=436 / 450,
    inside_all_gather=250 / 450,
    between_all_reduce=(
        *((2, 361.75e9), (4, 160.14e9), (8, 99.56e9)),
        *((16, 84.74e9), (32, 64.93e9), (64, 32.94e9)),
    ),
    between_all_gather=((2, 184.6e9), (4, 117e9), (8, 69e9), (16, 55e9), (32, 28e9), (64, 11.05e9)),
    adapter_bytes_per_s=None,
    inside_latency_s=67e-6,
    between_latency_s=54e-6,
    steps_by_rank=True,
    source="measured: Ultra-Scale Playbook, H100 nodes on EFA",
)

_NODES = (2, 1024)


def data_sheet_network(adapter_bytes_per_s: float) -> Network:
    """Return a fat-tree network from its adapters' rate. Assumed, not measured: rings reach 85 % of it
    between two nodes.
    """
    source = f"data sheet: {adapter_bytes_per_s / 1e9:.0f} GB/s per device between nodes"
    return reached_network(0.85 * adapter_bytes_per_s, source)


def reached_network(bytes_per_s: float, source: str) -> Network:
    """Return a fat-tree network of which each device reaches `bytes_per_s` (bus bandwidth) between two nodes.
    Assumed: half of that among 1,024; a collective takes 20 µs inside a node, and 10 µs for each level of a
    tree over the ranks, up and down, between nodes.
    """
    node = bytes_per_s * _ADAPTERS_PER_NODE
    points = tuple((nodes, node * (0.5 if nodes > 2 else 1.0)) for nodes in _NODES)
    return Network(
        name="fat tree",
        inside_all_reduce=0.78,
        inside_all_gather=250 / 450,
        between_all_reduce=points,
        between_all_gather=points,
        adapter_bytes_per_s=bytes_per_s,
        inside_latency_s=20e-6,
        between_latency_s=10e-6,
        steps_by_rank=False,
        source=source,
    )


# One 400 Gbit/s adapter per device (DGX H100, HGX B200) and one of 200 Gbit/s (DGX A100).
INFINIBAND_400 = data_sheet_network(50e9)
INFINIBAND_200 = data_sheet_network(25e9)
