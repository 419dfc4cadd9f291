"""`orchestra resume RUN [overrides]`: train a run on, from its newest committed checkpoint.

Here in the foreground, or as a new job of a cluster, as the run's configuration says. What the overrides
change is checked as for a new run. Which checkpoint is intact the ranks find out.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from conf.schema import LauncherName
from orchestra.cli.hydra_options import add_config_dir, with_presets
from orchestra.cli.run.outlook_text import after_line, start_line
from orchestra.cli.run.run_command import ForegroundAttempt, add_output_options, print_plan, train
from orchestra.cli.run.submit_command import job_lines, print_job_script
from orchestra.cli.run.sweep_text import resume_sweep
from orchestra.cli.text.describe import invocation
from orchestra.cli.text.resolve import add_directory_option, resolve_target
from orchestra.config.machine import Situation, by_itself, this_machine
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.report.run_state import name_of
from orchestra.report.unwatched import stop_with_command
from orchestra.run.config_file import plain_values, read_config
from orchestra.run.paths import RunDir, SweepDir, read_sweep
from orchestra.run.record import RunPhase
from orchestra.submit.resume_run import (
    ResumePlan,
    SchedulerAnswer,
    ask_scheduler,
    claim,
    following_still,
    plan_resume,
    resume_job,
    submit_resume,
)
from orchestra.submit.site import ask
from orchestra.submit.submission import fitted

if TYPE_CHECKING:
    from launchers.slurm.sbatch import Estimate
    from orchestra.submit.resume_run import ResumeJob

_EXPLAINED = """\
  orchestra resume first      go on where the newest checkpoint is
  orchestra resume first train.steps=2000 --accept-jump
                              train a finished run further, on a longer schedule
  orchestra resume first cluster.gpus_per_node=4
                              on another number of ranks
  orchestra resume first cluster.nodes=4 cluster.time_limit=8:00:00
  orchestra resume first cluster=local
                              a run of the cluster here in the foreground
  orchestra resume first cluster=slurm cluster.nodes=2
                              a run of this machine on the cluster

A run that was submitted is submitted again: a new job for the same run, with the code as it is now.
KEY=VALUE changes the run's frozen configuration; GROUP=NAME replaces that whole section by a preset.
The model, the seed, the data and the sequence length stay what they are.
What changes is told, with the learning rate before and after. Where a schedule would let that jump by more
than half nothing is started, unless --accept-jump is given, or the rate itself is set (optim.lr).
A checkpoint that turns out to be damaged is passed over for the one before.
Of a sweep what is missing or failed is submitted, or trained here, again.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = (
        "orchestra resume RUN [overrides] [--accept-jump] [--skip-memory-check]\n"
        "                        [--dry-run] [--json] [--config-dir DIR] [--dir DIR]"
    )
    parser.add_argument("run", metavar="RUN", help="name, unique start of one, or path")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="overrides", help="KEY=VALUE or GROUP=NAME"
    )
    add_output_options(parser)
    parser.add_argument(
        "--accept-jump", action="store_true", help="let a changed schedule move the rate at once"
    )
    parser.add_argument(
        "--skip-memory-check", action="store_true", help="submit even what the planner says does not fit"
    )
    add_config_dir(parser)
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Train on and return the exit code of the verdict, or submit and return 0.

    Raises ConfigError before anything is started, LaunchError when Slurm is silent.
    """
    stop_with_command()
    target = resolve_target(arguments.run, arguments.dir)
    arguments.overrides = with_presets(arguments)
    if not isinstance(target, RunDir):
        return _resume_sweep(arguments, target)
    answer = ask_scheduler(target, time.time())
    if goes_to_cluster(target, arguments.overrides):
        return _submit(arguments, target, answer)
    return _train_here(arguments, target, answer)


def _resume_sweep(arguments: Namespace, sweep: SweepDir) -> int:
    from orchestra.config.compose import chosen_launcher

    launcher = chosen_launcher(arguments.overrides)
    if bool(read_sweep(sweep).arrays) if launcher is None else launcher is LauncherName.slurm:
        return resume_sweep(arguments, sweep)
    from orchestra.cli.run.sweep_here import resume_sweep_here

    return resume_sweep_here(arguments, sweep)


def goes_to_cluster(run: RunDir, overrides: Sequence[str]) -> bool:
    """Tell whether a run is to go on in Slurm: as the cluster does that is typed, else as it was frozen."""
    from orchestra.config.compose import chosen_launcher

    launcher = chosen_launcher(overrides) or read_config(run.config).cluster.launcher
    return launcher is LauncherName.slurm


def _planned(
    arguments: Namespace, target: RunDir, situation: Situation, answer: SchedulerAnswer
) -> ResumePlan:
    overrides, accepts_jump = arguments.overrides, arguments.accept_jump
    return plan_resume(target, overrides, situation, time.time(), answer, accepts_jump=accepts_jump)


def _train_here(arguments: Namespace, target: RunDir, answer: SchedulerAnswer) -> int:
    situation = this_machine("resume", starts=not arguments.dry_run, is_alone=True)
    plan = _planned(arguments, target, situation, answer)
    if plan.is_finished:
        return _say_finished(plan, as_json=arguments.json)
    if awaited := following_still(target, time.time()).awaited:
        names = " and ".join(awaited)
        raise ConfigError(f"{name_of(target)} begins after {names}, not done yet; train it here after that")
    notes = tuple(plan.changes.lines())
    attempt = ForegroundAttempt(plan.config, plan.run, plan.number, plan.checkpoint_step, notes)
    if arguments.dry_run:
        facts = {"attempt": plan.number, "checkpoint_step": plan.checkpoint_step, **plan.changes.facts()}
        print_plan(attempt, facts, as_json=arguments.json)
        return EXIT_DONE
    claim(plan, sys.argv)
    return train(attempt, as_json=arguments.json)


def _submit(arguments: Namespace, target: RunDir, answer: SchedulerAnswer) -> int:
    site = ask(is_dry=arguments.dry_run, folder=target.path.parent)
    situation = Situation("resume", cluster=site, is_alone=True)
    plan = _planned(arguments, target, situation, answer)
    if plan.is_finished:
        return _say_finished(plan, as_json=arguments.json)
    site.require()
    # A member of a sweep keeps what it shares a node by, for when the sweep goes on.
    alone = by_itself(plan.config)
    if plan.config.cluster.members_per_node == "auto":
        # That is counted for the members of a sweep together.
        plan = replace(plan, config=alone)
    if plan.overrides:
        fitted(alone, site, checks_memory=not arguments.skip_memory_check)
    following = following_still(target, time.time(), is_dry=arguments.dry_run)
    planned = resume_job(plan, site.share(alone), following)
    estimate = site.tested(planned.script())
    if arguments.dry_run and arguments.json:
        script = {"script": planned.script(), "config": plain_values(planned.next.config)}
        print(json.dumps({**_facts(planned, estimate), **script}, indent=2))
        return EXIT_DONE
    if arguments.dry_run:
        print_job_script(planned.script(), estimate)
        print("".join(f"# {line}\n" for line in plan.changes.lines()), end="", file=sys.stderr)
        return EXIT_DONE
    job = submit_resume(planned, sys.argv)
    if arguments.json:
        print(json.dumps({**_facts(planned, estimate), "job": job}))
        return EXIT_DONE
    step = plan.checkpoint_step
    goes_on = f"goes on {'from the start' if step is None else f'from step {step}'}"
    waits = [after_line(following)] if following.awaited else []
    waits += [start_line(estimate, following)] if estimate is not None else []
    print("\n".join([f"run     {name_of(plan.run)}, attempt {plan.number}", *plan.changes.lines()]))
    print("\n".join(job_lines(plan.run, job, plan.config.cluster, goes_on, *waits)))
    return EXIT_DONE


def _facts(planned: ResumeJob, estimate: Estimate | None) -> dict[str, object]:
    plan = planned.next
    return {
        "name": plan.run.name,
        "path": str(plan.run.path),
        "attempt": plan.number,
        "checkpoint_step": plan.checkpoint_step,
        "estimated_start": None if estimate is None else estimate.start,
        **plan.changes.facts(),
    }


def _say_finished(plan: ResumePlan, *, as_json: bool) -> int:
    steps = plan.before.train.steps
    if as_json:
        facts = {
            "name": plan.run.name,
            "path": str(plan.run.path),
            "state": RunPhase.finished,
            "code": EXIT_DONE,
            "attempt": plan.last_attempt,
            "checkpoint_step": plan.checkpoint_step,
            "steps": steps,
        }
        print(json.dumps(facts))
        return EXIT_DONE
    ignored = "; the overrides were not applied" if plan.overrides else ""
    print(f"{name_of(plan.run)} is finished: {steps} of {steps} steps are trained{ignored}")
    print(f"to train it further: {invocation('resume', plan.run)} train.steps={2 * steps} --accept-jump")
    return EXIT_DONE
