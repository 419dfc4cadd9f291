"""What the rows of metrics.jsonl show over the life of a run, thinned for a page. Pure.

A long run has more rows than a screen has dots. Of each stretch of rows a few are kept, whole: its first and
last, and those with the extremes that a reader looks for, so that no spike is thinned away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from orchestra.run.events import is_number
from orchestra.run.files import Record
from orchestra.run.metrics_file import is_eval_column

# Rows of one run that a page shows.
MOST_ROWS = 2_000
# The columns that are drawn, beside losses by source and those of experts.
COLUMNS = (
    *("step", "time", "tokens", "loss", "grad_norm", "lr", "tokens_per_s", "mfu", "mfu_causal", "hfu"),
    *("step_time_s", "data_time_s", "memory_peak_bytes", "goodput", "attempt"),
    # Null where nothing can be read.
    *("energy_j", "power_w"),
)
_EXTREMES: tuple[tuple[Callable[..., Record], str], ...] = (
    (min, "loss"),
    (max, "loss"),
    (max, "grad_norm"),
    (min, "tokens_per_s"),
    (max, "step_time_s"),
)
_OF_EXPERTS = "moe/"
# Rows that follow, of which each keeps its first and last row as well.
_KEPT_OF_STRETCH = len(_EXTREMES) + 2


def thinned(rows: Sequence[Record], most: int = MOST_ROWS) -> list[Record]:
    """Return at most about `most` of the rows, in their order; all where they are no more."""
    if len(rows) <= most:
        return list(rows)
    num_stretches = max(1, most // _KEPT_OF_STRETCH)
    kept: list[Record] = []
    for index in range(num_stretches):
        begin, end = (round(edge * len(rows) / num_stretches) for edge in (index, index + 1))
        stretch = rows[begin:end]
        chosen = {id(stretch[0]), id(stretch[-1])}
        for pick, key in _EXTREMES:
            if known := [row for row in stretch if is_number(row.get(key))]:
                chosen.add(id(pick(known, key=lambda row: row[key])))
        # A loss that is no number is what somebody looks for.
        chosen.update(id(row) for row in [row for row in stretch if row.get("loss") is None][:1])
        # What is measured now and then stands in few rows; where it is measured always, in too many.
        evaluated: dict[str, list[Record]] = {}
        for row in stretch:
            for key in filter(is_eval_column, row):
                evaluated.setdefault(key, []).append(row)
        for of_one in evaluated.values():
            chosen.update(id(of_one[round(edge * (len(of_one) - 1) / 2)]) for edge in range(3))
        kept += [row for row in stretch if id(row) in chosen]
    return kept


def curves(rows: Sequence[Record], flops_per_token: int | None, began: float | None) -> Record:
    """Return the columns of the thinned rows: lists of one length, None where a row has no number.

    `time_s` counts from `began` (Unix seconds); `flops` is the model's work so far. `rows` count all.
    """
    shown = thinned(rows)
    table: Record = {key: _column(shown, key) for key in COLUMNS}
    times = [time for time in table.pop("time") if time is not None]
    start = began if began is not None else min(times, default=0.0)
    table["time_s"] = [_rounded(row["time"] - start) if is_number(row.get("time")) else None for row in shown]
    table["flops"] = [
        _rounded(row["tokens"] * flops_per_token)
        if flops_per_token and is_number(row.get("tokens"))
        else None
        for row in shown
    ]
    others = _other_columns(shown)
    return {
        "num_rows": len(rows),
        "is_thinned": len(shown) < len(rows),
        "columns": {
            key: values for key, values in table.items() if any(value is not None for value in values)
        },
        "sources": {key: _column(shown, key) for key in others if key.endswith("/loss")},
        "experts": {key: _column(shown, key) for key in others if key.startswith(_OF_EXPERTS)},
        "tokens_per_expert": _tokens_per_expert(rows[-1] if rows else {}),
    }


def void_curve(all_rows: Iterable[Record], counted: Iterable[Record]) -> Record:
    """Return step and loss of the rows that a roll-back or a restart made void, in the order of the file."""
    counting = {(row["step"], str(row.get("time"))) for row in counted}
    void = [
        row
        for row in all_rows
        if is_number(row.get("step")) and (row["step"], str(row.get("time"))) not in counting
    ]
    shown = thinned(void, MOST_ROWS // 4)
    return {
        "step": _column(shown, "step"),
        "loss": _column(shown, "loss"),
        "attempt": _column(shown, "attempt"),
        "num_rows": len(void),
    }


def _other_columns(rows: Iterable[Record]) -> list[str]:
    """Return the names of losses by source, and of what experts measure, that any row has."""
    found: dict[str, None] = {}
    for row in rows:
        for key in row:
            is_loss = key.startswith(("eval/", "train/")) and key.endswith("/loss")
            if is_loss or (key.startswith(_OF_EXPERTS) and not isinstance(row[key], list)):
                found[key] = None
    return sorted(found)


def _tokens_per_expert(row: Record) -> dict[str, list[float]]:
    """Return the last row's number of tokens by expert, by layer."""
    return {
        key.removeprefix(_OF_EXPERTS).partition("/")[0]: [each for each in value if is_number(each)]
        for key, value in row.items()
        if key.startswith(_OF_EXPERTS) and key.endswith("/tokens_per_expert") and isinstance(value, list)
    }


def _column(rows: Iterable[Record], key: str) -> list[float | int | None]:
    return [_rounded(row[key]) if is_number(row.get(key)) else None for row in rows]


def _rounded(value: float) -> float | int:
    """Return six significant digits: half of what `repr` takes, and more than a screen shows."""
    return value if isinstance(value, int) else float(f"{value:.6g}")
