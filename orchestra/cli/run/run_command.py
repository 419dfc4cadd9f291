"""`orchestra run [overrides]`: compose, check, freeze, train on this machine in the foreground.

The order is the contract: whatever is wrong with the configuration ends the command with 2 before anything
exists. `resume` and `rehearse` make an attempt ready in their own ways; what is printed of it is the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import textwrap
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

from conf.schema import Config
from launchers.torchrun import LaunchPlace, command
from orchestra.cli.hydra_options import add_hydra_options, answered
from orchestra.cli.text import axis_links, describe, figures
from orchestra.cli.text.progress import Progress, open_view, silence, speaks_unicode
from orchestra.config.machine import signature, this_machine
from orchestra.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError
from orchestra.recovery.incidents import Verdict
from orchestra.run.config_file import plain_values, to_yaml
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.run_folders import remember
from orchestra.run.run_lineage import newest_checkpoint
from orchestra.sizes.topology import layout, length_of
from orchestra.submit.launch import launch_spec, source_root
from orchestra.submit.network_bench import with_measured_network
from orchestra.submit.new_run import RunRequest, frozen_config, planned_run, prepare

_CHART_HEIGHT = 8
_EXPLAINED = """\
Overrides are Hydra's: KEY=VALUE sets a value, GROUP=NAME takes a preset of a
group; `orchestra config` explains all keys.

  orchestra run          2 CPU ranks, or all GPUs; the model `debug`
  orchestra run train.steps=300 optim.lr=3e-3 run.name=first
  orchestra run model=llama_125m data=tokens data.path=corpus precision=bf16
  orchestra run experiment=demo cluster.gpus_per_node=1
  orchestra run -m optim.lr=1e-3,3e-3 cluster.members_at_once=2 run.name=grid

"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = (
        "orchestra run [-m] [overrides] [--dry-run] [--json] [--force]\n"
        "                     [--cfg job] [--info] [--config-dir DIR]"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="overrides", help="KEY=VALUE or GROUP=NAME"
    )
    add_output_options(parser)
    add_hydra_options(parser)
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="sweep: train every combination, one after another"
    )
    parser.add_argument(
        "--force", action="store_true", help="with -m: train every member again, also those that are done"
    )
    parser.epilog = _EXPLAINED + "Presets (files of conf/):\n" + _presets()


def _presets() -> str:
    groups = sorted(path for path in (source_root() / "conf").iterdir() if path.is_dir())
    named = {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}
    lines = [f"  {group + '=':<13} {', '.join(names)}" for group, names in named.items() if names]
    return "\n".join(textwrap.fill(line, figures.WIDTH, subsequent_indent=" " * 16) for line in lines)


def run(arguments: Namespace) -> int:
    """Train and return the exit code of the verdict. Raises ConfigError before anything is started."""
    if answered(arguments, "run"):
        return EXIT_DONE
    if arguments.multirun:
        from orchestra.cli.run.sweep_here import run_sweep

        return run_sweep(arguments)
    if arguments.force:
        raise ConfigError("--force is about the members of a sweep (-m); a single run is always a new one")
    from orchestra.config.compose import compose

    config = compose(arguments.overrides, this_machine(starts=not arguments.dry_run, is_alone=True)).config
    # Measured figures are no part of what was asked for: the signature stays the same.
    measured = with_measured_network(config)
    request = RunRequest(measured, signature(config), arguments.overrides, sys.argv)
    target = planned_run(request, time.time())
    if arguments.dry_run:
        planned = ForegroundAttempt(frozen_config(request, target), target)
        print_plan(planned, {"signature": request.signature}, as_json=arguments.json)
        return EXIT_DONE
    remember(target.path.parent)
    return train(ForegroundAttempt(request.config, prepare(request, target)), as_json=arguments.json)


@dataclass(frozen=True)
class ForegroundAttempt:
    """What is about to be trained: attempt `number` of `run`, which goes on from a step (None: the first)."""

    config: Config
    run: RunDir
    number: int = 0
    from_step: int | None = None
    # What a person should see before it begins.
    notes: tuple[str, ...] = ()

    @property
    def header(self) -> list[str]:
        """What is about to be trained, in lines."""
        return [*describe.header(self.config, self.run, self.number, self.from_step), *self.notes]


def add_output_options(parser: ArgumentParser) -> None:
    """Add --dry-run and --json."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be run; start and write nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result (or the plan) as JSON; progress goes to stderr"
    )


def print_plan(attempt: ForegroundAttempt, facts: Record, *, as_json: bool) -> None:
    """Print what would be started, `facts` of the caller's beside it in JSON. Starts and writes nothing."""
    run = attempt.run
    spec = launch_spec(attempt.config, run, attempt.number, search_path())
    # The port is looked for when torchrun is really started.
    words = command(spec, LaunchPlace(node=0, master_address="127.0.0.1", master_port=0))
    if as_json:
        plan = {
            "name": run.name,
            "path": str(run.path),
            **facts,
            "command": list(words),
            "environment": dict(spec.environment),
            "config": plain_values(attempt.config),
        }
        print(json.dumps(plan, indent=2))
        return
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items()))
    mesh = layout(attempt.config.parallelism, describe.world_size(attempt.config))
    print("\n".join([*attempt.header, *axis_links.of_cluster(mesh, attempt.config.cluster)]))
    print(f"\n# would be started as\n{environment} {shlex.join(words)}")
    print(f"\n# {describe.shown(run.config)}\n{to_yaml(attempt.config)}", end="")


def train(attempt: ForegroundAttempt, *, as_json: bool) -> int:
    """Train the attempt to its end, show it, and return the exit code of the verdict."""
    from orchestra.agents.agent import train_here

    config, run = attempt.config, attempt.run
    stream = sys.stderr if as_json else sys.stdout
    steps, tokens = config.train.steps, length_of(config.train).get("tokens")
    saves = config.checkpoint.every_steps is not None
    progress = Progress(run, steps, attempt.number, tokens, saves=saves)
    waiting = f"starting {figures.number_of(describe.world_size(config), 'rank')} …"
    view = open_view(progress, attempt.header, waiting, stream)
    verdict: Verdict | None = None

    def tick(number: int, stops: int) -> None:
        progress.follow(number)
        view.tick(stops)

    try:
        last, verdict = train_here(
            config, run, attempt.number, tick=tick, search_path=search_path(), say=progress.notice
        )
        attempt = dataclasses.replace(attempt, number=last)
    finally:
        view.close(_closing(attempt, progress, verdict, speaks_unicode(stream)))
    if verdict.code not in (EXIT_DONE, EXIT_STOPPED, EXIT_INTERRUPTED):
        with contextlib.suppress(OSError):
            print("error: " + describe.failure(run, attempt.number, verdict), file=sys.stderr)
    if as_json:
        _print_result(attempt, progress, verdict)
    return verdict.code


def _print_result(attempt: ForegroundAttempt, progress: Progress, verdict: Verdict) -> None:
    """Print the result; where that fails the exit code is still the training's."""
    numbers = {**dataclasses.asdict(verdict), **dataclasses.asdict(progress.summary())}
    identity = {"name": attempt.run.name, "path": str(attempt.run.path), "state": verdict.state}
    try:
        place = {"attempt": attempt.number, "checkpoint_step": newest_checkpoint(read_events(attempt.run))}
        print(json.dumps({**identity, **place, **numbers}), flush=True)
    except OSError as error:
        silence(sys.stdout)
        with contextlib.suppress(OSError):
            print(f"error: the result could not be printed: {error.strerror}", file=sys.stderr)


def _closing(
    attempt: ForegroundAttempt, progress: Progress, verdict: Verdict | None, with_chart: bool
) -> list[str]:
    """Return the last words; nothing when the run never ended by itself or its files cannot be read."""
    if verdict is None:
        return []
    try:
        progress.update()
        events = read_events(attempt.run)
    except OSError as error:
        return [f"the summary could not be made: {error}"]
    losses = progress.losses if with_chart else []
    return [
        *(["", "loss", *figures.chart(losses, figures.WIDTH, _CHART_HEIGHT)] if len(losses) > 1 else []),
        *describe.summary_lines(attempt.run, progress.summary(), verdict),
        *describe.checkpoint_lines(attempt.config, attempt.run, events),
        *describe.attention_lines(events),
        *describe.mirror_lines(events),
        *describe.resume_lines(attempt.run, verdict, events, attempt.config),
    ]


def search_path() -> list[str]:
    """Return the folders of PYTHONPATH, which the ranks get too."""
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
