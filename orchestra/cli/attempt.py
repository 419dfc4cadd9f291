"""One attempt of a run, trained on this machine in the foreground: the plan, what is seen of it, its summary.

`run` and `resume` differ in how an attempt is made ready; from there on this is both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from argparse import ArgumentParser
from dataclasses import dataclass

from conf.schema import Config
from orchestra.cli import describe, live
from orchestra.cli.progress import Progress
from orchestra.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED
from orchestra.events import read_events
from orchestra.jsonl import Record
from orchestra.report.checkpoints import newest_checkpoint
from orchestra.report.verdict import Verdict
from orchestra.rundir import RunDir

_WIDTH = 80


@dataclass(frozen=True)
class Attempt:
    """What is about to be trained: attempt `number` of `run`, which goes on from a step (None: the first)."""

    config: Config
    run: RunDir
    number: int = 0
    from_step: int | None = None

    def header(self) -> list[str]:
        """Return what is about to be trained, one fact a line."""
        return describe.header(self.config, self.run, self.number, self.from_step)


def add_output_options(parser: ArgumentParser) -> None:
    """Add --dry-run and --json."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be run; start and write nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result (or the plan) as JSON; progress goes to stderr"
    )


def print_plan(attempt: Attempt, facts: Record, *, as_json: bool) -> None:
    """Print what would be started, `facts` of the caller's beside it in JSON. Starts and writes nothing."""
    from launchers.spec import Place
    from launchers.torchrun import command
    from orchestra.frozen import to_yaml
    from orchestra.submit.launch import launch_spec

    run = attempt.run
    spec = launch_spec(attempt.config, run, attempt.number, _search_path())
    # The port is looked for when torchrun is really started.
    words = command(spec, Place(node=0, master_address="127.0.0.1", master_port=0))
    frozen = to_yaml(attempt.config)
    if as_json:
        plan = {
            "name": run.name,
            "path": str(run.path),
            **facts,
            "command": list(words),
            "environment": dict(spec.environment),
            "config": frozen,
        }
        print(json.dumps(plan, indent=2))
        return
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items()))
    print("\n".join(attempt.header()))
    print(f"\n# would be started as\n{environment} {shlex.join(words)}")
    print(f"\n# {describe.shown(run.config)}\n{frozen}", end="")


def train(attempt: Attempt, *, as_json: bool) -> int:
    """Train the attempt to its end, show it, and return the exit code of the verdict."""
    from orchestra.crew.foreground import train_here

    config, run = attempt.config, attempt.run
    stream = sys.stderr if as_json else sys.stdout
    progress = Progress(run, config.train.steps, attempt.number)
    ranks = describe.world_size(config)
    waiting = f"starting {ranks} rank{'s' if ranks > 1 else ''} …"
    view = live.open_view(progress, attempt.header(), waiting, stream)
    verdict: Verdict | None = None

    def tick(number: int, stops: int) -> None:
        progress.follow(number)
        view.tick(stops)

    try:
        last, verdict = train_here(
            config, run, attempt.number, tick=tick, search_path=_search_path(), say=progress.notice
        )
        attempt = dataclasses.replace(attempt, number=last)
    finally:
        view.close(_closing(attempt, progress, verdict, live.speaks_unicode(stream)))
    if verdict.code not in (EXIT_DONE, EXIT_STOPPED, EXIT_INTERRUPTED):
        with contextlib.suppress(OSError):
            print("error: " + describe.failure(run, attempt.number, verdict), file=sys.stderr)
    if as_json:
        _print_result(attempt, progress, verdict)
    return verdict.code


def _print_result(attempt: Attempt, progress: Progress, verdict: Verdict) -> None:
    """Print the result; where that fails the exit code is still the training's."""
    numbers = {**dataclasses.asdict(verdict), **dataclasses.asdict(progress.summary())}
    identity = {"name": attempt.run.name, "path": str(attempt.run.path), "state": verdict.state}
    try:
        place = {"attempt": attempt.number, "checkpoint_step": newest_checkpoint(read_events(attempt.run))}
        print(json.dumps({**identity, **place, **numbers}), flush=True)
    except OSError as error:
        live.silence(sys.stdout)
        with contextlib.suppress(OSError):
            print(f"error: the result could not be printed: {error.strerror}", file=sys.stderr)


def _closing(attempt: Attempt, progress: Progress, verdict: Verdict | None, with_chart: bool) -> list[str]:
    """Return the last words; nothing when the run never ended by itself or its files cannot be read."""
    if verdict is None:
        return []
    try:
        progress.update()
        events = read_events(attempt.run)
    except OSError as error:
        return [f"the summary could not be made: {error}"]
    drawn = describe.loss_chart(progress.losses, _WIDTH) if with_chart else []
    return [
        *drawn,
        *describe.summary_lines(attempt.run, progress.summary(), verdict),
        *describe.checkpoint_lines(attempt.config, attempt.run, events),
        *describe.mirror_lines(events),
        *describe.resume_lines(attempt.run, verdict, events),
    ]


def _search_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
