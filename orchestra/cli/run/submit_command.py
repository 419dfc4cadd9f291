"""`orchestra submit [overrides]`: compose, check, freeze, submit one Slurm job, print its id, exit.

Everything that can be told before the job is tried is told before: by the rules, by what the cluster has, and
by Slurm itself (`sbatch --test-only`), what the job costs and how the account stands too. It waits for the
job only with --wait; `--after RUN` lets the job wait for another run.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestra.cli.hydra_options import add_hydra_options, answered
from orchestra.cli.run.outlook_text import after_line, outlook_lines, start_line
from orchestra.cli.run.run_command import add_output_options
from orchestra.cli.text import describe, figures
from orchestra.cli.text.resolve import resolve_target
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.run_folders import remember

if TYPE_CHECKING:
    from conf.schema import ClusterConfig
    from launchers.slurm.sbatch import Estimate
    from orchestra.submit.fair.outlook import Outlook
    from orchestra.submit.fair.predecessors import Following
    from orchestra.submit.submission import PlannedMember
    from orchestra.submit.sweeps.arrays import PlacedSubmission

_EXPLAINED = """\
  orchestra submit cluster.nodes=4 cluster.time_limit=4:00:00 run.name=first
  orchestra submit model=llama_1b cluster.nodes=2 cluster.partition=a --dry-run
  orchestra submit cluster.device=cpu cluster.gpus_per_node=2 cluster.nodes=3
  orchestra submit cluster.slurm_extra.reservation=mine cluster.nodes=2
  orchestra submit 'cluster.setup=[module load cuda]' cluster.nodes=2
  orchestra submit -m optim.lr=1e-4,3e-4 cluster.nodes=2 run.name=grid
  orchestra submit --after first cluster.nodes=2 run.name=second

cluster=slurm is taken where no other cluster is chosen. Ranks per node and device are the cluster's own where
they are not given. The configuration and the code are frozen now: edits while the job waits change nothing.

-m submits every combination of the values as one array of jobs (several where the site or the jobs' shapes
ask for it). The same sweep again goes on with it: what is done or alive is left alone. Runs of other sweeps
in run.dir that compute the same are taken over.

--after RUN lets the job wait until RUN (a name, the start of one, a path; also a sweep) is done: in however
many jobs, requeued, chained or resumed. If RUN ends otherwise the new run does not begin (exit code 93);
resume both.

It says what the job costs at most, how the account stands (sshare) and when Slurm expects it to start.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = (
        "orchestra submit [-m] [overrides] [--dry-run] [--json] [--wait] [--force]\n"
        "                        [--after RUN] [--skip-memory-check] [--cfg job] [--info]\n"
        "                        [--config-dir DIR]"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="overrides", help="KEY=VALUE or GROUP=NAME"
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep: submit every combination")
    parser.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="RUN",
        help="begin when this run or sweep is done; may be given several times",
    )
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
    if arguments.multirun and arguments.after:
        raise ConfigError(
            "--after is for single runs, and -m submits a sweep; submit the sweep when the other run is "
            "done, or its runs one by one"
        )
    if arguments.multirun:
        from orchestra.cli.run.sweep_text import submit_sweep

        return submit_sweep(arguments)
    if arguments.force:
        raise ConfigError("--force is about the members of a sweep (-m); a single run is always a new one")
    if arguments.dry_run:
        return print_script(arguments)
    return _submit(_planned(arguments, is_dry=False), arguments)


def print_script(arguments: Namespace) -> int:
    """Print the script that `overrides` would be submitted as, and return 0; nothing is written or submitted.

    Raises ConfigError as `run` does.
    """
    _print_plan(_planned(arguments, is_dry=True), as_json=arguments.json)
    return EXIT_DONE


@dataclass(frozen=True)
class CheckedSubmission:
    """A submission that may be made, and what is known of it before."""

    placed: PlacedSubmission
    estimate: Estimate | None
    outlook: Outlook

    @property
    def following(self) -> Following:
        return self.placed.numbering.following

    def to_json(self) -> Record:
        """Return what `--json` prints of what is known before."""
        start = None if self.estimate is None else self.estimate.start
        after = {"after": self.following.to_json()} if self.following.predecessors else {}
        return {"estimated_start": start, **self.outlook.to_json(), **after}

    def lines(self) -> list[str]:
        """Return the same for people, all but when Slurm expects it to start."""
        after = [after_line(self.following)] if self.following.predecessors else []
        return [*after, *outlook_lines(self.outlook)]


def _planned(arguments: Namespace, *, is_dry: bool) -> CheckedSubmission:
    from orchestra.submit.fair.outlook import outlook
    from orchestra.submit.site import ask
    from orchestra.submit.submission import plan, with_cluster
    from orchestra.submit.sweeps.arrays import placed_run

    site, now = ask(is_dry=is_dry), time.time()
    overrides = with_cluster(arguments.overrides)
    checks_memory, follows = not arguments.skip_memory_check, bool(arguments.after)
    submission = plan(overrides, site, sys.argv, checks_memory=checks_memory, follows=follows)
    member = submission.members[0]
    behind = _awaited(arguments.after, member, now, is_dry=is_dry) if arguments.after else None
    placed = placed_run(submission, now, behind)
    jobs = placed.arrays()
    estimates = [site.tested(job.script()) for job in jobs]
    # Of several jobs the first that starts trains.
    known = [estimate for estimate in estimates if estimate is not None]
    estimate = min(known, key=lambda estimate: estimate.start, default=None)
    return CheckedSubmission(placed, estimate, outlook(jobs, member.config.cluster, site))


def _awaited(texts: Sequence[str], member: PlannedMember, now: float, *, is_dry: bool) -> Following:
    """Return what a new run waits for. Raises ConfigError and LaunchError."""
    from orchestra.submit.fair.predecessors import following, predecessor_of
    from orchestra.submit.new_run import parent_of_runs

    name = member.config.run.name
    if member.alternatives:
        raise ConfigError(
            "--after with cluster.alternatives: several jobs of one run cannot wait for another run; leave "
            "one of them out"
        )
    if "dependency" in member.config.cluster.slurm_extra:
        raise ConfigError(
            "--after with cluster.slurm_extra.dependency: a job takes one of them; leave one out"
        )
    if name in texts:
        raise ConfigError(f"--after {name}: the new run, run.name={name}, would wait for itself")
    parent = parent_of_runs(member.config)
    targets = [resolve_target(text, parent, takes_dir=False) for text in texts]
    predecessors = [predecessor_of(target) for target in dict.fromkeys(targets)]
    return following(predecessors, now, is_dry=is_dry)


def _print_plan(checked: CheckedSubmission, *, as_json: bool) -> None:
    from orchestra.run.config_file import plain_values
    from orchestra.submit.new_run import frozen_config

    placed = checked.placed
    scripts, run = [job.script() for job in placed.arrays()], placed.place
    if not as_json:
        print_job_script("\n".join(scripts), checked.estimate, checked.lines())
        return
    (member,) = placed.submission.members
    assert isinstance(run, RunDir)
    plan = {
        "name": run.name,
        "path": str(run.path),
        "signature": member.signature,
        "script": scripts[0],
        **({"scripts": scripts} if len(scripts) > 1 else {}),
        **checked.to_json(),
        "config": plain_values(frozen_config(member.request(()), run)),
    }
    print(json.dumps(plan, indent=2))


def print_job_script(script: str, estimate: Estimate | None, lines: Sequence[str] = ()) -> None:
    """Print the batch script, and beside it `lines` and when Slurm would start it where it says so."""
    from orchestra.submit.site import note

    print(script, end="")
    sys.stderr.write("".join(f"# {line}\n" for line in lines))
    if estimate is not None:
        note(f"Slurm would accept the job and expects to start it at {estimate.start} on {estimate.nodes}")


def _submit(checked: CheckedSubmission, arguments: Namespace) -> int:
    from orchestra.submit.hand_over import RunLedger, submit

    placed = checked.placed
    ledger, outcome = submit(placed)
    assert isinstance(ledger, RunLedger)
    (member,) = placed.submission.members
    config, run, jobs = member.config, ledger.run, [str(accepted.id) for accepted in outcome.accepted]
    remember(run.path.parent)
    if arguments.json:
        several = {"jobs": jobs} if len(jobs) > 1 else {}
        facts = {"name": run.name, "path": str(run.path), "job": jobs[0], **several, **checked.to_json()}
        # With --wait standard output is the results'.
        print(json.dumps(facts), file=sys.stderr if arguments.wait else sys.stdout)
    else:
        print(f"run     {run.name}")
        others = zip(jobs[1:], member.alternatives[1:], strict=True)
        start = start_line(checked.estimate, checked.following)
        more = [_job_line(job, kind.cluster) for job, (kind, _) in others]
        print("\n".join(job_lines(run, jobs[0], config.cluster, *more, *checked.lines(), start)))
    if not arguments.wait:
        return EXIT_DONE
    from orchestra.cli.run.sweep_text import wait

    return wait([run], config.run.metric, as_json=arguments.json)


def job_lines(run: RunDir, job: str, cluster: ClusterConfig, *more: str) -> list[str]:
    """Return which job was submitted for a run, `more` about it, and what to type next."""
    return [
        _job_line(job, cluster),
        *more,
        f"next    `{describe.invocation('status', run)}`, `{describe.invocation('logs', run)} -f`",
    ]


def _job_line(job: str, cluster: ClusterConfig) -> str:
    nodes = figures.number_of(cluster.nodes, "node")
    kind = f" ({cluster.constraint})" if cluster.alternatives and cluster.constraint else ""
    return f"job     {job}: {nodes} × {cluster.gpus_per_node} {cluster.device.value} ranks{kind}"
