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
from orchestra.submit.meeting import Meeting

_LOOPBACK = "127.0.0.1"


def own_address(network: NetworkConfig, task: JobTask) -> str:
    """Return the address at which this node meets the others. Raises LaunchError where none is known."""
    if task.num_nodes == 1:
        return _LOOPBACK
    try:
        return reachable_address(network.interface, task.host, task.launch_address)
    except LauncherError as error:
        raise LaunchError(f"{error} (cluster.network.interface)") from error


def placed(spec: LaunchSpec, task: JobTask, meeting: Meeting) -> tuple[LaunchSpec, Place]:
    """Return this node's place in an attempt, and the spec with the interface that leads there."""
    local = _LOOPBACK if task.num_nodes == 1 else address_towards(meeting.address)
    interface = None if local is None else interface_of(local)
    if interface is not None and "GLOO_SOCKET_IFNAME" not in spec.environment:
        # gloo takes what this host's name means, which may be an address that nobody else reaches.
        spec = dataclasses.replace(spec, environment={**spec.environment, "GLOO_SOCKET_IFNAME": interface})
    place = Place(
        task.node,
        meeting.address,
        meeting.port,
        local_address=local,
        meeting_id=f"{task.job}.{task.restart}-{meeting.attempt}",
    )
    return spec, place
