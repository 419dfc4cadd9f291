"""Whether a run gets on in the slices of time that a cluster gives it: up to a time limit, or until a job of
higher priority takes its nodes. Pure; told by `orchestra status` and `why`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestra.recovery.history import read, stored_step
from orchestra.run.control import stop_requests
from orchestra.run.files import Record

_ENDS = (stop_requests.TIME_LIMIT, stop_requests.PREEMPTED)


@dataclass(frozen=True)
class TimeSlice:
    """An attempt that ended with its slice and was to go on: its seconds, those before its first step (None:
    it came to none), and the steps that it added to what is saved.
    """

    attempt: int
    seconds: float
    start_s: float | None
    steps: int


def time_slices(events: Iterable[Record]) -> list[TimeSlice]:
    """Return the slices of a run that ended, oldest first."""
    slices = []
    saved = 0
    for attempt in read(events):
        begin = saved
        for event in attempt.events:
            # A restore may go back.
            saved = stored_step(event, saved)
            begin = saved if event["event"] == "restored" else begin
        # What is written under an attempt's number of a later start that was called off is not its own.
        ends = [
            event
            for event in attempt.decisions
            if event.get("reason") in _ENDS and not event.get("before_start")
        ]
        if not ends:
            continue
        began, trained = float(attempt.start["time"]), attempt.training_started
        start_s = None if trained is None else float(trained["time"]) - began
        slices.append(TimeSlice(attempt.number, float(ends[-1]["time"]) - began, start_s, saved - begin))
    return slices


def in_words(slices: Sequence[TimeSlice]) -> str:
    """Return how a run gets on in its slices; empty for fewer than two."""
    if len(slices) < 2:
        return ""
    idle = 0
    for each in reversed(slices):
        if each.steps > 0:
            break
        idle += 1
    of_last = slices[-idle:] if idle else slices
    minutes = sum(each.seconds for each in of_last) / len(of_last) / 60
    if idle:
        last = "1 slice" if idle == 1 else f"{idle} slices"
        starts = [each.start_s for each in of_last if each.start_s is not None]
        why = (
            f", of which a start took {sum(starts) / len(starts) / 60:.1f}"
            if starts
            else ", all of it to start"
        )
        return f"the last {last} of {minutes:.1f} min{why}, made no step that is saved"
    steps = sum(each.steps for each in slices)
    fewest = min(each.steps for each in slices)
    return f"{len(slices)} slices of {minutes:.1f} min made {steps} steps, {fewest} at least in each"
