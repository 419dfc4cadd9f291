"""The environment that Slurm's commands get. It reads and changes none of this process's.

sbatch takes options from variables and hands the whole environment on to the job. Typed inside another
allocation it would take over that one's nodes, tasks and limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_OF_AN_ALLOCATION = re.compile(r"(SLURM|SLURMD|SBATCH|SALLOC|SRUN|PMIX|PMI|PMI2)_")
# Which cluster is meant, not what was allocated on it.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"})
# What commands print and which jobs they show or end: a filter would make a job look gone.
_OF_A_COMMAND = re.compile(r"(SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL|SPRIO|SSTAT|SACCTMGR)_")


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the caller's own allocation and without options in variables."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (_OF_AN_ALLOCATION.match(name) or _OF_A_COMMAND.match(name))
    }
