"""The cluster's network: a bridge on the controller, a link from it to every node and one to the machine.

Only the machine's own end of one link lies outside the hosts. Everything else goes with the hosts, so
nothing of the machine's other networks is changed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Network

from slurm.cluster.commands import run
from slurm.cluster.errors import ClusterError
from slurm.cluster.hosts import NAMESPACES
from slurm.cluster.layout import CONTROLLER, NUM_SLOTS, ClusterLayout

BRIDGE = "cluster"


def free_slot(layout: ClusterLayout) -> ClusterLayout:
    """Return the layout with the first slot whose link, namespaces and subnet nobody on this machine uses.

    Raises:
        ClusterError: there is none.
    """
    routes = [IPv4Network(route["dst"], strict=False) for route in _routes() if route["dst"][0].isdigit()]
    links = {link["ifname"] for link in json.loads(run(["ip", "-json", "link"]))}
    for slot in range(NUM_SLOTS):
        candidate = dataclasses.replace(layout, slot=slot)
        is_taken = candidate.login_link in links
        is_taken |= any((NAMESPACES / candidate.namespace(host)).exists() for host in candidate.hosts)
        is_taken |= any(candidate.subnet.overlaps(route) for route in routes)
        if not is_taken:
            return candidate
    raise ClusterError(
        f"{NUM_SLOTS} clusters are up here, or their names or subnets are taken; "
        "see `ip netns`, `ip link` and `ip route`"
    )


def _routes() -> list[dict[str, str]]:
    routes: list[dict[str, str]] = json.loads(
        run(["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]"
    )
    return [route for route in routes if route.get("dst", "default") != "default"]


def connect_controller(layout: ClusterLayout, pid: int) -> None:
    """Make the bridge on the controller, whose first process is `pid`, and link the machine itself to it."""
    remove_login_link(layout)
    _ip_on(
        pid,
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"link set {BRIDGE} up",
        f"address add {layout.address(CONTROLLER)}/24 dev {BRIDGE}",
    )
    run(["ip", "link", "add", layout.login_link, "type", "veth", "peer", "name", "login", "netns", str(pid)])
    _ip_on(pid, f"link set login master {BRIDGE} up")
    run(["ip", "address", "add", f"{layout.login_address}/24", "dev", layout.login_link])
    run(["ip", "link", "set", layout.login_link, "up"])


def connect_nodes(layout: ClusterLayout, controller_pid: int, node_pids: Mapping[str, int]) -> None:
    """Link nodes, given by their first processes, to the bridge, each with its address."""
    for node, pid in node_pids.items():
        # A dead node's connections keep its end of the old link for minutes.
        with suppress(ClusterError):
            _ip_on(controller_pid, f"link delete {node}")
        # The same for a node in every life, so that nobody's table of neighbours is out of date.
        hardware = f"02:dc:{layout.slot:02x}:00:00:{layout.nodes.index(node) + 1:02x}"
        _ip_on(
            controller_pid,
            f"link add {node} type veth peer name eth0 address {hardware} netns {pid}",
            f"link set {node} master {BRIDGE} up",
        )
        address = f"address add {layout.address(node)}/24 dev eth0"
        _ip_on(pid, "link set lo up", address, "link set eth0 up")


def cut_node(controller_pid: int, node: str) -> None:
    """Take a node's link down: its peers receive nothing more, not even the end of a connection."""
    with suppress(ClusterError):  # The link is gone where the node is.
        _ip_on(controller_pid, f"link set {node} down")


def remove_login_link(layout: ClusterLayout) -> None:
    """Remove the machine's own link. Idempotent."""
    with suppress(ClusterError):
        run(["ip", "link", "delete", layout.login_link])


def _ip_on(pid: int, *commands: str) -> None:
    given = "".join(f"{command}\n" for command in commands)
    run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"], given=given)
