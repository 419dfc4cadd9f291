"""What a worker reads of the run's record, `run.json`; it writes nothing into it."""

from __future__ import annotations

import json

from orchestra.rundir import RunDir


def wandb_id(run: RunDir) -> str | None:
    """Return the id under which Weights & Biases knows the run; None where the record has none."""
    try:
        record = json.loads(run.record.read_text())
    except (OSError, ValueError):
        return None
    found = record.get("wandb_id") if isinstance(record, dict) else None
    return found if isinstance(found, str) else None
