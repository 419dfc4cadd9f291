"""`orchestra submit [overrides]`: compose, check, freeze, submit one Slurm job, print its id, exit.

Everything that can be told before the job is tried is told before: by the rules, by what the cluster has, and
by Slurm itself (`sbatch --test-only`). It waits for the job only with --wait.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.cli import on_cluster
from orchestra.cli.foreground_view import add_output_options
from orchestra.cli.text import describe
from orchestra.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from conf.schema import Config
    from launchers.slurm.cluster import Partition
    from launchers.slurm.sbatch import Estimate
    from orchestra.submit.new_run import RunRequest
    from orchestra.submit.submission import PlannedJob, Submitted

_EXPLAINED = """\
  orchestra submit cluster.nodes=4 cluster.time_limit=4:00:00 run.name=first
  orchestra submit model=llama_1b cluster.nodes=2 cluster.partition=gpu --dry-run
  orchestra submit cluster.device=cpu cluster.gpus_per_node=2 cluster.nodes=3
  orchestra submit cluster.slurm_extra.reservation=maintenance 'cluster.setup=[module load cuda]'
  orchestra submit -m optim.lr=1e-4,3e-4 parallelism.tp=1,2 cluster.nodes=2 run.name=grid

cluster=slurm is taken where no other cluster is chosen. Ranks per node and device are the cluster's own where
they are not given. The configuration and the code are frozen now: edits while the job waits change nothing.

-m submits every combination of the values as one array of jobs (several where the site or the jobs' shapes
ask for it). The same sweep again goes on with it: what is done or alive is left alone. Runs of other sweeps
in run.dir that compute the same are taken over.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra submit` takes."""
    parser.usage = (
        "orchestra submit [-m] [overrides] [--dry-run] [--json] [--wait] [--force]\n"
        "                        [--skip-memory-check]"
    )
    parser.add_argument("overrides", nargs="*", metavar="overrides", help="KEY=VALUE or GROUP=NAME")
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep: submit every combination")
    parser.add_argument(
        "--wait", action="store_true", help="wait until all is over, print the results, exit with the worst"
    )
    parser.add_argument(
        "--force", action="store_true", help="with -m: train every member anew, whatever there is already"
    )
    parser.add_argument(
        "--skip-memory-check", action="store_true", help="submit what the planner says does not fit, too"
    )
    add_output_options(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Submit and return 0, with --wait the code of the worst end.

    Raises ConfigError before anything exists, LaunchError when Slurm is silent.
    """
    if arguments.wait and arguments.dry_run:
        raise ConfigError("--wait and --dry-run: nothing is submitted, so there is nothing to wait for")
    if arguments.multirun:
        from orchestra.cli.sweep_text import submit_sweep

        return submit_sweep(arguments)
    if arguments.force:
        raise ConfigError("--force is about the members of a sweep (-m); a single run is always a new one")
    return _submit_one(arguments)


def _submit_one(arguments: Namespace) -> int:
    if arguments.dry_run:
        return print_script(arguments)
    plan, estimate = _planned(arguments, is_dry=False)
    return _submit(plan, estimate, arguments)


def print_script(arguments: Namespace) -> int:
    """Print the script that `overrides` would be submitted as, and return 0; nothing is written or submitted.

    Raises ConfigError as `run` does.
    """
    plan, estimate = _planned(arguments, is_dry=True)
    _print_plan(plan, estimate, as_json=arguments.json)
    return EXIT_DONE


def _planned(arguments: Namespace, *, is_dry: bool) -> tuple[PlannedJob, Estimate | None]:
    from orchestra.config.compose import compose
    from orchestra.submit.new_run import planned_run
    from orchestra.submit.submission import planned_job

    overrides = on_cluster.with_cluster(arguments.overrides)
    config = compose(overrides, on_cluster.SITUATION).config
    partitions = on_cluster.partitions_or_none(is_needed=not is_dry)
    request = _request(config, overrides, partitions, checks_memory=not arguments.skip_memory_check)
    target = planned_run(request, time.time())
    plan = planned_job(request, target, on_cluster.share_of(request.config, partitions))
    return plan, None if partitions is None else on_cluster.tested(plan.script())


def _request(
    config: Config, overrides: list[str], partitions: tuple[Partition, ...] | None, *, checks_memory: bool
) -> RunRequest:
    """Check the configuration against the cluster, whose numbers take the place of `auto`."""
    from orchestra.config.machine import signature
    from orchestra.submit.network_bench import with_measured_network
    from orchestra.submit.new_run import RunRequest

    config, problems = on_cluster.on_site(config, partitions)
    problems = [*on_cluster.place_problems(Path(config.run.dir).absolute()), *problems]
    if checks_memory and not problems:
        problems += on_cluster.memory_problems(config, partitions)
    if problems:
        raise ConfigError(problems)
    return RunRequest(with_measured_network(config), signature(config), overrides, sys.argv)


def _print_plan(plan: PlannedJob, estimate: Estimate | None, *, as_json: bool) -> None:
    from orchestra.run.config_file import to_yaml
    from orchestra.submit.new_run import frozen_config

    script = plan.script()
    if not as_json:
        print(script, end="")
        if estimate is not None:
            on_cluster.note(
                f"Slurm would take it and expects it to start at {estimate.start} on {estimate.nodes}"
            )
        return
    facts = {"name": plan.run.name, "path": str(plan.run.path), "signature": plan.request.signature}
    start = None if estimate is None else estimate.start
    config = to_yaml(frozen_config(plan.request, plan.run))
    print(json.dumps({**facts, "script": script, "estimated_start": start, "config": config}, indent=2))


def _submit(plan: PlannedJob, estimate: Estimate | None, arguments: Namespace) -> int:
    from orchestra.submit.submission import submit

    done = submit(plan)
    _tell(plan, done, None if estimate is None else estimate.start, arguments)
    if not arguments.wait:
        return EXIT_DONE
    from orchestra.cli.sweep_text import wait

    return wait([done.run], plan.request.config.run.metric, as_json=arguments.json)


def _tell(plan: PlannedJob, done: Submitted, start: str | None, arguments: Namespace) -> None:
    if arguments.json:
        facts = {"name": done.run.name, "path": str(done.run.path), "job": done.job, "estimated_start": start}
        # With --wait standard output is the results'.
        print(json.dumps(facts), file=sys.stderr if arguments.wait else sys.stdout)
        return
    config = plan.request.config.cluster
    nodes = f"{config.nodes} node{'' if config.nodes == 1 else 's'}"
    print(f"run     {done.run.name}")
    print(f"job     {done.job}: {nodes} × {config.gpus_per_node} {config.device.value} ranks")
    if start is not None:
        print(f"starts  {start}, as Slurm expects")
    print(
        f"next    `{describe.invocation('status', done.run)}`, `{describe.invocation('logs', done.run)} -f`"
    )
