"""Which process is kept warm on a node: one that has imported what every rank of a run imports first."""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import Config
from launchers.warm.host import WarmHost
from launchers.warm.owner import Owner
from orchestra.rundir import RunDir
from orchestra.submit.environment import worker_environment

# The last two are imported by torch itself when an optimizer and a mesh are made: a second per rank.
_WORKER_MODULES = ("orchestra.train.worker", "torch._dynamo", "torch.distributed.tensor")


def warm_host(
    config: Config, run: RunDir, search_path: Sequence[str] = (), owner: Owner | None = None
) -> WarmHost | None:
    """Return what starts this node's ranks without importing torch again; None where it is not wanted.

    Without an `owner` the process is this one's own, and ends with it.
    """
    if not config.recovery.warm_start:
        return None
    ranks = int(config.cluster.gpus_per_node)
    environment = worker_environment(config, ranks, search_path=search_path)
    return WarmHost(_WORKER_MODULES, environment, run.logs / "warm.log", owner)
