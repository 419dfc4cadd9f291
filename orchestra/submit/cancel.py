"""Asks a run's attempt to stop, through its control/ folder, wherever it trains. It waits for nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from orchestra import control
from orchestra.control import StopRequest
from orchestra.errors import OrchestraError
from orchestra.events import read_events
from orchestra.report.state import read_ending
from orchestra.report.verdict import last_attempt
from orchestra.rundir import RunDir
from orchestra.submit.resume import pending_attempt

# States of runs that may hear a request: of a silent one on another host nobody knows.
_MAY_HEAR = ("running", "not started", "unknown")


@dataclass(frozen=True)
class Cancellation:
    """What asking a run to stop comes to. Without an attempt there is nothing that could be stopped."""

    run: RunDir
    state: str
    attempt: int | None = None
    # A request that says as much as the one that is asked for stands already.
    earlier: StopRequest | None = None


def cancellation(run: RunDir, now: float, *, at_once: bool = False) -> Cancellation:
    """Return what a request to stop `run` would do at Unix time `now`. Reads only."""
    events = read_events(run)
    state, _ = read_ending(run, events, now)
    last = last_attempt(events)
    attempt = pending_attempt(run, last, now)
    if attempt is not None:
        state = "being resumed"
    elif state in _MAY_HEAR:
        attempt = 0 if last is None else last
    if attempt is None:
        return Cancellation(run, state)
    requests = control.read_requests(run, attempt)
    earlier = next((request for request in requests if request.at_once or not at_once), None)
    return Cancellation(run, state, attempt, earlier)


def ask(plan: Cancellation, *, at_once: bool = False) -> None:
    """Write the request, unless one that says as much stands already. Raises OrchestraError."""
    if plan.attempt is None or plan.earlier is not None:
        return
    try:
        control.write_request(plan.run, plan.attempt, control.CANCEL, at_once=at_once)
    except OSError as error:
        raise OrchestraError(
            f"{plan.run.name} could not be asked to stop: {plan.run.control}: {error.strerror}; send "
            "SIGTERM to the process that leads it"
        ) from error


def seconds_ago(request: StopRequest) -> float:
    """Return how long ago a request was made."""
    return max(0.0, time.time() - request.time)
