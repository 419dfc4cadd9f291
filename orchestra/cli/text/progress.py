"""Follows a run's metrics while they grow, and sums them up."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from orchestra.report.run_state import failed_save, median_of, passed_over, seconds_left
from orchestra.run.events import is_whole, rank_writer
from orchestra.run.files import JsonLinesReader, Record
from orchestra.run.metrics_file import rows_that_count, sound_row
from orchestra.run.paths import RunDir

# What is remembered of each row: a run may have a million of them.
_KEPT = ("step", "loss", "tokens_per_s", "mfu", "mfu_causal", "step_time_s")


class Progress:
    """The rows of one run so far, and what becomes of its checkpoints in the attempt that is watched.

    `update` reads what is new; the rest are views of it.
    """

    def __init__(self, run: RunDir, steps: int, attempt: int = 0) -> None:
        self.steps = steps
        self.rows: list[Record] = []
        # The newest row, whole; empty before the first.
        self.last: Record = {}
        self.began = time.monotonic()
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
            self.update()
            self.has_begun = False

    def follow(self, attempt: int) -> None:
        """Watch another attempt of the run from now on; -1, between two attempts, changes nothing."""
        if attempt in (-1, self._attempt):
            return
        self._follow_checkpoints()
        self._attempt, self.saving = attempt, None
        self._events = JsonLinesReader(self._run.event_file(rank_writer(attempt, 0)))

    def notice(self, words: str) -> None:
        """Add what a person should read."""
        self._notices.append(words)

    def update(self) -> list[Record]:
        """Read the rows written since the last call and return them."""
        new = [row for read in self._reader.read_new() if (row := sound_row(read)) is not None]
        self._follow_checkpoints()
        if new:
            self.has_begun = True
            rows = [{key: row.get(key) for key in _KEPT} for row in new]
            if self.rows and rows[0]["step"] <= self.rows[-1]["step"]:
                self.rows = rows_that_count([*self.rows, *rows])
            else:
                self.rows += rows_that_count(rows)
            self.last = new[-1]
        return new

    def _follow_checkpoints(self) -> None:
        for event in self._events.read_new():
            name, step = event.get("event"), event.get("step")
            if name == "micro_batch_chosen":
                chosen = f"micro-batch {event.get('size')} × accumulation {event.get('accumulation')}"
                self._notices.append(f"{chosen}: the largest that fits")
            if not is_whole(step):
                continue
            if name == "checkpoint_started":
                self.saving = step
            elif name == "checkpoint_committed":
                self.saving = None
            elif name == "checkpoint_failed":
                self.saving = None
                self._notices.append(failed_save(event))
            elif name == "stop_requested":
                self._notices.append(f"stopping after step {step}: {event.get('reason', 'asked to')}")
            elif name == "restored":
                self._notices += [*passed_over(event), _restored(event, step)]

    def take_notices(self) -> list[str]:
        """Return what a person should read of choices, restores, failed saves, stops; each is given once."""
        taken, self._notices = self._notices, []
        return taken

    @property
    def losses(self) -> list[float]:
        """The finite losses so far."""
        return [row["loss"] for row in self.rows if _is_finite(row["loss"])]

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the recent pace."""
        return seconds_left(self.rows, self.steps) if self.rows else None

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
    tokens: int | None
    tokens_per_s: float | None
    mfu: float | None
    mfu_causal: float | None
    mfu_convention: str | None
    wall_s: float


def _restored(event: Record, step: int) -> str:
    if step:
        return f"restored the checkpoint of step {step}"
    reason = event.get("reason")
    return f"begins at step 1{f': {reason}' if isinstance(reason, str) else ''}"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
