"""`orchestra submit [overrides]`: compose, check, freeze, submit one Slurm job, print its id, exit.

Everything that can be told before the job is tried is told before: by the rules, by what the cluster has, and
by Slurm itself (`sbatch --test-only`). It waits for the job only with --wait.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from orchestra.cli.hydra_options import add_hydra_options, answered
from orchestra.cli.run.run_command import add_output_options
from orchestra.cli.text import describe, figures
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.run.paths import RunDir
from orchestra.run.run_folders import remember

if TYPE_CHECKING:
    from conf.schema import ClusterConfig
    from launchers.slurm.sbatch import Estimate
    from orchestra.submit.sweeps.arrays import PlacedSubmission

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
    parser.usage = (
        "orchestra submit [-m] [overrides] [--dry-run] [--json] [--wait] [--force]\n"
        "                        [--skip-memory-check] [--cfg job] [--info] [--config-dir DIR]"
    )
    parser.add_argument("overrides", nargs="*", metavar="overrides", help="KEY=VALUE or GROUP=NAME")
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep: submit every combination")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait until all have ended, print the results, exit with the worst code",
    )
    parser.add_argument(
        "--force", action="store_true", help="with -m: train every member again, also those that are done"
    )
    parser.add_argument(
        "--skip-memory-check", action="store_true", help="submit even what the planner says does not fit"
    )
    add_output_options(parser)
    add_hydra_options(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Submit and return 0, with --wait the code of the worst end.

    Raises ConfigError before anything exists, LaunchError when Slurm is silent.
    """
    if answered(arguments, "submit"):
        return EXIT_DONE
    if arguments.wait and arguments.dry_run:
        raise ConfigError("--wait and --dry-run: nothing is submitted, so there is nothing to wait for")
    if arguments.multirun:
        from orchestra.cli.run.sweep_text import submit_sweep

        return submit_sweep(arguments)
    if arguments.force:
        raise ConfigError("--force is about the members of a sweep (-m); a single run is always a new one")
    if arguments.dry_run:
        return print_script(arguments)
    return _submit(*_planned(arguments, is_dry=False), arguments)


def print_script(arguments: Namespace) -> int:
    """Print the script that `overrides` would be submitted as, and return 0; nothing is written or submitted.

    Raises ConfigError as `run` does.
    """
    _print_plan(*_planned(arguments, is_dry=True), as_json=arguments.json)
    return EXIT_DONE


def _planned(arguments: Namespace, *, is_dry: bool) -> tuple[PlacedSubmission, Estimate | None]:
    from orchestra.submit.site import ask
    from orchestra.submit.submission import plan, with_cluster
    from orchestra.submit.sweeps.arrays import placed_run

    site = ask(is_dry=is_dry)
    overrides = with_cluster(arguments.overrides)
    submission = plan(overrides, site, sys.argv, checks_memory=not arguments.skip_memory_check)
    placed = placed_run(submission, time.time())
    estimates = [site.tested(job.script()) for job in placed.arrays()]
    # Of several jobs the first that starts trains.
    known = [estimate for estimate in estimates if estimate is not None]
    return placed, min(known, key=lambda estimate: estimate.start, default=None)


def _print_plan(placed: PlacedSubmission, estimate: Estimate | None, *, as_json: bool) -> None:
    from orchestra.run.config_file import plain_values
    from orchestra.submit.new_run import frozen_config

    scripts, run = [job.script() for job in placed.arrays()], placed.place
    if not as_json:
        print_job_script("\n".join(scripts), estimate)
        return
    (member,) = placed.submission.members
    assert isinstance(run, RunDir)
    plan = {
        "name": run.name,
        "path": str(run.path),
        "signature": member.signature,
        "script": scripts[0],
        **({"scripts": scripts} if len(scripts) > 1 else {}),
        "estimated_start": None if estimate is None else estimate.start,
        "config": plain_values(frozen_config(member.request(()), run)),
    }
    print(json.dumps(plan, indent=2))


def print_job_script(script: str, estimate: Estimate | None) -> None:
    """Print the batch script, and when Slurm would start it where it says so."""
    from orchestra.submit.site import note

    print(script, end="")
    if estimate is not None:
        note(f"Slurm would accept the job and expects to start it at {estimate.start} on {estimate.nodes}")


def _submit(placed: PlacedSubmission, estimate: Estimate | None, arguments: Namespace) -> int:
    from orchestra.submit.hand_over import RunLedger, submit

    ledger, outcome = submit(placed)
    assert isinstance(ledger, RunLedger)
    (member,) = placed.submission.members
    config, run, jobs = member.config, ledger.run, [str(accepted.id) for accepted in outcome.accepted]
    remember(run.path.parent)
    if arguments.json:
        start = None if estimate is None else estimate.start
        several = {"jobs": jobs} if len(jobs) > 1 else {}
        facts = {"name": run.name, "path": str(run.path), "job": jobs[0], **several, "estimated_start": start}
        # With --wait standard output is the results'.
        print(json.dumps(facts), file=sys.stderr if arguments.wait else sys.stdout)
    else:
        print(f"run     {run.name}")
        others = zip(jobs[1:], member.alternatives[1:], strict=True)
        more = [_job_line(job, kind.cluster) for job, (kind, _) in others]
        print("\n".join(job_lines(run, jobs[0], config.cluster, estimate, *more)))
    if not arguments.wait:
        return EXIT_DONE
    from orchestra.cli.run.sweep_text import wait

    return wait([run], config.run.metric, as_json=arguments.json)


def job_lines(
    run: RunDir, job: str, cluster: ClusterConfig, estimate: Estimate | None, *more: str
) -> list[str]:
    """Return which job was submitted for a run, `more` about it, when it may start and what to type next."""
    return [
        _job_line(job, cluster),
        *more,
        *([] if estimate is None else [f"starts  {estimate.start}, as Slurm expects"]),
        f"next    `{describe.invocation('status', run)}`, `{describe.invocation('logs', run)} -f`",
    ]


def _job_line(job: str, cluster: ClusterConfig) -> str:
    nodes = figures.number_of(cluster.nodes, "node")
    kind = f" ({cluster.constraint})" if cluster.alternatives and cluster.constraint else ""
    return f"job     {job}: {nodes} × {cluster.gpus_per_node} {cluster.device.value} ranks{kind}"
