"""How many jobs a cluster takes at once: the size of an array, and a refusal for the sake of a limit.

It asks the controller once and decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from launchers.slurm.settings import settings

# What sbatch says when a user, an account, a QOS or the controller has as many jobs as it may have. The job
# itself is right: it is accepted once others have ended.
_FULL = re.compile(
    r"submit ?limit|submit ?job ?limit|max ?submit|violates accounting/qos policy"
    r"|job queue full|temporarily unable to accept|resource temporarily unavailable|maxjobcount",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Limits:
    """What one job array may hold: its tasks are numbered from 0 to `array_size` - 1. 0: no arrays at all."""

    array_size: int


# Slurm's own, for a controller that does not say.
DEFAULT = Limits(array_size=1001)


def limits() -> Limits:
    """Return the cluster's limits. Raises SlurmMissing, SlurmRefused and SlurmSilent."""
    return parsed(settings())


def parsed(config: Mapping[str, str]) -> Limits:
    """Return the limits in what `scontrol show config` printed, by name."""
    size = config.get("MaxArraySize", "")
    return Limits(int(size)) if size.isdecimal() else DEFAULT


def is_full(refusal: str) -> bool:
    """Whether Slurm refused a job only because there are too many already."""
    return _FULL.search(refusal) is not None
