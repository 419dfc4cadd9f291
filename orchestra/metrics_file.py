"""The rows of `metrics.jsonl` as both planes read them: their keys, and which of them still count.

The trainer appends one row per logged step and never edits the file. A run that was rolled back trains some
steps again and appends their rows a second time; reading keeps the newer ones. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestra.jsonl import Record, read_json_lines
from orchestra.rundir import RunDir

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
    "goodput",
    "nonfinite_steps",
)


def read_metrics(run: RunDir) -> list[Record]:
    """Return the rows that count, by rising step; a run without metrics yet has none."""
    return rows_that_count(read_json_lines(run.metrics))


def rows_that_count(rows: Iterable[Record]) -> list[Record]:
    """Drop what a rollback made void: a row ends the validity of all earlier rows of its step and later ones.

    Rows without an integer `step` are passed over.
    """
    kept: list[Record] = []
    for row in rows:
        if not isinstance(row.get("step"), int):
            continue
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def productive_seconds(rows: Sequence[Record]) -> float:
    """Return the seconds spent in the steps that `rows` (rising, complete from step 1) cover."""
    seconds, previous = 0.0, 0
    for row in rows:
        seconds += float(row.get("step_time_s") or 0.0) * (row["step"] - previous)
        previous = row["step"]
    return seconds
