"""Rules about jobs on a Slurm cluster: what the configuration alone can break, and what the cluster lacks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from conf.schema import Config, LauncherName
from launchers.slurm.batch_script import option_problems
from orchestra.config.machine import Situation
from orchestra.sizes.units import slurm_time_s

# Slurm's warning was seen up to 28 s off its time, and so was the time limit itself.
SLACK_S = 30
# Keys that say what an option of sbatch says.
_SAID_BY = {
    "partition": "cluster.partition",
    "time": "cluster.time_limit",
    "gpus_per_node": "cluster.gpus_per_node",
    "nodes": "cluster.nodes",
    "job_name": "run.name",
    "requeue": "cluster.requeue",
    "no_requeue": "cluster.requeue",
    "signal": "recovery.stop_timeout_s",
}


def warning_lead_s(config: Config) -> int:
    """Return how long before its time limit a job is warned: long enough for the save that follows."""
    return math.ceil(config.recovery.stop_timeout_s) + SLACK_S


def rule_launcher(config: Config, situation: Situation) -> Iterator[str]:
    is_slurm = config.cluster.launcher is LauncherName.slurm
    if is_slurm and situation.verb == "run":
        yield (
            "cluster.launcher=slurm: `orchestra run` trains on this machine; use `orchestra submit` for a "
            "job on the cluster, or cluster=local"
        )
    elif not is_slurm and situation.verb == "submit":
        yield (
            "cluster.launcher=local is this machine alone; use cluster=slurm to submit a job, or "
            "`orchestra run` to train here"
        )


def rule_time_for_warning(config: Config, _: Situation) -> Iterator[str]:
    cluster = config.cluster
    if cluster.launcher is not LauncherName.slurm or cluster.time_limit is None:
        return
    try:
        limit_s = slurm_time_s(cluster.time_limit)
    except ValueError:
        return
    stop_s, lead_s = config.recovery.stop_timeout_s, warning_lead_s(config)
    least_s = lead_s + math.ceil(stop_s)
    if limit_s is not None and limit_s < least_s:
        yield (
            f"cluster.time_limit={cluster.time_limit} leaves no time to train: the job is warned {lead_s} s "
            f"before its end (recovery.stop_timeout_s={stop_s:g} for a save, {SLACK_S} s because Slurm is "
            f"not exact), and a save takes up to that; use {math.ceil(least_s / 60)} minutes or more, or "
            f"lower recovery.stop_timeout_s"
        )


def rule_slurm_extra(config: Config, _: Situation) -> Iterator[str]:
    extra = config.cluster.slurm_extra
    named = {name: _SAID_BY.get(name.removeprefix("--").replace("-", "_")) for name in extra}
    for name, key in named.items():
        if key is not None:
            yield f"cluster.slurm_extra.{name}: {key} says that; set it there"
    for problem in option_problems({name: extra[name] for name, key in named.items() if key is None}):
        yield f"cluster.slurm_extra.{problem}; leave it out"


def rule_array_throttle(config: Config, _: Situation) -> Iterator[str]:
    throttle = config.cluster.array_throttle
    if throttle is not None and throttle < 1:
        yield f"cluster.array_throttle={throttle} lets no job of a sweep run; use 1 or more, or leave it out"


def rule_cluster(config: Config, situation: Situation) -> Iterator[str]:
    """Ask the cluster, where the command has one."""
    if config.cluster.launcher is LauncherName.slurm and situation.cluster is not None:
        yield from situation.cluster.problems(config)


RULES = (rule_array_throttle, rule_launcher, rule_time_for_warning, rule_slurm_extra, rule_cluster)
