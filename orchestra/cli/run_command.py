"""`orchestra run [overrides]`: compose, check, freeze, train on this machine in the foreground.

The order is the contract: whatever is wrong with the configuration ends the command with 2 before anything
exists.
"""

from __future__ import annotations

import sys
import textwrap
import time
from argparse import SUPPRESS, Action, ArgumentParser, Namespace

from orchestra.cli.foreground_view import ForegroundAttempt, add_output_options, print_plan, train
from orchestra.config.machine import signature, this_machine
from orchestra.errors import EXIT_DONE
from orchestra.submit.launch import source_root
from orchestra.submit.network_bench import with_measured_network
from orchestra.submit.new_run import RunRequest, frozen_config, planned_run, prepare

_WIDTH = 80

_EXPLAINED = """\
Overrides are Hydra's: KEY=VALUE sets a value, GROUP=NAME takes a preset of a group.

  orchestra run                                          2 CPU ranks, or all GPUs; the model `debug`
  orchestra run train.steps=300 optim.lr=3e-3 run.name=first
  orchestra run model=llama_125m data=tokens data.path=corpus.bin precision=bf16
  orchestra run experiment=demo cluster.gpus_per_node=1

"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra run` takes."""
    parser.usage = "orchestra run [overrides] [--dry-run] [--json]"
    parser.add_argument("overrides", nargs="*", metavar="overrides", help="KEY=VALUE or GROUP=NAME")
    add_output_options(parser)
    parser.add_argument("-m", "--multirun", action=_RefuseSweep, nargs=0, help=SUPPRESS)
    parser.epilog = _EXPLAINED + "Presets (files of conf/):\n" + _presets()


class _RefuseSweep(Action):
    """Hydra's multirun, which users will try."""

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        parser.error("-m (multirun) is for sweeps, but this trains one run: give each key one value")


def _presets() -> str:
    groups = sorted(path for path in (source_root() / "conf").iterdir() if path.is_dir())
    named = {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}
    lines = [f"  {group + '=':<13} {', '.join(names)}" for group, names in named.items() if names]
    return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent=" " * 16) for line in lines)


def run(arguments: Namespace) -> int:
    """Train and return the exit code of the verdict. Raises ConfigError before anything is started."""
    request = _request(arguments.overrides, starts=not arguments.dry_run)
    target = planned_run(request, time.time())
    if arguments.dry_run:
        planned = ForegroundAttempt(frozen_config(request, target), target)
        print_plan(planned, {"signature": request.signature}, as_json=arguments.json)
        return EXIT_DONE
    return train(ForegroundAttempt(request.config, prepare(request, target)), as_json=arguments.json)


def _request(overrides: list[str], *, starts: bool) -> RunRequest:
    from orchestra.config.compose import compose

    config = compose(overrides, this_machine(starts=starts)).config
    # Measured figures are no part of what was asked for: the signature stays the same.
    return RunRequest(with_measured_network(config), signature(config), overrides, sys.argv)
