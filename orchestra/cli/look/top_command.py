"""`orchestra top [RUN]`: all runs or one, live in the terminal; keys for logs, why, report and cancel.

It draws with the terminal's own control sequences (ECMA-48) and needs no library, so that it works over ssh.
Into a pipe it prints what there is to see once, as plain text. It only reads; whatever changes a run is the
command that a key starts, and cancel asks first.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import tty
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TextIO

from launchers.slurm.queue import Questions
from orchestra.alerts.detect import look
from orchestra.alerts.observe import observe
from orchestra.alerts.observed import Limits
from orchestra.alerts.outlets import printable
from orchestra.cli.look.top_page import (
    Entry,
    Line,
    RunView,
    Style,
    all_page,
    run_page,
    text_page,
)
from orchestra.cli.text.progress import speaks_unicode
from orchestra.cli.text.resolve import (
    TARGET_HELP,
    Target,
    add_directory_option,
    all_targets,
    resolve_target,
)
from orchestra.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError
from orchestra.report.run_state import RunState, SweepState, runs_of
from orchestra.report.scheduler import read_states
from orchestra.run.events import is_number
from orchestra.run.files import read_last_lines
from orchestra.run.metrics_file import FollowedRows
from orchestra.run.paths import RunDir, SweepDir, read_sweep

_EVERY_S, _LONGEST_EVERY_S, _REDRAW_S = 2.0, 86_400.0, 1.0
# Of the time between two refreshes, that reading may take at most: a run may have a hundred thousand rows.
_READING = 0.1
_LOSS_ROWS, _LOSS_BYTES = 200, 1 << 16
# Of a command that a key starts: how long it may take, and how much of what it said is kept.
_COMMAND_S, _COMMAND_LINES = 60.0, 5_000
_VERBS_OF_KEYS = {"l": "logs", "w": "why", "r": "report"}
_ENTER_SCREEN, _LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
# What terminals send for keys that are no character.
_SEQUENCES = {"\x1b[A": "k", "\x1b[B": "j", "\x1b[5~": "-", "\x1b[6~": " ", "\x1bOA": "k", "\x1bOB": "j"}
_EXPLAINED = """\
  orchestra top        all runs; Enter opens one
  orchestra top first  one run: progress, loss, speed, nodes, what is wrong
  orchestra top | cat  the same once, as plain text
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help=f"{TARGET_HELP} (default: all)")
    parser.add_argument(
        "--every",
        type=float,
        default=_EVERY_S,
        metavar="S",
        help="seconds from one look to the next (%(default)g)",
    )
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Show it until `q`, or once into a pipe, and return 0."""
    if not 0 < arguments.every <= _LONGEST_EVERY_S:
        raise ConfigError(f"--every {arguments.every:g}: expected seconds above 0, a day of them at most")
    target = None if arguments.run is None else resolve_target(arguments.run, arguments.dir)
    top = Top(arguments.dir, target)
    if not (sys.stdout.isatty() and sys.stdin.isatty()) or os.environ.get("TERM") == "dumb":
        width = shutil.get_terminal_size((80, 24)).columns
        top.read()
        print("\n".join(text for _, text in top.page(width, None, has_blocks=speaks_unicode(sys.stdout))))
        return EXIT_DONE
    with _screen(sys.stdin.fileno(), sys.stdout):
        _follow(top, arguments.every)
    return EXIT_DONE


@dataclass
class Top:
    """What is shown, and what the keys do to it."""

    parent: Path
    # The run or sweep that was opened; None: all.
    target: Target | None
    entries: list[Entry] = field(default_factory=list)
    view: RunView | None = None
    chosen: int = 0
    # A text instead: its title, its lines, the first one shown.
    text: tuple[str, list[str]] | None = None
    first_line: int = 0
    # The command that waits for a yes.
    asks: tuple[str, ...] = ()
    is_over: bool = False
    _questions: Questions = field(default_factory=Questions)
    # The rows of the run that is looked at, by its path.
    _rows: dict[str, FollowedRows] = field(default_factory=dict)

    def read(self) -> None:
        """Read what the page shows."""
        now = time.time()
        self._leave_removed()
        if isinstance(self.target, RunDir):
            (state,), _ = read_states([self.target], now, self._questions)
            assert isinstance(state, RunState)
            if state.path not in self._rows:
                self._rows = {state.path: FollowedRows(self.target.metrics)}
            observed = observe(state, now, {}, self._rows[state.path])
            self.view = RunView(state, observed, look(observed, Limits()))
            return
        self.view = None
        targets = all_targets(self.parent) if self.target is None else _members(self.target)
        states, _ = read_states(targets, now, self._questions)
        self.entries = [Entry(state, _losses(state)) for state in states]
        self.chosen = max(0, min(self.chosen, len(self.entries) - 1))

    def _leave_removed(self) -> None:
        """Say so where what is shown was removed: it would look like a run that has not begun."""
        # What cannot be seen is told when it is read.
        with contextlib.suppress(OSError):
            if self.target is not None and not self.target.has_records():
                self.text = (self.target.name, ["its records are gone: it was removed or renamed"])
                self.target, self.view, self.chosen = None, None, 0

    def page(self, width: int, height: int | None, *, has_blocks: bool) -> list[Line]:
        """Return what is to be drawn."""
        if self.text is not None and height is not None:
            lines = text_page(*self.text, self.first_line, width, height)
        elif self.view is not None:
            lines = run_page(self.view, width, height, has_blocks=has_blocks)
        else:
            lines = all_page(self.entries, self.chosen, time.time(), width, height, has_blocks=has_blocks)
        if self.asks:
            name = printable(Path(self.asks[1]).name)
            lines[-1] = (
                Style.bad,
                f"{self.asks[0]} {name}? y: yes, it saves and stops; any other key: no"[:width],
            )
        return lines

    def press(self, key: str, height: int, perform: Callable[[Sequence[str]], list[str]]) -> None:
        """Do what a key says; `perform` runs an `orchestra` command and returns what it said."""
        if self.asks:
            words, self.asks = self.asks, ()
            if key == "y":
                self._show(words, perform)
        elif key == "q":
            self.is_over = True
        elif self.text is not None:
            self._scroll(key, height)
        elif key in ("j", "k") and self.view is None:
            step = 1 if key == "j" else -1
            self.chosen = max(0, min(self.chosen + step, len(self.entries) - 1))
        elif key in ("\r", "\n") and self.view is None and self.entries:
            self.target = self._chosen()
            self.chosen = 0
            self.read()
        elif key in ("b", "\x1b"):
            self.target, self.view = None, None
            self.read()
        elif key == "c" and (target := self._chosen()) is not None:
            self.asks = ("cancel", str(target.path))
        elif key in _VERBS_OF_KEYS and (target := self._chosen()) is not None:
            self._show((_VERBS_OF_KEYS[key], str(target.path)), perform)

    def _chosen(self) -> Target | None:
        if isinstance(self.target, RunDir):
            return self.target
        if not self.entries:
            return None
        state = self.entries[self.chosen].state
        return state.sweep if isinstance(state, SweepState) else RunDir(Path(state.path))

    def _show(self, words: Sequence[str], perform: Callable[[Sequence[str]], list[str]]) -> None:
        said = perform(words)
        self.text = (f"orchestra {words[0]} {Path(words[1]).name}", said)
        # Of logs the end is wanted.
        self.first_line = max(0, len(said) - 20) if words[0] == "logs" else 0

    def _scroll(self, key: str, height: int) -> None:
        assert self.text is not None
        steps = {"j": 1, "k": -1, " ": height - 3, "-": 3 - height, "\r": 1}
        if key in steps:
            last = max(0, len(self.text[1]) - (height - 2))
            self.first_line = max(0, min(self.first_line + steps[key], last))
        elif key in ("b", "\x1b"):
            self.text = None


def _members(sweep: SweepDir) -> list[Target]:
    return [run for _, run in runs_of(sweep, read_sweep(sweep))]


def _losses(state: RunState | SweepState) -> list[float]:
    if isinstance(state, SweepState):
        return []
    try:
        rows = read_last_lines(RunDir(Path(state.path)).metrics, _LOSS_ROWS, _LOSS_BYTES)
    except OSError:
        return []
    return [row["loss"] for row in rows if is_number(row.get("loss"))]


def _follow(top: Top, every_s: float) -> None:
    """Draw, and act on keys, until it is over."""
    has_blocks = speaks_unicode(sys.stdout)
    read_at, took_s = -float("inf"), 0.0
    while not top.is_over:
        began = time.monotonic()
        if began - read_at >= max(every_s, took_s / _READING) and top.text is None:
            top.read()
            read_at, took_s = time.monotonic(), time.monotonic() - began
        width, height = os.get_terminal_size(sys.stdout.fileno())
        _draw(top.page(width, height, has_blocks=has_blocks), sys.stdout)
        # A window of another size is drawn anew at the next turn.
        for key in _keys(sys.stdin.fileno(), min(every_s, _REDRAW_S)):
            top.press(key, height, _perform)


def _draw(lines: Sequence[Line], stream: TextIO) -> None:
    """Draw a page over the last one, as one write, so that nothing flickers."""
    drawn = [f"\x1b[{style.value}m{text}\x1b[0m" if style.value else text for style, text in lines]
    # What the page before had in a line is erased after its end; the last line must not scroll.
    stream.write("\x1b[H" + "\x1b[K\r\n".join(drawn) + "\x1b[K\x1b[J")
    stream.flush()


def _keys(terminal: int, timeout_s: float) -> list[str]:
    """Return the keys that were pressed, as soon as there are some; none after the time-out."""
    if not select.select([terminal], [], [], timeout_s)[0]:
        return []
    text = os.read(terminal, 1024).decode(errors="ignore")
    if not text:
        # The terminal is gone.
        return ["q"]
    if text in _SEQUENCES:
        return [_SEQUENCES[text]]
    # A sequence that is not known is no key; Escape alone is one.
    return list(text) if not text.startswith("\x1b") or text == "\x1b" else []


def _perform(words: Sequence[str]) -> list[str]:
    """Run a command of ours and return the end of what it said."""
    command = [sys.executable, "-m", "orchestra", *words]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"no answer within {_COMMAND_S:g} s"]
    lines = done.stdout.decode(errors="replace").splitlines()[-_COMMAND_LINES:]
    return [*lines, *([f"it ended with code {done.returncode}"] if done.returncode else [])]


@contextlib.contextmanager
def _screen(terminal: int, stream: TextIO) -> Iterator[None]:
    """Take the terminal: its other screen, keys as they are pressed. It is as before in any case after."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(EXIT_INTERRUPTED)

    before = termios.tcgetattr(terminal)
    handlers = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        # Ctrl-C still interrupts.
        tty.setcbreak(terminal)
        stream.write(_ENTER_SCREEN)
        yield
    finally:
        with contextlib.suppress(OSError):
            stream.write(_LEAVE_SCREEN)
            stream.flush()
        # A terminal that was closed takes no settings.
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
