"""`orchestra submit [overrides]`: compose, check, freeze, submit one Slurm job, print its id, exit.

Everything that can be told before the job is tried is told before: by the rules, by what the cluster has, and
by Slurm itself (`sbatch --test-only`). It never waits for the job.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.cli import describe
from orchestra.cli.attempt import add_output_options
from orchestra.config.situation import Situation
from orchestra.errors import EXIT_DONE, ConfigError, LaunchError

if TYPE_CHECKING:
    from conf.schema import Config
    from launchers.slurm.sbatch import Estimate
    from launchers.slurm.site import Partition
    from orchestra.submit.prepare import RunRequest
    from orchestra.submit.submission import PlannedJob

# Whatever this machine is: a login node has neither the GPUs nor the cores of the nodes.
_SITUATION = Situation("submit")

_EXPLAINED = """\
  orchestra submit cluster.nodes=4 cluster.time_limit=4:00:00 run.name=first
  orchestra submit model=llama_1b cluster.nodes=2 cluster.partition=gpu --dry-run
  orchestra submit cluster.device=cpu cluster.gpus_per_node=2 cluster.nodes=3
  orchestra submit cluster.slurm_extra.reservation=maintenance 'cluster.setup=[module load cuda]'

cluster=slurm is taken where no other cluster is chosen. Ranks per node and device are the cluster's own where
they are not given. The configuration and the code are frozen now: edits while the job waits change nothing.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra submit` takes."""
    parser.usage = "orchestra submit [overrides] [--dry-run] [--json]"
    parser.add_argument("overrides", nargs="*", metavar="overrides", help="KEY=VALUE or GROUP=NAME")
    add_output_options(parser)
    parser.add_argument("-m", "--multirun", action=_RefuseSweep, nargs=0, help=SUPPRESS)
    parser.epilog = _EXPLAINED


class _RefuseSweep(Action):
    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        parser.error("-m (multirun): sweeps are not built yet; submit one run at a time")


def run(arguments: Namespace) -> int:
    """Submit and return 0. Raises ConfigError before anything exists, LaunchError when Slurm is silent."""
    from orchestra.config.compose import compose
    from orchestra.submit.job import Share
    from orchestra.submit.prepare import planned_run
    from orchestra.submit.site import cpus_of_share
    from orchestra.submit.submission import planned_job

    overrides = _with_cluster(arguments.overrides)
    config = compose(overrides, _SITUATION).config
    partitions = _partitions(is_needed=not arguments.dry_run)
    request = _request(config, overrides, partitions)
    target = planned_run(request, time.time())
    share = None if partitions is None else cpus_of_share(request.config, partitions)
    plan = planned_job(request, target, Share(share))
    estimate = None if partitions is None else _tested(plan)
    if arguments.dry_run:
        _print_plan(plan, estimate, as_json=arguments.json)
        return EXIT_DONE
    _submit(plan, estimate, as_json=arguments.json)
    return EXIT_DONE


def _with_cluster(overrides: Sequence[str]) -> list[str]:
    chosen = ("cluster=", "+cluster=", "cluster.launcher=", "experiment=")
    if any(override.startswith(chosen) for override in overrides):
        return list(overrides)
    return ["cluster=slurm", *overrides]


def _partitions(*, is_needed: bool) -> tuple[Partition, ...] | None:
    """Ask the cluster what it has; None on a machine without Slurm where nothing is to be submitted."""
    from launchers.errors import LauncherError, SlurmMissing
    from launchers.slurm.site import partitions

    try:
        return partitions()
    except SlurmMissing as error:
        if is_needed:
            raise ConfigError(f"{error}, or train here with `orchestra run`") from error
        _note(f"{error}: what the cluster has was not checked")
    except LauncherError as error:
        if is_needed:
            raise LaunchError(f"{error}; nothing was submitted") from error
        _note(f"{error}: what the cluster has was not checked")
    return None


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _request(config: Config, overrides: list[str], partitions: tuple[Partition, ...] | None) -> RunRequest:
    """Check the configuration against the cluster, whose numbers take the place of `auto`."""
    from orchestra.config.compose import compose
    from orchestra.config.signature import signature
    from orchestra.submit.prepare import RunRequest
    from orchestra.submit.site import folder_problems, numbers_for_auto, site_problems

    numbers = [] if partitions is None else numbers_for_auto(config, partitions)
    if numbers:
        config = compose([*overrides, *numbers], _SITUATION).config
    problems = list(folder_problems(Path(config.run.dir).absolute(), _mounts()))
    problems += [] if partitions is None else site_problems(config, partitions)
    if config.cluster.gpus_per_node == "auto" and not problems:
        problems.append("cluster.gpus_per_node=auto: what the nodes have is not known; give a number")
    if problems:
        raise ConfigError(problems)
    return RunRequest(config, signature(config), overrides, sys.argv)


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""


def _tested(plan: PlannedJob) -> Estimate | None:
    """Let Slurm judge the script. Its silence here is no verdict: the submission itself will tell."""
    from launchers.errors import LauncherError, SlurmRefused
    from launchers.slurm import sbatch

    try:
        return sbatch.tested(plan.script())
    except SlurmRefused as error:
        raise ConfigError(f"Slurm refuses the job: {error}") from error
    except LauncherError as error:
        _note(f"the job was not tested beforehand: {error}")
        return None


def _print_plan(plan: PlannedJob, estimate: Estimate | None, *, as_json: bool) -> None:
    from orchestra.frozen import to_yaml
    from orchestra.submit.prepare import frozen_config

    script = plan.script()
    if not as_json:
        print(script, end="")
        if estimate is not None:
            _note(f"Slurm would take it and expects it to start at {estimate.start} on {estimate.nodes}")
        return
    facts = {"name": plan.run.name, "path": str(plan.run.path), "signature": plan.request.signature}
    start = None if estimate is None else estimate.start
    config = to_yaml(frozen_config(plan.request, plan.run))
    print(json.dumps({**facts, "script": script, "estimated_start": start, "config": config}, indent=2))


def _submit(plan: PlannedJob, estimate: Estimate | None, *, as_json: bool) -> None:
    from orchestra.submit.submission import submit

    done = submit(plan)
    start = None if estimate is None else estimate.start
    if as_json:
        facts = {"name": done.run.name, "path": str(done.run.path), "job": done.job, "estimated_start": start}
        print(json.dumps(facts))
        return
    cluster = plan.request.config.cluster
    nodes = f"{cluster.nodes} node{'' if cluster.nodes == 1 else 's'}"
    print(f"run     {done.run.name}")
    print(f"job     {done.job}: {nodes} × {cluster.gpus_per_node} {cluster.device.value} ranks")
    if start is not None:
        print(f"starts  {start}, as Slurm expects")
    print(
        f"next    `{describe.invocation('status', done.run)}`, `{describe.invocation('logs', done.run)} -f`"
    )
