"""The time before a job's first attempt: how long its nodes are waited for, and what a warning means then.

It begins nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from launchers.crew import Member
from orchestra import control
from orchestra.crew.judging import requests_of
from orchestra.crew.station import Station
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_INTERRUPTED, EXIT_STOPPED, LaunchError
from orchestra.events import EventWriter, read_events
from orchestra.jsonl import Record
from orchestra.report.verdict import Verdict
from orchestra.submit.claims import upcoming_attempt

# From the start of the first node's task to the last one's: images are pulled, Python is loaded by many.
GATHER_TIMEOUT_S = 600.0
# How long spares, and with recovery.min_nodes the last of the others, are waited for.
_STRAGGLERS_S = 15.0
_MIN_NODES_WAIT_S = 60.0
# Starts of jobs in a row that may reach their time limit before an attempt begins.
_MOST_TOO_LATE = 3


class Gathering:
    """The wait for the nodes of one start of a job, as its leader sees it."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._began = time.monotonic()

    def is_over(self, members: Mapping[int, Member]) -> bool:
        """Tell whether as many have come as there will be. Raises LaunchError where they stay too few."""
        waited = time.monotonic() - self._began
        if len(members) == self._station.crew.num_nodes:
            return True
        wanted, least = self._station.config.cluster.nodes, self._station.config.recovery.min_nodes
        if len(members) >= wanted and waited > _STRAGGLERS_S:
            return True
        if least is not None and len(members) >= least and waited > _MIN_NODES_WAIT_S:
            return True
        if waited > GATHER_TIMEOUT_S:
            raise LaunchError(self.too_few(members))
        return False

    def too_few(self, members: Mapping[int, Member]) -> str:
        """Return who is missing, as an error's words."""
        num_nodes = self._station.crew.num_nodes
        missing = sorted(set(range(num_nodes)) - set(members))
        return (
            f"only {len(members)} of {num_nodes} nodes came within {GATHER_TIMEOUT_S:g} s or are fit; "
            f"missing: {', '.join(map(str, missing)) or 'none'}. Their logs tell what became of them, or "
            f"they do not share {self._station.run.path}"
        )


def called_off(station: Station) -> tuple[int, str]:
    """Let the run go on where an attempt that was warned now would; return the exit code, and in a few words
    what was done. *The leader only*, before the first order. Raises OSError.

    The time limit and a preemption say nothing against the run, whether its nodes had met or not.
    """
    first = station.signals.first or ""
    words = f"{first} came before the attempt began"
    if first == "SIGINT":
        return EXIT_INTERRUPTED, words
    attempt = upcoming_attempt(station.run)
    reason = control.signal_reason(first)
    if reason == control.TIME_LIMIT and _too_late(read_events(station.run)) >= _MOST_TOO_LATE:
        limit = station.config.cluster.time_limit
        said = f"{_MOST_TOO_LATE} starts in a row ended before an attempt began (cluster.time_limit={limit})"
        return EXIT_DO_NOT_RESTART, f"{words}: {said}"
    # What follows the attempt before: this one never was, and its number is free.
    name = f"crew.{station.crew.folder.name}"
    events = EventWriter(station.run, name, attempt - 1, before_start=True)
    try:
        said = station.surroundings.go_on(
            Verdict(EXIT_STOPPED, "StopRequested", words),
            attempt - 1,
            events,
            lambda: frozenset([reason, *(request.reason for request in requests_of(station, attempt))]),
        )
    finally:
        events.close()
    return EXIT_STOPPED, f"{words}: {said}" if said else words


def _too_late(events: Iterable[Record]) -> int:
    """Return how often since the last attempt began a start was called off because of the time limit."""
    count = 0
    for event in events:
        if event["event"] == "attempt_started":
            count = 0
        is_requeue = event["event"] == "requeued" and event.get("reason") == control.TIME_LIMIT
        count += is_requeue and event.get("before_start") is True
    return count
