"""Which of a run's jobs trains it that was submitted for several kinds of nodes (`cluster.alternatives`).

The first of them that starts makes control/alternative.json, once for the run's life; so does whoever cancels
the run while all of them wait. Standard library only.
"""

from __future__ import annotations

import json

from orchestra.run.files import Record, make_once, read_json
from orchestra.run.paths import RunDir

# Chosen by whoever cancels the run: none of them.
NONE = -1


def chosen_alternative(run: RunDir) -> int | None:
    """Return the number of the alternative that trains; None while none has started."""
    number = (read_json(run.alternative) or {}).get("alternative")
    return number if isinstance(number, int) else None


def choose_alternative(run: RunDir, number: int, job: str) -> bool:
    """Let this alternative, or `NONE`, be the one; return False where one was chosen. Raises OSError."""
    run.control.mkdir(exist_ok=True)
    return make_once(run.alternative, json.dumps({"alternative": number, "job": job}) + "\n")


def in_order(run: RunDir, record: Record) -> Record:
    """Return a run's record with the job of the chosen alternative as the newest one."""
    jobs = record.get("jobs")
    if not isinstance(jobs, list) or not jobs:
        return record
    if not isinstance(jobs[-1], dict) or "alternative" not in jobs[-1]:
        return record
    number = chosen_alternative(run)
    ordered = sorted(jobs, key=lambda entry: isinstance(entry, dict) and entry.get("alternative") == number)
    return {**record, "jobs": ordered}
