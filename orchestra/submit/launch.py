"""From a run directory to the specification of one attempt: a pure function. It starts and writes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import Config
from launchers.spec import LaunchSpec
from orchestra.rundir import RunDir
from orchestra.submit.environment import worker_environment

WORKER_MODULE = "orchestra.train"


def launch_spec(config: Config, run: RunDir, attempt: int, search_path: Sequence[str] = ()) -> LaunchSpec:
    """Return what starts `attempt` of `run`: the same worker module on every rank.

    `config` is resolved: `cluster.gpus_per_node` is a number. `search_path` follows the packages' own folder
    in PYTHONPATH.
    """
    ranks_per_node = int(config.cluster.gpus_per_node)
    return LaunchSpec(
        module=WORKER_MODULE,
        arguments=(str(run.path), "--attempt", str(attempt)),
        environment=worker_environment(config, ranks_per_node, search_path=search_path),
        ranks_per_node=ranks_per_node,
        node_logs=tuple(run.node_log(attempt, node) for node in range(config.cluster.nodes)),
    )
