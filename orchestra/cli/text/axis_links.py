"""Which links each axis of a layout uses, a line each: for `plan` and for `run --dry-run`."""

from __future__ import annotations

from conf.schema import ClusterConfig
from orchestra.cli.text import figures
from orchestra.sizes import hardware
from orchestra.sizes.topology import Layout, axis_links

_GB = 1e9


def lines(
    mesh: Layout, ranks_per_node: int, inside_bytes_per_s: float | None, between_bytes_per_s: float | None
) -> list[str]:
    """Return a line for each axis of more than one rank. Rates are of one device and direction; None: not
    known.
    """
    found = []
    for link in axis_links(mesh, ranks_per_node):
        if link.num_nodes == 1:
            words, rate = "inside a node", inside_bytes_per_s
        else:
            words, rate = f"across {figures.number_of(link.num_nodes, 'node')}", between_bytes_per_s
            if link.num_nodes < link.degree:
                words += ", several ranks in each"
        rate_words = "" if rate is None else f", {rate / _GB:.3g} GB/s a device"
        found.append(f"{link.axis} {link.degree}: {words}{rate_words}")
    return [f"{'' if number else 'links':<8}{text}" for number, text in enumerate(found)]


def of_cluster(mesh: Layout, cluster: ClusterConfig) -> list[str]:
    """Return the lines of a configuration: by what was measured or given, or by the device's data sheet."""
    inside = cluster.network.intra_node_bytes_per_s or hardware.row(cluster.hardware).link_bytes_per_s
    return lines(mesh, int(cluster.gpus_per_node), inside, cluster.network.inter_node_bytes_per_s)
