"""Rules about failures: what a run may shrink to, who stands by, and how long silence lasts.

The bounds of single numbers stand in `rules_values`, planned failures in `rules_faults`.
"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import Config, LauncherName
from orchestra.config.situation import Situation
from orchestra.errors import ConfigError
from orchestra.topology import batch_shape, has_open_micro_batch, layout

# An agent beats about once a second, and a shared file system shows it to others some seconds later.
_SHORTEST_SILENCE_S = 5.0


def rule_min_nodes(config: Config, _: Situation) -> Iterator[str]:
    """A run that may shrink must have a layout on fewer nodes, with the same global batch."""
    nodes, least, ranks = config.cluster.nodes, config.recovery.min_nodes, config.cluster.gpus_per_node
    if least is None or least < 1 or nodes < 1:
        return
    if least > nodes:
        yield f"recovery.min_nodes={least} is above cluster.nodes={nodes}; use at most that"
        return
    if isinstance(ranks, str) or ranks < 1 or _problem(config, nodes * ranks) is not None:
        return
    fewer = range(nodes - 1, least - 1, -1)
    problems = [_problem(config, count * ranks) for count in fewer]
    if problems and None not in problems:
        within = f"{least} to {nodes - 1} nodes" if least < nodes - 1 else f"{least} nodes"
        yield (
            f"recovery.min_nodes={least}: the run cannot go on with {within} of cluster.nodes={nodes}: "
            f"{problems[0]}; or leave out recovery.min_nodes"
        )


def _problem(config: Config, num_ranks: int) -> str | None:
    try:
        mesh = layout(config.parallelism, num_ranks)
        if not has_open_micro_batch(config.train):
            batch_shape(config.train, mesh.dp)
    except ConfigError as error:
        return error.problems[0]
    return None


def rule_spare_nodes(config: Config, _: Situation) -> Iterator[str]:
    spares = config.cluster.spare_nodes
    if spares > 0 and config.cluster.launcher is LauncherName.local:
        yield (
            f"cluster.spare_nodes={spares}: launcher=local is this machine alone; use cluster.spare_nodes=0, "
            f"or cluster=slurm"
        )


def rule_agent_timeout(config: Config, _: Situation) -> Iterator[str]:
    timeout_s = config.recovery.agent_timeout_s
    if 0 < timeout_s < _SHORTEST_SILENCE_S:
        yield (
            f"recovery.agent_timeout_s={timeout_s:g}: agents show once a second that they live, and a shared "
            f"file system may show it late: healthy nodes would count as lost; use "
            f"{_SHORTEST_SILENCE_S:g} or more"
        )


RULES = (rule_min_nodes, rule_spare_nodes, rule_agent_timeout)
