"""The record of which samples each step trained on (`data.ledger=true`), to prove exactly-once."""

from __future__ import annotations

from collections.abc import Iterable

from orchestra.data.order import Int64
from orchestra.run.files import JsonLinesWriter, Record, read_json_lines
from orchestra.run.paths import RunDir


class Ledger:
    """Appends one rank's sample ids to <run>/samples/rank-00000.jsonl, a line for each step."""

    def __init__(self, run: RunDir, rank: int, attempt: int) -> None:
        self._file = JsonLinesWriter(run.samples / f"rank-{rank:05d}.jsonl")
        self._attempt = attempt

    def write(self, step: int, sample_ids: Int64) -> None:
        """Record the ids [A, B] that this rank trained on in `step`."""
        self._file.write({"step": step, "attempt": self._attempt, "sample_ids": sample_ids.tolist()})


def read_ledger(run: RunDir) -> dict[int, list[int]]:
    """Return the ids of each step that counts, over all ranks.

    A later attempt makes void what earlier ones recorded from its first step on, on whatever ranks: the run
    was rolled back to before that step, and may have gone on with fewer ranks.
    """
    records = [
        record for file in sorted(run.samples.glob("rank-*.jsonl")) for record in read_json_lines(file)
    ]
    samples: dict[int, list[int]] = {}
    for record in _that_count(records):
        samples.setdefault(record["step"], []).extend(
            sample for micro_batch in record["sample_ids"] for sample in micro_batch
        )
    return dict(sorted(samples.items()))


def _that_count(records: Iterable[Record]) -> list[Record]:
    kept: list[Record] = []
    first_void: int | None = None
    by_attempt: dict[int, list[Record]] = {}
    for record in records:
        by_attempt.setdefault(record["attempt"], []).append(record)
    for attempt in sorted(by_attempt, reverse=True):
        mine = by_attempt[attempt]
        kept += [record for record in mine if first_void is None or record["step"] < first_void]
        began = min(record["step"] for record in mine)
        first_void = began if first_void is None else min(first_void, began)
    return kept
