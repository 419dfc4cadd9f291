"""What a run's events say about its checkpoints. It looks at no checkpoint itself."""

from __future__ import annotations

from collections.abc import Iterable

from orchestra.events import is_whole
from orchestra.jsonl import Record
from orchestra.roll_backs import EVENT


def newest_checkpoint(events: Iterable[Record]) -> int | None:
    """Return the step that the run would go on from: what was committed last, restored or gone back to since.

    A restore passes over damaged checkpoints, so it counts whatever had been committed before. `events` are
    in the order of time. None where nothing was committed.
    """
    step: int | None = None
    for event in events:
        # A restore from copies in memory touches no checkpoint.
        is_of_storage = event.get("source") != "memory"
        is_told = event.get("event") in ("checkpoint_committed", "restored") and is_of_storage
        if is_told and is_whole(event.get("step")):
            step = event["step"] or None
        elif event.get("event") == EVENT and is_whole(event.get("to")):
            step = event["to"] or None
    return step


def was_verified(events: Iterable[Record], step: int, created: float) -> bool:
    """Return whether all bytes of the checkpoint of `step`, written at `created`, were found intact."""
    verdicts = [
        event.get("intact")
        for event in events
        if event.get("event") == "checkpoint_verified"
        and (event.get("step"), event.get("created")) == (step, created)
    ]
    return bool(verdicts) and verdicts[-1] is True


def failed_save(event: Record) -> str:
    """Return in a sentence what a `checkpoint_failed` event tells."""
    reasons = event.get("reasons")
    listed = reasons.items() if isinstance(reasons, dict) else ()
    # Most failures are the same one on every rank.
    ranks_of: dict[str, list[str]] = {}
    for rank, reason in listed:
        ranks_of.setdefault(str(reason), []).append(str(rank))
    texts = [f"{reason} (rank {', '.join(ranks)})" for reason, ranks in ranks_of.items()]
    why = "; ".join(texts) or str(event.get("message") or event.get("reason") or reasons or "no reason given")
    return f"the checkpoint of step {event.get('step', '?')} was not saved: {why}"


def passed_over(event: Record) -> list[str]:
    """Return a sentence for each newer checkpoint that a `restored` event says was not taken."""
    skipped = event.get("skipped")
    entries = [entry for entry in skipped if isinstance(entry, dict)] if isinstance(skipped, list) else []
    told = [(entry.get("step", "?"), entry.get("reason", "no reason given")) for entry in entries]
    return [f"the checkpoint of step {step} was passed over: {reason}" for step, reason in told]
