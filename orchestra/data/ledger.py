"""The record of which samples each step trained on (`data.ledger=true`), to prove exactly-once."""

from __future__ import annotations

from orchestra.data.order import Int64
from orchestra.jsonl import JsonLinesWriter
from orchestra.rundir import RunDir


class Ledger:
    """Appends one rank's sample ids to <run>/samples/rank-00000.jsonl, a line for each step."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self._file = JsonLinesWriter(run.samples / f"rank-{rank:05d}.jsonl")

    def write(self, step: int, sample_ids: Int64) -> None:
        """Record the ids [A, B] that this rank trained on in `step`."""
        self._file.write({"step": step, "sample_ids": sample_ids.tolist()})
