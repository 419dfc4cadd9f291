"""Where one node of a job stands: the address it is met at, and what follows for torchrun and gloo.

It starts nothing and opens no connection.
"""

from __future__ import annotations

import dataclasses

from conf.schema import NetworkConfig
from launchers.addresses import address_towards, interface_of, reachable_address
from launchers.errors import LauncherError
from launchers.slurm.task import JobTask
from launchers.spec import LaunchSpec, Place
from orchestra.errors import LaunchError

_LOOPBACK = "127.0.0.1"


def own_address(network: NetworkConfig, task: JobTask) -> str:
    """Return the address at which this node meets the others. Raises LaunchError where none is known."""
    if task.num_nodes == 1:
        return _LOOPBACK
    try:
        return reachable_address(network.interface, task.host, task.launch_address)
    except LauncherError as error:
        raise LaunchError(f"{error} (cluster.network.interface)") from error


def placed(spec: LaunchSpec, node: int, address: str, port: int, meeting_id: str) -> tuple[LaunchSpec, Place]:
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
    return spec, Place(node, address, port, local_address=local, meeting_id=meeting_id)
