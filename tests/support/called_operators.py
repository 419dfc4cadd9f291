"""Counts calls of torch's operators, those of compiled code too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch


def num_called(name: str, work: Callable[[], None]) -> int:
    """Return how often `work` calls the operator `name`, such as `aten::mm`."""
    return called(work)[name]


def called(work: Callable[[], None]) -> Counter[str]:
    """Return how often `work` calls each operator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
        work()
    return Counter(event.name for event in traced.events() or [])
