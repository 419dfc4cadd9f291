"""How an attempt over several nodes ended: from the nodes' reports and the run's events to one verdict.

The leader writes it down; what follows is not said here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from launchers.crew import Order
from launchers.spec import Ending
from orchestra import control
from orchestra.control import StopRequest
from orchestra.crew.part import ending_of
from orchestra.crew.reach import cut_off
from orchestra.crew.station import Station, attempt_of, host_of
from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from orchestra.report.verdict import Verdict, finished_ranks, node_verdict
from orchestra.submit.recording import AttemptRecord

Reports = dict[int, dict[str, Any]]


def conclude(station: Station, order: Order) -> tuple[Verdict, list[int]]:
    """Judge an attempt whose nodes have all reported or are lost; return the verdict and the lost nodes, with
    those that no other node reaches.

    It is written down once: an agent that leads after another one died over it takes that one's word.
    """
    attempt = attempt_of(order)
    record = station.record(attempt)
    reports = station.crew.reports(order.number, order.nodes)
    missing = [node for node in order.nodes if node not in reports]
    alone = [node for node in cut_off(station, order) if node in reports]
    lost = [*missing, *alone]
    told = node_verdict(record.seen()) if newest_restart(record) is not None else None
    if told is not None:
        return told, lost
    _write_lost(station, order, record, reports, alone)
    ending, interruption = _merged(station, order, record, reports)
    verdict = record.conclude(
        ending,
        interruption,
        lambda it: station.surroundings.judged(it, attempt, record.events),
        decides=lambda it: _is_for_the_policy(station, record, it),
    )
    station.say(f"attempt {attempt} {verdict.state}: {verdict.message or verdict.cause}")
    return verdict, lost


def _is_for_the_policy(station: Station, record: AttemptRecord, verdict: Verdict) -> bool:
    """Tell whether what follows this verdict is the policy's to say: it does so within the next second."""
    is_stopped = station.signals.count() or requests_of(station, record.number)
    return verdict.state == "failed" and not is_stopped and not is_fenced(record)


def newest_restart(record: AttemptRecord) -> dict[str, Any] | None:
    """Return what was decided after this attempt; None while nothing was."""
    decided = [event for event in record.seen() if event["event"] == "restarting"]
    return decided[-1] if decided else None


def is_fenced(record: AttemptRecord) -> bool:
    """Tell whether a rank found that a newer attempt trains the run: then this crew has no part in it."""
    return any(event["event"] == "fenced" for event in record.seen())


def requests_of(station: Station, attempt: int) -> list[StopRequest]:
    """Return the requests to stop an attempt, none where the file system does not answer."""
    try:
        return control.read_requests(station.run, attempt)
    except OSError:
        return []


def as_stopped(verdict: Verdict, requests: list[StopRequest]) -> Verdict:
    """Return the verdict by which a run goes on that was warned, and failed over its last save."""
    reasons = {request.reason for request in requests}
    is_warned = control.TIME_LIMIT in reasons and control.CANCEL not in reasons
    return Verdict(EXIT_STOPPED, verdict.cause, verdict.message, step=verdict.step) if is_warned else verdict


def _write_lost(
    station: Station, order: Order, record: AttemptRecord, reports: Reports, alone: Sequence[int]
) -> None:
    """Write down who did not report or is not reached, and whose agent died."""
    silent = station.crew.silent(order.nodes)
    for node in order.nodes:
        report = reports.get(node)
        if report is None:
            cause = "its agent is silent" if node in silent else "it did not report its end"
            event = "node_lost"
        elif node in alone:
            cause, event = "no other node reaches it", "node_lost"
        elif report.get("cause") == "agent lost":
            cause = event = "agent_lost"
        else:
            continue
        with contextlib.suppress(OSError):
            record.events.write(event, node=node, host=host_of(order, node), cause=cause.replace("_", " "))


def _merged(
    station: Station, order: Order, record: AttemptRecord, reports: Reports
) -> tuple[Ending, str | None]:
    """Return the ending of all nodes together, and why the ranks were ended at once where they were."""
    endings = {node: ending_of(report) for node, report in reports.items()}
    finished = finished_ranks(record.seen())
    per_node = int(station.config.cluster.gpus_per_node)
    codes = [ending.exit_code for ending in endings.values()]
    for index, node in enumerate(order.nodes):
        if node not in reports:
            is_done = finished >= set(range(index * per_node, (index + 1) * per_node))
            codes.append(EXIT_DONE if is_done else EXIT_FAILED)
    code = next((code for code in codes if code != EXIT_DONE), EXIT_DONE)
    failures = tuple(it for ending in endings.values() for it in ending.failures)
    survivors = tuple(it for ending in endings.values() for it in ending.survivors)
    stops = max((ending.stops for ending in endings.values()), default=0)
    interruptions = [str(it["interruption"]) for it in reports.values() if it.get("interruption")]
    return Ending(code, stops, failures, survivors), next(iter(interruptions), None)
