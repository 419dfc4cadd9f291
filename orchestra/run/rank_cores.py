"""The cores that a rank runs on: the node agent chooses them for all ranks, and each takes its own.

Standard library only, and imported before torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

_VARIABLE = "ORCHESTRA_CORES"


def cores_environment(cores: Sequence[Sequence[int]]) -> dict[str, str]:
    """Return what is added to the environment of a node's ranks; `cores` of each by its local rank."""
    return {_VARIABLE: json.dumps(cores)} if cores else {}


def take_own_cores() -> None:
    """Keep this process to the cores that were chosen for it, if any. *Any rank*, before its threads start.

    Linux takes memory from the NUMA node of the core that touches it first: it is near these cores from here
    on.
    """
    if _VARIABLE not in os.environ:
        return
    cores = json.loads(os.environ[_VARIABLE])[int(os.environ.get("LOCAL_RANK", "0"))]
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        # The job may have lost cores since. Slower, but no reason not to train.
        sys.stderr.write(f"warning: this rank is not bound to its cores {cores}: {error.strerror}\n")
