"""The rows of `metrics.jsonl` as both planes read them: their keys, and which of them still count.

The trainer appends one row per logged step and never edits the file. A run that was rolled back trains some
steps again and appends their rows a second time; reading keeps the newer ones, and only what lies on the
run's line: an attempt that stood still may append its rows when a newer one has long gone on. Standard
library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from checkpointing.lineage import UNDIVIDED, Lineage
from orchestra.run.events import is_number, is_whole
from orchestra.run.files import JsonLinesReader, Record, read_json_lines, read_last_lines
from orchestra.run.paths import RunDir
from orchestra.run.record import jobs_of
from orchestra.run.run_lineage import read_lineage

# What `mfu` and `hfu` mean, written beside them in every row: PaLM, appendix B (arXiv:2204.02311):
# 6·(N − embedding lookup) + 12·L·h·s FLOPs per token. `mfu_causal` counts attention at half, 6·L·h·s.
MFU_CONVENTION = "palm"

# The keys of every row, in the order they are written. Durations are means over the steps since the last row.
METRIC_KEYS = (
    "step",
    "time",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "mfu_causal",
    "hfu",
    "mfu_convention",
    "step_time_s",
    "data_time_s",
    "memory_peak_bytes",
    # Of all GPUs since the row before, and the mean of one in that time.
    "energy_j",
    "power_w",
    "goodput",
    "nonfinite_steps",
    "attempt",
)

# Those that are numbers, and of which a run can have a last one.
NUMBER_KEYS = tuple(key for key in METRIC_KEYS if key not in ("step", "mfu_convention", "attempt"))
# What the names of losses by source begin with: eval/NAME/loss is held-out, in the row of the step that it
# follows, and train/NAME/loss that of a blend's part in the step of its row.
_EVAL, _TRAIN = "eval/", "train/"
# How often a run has gone through its data, in rows of runs that do more than once.
EPOCH = "data/epoch"
# What data is called that is no blend, where the parts of one are named.
DATA = "data"
# The squared norm of the true gradient, and the variance of one sequence's: means of what the steps since the
# last row say. The noise scale is the quotient of means over many rows.
NOISE_GRADIENT, NOISE_VARIANCE = "noise/gradient_squared", "noise/sequence_variance"
# What the newest rows tell, and the bytes at the end of the file that are read for them: independent of the
# run's length.
RECENT_ROWS = 20
_TAIL_BYTES = 1 << 15
_MANY_ROWS, _MANY_BYTES = 2_000, 1 << 20
# Rows that `FollowedRows` keeps as they are, steps that one row of it may stand for, and the largest share of
# its time that a step's row may have spent outside steps (in a save, an evaluation, a pause) to be folded.
_KEPT_WHOLE, _FOLDED_STEPS, _FOLDED_REST = 4_000, 100, 0.05

# What nearly all values are, and how large at most.
_NUMBERS, _USUAL = frozenset({int, float, type(None)}), 1 << 62


def eval_column(name: str) -> str:
    """Return the column of the mean loss on the held-out source `name`, in nats per token."""
    return f"{_EVAL}{name}/loss"


def is_eval_column(key: str) -> bool:
    """Whether a column is one of held-out data."""
    return key.startswith(_EVAL)


def score_column(metric: str) -> str:
    """Return the column that checkpoint.keep_best compares by run.metric: the training's loss unless it is
    one of held-out data.
    """
    return metric if is_eval_column(metric) else "loss"


def train_column(name: str) -> str:
    """Return the column of the mean training loss on the part `name` of a blend, in nats per token."""
    return f"{_TRAIN}{name}/loss"


def repeats_words(event: Record, most: int = 4) -> str:
    """Say how often a whole run goes through the parts of its data that it repeats, by an event
    `data_repeats`; nothing where that is damaged.
    """
    epochs = event.get("epochs")
    counts = {str(name): n for name, n in epochs.items() if is_number(n)} if isinstance(epochs, dict) else {}
    most_first = sorted(counts, key=lambda name: -counts[name])
    named = ["its data" if name == DATA else name for name in most_first]
    words = [f"{_times(counts[name])} through {of}" for name, of in zip(most_first, named, strict=True)]
    more = f" and {len(words) - most} more parts of its data" if len(words) > most else ""
    return f"goes {', '.join(words[:most])}{more}" if words else ""


def _times(count: float) -> str:
    if count < 1.005:
        return "just over once"
    return f"{count:.3g} times" if count < 100 else f"{count:,.0f} times"


def eval_losses(row: Record) -> dict[str, float]:
    """Return the held-out losses of a row by the names of their sources."""
    return _losses(row, _EVAL)


def train_losses(row: Record) -> dict[str, float]:
    """Return the training losses of a row by the names of a blend's parts."""
    return _losses(row, _TRAIN)


def _losses(row: Record, prefix: str) -> dict[str, float]:
    columns = [key for key in row if key.startswith(prefix) and key.endswith("/loss") and is_number(row[key])]
    return {key[len(prefix) : -len("/loss")]: row[key] for key in columns}


def read_metrics(run: RunDir) -> list[Record]:
    """Return the rows that count, by rising step; a run without metrics yet has none."""
    return rows_that_count(read_json_lines(run.metrics), read_lineage(run))


def recent_rows(run: RunDir, lineage: Lineage) -> list[Record]:
    """Return the last rows that count, `RECENT_ROWS` of them at most."""
    # Where a run went back further than the first rows tell, more are read.
    for num_rows, num_bytes in ((RECENT_ROWS, _TAIL_BYTES), (_MANY_ROWS, _MANY_BYTES)):
        try:
            rows = rows_that_count(read_last_lines(run.metrics, num_rows, num_bytes), lineage)
        except OSError:
            return []
        if rows:
            break
    return rows[-RECENT_ROWS:]


class FollowedRows:
    """All rows of a file in its order, also those that do not count, for who looks at it again and again.

    Each look parses what was written since the one before. Of rows before the newest few thousand, those of
    a hundred steps in a row become one that says of their time, energy and tokens what they said together:
    the accounts are the same, and a run of a million steps takes no more memory and time than a young one.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._reader, self._of_file = JsonLinesReader(self._file), (0, 0)
        self._older: list[Record] = []
        self._newest: list[Record] = []
        # The row before those that become one next, these, and the seconds that the steps of each took.
        self._before: Record = {}
        self._alike: list[Record] = []
        self._seconds: list[float] = []

    def read(self) -> list[Record]:
        """Return the rows that there are now; none of a missing file. Raises OSError."""
        try:
            there = self._file.stat()
        except FileNotFoundError:
            self._begin_anew()
            return []
        of_file = (there.st_dev, there.st_ino)
        if of_file != self._of_file or there.st_size < self._reader.offset:
            # Another run of that name.
            self._begin_anew()
            self._of_file = of_file
        for rows in self._reader.pieces():
            self._newest += rows
            if len(self._newest) >= 2 * _KEPT_WHOLE:
                self._fold()
        return [*self._older, *self._alike, *self._newest]

    def _fold(self) -> None:
        last = self._alike[-1] if self._alike else {}
        for row in self._newest[:-_KEPT_WHOLE]:
            seconds = _time_in_steps(last, row)
            if seconds is None or not self._seconds or row["step"] - self._before["step"] > _FOLDED_STEPS:
                self._end_of_alike()
                self._before = last
            self._alike.append(row)
            self._seconds += [] if seconds is None else [seconds]
            last = row
        del self._newest[:-_KEPT_WHOLE]

    def _end_of_alike(self) -> None:
        """Let the rows that are alike become one where their sums are known, which finite numbers have."""
        rows, energy = self._alike, [row.get("energy_j") for row in self._alike]
        joules = None if None in energy else math.fsum(filter(is_number, energy))
        if len(rows) > 1 and all(map(is_number, self._seconds)) and (joules is not None or not any(energy)):
            steps = rows[-1]["step"] - self._before["step"]
            sums = {"step_time_s": sum(self._seconds) / steps, "energy_j": joules}
            rows = [{**rows[-1], **{key: value for key, value in sums.items() if key in rows[-1]}}]
        self._older += rows
        self._alike, self._seconds = [], []


def _time_in_steps(before: Record, row: Record) -> float | None:
    """Return the seconds since the row before, of the same attempt, that a row's steps took; None where that
    is not known, or much else took place.
    """
    try:
        steps, all_s = row["step"] - before["step"], row["time"] - before["time"]
        seconds = min(steps * row["step_time_s"], all_s)
        is_folded = row["attempt"] == before["attempt"] and steps > 0
        return seconds if is_folded and seconds >= (1.0 - _FOLDED_REST) * all_s >= 0.0 else None
    except (KeyError, TypeError, OverflowError):
        return None


def rows_that_count(rows: Iterable[Record], lineage: Lineage = UNDIVIDED) -> list[Record]:
    """Drop what is off the line, and what was trained again: a row ends the validity of all rows of its step
    and later ones that its attempt or an earlier one has written before.

    The rows come out as `sound_row` makes them; those that have no step are passed over. Older ones do not
    say their attempt: their order counts.
    """
    kept: list[Record] = []
    # By attempt, each one's in the order of the file.
    for row in sorted(filter(None, map(sound_row, rows)), key=lambda row: row.get("attempt", -1)):
        if not lineage.is_on_line(row["step"], row.get("attempt")):
            continue
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def sound_row(row: Record) -> Record | None:
    """Return a row in which every metric is a finite number or None; None for one without a step ≥ 0, or with
    an attempt that is none.
    """
    if not is_whole(row.get("step")) or row["step"] < 0 or not is_whole(row.get("attempt", 0)):
        return None
    # A long run has a million rows, and nearly all are sound.
    if _are_numbers(row):
        return row
    wrong: Record = {
        key: None
        for key, value in row.items()
        if not is_number(value)
        and value is not None
        and (key in NUMBER_KEYS or key.startswith((_EVAL, _TRAIN)))
    }
    if not isinstance(row.get("mfu_convention", ""), str):
        wrong["mfu_convention"] = None
    return {**row, **wrong} if wrong else row


def _are_numbers(row: Record) -> bool:
    """Whether all values but the convention's name are surely finite numbers of usual size, or None."""
    values = list(row.values())
    if isinstance(row.get("mfu_convention"), str):
        values.remove(row["mfu_convention"])
    if not _NUMBERS.issuperset(map(type, values)):
        return False
    numbers = [*filter(None, values)]
    return not numbers or (-_USUAL < min(numbers) <= max(numbers) < _USUAL and math.isfinite(sum(numbers)))


def wall_begin(events: Iterable[Record], record: Record) -> float | None:
    """Return when a run's wall time began: its first submission or start in Unix seconds; None without one.

    `events` are the run's; `record` is its run.json, where alone a member of a sweep finds its submission.
    `goodput` is the seconds in steps that count over all seconds since then.
    """
    times = [event["time"] for event in events if event.get("event") in ("submitted", "attempt_started")]
    times += [entry["submitted"] for entry in jobs_of(record) if is_number(entry.get("submitted"))]
    return min(times, default=None)
