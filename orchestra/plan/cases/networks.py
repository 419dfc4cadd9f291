"""How fast collectives are: bus bandwidth by the number of nodes, and the latency of a ring's steps.

Bus bandwidth is nccl-tests' figure: bytes · (n − 1)/n ÷ time for all-gather and reduce-scatter, twice that
for all-reduce. It knows no model: callers say how many bytes and which ranks.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

_ADAPTERS_PER_NODE = 8

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Group:
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

    def all_reduce_s(self, num_bytes: float, group: Group, link_bytes_per_s: float) -> float:
        """Return the seconds to sum `num_bytes` over a group."""
        inside = self.inside_all_reduce * link_bytes_per_s
        rate = self._rate(inside, self.between_all_reduce, group)
        share = (group.num_ranks - 1) / group.num_ranks
        return 2 * num_bytes * share / rate + 2 * self._latency(group)

    def all_gather_s(self, num_bytes: float, group: Group, link_bytes_per_s: float) -> float:
        """Return the seconds to gather, or to reduce and scatter, `num_bytes` (the size of the whole)."""
        inside = self.inside_all_gather * link_bytes_per_s
        rate = self._rate(inside, self.between_all_gather, group)
        return num_bytes * (group.num_ranks - 1) / group.num_ranks / rate + self._latency(group)

    def all_to_all_s(self, num_bytes: float, group: Group, link_bytes_per_s: float) -> float:
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

    def _rate(self, inside: float, between: Points, group: Group) -> float:
        if group.num_nodes <= 1:
            return inside
        rate = min(inside, _interpolated(between, group.num_nodes))
        if self.adapter_bytes_per_s is not None:
            rate = min(rate, self.adapter_bytes_per_s * group.per_node)
        return rate

    def _latency(self, group: Group) -> float:
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
    between two nodes and half of that among 1,024; a collective takes 20 µs inside a node, and 10 µs for
    each level of a tree over the ranks, up and down, between nodes.
    """
    node = 0.85 * adapter_bytes_per_s * _ADAPTERS_PER_NODE
    points = tuple((nodes, node * (0.5 if nodes > 2 else 1.0)) for nodes in _NODES)
    return Network(
        name="data sheet",
        inside_all_reduce=0.78,
        inside_all_gather=250 / 450,
        between_all_reduce=points,
        between_all_gather=points,
        adapter_bytes_per_s=0.85 * adapter_bytes_per_s,
        inside_latency_s=20e-6,
        between_latency_s=10e-6,
        steps_by_rank=False,
        source=f"data sheet: {adapter_bytes_per_s / 1e9:.0f} GB/s per device between nodes",
    )


# One 400 Gbit/s adapter per device (DGX H100, HGX B200) and one of 200 Gbit/s (DGX A100).
INFINIBAND_400 = data_sheet_network(50e9)
INFINIBAND_200 = data_sheet_network(25e9)
