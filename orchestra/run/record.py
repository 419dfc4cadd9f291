"""What a worker reads of the run's record, `run.json`; it writes nothing into it."""

from __future__ import annotations

import json

from orchestra.run.files import Record
from orchestra.run.paths import RunDir


def run_record(run: RunDir) -> Record:
    """Return the record; empty where it is missing or torn."""
    try:
        record = json.loads(run.record.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def wandb_id(run: RunDir) -> str | None:
    """Return the id under which Weights & Biases knows the run; None where the record has none."""
    found = run_record(run).get("wandb_id")
    return found if isinstance(found, str) else None
