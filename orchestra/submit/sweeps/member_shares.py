"""How members of a sweep that train at the same time share a machine: cores, and on GPUs devices.

Used on this machine (`cluster.members_at_once`) and on the nodes of a cluster (`cluster.members_per_node`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conf.schema import Config, Device
from orchestra.run.control.member_places import MEMBERS_VARIABLE


@dataclass(frozen=True)
class MemberShare:
    """What one of the members that train at the same time has of the machine."""

    cores: frozenset[int]
    # Values of CUDA_VISIBLE_DEVICES; None: all.
    devices: tuple[str, ...] | None
    # How many members have each of the devices.
    on_device: int = 1

    @property
    def environment(self) -> dict[str, str]:
        """What the member is started with beside the variables of whoever starts it."""
        if self.devices is None:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices), MEMBERS_VARIABLE: str(self.on_device)}


def shares(configs: Sequence[Config], number: int) -> list[MemberShare]:
    """Cut this machine into so many parts; with one everything is its. Where there are too few devices,
    members share one.
    """
    cores = sorted(os.sched_getaffinity(0))
    if number <= 1:
        return [MemberShare(frozenset(cores), None)]
    share = max(1, len(cores) // number)
    parts = [
        frozenset(cores[(place * share + k) % len(cores)] for k in range(share)) for place in range(number)
    ]
    on_gpu = [config.cluster for config in configs if config.cluster.device is Device.cuda]
    if not on_gpu or any(cluster.share_devices for cluster in on_gpu):
        return [MemberShare(part, None) for part in parts]
    each = max(int(cluster.gpus_per_node) for cluster in on_gpu)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(device) for device in range(number * each)] if given is None else given.split(",")
    on_device = -(-number * each // len(names))
    return [
        MemberShare(part, tuple(names[(place * each + rank) % len(names)] for rank in range(each)), on_device)
        for place, part in enumerate(parts)
    ]


@contextlib.contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Let what is started meanwhile run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
