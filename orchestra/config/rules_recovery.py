"""Rules about failures: what a run may shrink to, who stands by, how long silence lasts, and going back.

The bounds of single numbers stand in `rules_values`, planned failures in `rules_faults`.
"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import Config, Device, LauncherName, OnNonfinite, OnSpike
from orchestra.config.situation import Situation, world_size
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


def rule_roll_back(config: Config, _: Situation) -> Iterator[str]:
    """Going back takes somewhere to go back to, and another start of the ranks."""
    asked = [
        key
        for key, is_asked in (
            ("recovery.loss_spike.action", config.recovery.loss_spike.action is OnSpike.roll_back),
            ("train.on_nonfinite", config.train.on_nonfinite is OnNonfinite.roll_back),
        )
        if is_asked
    ]
    if not asked:
        return
    key = asked[0]
    if config.checkpoint.every_steps is None:
        yield (
            f"{key}=roll_back: with checkpoint.every_steps=null there is nothing to go back to; give "
            f"checkpoint.every_steps, or use {key}=skip"
        )
    if config.recovery.max_restarts == 0:
        yield (
            f"{key}=roll_back starts the ranks again, and recovery.max_restarts=0 forbids that; use 1 or "
            f"more, or {key}=stop"
        )


def rule_replay(config: Config, _: Situation) -> Iterator[str]:
    """A step is computed again by a rank with the same part of the model, which has to be there."""
    every, tolerance = config.recovery.replay_every_steps, config.recovery.replay_tolerance
    if every is None:
        if tolerance is not None:
            yield (
                f"recovery.replay_tolerance={tolerance:g} means nothing without recovery.replay_every_steps; "
                "give that too, or leave it out"
            )
        return
    if config.parallelism.zero == 3:
        yield (
            f"recovery.replay_every_steps={every}: with parallelism.zero=3 no rank holds the parameters to "
            "compute another one's step; use parallelism.zero=2 or less, or null"
        )
    if config.recovery.max_restarts == 0:
        yield (
            f"recovery.replay_every_steps={every} starts the ranks again once one differs, and "
            "recovery.max_restarts=0 forbids that; use 1 or more"
        )
    is_gpu = config.cluster.device is Device.cuda
    if is_gpu and tolerance is None and not config.train.deterministic:
        yield (
            f"recovery.replay_every_steps={every} compares bit for bit, and GPUs may compute differently "
            "each time; use train.deterministic=true, or give recovery.replay_tolerance, e.g. 0.01"
        )
    ranks = world_size(config)
    if ranks is not None and _data_parallel(config, ranks) == 1:
        yield (
            f"recovery.replay_every_steps={every}: the run has one data-parallel rank, and nobody else to "
            "compute its step; use more ranks, or null"
        )


def _data_parallel(config: Config, num_ranks: int) -> int | None:
    """Return the data-parallel degree; None where there is no such layout, which another rule says."""
    try:
        return layout(config.parallelism, num_ranks).dp
    except ConfigError:
        return None


RULES = (rule_min_nodes, rule_spare_nodes, rule_agent_timeout, rule_roll_back, rule_replay)
