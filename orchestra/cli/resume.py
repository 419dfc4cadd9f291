"""`orchestra resume RUN [overrides]`: train a run on here, from its newest committed checkpoint.

What the overrides change is checked as for a new run. Which checkpoint is intact the ranks find out.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace

from orchestra.cli.attempt import Attempt, add_output_options, print_plan, train
from orchestra.cli.describe import invocation
from orchestra.cli.resolve import add_directory_option, resolve
from orchestra.errors import EXIT_DONE
from orchestra.submit.resume import NextAttempt, claim, next_attempt

_EXPLAINED = """\
  orchestra resume first                              go on where the newest checkpoint is
  orchestra resume first train.steps=2000             train a finished run further
  orchestra resume first cluster.gpus_per_node=4      on another number of ranks
  orchestra resume first checkpoint.every_steps=100 precision.name=bf16

KEY=VALUE changes the run's frozen configuration; GROUP=NAME replaces that whole section by a preset.
The model, the seed, the data and the sequence length stay what they are.
A checkpoint that turns out to be damaged is passed over for the one before.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra resume` takes."""
    parser.usage = "orchestra resume RUN [overrides] [--dry-run] [--json] [--dir DIR]"
    parser.add_argument("run", metavar="RUN", help="name, unique start of one, or path")
    parser.add_argument("overrides", nargs="*", metavar="overrides", help="KEY=VALUE or GROUP=NAME")
    add_output_options(parser)
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Train on and return the exit code of the verdict. Raises ConfigError before anything is started."""
    from orchestra.config.situation import this_machine

    target = resolve(arguments.run, arguments.dir)
    situation = this_machine("resume", starts=not arguments.dry_run)
    plan = next_attempt(target, arguments.overrides, situation, time.time())
    attempt = Attempt(plan.config, plan.run, plan.number, plan.checkpoint_step)
    if plan.is_finished:
        _say_finished(plan, as_json=arguments.json)
        return EXIT_DONE
    if arguments.dry_run:
        facts = {"attempt": plan.number, "checkpoint_step": plan.checkpoint_step}
        print_plan(attempt, facts, as_json=arguments.json)
        return EXIT_DONE
    claim(plan, sys.argv)
    return train(attempt, as_json=arguments.json)


def _say_finished(plan: NextAttempt, *, as_json: bool) -> None:
    steps = plan.before.train.steps
    if as_json:
        identity = {"name": plan.run.name, "path": str(plan.run.path), "state": "finished", "code": EXIT_DONE}
        numbers = {"attempt": plan.last_attempt, "checkpoint_step": plan.checkpoint_step, "steps": steps}
        print(json.dumps({**identity, **numbers}))
        return
    ignored = "; the overrides were not applied" if plan.overrides else ""
    print(f"{plan.run.name} is finished: {steps} of {steps} steps are trained{ignored}")
    print(f"to train it further: {invocation('resume', plan.run)} train.steps={2 * steps}")
