"""One attempt of a run, trained on this machine in the foreground: the plan, what is seen of it, its summary.

`run` and `resume` differ in how an attempt is made ready; from there on this is both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shlex
import shutil
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from conf.schema import Config
from launchers.spec import LaunchPlace
from launchers.torchrun import command
from orchestra.cli.text import describe, figures
from orchestra.cli.text.figures import sparkline
from orchestra.cli.text.progress import Progress
from orchestra.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED
from orchestra.recovery.history import newest_checkpoint
from orchestra.recovery.incidents import Verdict
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.submit.launch import launch_spec

if TYPE_CHECKING:
    from rich.console import RenderableType


# What a person sees while a run trains here: one live line on a terminal, plain lines anywhere else.
#
# The view reads metrics.jsonl like anybody could; it has no part in the training and cannot slow it. When its
# output goes nowhere any more (a closed pipe, a full disk, a terminal that is gone) it falls silent, when it
# fails itself it says so in the end, and the training goes on.


_PLAIN_LINES = 50
_REFRESH_S = 0.5
_SHORTEST_BAR = 4


class View(Protocol):
    """Shows a run's progress."""

    def tick(self, stops: int) -> None:
        """Show what is new; called about ten times a second. `stops` counts the requests to stop so far."""

    def close(self, lines: Iterable[str]) -> None:
        """Show the last state and then `lines`."""


def open_view(progress: Progress, header: Iterable[str], waiting: str, stream: TextIO) -> View:
    """Return the view that fits `stream`; `waiting` is shown until the first metric."""
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    for line in [*header] if is_terminal else [*header, waiting]:
        _print(line, stream)

    def make() -> View:
        return TerminalView(progress, waiting, stream) if is_terminal else PlainView(progress, stream)

    return GuardedView(make, stream)


def speaks_unicode(stream: TextIO) -> bool:
    """Tell whether blocks and braille dots can be written to `stream`."""
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")


def width_of(stream: TextIO) -> int:
    """Return the columns to fill: the terminal's, 80 elsewhere."""
    return shutil.get_terminal_size((_WIDTH, 24)).columns if stream.isatty() else _WIDTH


def silence(stream: TextIO) -> None:
    """Send whatever is still written to `stream`, its buffer included, to nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file cannot and need not
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _print(line: str, stream: TextIO) -> None:
    """Print a line; the first one that cannot be written silences the stream."""
    try:
        print(line, file=stream, flush=True)
    except OSError:
        silence(stream)


class GuardedView:
    """A view whose failure ends the view, never the training."""

    def __init__(self, make: Callable[[], View], stream: TextIO) -> None:
        self._stream = stream
        self._view: View | None = None
        self._problem: str | None = None
        self._safely(lambda: setattr(self, "_view", make()))

    def tick(self, stops: int) -> None:
        view = self._view
        if view is not None and self._problem is None:
            self._safely(lambda: view.tick(stops))

    def close(self, lines: Iterable[str]) -> None:
        view = self._view
        if view is not None:
            # After a failure too: a terminal is put back as it was.
            self._safely(lambda: view.close(()))
        for line in [*([] if self._problem is None else [self._problem]), *lines]:
            _print(line, self._stream)

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError:
            silence(self._stream)
        except (Exception, SystemExit) as error:  # noqa: BLE001  rich exits where a pipe is closed
            self._problem = f"the progress could not be shown: {type(error).__name__}: {error}"


class PlainView:
    """At most about fifty lines over a whole run, each complete in itself."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream
        self._every = max(1, math.ceil(progress.steps / _PLAIN_LINES))
        self._next_step = 1
        self._stops = 0

    def tick(self, stops: int) -> None:
        rows = self._progress.update()
        for notice in self._progress.take_notices():
            _print(notice, self._stream)
        for row in rows:
            if row["step"] >= self._next_step or row["step"] == self._progress.steps:
                self._next_step = (row["step"] // self._every + 1) * self._every
                _print(self._line(row), self._stream)
        if stops > self._stops:
            self._stops = stops
            _print("stopping", self._stream)

    def _line(self, row: Record) -> str:
        steps = self._progress.steps
        width = len(str(steps))
        return f"step {row['step']:>{width}}/{steps}  {measures(row)}  ETA {_eta(self._progress, row)}"

    def close(self, lines: Iterable[str]) -> None:
        self.tick(self._stops)
        for line in lines:
            _print(line, self._stream)


def measures(row: Record, omitted: int = 0) -> str:
    """Return loss, speed, MFU and gradient norm of a row, in that order, the last `omitted` left out."""
    found = [
        f"loss {figures.loss(row.get('loss'))}",
        f"{figures.quantity(row.get('tokens_per_s'))} tok/s",
        f"MFU {figures.percent(row.get('mfu'))}",
        f"|g| {figures.quantity(row.get('grad_norm'))}",
    ]
    return "  ".join(found[: len(found) - omitted])


def _eta(progress: Progress, row: Record) -> str:
    left = progress.seconds_left
    return "0:00" if row["step"] >= progress.steps else figures.duration(left)


class TerminalView:
    """One line that stays in place, and the loss so far as a second one."""

    def __init__(self, progress: Progress, waiting: str, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._progress = progress
        self._waiting = waiting
        self._stream = stream
        self._drawn = 0.0
        self._live = Live(console=Console(file=stream), auto_refresh=False)
        self._live.start()

    def tick(self, stops: int) -> None:
        self._update()
        if time.monotonic() - self._drawn >= _REFRESH_S:
            self._drawn = time.monotonic()
            self._live.update(self._drawing(stops), refresh=True)

    def _update(self) -> None:
        self._progress.update()
        for notice in self._progress.take_notices():
            # Above the line that stays in place.
            self._live.console.print(notice, markup=False, highlight=False)

    def _drawing(self, stops: int) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        stopping = [Text("stopping (Ctrl-C again: at once)", style="yellow")] if stops else []
        if not self._progress.has_begun:
            return Group(Text(f"{self._waiting} {self._progress.wall_s:.0f} s", style="dim"), *stopping)
        # Room for the "^C" that a terminal echoes: where it wraps, the lines above are not drawn over.
        width = width_of(self._stream) - len("^C")
        curve = Text(self._curve(width), style="cyan", no_wrap=True)
        return Group(curve, self._bar(width), *stopping)

    def _curve(self, width: int) -> str:
        losses = self._progress.losses
        first, last = (f"loss {losses[0]:.2f} ", f" {losses[-1]:.2f}") if losses else ("", "")
        room = width - len(first) - len(last)
        if not losses or room < 1 or not speaks_unicode(self._stream):
            return ""
        return first + sparkline(losses, room) + last

    def _bar(self, width: int) -> RenderableType:
        from rich.text import Text

        row, steps = self._progress.last, self._progress.steps
        figures_text = self._figures(width)
        room = width - len(figures_text)
        if room < _SHORTEST_BAR:
            return Text(figures_text.strip(), no_wrap=True)
        done = min(room, room * row["step"] // steps)
        full, empty = ("━", "─") if speaks_unicode(self._stream) else ("#", ".")
        return Text.assemble(
            (full * done, "green"), (empty * (room - done), "dim"), figures_text, no_wrap=True
        )

    def _figures(self, width: int) -> str:
        """Return as many figures as fit, the least important left out first: |g|, MFU, tokens/s."""
        row, eta = self._progress.last, _eta(self._progress, self._progress.last)
        step = f" {row['step']}/{self._progress.steps}"
        saving = "  saving" if self._progress.saving is not None else ""
        texts = [f"{step}  {measures(row, omitted)}  ETA {eta}{saving}" for omitted in range(4)]
        return next((text for text in texts if len(text) <= width), texts[-1])

    def close(self, lines: Iterable[str]) -> None:
        self._update()
        try:
            # Drawn by stop().
            self._live.update(self._drawing(stops=0))
        finally:
            self._live.stop()
        for line in lines:
            _print(line, self._stream)


_WIDTH = 80


@dataclass(frozen=True)
class ForegroundAttempt:
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


def print_plan(attempt: ForegroundAttempt, facts: Record, *, as_json: bool) -> None:
    """Print what would be started, `facts` of the caller's beside it in JSON. Starts and writes nothing."""
    from orchestra.run.config_file import to_yaml

    run = attempt.run
    spec = launch_spec(attempt.config, run, attempt.number, _search_path())
    # The port is looked for when torchrun is really started.
    words = command(spec, LaunchPlace(node=0, master_address="127.0.0.1", master_port=0))
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


def train(attempt: ForegroundAttempt, *, as_json: bool) -> int:
    """Train the attempt to its end, show it, and return the exit code of the verdict."""
    from orchestra.agents.foreground import train_here

    config, run = attempt.config, attempt.run
    stream = sys.stderr if as_json else sys.stdout
    progress = Progress(run, config.train.steps, attempt.number)
    ranks = describe.world_size(config)
    waiting = f"starting {ranks} rank{'s' if ranks > 1 else ''} …"
    view = open_view(progress, attempt.header(), waiting, stream)
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
