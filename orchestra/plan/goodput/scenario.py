"""What a simulated run is: its size, its times, its failures, and what there is to go on with. Seconds.

Every device fails at a constant rate, whatever its age and its neighbours: intervals are exponential. A
switch takes its nodes with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from orchestra.sizes.save_interval import HOUR_S, LLAMA3_MTBF_DEVICE_HOURS, mttf_s

DAY_S = 86_400.0


class Cause(Enum):
    """What fails. Of the node there remains, after a crash or a hang: all; else nothing until its repair."""

    # A process dies; the node can go on.
    crash = "crash"
    hang = "hang"
    # A device breaks: its rank is killed, and killed again wherever that node is used before its repair.
    device = "device"
    node = "node"
    # All nodes at one switch.
    switch = "switch"


# Llama 3 405B, 54 days on 16,384 H100 (arXiv:2407.21783, table 5), its causes sorted into these: software bug
# 54 and dependency 2 are crashes, watchdog time-outs 7 hangs; GPU 148, HBM3 72, SRAM 19, system processor 17,
# thermal 6 and silent corruption 6 devices; network 35 switches; maintenance 32 and host parts 21 nodes.
LLAMA3_MIX: Mapping[Cause, float] = {
    Cause.crash: 56 / 419,
    Cause.hang: 7 / 419,
    Cause.device: 268 / 419,
    Cause.switch: 35 / 419,
    Cause.node: 53 / 419,
}


@dataclass(frozen=True)
class Failure:
    """One failure: when (seconds from the run's beginning), of the node at which place, and what."""

    time: float
    place: int
    cause: Cause


def failures(
    num_nodes: int, devices_per_node: int, mtbf_device_hours: float, mix: Mapping[Cause, float], seed: int
) -> Iterator[Failure]:
    """Yield the failures of `num_nodes` nodes by rising time, without end; the same for the same arguments.

    Whoever uses fewer nodes at a time skips those beyond. Nothing is drawn per device: the sum of independent
    exponential processes is one, of the summed rate.
    """
    chance = random.Random(f"failures {seed}")
    mean_s = mtbf_device_hours * HOUR_S / (num_nodes * devices_per_node)
    causes, weights = list(mix), list(mix.values())
    time = 0.0
    while True:
        time += chance.expovariate(1 / mean_s)
        [cause] = chance.choices(causes, weights)
        yield Failure(time, chance.randrange(num_nodes), cause)


@dataclass(frozen=True)
class Times:
    """What a run's own moves take, measured or assumed."""

    step_s: float
    # The training waits so long for a save; then it is written, so long, beside the training.
    stall_s: float
    write_s: float = 0.0
    # From the decision to the first step, without the restore: processes, connections, compilation.
    restart_s: float = 120.0
    restore_s: float = 60.0
    # The same from copies in memory, and what the training waits for each copy.
    restore_from_memory_s: float = 5.0
    copy_s: float = 0.0
    # From a failure to its being noticed, by what tells: an exit, a silent agent, a silent rank.
    notice_exit_s: float = 1.0
    notice_node_s: float = 10.0
    notice_hang_s: float = 60.0

    def notice_s(self, cause: Cause) -> float:
        """Return how long a failure goes unnoticed."""
        by_silence = {Cause.hang: self.notice_hang_s, Cause.node: self.notice_node_s}
        return {**by_silence, Cause.switch: self.notice_node_s}.get(cause, self.notice_exit_s)


@dataclass(frozen=True)
class Repairs:
    """How long a broken node is away: two exponential distributions, one of them for what takes days."""

    usual_s: float = 4 * 3600.0
    slow_share: float = 0.1
    slow_s: float = 3 * DAY_S


@dataclass(frozen=True)
class Scenario:
    """One run under failures."""

    num_nodes: int
    times: Times
    every_steps: int
    devices_per_node: int = 8
    mtbf_device_hours: float = LLAMA3_MTBF_DEVICE_HOURS
    mix: Mapping[Cause, float] = field(default_factory=lambda: LLAMA3_MIX)
    # Llama 3's racks: two nodes at a switch (arXiv:2407.21783, section 3.3.1).
    nodes_per_switch: int = 2
    memory_copy_every_steps: int | None = None
    # Nodes that wait inside the allocation; the fewest that the run may shrink to.
    spare_nodes: int = 0
    min_nodes: int | None = None
    can_requeue: bool = True
    # Mean wait of a job for its start, exponential.
    queue_wait_s: float = 600.0
    # Nodes that the scheduler has for it in all; None: there are always others.
    cluster_nodes: int | None = None
    repairs: Repairs = field(default_factory=Repairs)
    preemptions_per_day: float = 0.0
    time_limit_s: float | None = None
    # Whether broken devices are found by the look at each node before an attempt (recovery.preflight).
    preflight: bool = True
    # When a person resumes a run that was given up; None: nobody does.
    attended_after_s: float | None = None
    horizon_s: float = 54 * DAY_S

    @property
    def num_devices(self) -> int:
        """Devices that train when all nodes do."""
        return self.num_nodes * self.devices_per_node

    @property
    def mttf_s(self) -> float:
        """Mean time to failure of the whole run."""
        return mttf_s(self.num_devices, self.mtbf_device_hours)

    @property
    def saves_every_steps(self) -> int:
        """Steps between saves that are made: one that is due while another is written is left out."""
        save_s = self.every_steps * self.times.step_s + self.times.stall_s
        return self.every_steps * max(1, math.ceil(self.times.write_s / save_s))
