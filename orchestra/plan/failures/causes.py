"""What fails and how often: causes and their shares, rates with sources, and one run's failures, drawn.

Every device fails at a constant rate, whatever its age and its neighbours: intervals are exponential. A
switch takes its nodes with it. It knows no policy and no training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from orchestra.save_interval import HOUR_S


class Cause(Enum):
    """What fails. Of the node there remains, after a crash or a hang: all; else nothing until its repair."""

    # A process dies; the node can go on.
    crash = "crash"
    hang = "hang"
    # A device breaks: its rank is killed, and killed again wherever that node is used before its repair.
    device = "device"
    node = "node"
    # All nodes behind one switch.
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
LLAMA3_DEVICES = 16_384
LLAMA3_FAILURES = 419
LLAMA3_DAYS = 54

# Kokolis et al. (arXiv:2410.21680, section III), A100 in nodes of eight: infrastructure failures per
# node-day of large jobs on their cluster RSC-1. From it they project 1.8 h at 16,384 and 0.23 h at 131,072
# devices. Their 7.9 h at 1,024 is no projection: what jobs of that size saw, all failures counted. By the
# projection it would be 28.8 h.
RSC1_FAILURES_PER_NODE_DAY = 6.50e-3
RSC1_MEASURED_MTTF_H = (1_024, 7.9)
DEVICES_PER_NODE = 8


def device_hours(failures_per_node_day: float, devices_per_node: int = DEVICES_PER_NODE) -> float:
    """Return the mean time between failures of one device, in hours, from a rate per node and day."""
    return devices_per_node * 24 / failures_per_node_day


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
