"""How runs ended that a command waited for: a table, or JSON. It waits through `orchestra.submit.waiting`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestra.rundir import RunDir
    from orchestra.submit.sweeper import Trial
    from orchestra.submit.waiting import Result


def _trial(trial: Trial) -> dict[str, Any]:
    row = {"overrides": list(trial.chosen), "state": "refused"}
    return row if trial.result is None else {**row, **_result(trial.result)}


def wait(runs: Sequence[RunDir], metric: str, *, as_json: bool) -> int:
    """Wait for runs, print how each ended, and return the code of the worst end."""
    from orchestra.submit import waiting

    results = waiting.wait_for(runs, metric)
    rows = [_result(result) for result in results]
    print(json.dumps({"results": rows}, indent=2) if as_json else _table(rows))
    return waiting.exit_code(results)


def _result(result: Result) -> dict[str, Any]:
    from orchestra.report.state import name_of

    identity = {"name": name_of(result.run), "path": str(result.run.path), "state": result.state}
    value = {"metric": result.metric, "value": result.value, "cause": result.cause}
    return {**identity, "code": result.code, **value}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        (row.get("name", "–"), row["state"], _value(row), " ".join(row.get("overrides", ()))) for row in rows
    ]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell[column].ljust(widths[column]) for column in range(3)), cell[3]]).rstrip()
        for cell in cells
    )


def _value(row: dict[str, Any]) -> str:
    if "metric" not in row:
        return ""
    return f"{row['metric']} {'none' if row['value'] is None else format(row['value'], '.6g')}"


def print_trials(trials: Sequence[Trial], *, as_json: bool) -> None:
    """Print what a sweeper chose, and how each of its trials ended."""
    rows = [_trial(trial) for trial in trials]
    print(json.dumps({"trials": rows}, indent=2) if as_json else _table(rows))
