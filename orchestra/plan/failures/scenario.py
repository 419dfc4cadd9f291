"""What a simulated run is: its size, its times, its failures, and what there is to go on with. Seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestra.plan.failures.causes import LLAMA3_MIX, Cause
from orchestra.save_interval import LLAMA3_MTBF_DEVICE_HOURS, mttf_s

DAY_S = 86_400.0


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
    # Llama 3's racks: two nodes behind a switch (arXiv:2407.21783, section 3.3.1).
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
