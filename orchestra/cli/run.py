"""`orchestra run [overrides]`: compose, check, freeze, train on this machine in the foreground.

The order is the contract: whatever is wrong with the configuration ends the command with 2 before anything
exists.
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
from argparse import SUPPRESS, Action, ArgumentParser, Namespace

from conf.schema import Config
from orchestra.cli import describe, live
from orchestra.cli.progress import Progress
from orchestra.errors import EXIT_DONE, EXIT_INTERRUPTED
from orchestra.events import read_events
from orchestra.report.verdict import Verdict
from orchestra.rundir import RunDir
from orchestra.submit.prepare import RunRequest, frozen_config, planned_run, prepare

_ATTEMPT = 0
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
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be run; start and write nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result (or the plan) as JSON; progress goes to stderr"
    )
    parser.add_argument("-m", "--multirun", action=_RefuseSweep, nargs=0, help=SUPPRESS)
    parser.epilog = _EXPLAINED + "Presets (files of conf/):\n" + _presets()


class _RefuseSweep(Action):
    """Hydra's multirun, which users will try."""

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        parser.error("-m (multirun) is for sweeps, but this trains one run: give each key one value")


def _presets() -> str:
    from orchestra.submit.environment import source_root

    groups = sorted(path for path in (source_root() / "conf").iterdir() if path.is_dir())
    named = {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}
    lines = [f"  {group + '=':<13} {', '.join(names)}" for group, names in named.items() if names]
    return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent=" " * 16) for line in lines)


def run(arguments: Namespace) -> int:
    """Train and return the exit code of the verdict. Raises ConfigError before anything is started."""
    request = _request(arguments.overrides, starts=not arguments.dry_run)
    target = planned_run(request, time.time())
    if arguments.dry_run:
        _print_plan(request, target, as_json=arguments.json)
        return EXIT_DONE
    return _train(request.config, prepare(request, target), as_json=arguments.json)


def _request(overrides: list[str], *, starts: bool) -> RunRequest:
    from orchestra.config.compose import compose
    from orchestra.config.signature import signature
    from orchestra.config.situation import this_machine

    config = compose(overrides, this_machine(starts=starts)).config
    return RunRequest(config, signature(config), overrides, sys.argv)


def _print_plan(request: RunRequest, target: RunDir, *, as_json: bool) -> None:
    from launchers.spec import Place
    from launchers.torchrun import command
    from orchestra.frozen import to_yaml
    from orchestra.submit.launch import launch_spec

    spec = launch_spec(request.config, target, _ATTEMPT, _search_path())
    # The port is looked for when torchrun is really started.
    words = command(spec, Place(node=0, master_address="127.0.0.1", master_port=0))
    frozen = to_yaml(frozen_config(request, target))
    if as_json:
        plan = {
            "name": target.name,
            "path": str(target.path),
            "signature": request.signature,
            "command": list(words),
            "environment": dict(spec.environment),
            "config": frozen,
        }
        print(json.dumps(plan, indent=2))
        return
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items()))
    print("\n".join(describe.header(request.config, target)))
    print(f"\n# would be started as\n{environment} {shlex.join(words)}")
    print(f"\n# {describe.shown(target.config)}\n{frozen}", end="")


def _train(config: Config, target: RunDir, *, as_json: bool) -> int:
    from orchestra.submit.foreground import train_here

    stream = sys.stderr if as_json else sys.stdout
    progress = Progress(target, config.train.steps)
    ranks = describe.world_size(config)
    waiting = f"starting {ranks} rank{'s' if ranks > 1 else ''} …"
    view = live.open_view(progress, describe.header(config, target), waiting, stream)
    verdict: Verdict | None = None
    try:
        verdict = train_here(config, target, _ATTEMPT, tick=view.tick, search_path=_search_path())
    finally:
        view.close(_closing(target, progress, verdict, live.speaks_unicode(stream)))
    if verdict.code not in (EXIT_DONE, EXIT_INTERRUPTED):
        with contextlib.suppress(OSError):
            print("error: " + describe.failure(target, _ATTEMPT, verdict), file=sys.stderr)
    if as_json:
        _print_result(target, progress, verdict)
    return verdict.code


def _print_result(target: RunDir, progress: Progress, verdict: Verdict) -> None:
    """Print the result; where that fails the exit code is still the training's."""
    numbers = {**dataclasses.asdict(verdict), **dataclasses.asdict(progress.summary())}
    identity = {"name": target.name, "path": str(target.path), "state": verdict.state}
    try:
        print(json.dumps({**identity, **numbers}), flush=True)
    except OSError as error:
        live.silence(sys.stdout)
        with contextlib.suppress(OSError):
            print(f"error: the result could not be printed: {error.strerror}", file=sys.stderr)


def _closing(target: RunDir, progress: Progress, verdict: Verdict | None, with_chart: bool) -> list[str]:
    """Return the last words; nothing when the run never ended by itself or its files cannot be read."""
    if verdict is None:
        return []
    try:
        progress.update()
        events = read_events(target)
    except OSError as error:
        return [f"the summary could not be made: {error}"]
    drawn = describe.loss_chart(progress.losses, _WIDTH) if with_chart else []
    mirrored = describe.mirror_lines(events)
    return [*drawn, *describe.summary_lines(target, progress.summary(), verdict), *mirrored]


def _search_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
