"""Measures what the planner needs to know of this machine's CPU, and keeps it in the user's cache folder.

`python -m orchestra.train.cpu_rates PRECISION` takes some seconds: the fastest product of one thread, how
fast one thread copies memory, and what of both a core keeps while all compute. One thread first, because a
rank's threads share cores and memory with other ranks. It trains nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping

import torch

from conf.schema import PrecisionConfig, PrecisionName
from orchestra.precision.dtypes import policy
from orchestra.train.metrics import measured_cpu_peak_flops

# Larger than any cache, and long enough for a clock.
_COPIED_BYTES = 128 << 20
_BUDGET_S = 0.5


def cpu_rates(precision: PrecisionName) -> Mapping[str, float]:
    """Return FLOP/s of products and bytes/s of memory traffic of one thread, and the shares of them that a
    core keeps while all compute.
    """
    dtype, cores = policy(PrecisionConfig(precision)).parameter, len(os.sched_getaffinity(0))
    alone, together = (_rates(dtype, num_threads) for num_threads in (1, cores))
    return {
        "peak_flops": alone[0],
        "memory_bytes_per_s": alone[1],
        "busy_share": min(1.0, together[0] / alone[0] / cores),
        "busy_memory_share": min(1.0, together[1] / alone[1] / cores),
    }


def _rates(dtype: torch.dtype, num_threads: int) -> tuple[float, float]:
    torch.set_num_threads(num_threads)
    return measured_cpu_peak_flops(dtype, num_threads), _memory_bytes_per_s()


def _memory_bytes_per_s() -> float:
    """Return bytes read and written per second by the fastest copy of a large tensor."""
    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    fastest, deadline = float("inf"), time.perf_counter() + _BUDGET_S
    while (began := time.perf_counter()) < deadline:
        target.copy_(source)
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * _COPIED_BYTES / fastest


def main() -> None:
    """Print the rates as JSON."""
    sys.stdout.write(json.dumps(cpu_rates(PrecisionName[sys.argv[1]])) + "\n")


if __name__ == "__main__":
    main()
