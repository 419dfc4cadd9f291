"""Which collectives stalled when ranks hung, from the records in an attempt's logs: for `orchestra why`, and
for the agents that ask whom the others wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestra.recovery.collectives import FlightRecord, parsed, stalled_collectives
from orchestra.run.events import is_whole
from orchestra.run.files import Record
from orchestra.run.paths import RunDir

# NCCL's own dumps hold stacks of 2,000 collectives; a file that is larger is none of them.
_LARGEST_BYTES = 64 << 20


def stalled_words(run: RunDir, events: Sequence[Record]) -> tuple[int, list[str]] | None:
    """Return the newest attempt in which a collective stalled for good, and in a sentence each which one, and
    whom it waits for; None where none did.
    """
    sizes = {
        event["attempt"]: int(event.get("nodes", 0)) * int(event.get("ranks_per_node", 0))
        for event in events
        if event["event"] == "attempt_started"
        and is_whole(event.get("nodes", 0))
        and is_whole(event.get("ranks_per_node", 0))
    }
    hung = {event["attempt"] for event in events if event["event"] == "hang_detected"}
    failed = {event["attempt"] for event in events if event["event"] == "rank_failed"}
    for attempt in sorted((hung | failed) & sizes.keys(), reverse=True):
        # Where nobody hung, ranks that were slow and went on left records too: only NCCL's count.
        records = recorded_collectives(run, attempt, sizes[attempt], own=attempt in hung)
        if stalls := stalled_collectives(records, sizes[attempt]):
            return attempt, [stall.words() for stall in stalls]
    return None


def recorded_collectives(run: RunDir, attempt: int, num_ranks: int, *, own: bool) -> dict[int, FlightRecord]:
    """Return the records of an attempt's ranks: their own where wanted, else dumps of NCCL's watchdog. Files
    that cannot be read are passed over.
    """
    prefix = run.nccl_dumps(attempt)
    records = {}
    for rank in range(num_ranks):
        dump = prefix.with_name(f"{prefix.name}{rank}")
        for place in (run.rank_collectives(attempt, rank), dump) if own else (dump,):
            if (record := _read(place)) is not None:
                records[rank] = record
                break
    return records


def _read(place: Path) -> FlightRecord | None:
    try:
        if place.stat().st_size > _LARGEST_BYTES:
            return None
        return parsed(place.read_bytes())
    except (OSError, ValueError):
        return None
