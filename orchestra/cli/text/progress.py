"""What a person sees of a run while it trains here: one live line on a terminal, plain lines anywhere else.

`Progress` reads metrics.jsonl like anybody could; it has no part in the training and cannot slow it. A view
whose output goes nowhere any more (a closed pipe, a full disk, a terminal that is gone) falls silent, one
that fails says so in the end, and the training goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from orchestra.cli.text import figures
from orchestra.report.run_state import failed_save, median_of, outage, passed_over, read_twice, seconds_left
from orchestra.run.events import is_number, is_whole, rank_writer
from orchestra.run.files import JsonLinesReader, Record
from orchestra.run.metrics_file import eval_losses, repeats_words, rows_that_count, sound_row, train_losses
from orchestra.run.paths import RunDir

if TYPE_CHECKING:
    from rich.console import RenderableType

_PLAIN_LINES = 50
_REFRESH_S = 0.5
_SHORTEST_BAR = 4
_STOPPING = "stopping after this step, with a checkpoint (Ctrl-C again: at once)"
_STOPPING_UNSAVED = "stopping after this step; nothing is saved (Ctrl-C again: at once)"
# Before the first row: whether a step is on nobody here knows.
_STOPPING_UNBEGUN = "stopping (Ctrl-C again: at once)"
_OF_CLOSING = re.compile(r"(attempt \d+ finished: )?finished")
# How many rows are remembered, and what of each: a run may have a million of them.
_MOST_ROWS = 20_000
_KEPT = ("step", "attempt", "loss", "tokens", "tokens_per_s", "mfu", "mfu_causal", "step_time_s")


class Progress:
    """The rows of one run so far, and what becomes of its checkpoints in the attempt that is watched.

    `update` reads what is new; the rest are views of it.
    """

    def __init__(
        self, run: RunDir, steps: int, attempt: int = 0, tokens: int | None = None, *, saves: bool = True
    ) -> None:
        self.steps = steps
        self._saves = saves
        # Of the whole run; None: all steps have the same number.
        self.tokens = tokens
        self.rows: list[Record] = []
        # The newest row, whole; empty before the first.
        self.last: Record = {}
        self.began = time.monotonic()
        # The newest held-out losses by source.
        self.held_out: dict[str, float] = {}
        # Whether anything was trained since this object was made.
        self.has_begun = False
        # The step whose checkpoint is being written.
        self.saving: int | None = None
        self._notices: list[str] = []
        self._run = run
        self._attempt = attempt
        self._reader = JsonLinesReader(run.metrics)
        self._events = JsonLinesReader(run.event_file(rank_writer(attempt, 0)))
        if attempt:
            # What the attempts before trained is no news.
            for _ in self._read():
                pass
            self._follow_checkpoints()
            self.has_begun = False

    @property
    def stopping(self) -> str:
        """What is said once it was asked to stop."""
        if not self.has_begun:
            return _STOPPING_UNBEGUN
        return _STOPPING if self._saves else _STOPPING_UNSAVED

    def follow(self, attempt: int) -> None:
        """Watch another attempt of the run from now on; -1, between two attempts, changes nothing."""
        if attempt in (-1, self._attempt):
            return
        self._follow_checkpoints()
        self._attempt, self.saving = attempt, None
        self._events = JsonLinesReader(self._run.event_file(rank_writer(attempt, 0)))

    def notice(self, words: str) -> None:
        """Add what a person should read, but for what the closing lines say."""
        if not _OF_CLOSING.fullmatch(words):
            self._notices.append(words)

    def update(self) -> list[Record]:
        """Read the rows written since the last call and return them."""
        new = list(itertools.chain.from_iterable(self._read()))
        self._follow_checkpoints()
        return new

    def _read(self) -> Iterator[list[Record]]:
        """Take the rows written since the last call, and yield them in parts: there may be a million."""
        for records in self._reader.pieces():
            if new := [row for read in records if (row := sound_row(read)) is not None]:
                self._take(new)
                yield new

    def _take(self, new: list[Record]) -> None:
        self.has_begun = True
        rows = [{"attempt": -1} | {key: row[key] for key in _KEPT if key in row} for row in new]
        following = rows_that_count([*self.rows[-1:], *rows])
        if self.rows and following[0] is self.rows[-1]:
            self.rows += following[1:]
        else:
            # Somewhere among them the run went back.
            self.rows = rows_that_count([*self.rows, *rows])
        if len(self.rows) > _MOST_ROWS:
            # Of older ones every second is forgotten, and then again.
            newest = _MOST_ROWS // 2
            self.rows = [*self.rows[:-newest:2], *self.rows[-newest:]]
        for row in new:
            self.held_out = eval_losses(row) or self.held_out
        last = self.last.get("attempt", -1)
        # Of one that was replaced none counts any more.
        self.last = next((row for row in new[::-1] if row.get("attempt", last) >= last), self.last)

    def _follow_checkpoints(self) -> None:
        for event in self._events.read_new():
            name, step = event.get("event"), event.get("step")
            if name == "micro_batch_chosen":
                chosen = f"micro-batch {event.get('size')} × accumulation {event.get('accumulation')}"
                self._notices.append(f"{chosen}: the largest that fits")
            elif name == "compile_off":
                self._notices.append(f"training without torch.compile: {event.get('cause')}")
            elif name == "devices_shared":
                self._notices.append(_shared_devices(event))
            elif name == "data_repeats" and (repeats := repeats_words(event)):
                self._notices.append(f"the run {repeats}")
            elif name in ("restore_waits", "fallback_unusable", "fallback_unreachable"):
                self._notices.append(outage(event))
            if not is_whole(step):
                continue
            if name == "checkpoint_started":
                self.saving = step
            elif name in ("checkpoint_committed", "checkpoint_failed"):
                self.saving = None
                self._notices += [failed_save(event)] if name == "checkpoint_failed" else []
                if "fallback" in event:
                    self._notices.append(f"the checkpoint of step {step} is in {event['fallback']}")
            elif name == "last_save_waits":
                patience = figures.duration(event.get("patience_s"))
                self._notices.append(f"its state is kept in memory, and saving it tried again for {patience}")
            elif name == "best_begins_anew":
                self._notices.append(
                    f"checkpoint.keep_best begins anew after step {step}: its loss is measured otherwise"
                )
            elif name == "experts_moved":
                self._notices.append(_moved_experts(event, step))
            elif name == "evaluation_left":
                self._notices.append(f"left the evaluation after step {step}: {event.get('cause')}")
            elif name == "stop_requested":
                self._notices.append(f"stopping after step {step}: {event.get('reason', 'asked to')}")
            elif name == "restored":
                self._notices += [*passed_over(event), *read_twice(event), _restored(event, step)]

    def take_notices(self) -> list[str]:
        """Return what a person should read of choices, restores, failed saves, stops; each is given once."""
        taken, self._notices = self._notices, []
        return taken

    @property
    def losses(self) -> list[float]:
        """The finite losses so far."""
        return [row["loss"] for row in self.rows if is_number(row.get("loss"))]

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the recent pace."""
        return seconds_left(self.rows, self.steps, self.tokens) if self.rows else None

    @property
    def wall_s(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self.began

    def summary(self) -> Summary:
        """Sum up what has been trained."""
        losses = self.losses
        # The first rows hold warm-up: allocations, compilation, caches.
        steady = self.rows[len(self.rows) // 10 :]
        return Summary(
            step=self.last.get("step"),
            steps=self.steps,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            num_skipped=self.last.get("nonfinite_steps") or 0,
            train=train_losses(self.last),
            eval=self.held_out,
            tokens=self.last.get("tokens"),
            tokens_per_s=median_of(steady, "tokens_per_s"),
            mfu=median_of(steady, "mfu"),
            mfu_causal=median_of(steady, "mfu_causal"),
            mfu_convention=self.last.get("mfu_convention"),
            wall_s=self.wall_s,
        )


@dataclass(frozen=True)
class Summary:
    """A run in numbers; medians leave out the first tenth of the rows. None where nothing was measured."""

    step: int | None
    steps: int
    first_loss: float | None
    last_loss: float | None
    # Steps without an update since the run began: their loss or gradient was not finite.
    num_skipped: int
    # The training losses of a blend's parts in the last row, and the newest held-out losses by source.
    train: Mapping[str, float]
    eval: Mapping[str, float]
    tokens: int | None
    tokens_per_s: float | None
    mfu: float | None
    mfu_causal: float | None
    mfu_convention: str | None
    wall_s: float


def _shared_devices(event: Record) -> str:
    nccl = f"NCCL {event['nccl']}" if event.get("nccl") else "NCCL"
    carrier = nccl if event.get("backend") == "nccl" else f"gloo, for want of a newer {nccl}"
    return f"{event.get('ranks')} ranks share a GPU; their collectives go over {carrier}"


def _moved_experts(event: Record, step: int) -> str:
    before, expected = (figures.quantity(event.get(key)) for key in ("load_before", "load_expected"))
    moved = f"{event.get('experts')} experts of {event.get('layers')} layers moved"
    return f"step {step}: {moved}; the busiest rank had {before} times the mean's tokens, so {expected}"


def _restored(event: Record, step: int) -> str:
    if step:
        return f"restored the checkpoint of step {step}"
    reason = event.get("reason")
    return f"begins at step 1{f': {reason}' if isinstance(reason, str) else ''}"


class View(Protocol):
    """Shows a run's progress."""

    def tick(self, stops: int) -> None:
        """Show what is new; called about ten times a second. `stops` counts the requests to stop so far."""

    def close(self) -> None:
        """Show the last state."""


def open_view(progress: Progress, header: Iterable[str], waiting: str, stream: TextIO) -> GuardedView:
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
    """A view whose failure ends the view, never the training, and what is said after it."""

    def __init__(self, make: Callable[[], View], stream: TextIO) -> None:
        self._stream = stream
        self._view: View | None = None
        self._problem: str | None = None
        with self._guarded():
            self._view = make()

    def tick(self, stops: int) -> None:
        """See `View.tick`."""
        if self._view is not None and self._problem is None:
            with self._guarded():
                self._view.tick(stops)

    def close(self, lines: Iterable[str]) -> None:
        """Show the last state and then `lines`."""
        if self._view is not None:
            # After a failure too: a terminal is put back as it was.
            with self._guarded():
                self._view.close()
        for line in [*([] if self._problem is None else [self._problem]), *lines]:
            _print(line, self._stream)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
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
        # Held-out losses that no line had yet.
        self._held_out: dict[str, float] = {}
        self._stops = 0

    def tick(self, stops: int) -> None:
        rows = self._progress.update()
        for notice in self._progress.take_notices():
            _print(notice, self._stream)
        for row in rows:
            self._held_out = eval_losses(row) or self._held_out
            if row["step"] >= self._next_step or row["step"] == self._progress.steps:
                self._next_step = (row["step"] // self._every + 1) * self._every
                step = f"step {row['step']:>{len(str(self._progress.steps))}}/{self._progress.steps}"
                _print(
                    f"{step}  {_measures(row)}{self._eval()}  ETA {_eta(self._progress, row)}", self._stream
                )
        if stops > self._stops:
            self._stops = stops
            _print(self._progress.stopping if stops == 1 else "stopping at once", self._stream)

    def _eval(self) -> str:
        """Return the held-out losses that no line had yet."""
        found, self._held_out = self._held_out, {}
        return f"  eval {figures.named_losses(found)}" if found else ""

    def close(self) -> None:
        self.tick(self._stops)


def _measures(row: Record, omitted: int = 0) -> str:
    """Return loss, speed, MFU and gradient norm of a row, in that order, the last `omitted` left out."""
    texts = [
        f"loss {figures.loss(row.get('loss'))}",
        f"{figures.quantity(row.get('tokens_per_s'))} tok/s",
        f"MFU {figures.percent(row.get('mfu'))}",
        f"|g| {figures.quantity(row.get('grad_norm'))}",
    ]
    return "  ".join(texts[: len(texts) - omitted])


def _eta(progress: Progress, row: Record) -> str:
    return "0:00" if row["step"] >= progress.steps else figures.duration(progress.seconds_left)


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

        stopping = [Text(self._progress.stopping, style="yellow")] if stops else []
        if not self._progress.has_begun:
            return Group(Text(f"{self._waiting} {self._progress.wall_s:.0f} s", style="dim"), *stopping)
        # Room for the "^C" that a terminal echoes: where it wraps, the lines above are not drawn over.
        width = shutil.get_terminal_size((figures.WIDTH, 24)).columns - len("^C")
        curve = Text(self._curve(width), style="cyan", no_wrap=True)
        return Group(curve, self._bar(width), *stopping)

    def _curve(self, width: int) -> str:
        losses = self._progress.losses
        first, last = (f"loss {losses[0]:.2f} ", f" {losses[-1]:.2f}") if losses else ("", "")
        room = width - len(first) - len(last)
        if not losses or room < 1 or not speaks_unicode(self._stream):
            return ""
        return first + figures.sparkline(losses, room) + last

    def _bar(self, width: int) -> RenderableType:
        from rich.text import Text

        numbers = self._numbers(width)
        room = width - len(numbers)
        if room < _SHORTEST_BAR:
            return Text(numbers.strip(), no_wrap=True)
        done = min(room, room * self._progress.last["step"] // self._progress.steps)
        full, empty = ("━", "─") if speaks_unicode(self._stream) else ("#", ".")
        return Text.assemble((full * done, "green"), (empty * (room - done), "dim"), numbers, no_wrap=True)

    def _numbers(self, width: int) -> str:
        """Return as many numbers as fit, the least important left out first: |g|, MFU, tokens/s."""
        row, eta = self._progress.last, _eta(self._progress, self._progress.last)
        step = f" {row['step']}/{self._progress.steps}"
        saving = "  saving" if self._progress.saving is not None else ""
        held_out = figures.named_losses(self._progress.held_out)
        texts = [f"{step}  {_measures(row)}  eval {held_out}  ETA {eta}{saving}"] if held_out else []
        texts += [f"{step}  {_measures(row, omitted)}  ETA {eta}{saving}" for omitted in range(4)]
        return next((text for text in texts if len(text) <= width), texts[-1])

    def close(self) -> None:
        self._update()
        try:
            # Drawn by stop().
            self._live.update(self._drawing(stops=0))
        finally:
            self._live.stop()
