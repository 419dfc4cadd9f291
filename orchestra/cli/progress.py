"""Follows a run's metrics while they grow, and sums them up. It shows nothing and starts nothing."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from orchestra.jsonl import JsonLinesReader, Record
from orchestra.metrics_file import rows_that_count, sound_row
from orchestra.report.state import median_of, seconds_left
from orchestra.rundir import RunDir

# What is remembered of each row: a run may have a million of them.
_KEPT = ("step", "loss", "tokens_per_s", "mfu", "mfu_causal", "step_time_s")


class Progress:
    """The rows of one run so far. `update` reads what is new; the rest are views of it."""

    def __init__(self, run: RunDir, steps: int) -> None:
        self.steps = steps
        self.rows: list[Record] = []
        # The newest row, whole; empty before the first.
        self.last: Record = {}
        self.began = time.monotonic()
        self._reader = JsonLinesReader(run.metrics)

    def update(self) -> list[Record]:
        """Read the rows written since the last call and return them."""
        new = [row for read in self._reader.read_new() if (row := sound_row(read)) is not None]
        if new:
            rows = [{key: row.get(key) for key in _KEPT} for row in new]
            if self.rows and rows[0]["step"] <= self.rows[-1]["step"]:
                self.rows = rows_that_count([*self.rows, *rows])
            else:
                self.rows += rows_that_count(rows)
            self.last = new[-1]
        return new

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


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
