"""The life of a run for its page: attempts with what ended each and what that cost, checkpoints, lost nodes,
experts that moved.

Pure: what it says comes from `orchestra.recovery`, the owner of history and accounts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conf.schema import Fault
from orchestra.recovery.accounting import AttemptTimes
from orchestra.report.attempts import EndedAttempt
from orchestra.report.run_state import failed_save, passed_over, read_twice
from orchestra.run.events import is_number, is_whole
from orchestra.run.files import Record

# Checkpoints, and moves of experts, that a page lists one by one, the newest of them.
MOST_LISTED = 400
_KINDS_OF_NODES = ("node_lost", "agent_lost")


def attempt_rows(times: Sequence[AttemptTimes], ended: Sequence[EndedAttempt], began: float) -> list[Record]:
    """Return a row for each attempt: when, where, what ended it, the rule that decided, what was lost.

    Times are seconds since `began` (Unix seconds). `lost_steps` were trained and are trained again,
    `lost_s` is what they took, `down_s` the time from its end to the next attempt's first step.
    """
    by_number = {each.incident.attempt: each for each in ended}
    rows = []
    for index, attempt in enumerate(times):
        following = times[index + 1] if index + 1 < len(times) else None
        end = by_number.get(attempt.attempt.number)
        start = attempt.attempt.start
        hosts = start.get("hosts")
        rows.append(
            {
                "number": attempt.attempt.number,
                "started_s": attempt.started - began,
                "training_s": None if attempt.training_at is None else attempt.training_at - began,
                "ended_s": attempt.end - began,
                "began_after_step": attempt.begin,
                "reached_step": _reached(attempt, end),
                "restored_from": (attempt.attempt.restored or {}).get("source"),
                "restore_s": attempt.restore_s or None,
                "hosts": [str(host) for host in hosts] if isinstance(hosts, list) else [],
                "job": start.get("job") if isinstance(start.get("job"), str) else None,
                "ranks": _num_ranks(start),
                **_ending(end, attempt.attempt.named("fault_injected")),
                **_cost(attempt, end, following),
            }
        )
    return rows


def _num_ranks(start: Mapping[str, Any]) -> int | None:
    nodes, each = start.get("nodes"), start.get("ranks_per_node")
    return nodes * each if is_whole(nodes) and is_whole(each) else None


def _reached(attempt: AttemptTimes, end: EndedAttempt | None) -> int | None:
    """Return the last step that is known to have been trained."""
    steps = [row["step"] for row in attempt.rows]
    steps += attempt.attempt.committed_steps
    if end is not None and end.incident.step is not None and end.incident.is_failure:
        # The step in which it failed is none that was trained.
        steps.append(end.incident.step - 1)
    return max(steps, default=None)


def _ending(end: EndedAttempt | None, planned: Sequence[Record]) -> Record:
    if end is None:
        return {"kind": None, "is_failure": False}
    incident = end.incident
    return {
        "kind": incident.kind.value,
        "is_failure": incident.is_failure,
        # A planned delay ends no attempt: what did came by itself.
        "is_planned": any(event.get("fault") != Fault.slow.name for event in planned),
        "cause": incident.cause,
        "rank": incident.rank,
        "host": incident.host,
        "blamed": list(incident.blamed),
        "step": incident.step,
        "decision": end.decision,
        "rule": end.rule,
        "reason": end.reason,
        "wait_s": end.wait_s,
        "excluded": list(end.exclude),
        "replaced": [list(pair) for pair in end.replaced],
        "roll_back": None if incident.roll_back is None else incident.roll_back.words,
    }


def _cost(attempt: AttemptTimes, end: EndedAttempt | None, following: AttemptTimes | None) -> Record:
    """Return what an attempt's end cost; nothing where it is the last one or ended as it was asked to."""
    if end is None or following is None:
        return {"lost_steps": None, "lost_s": None, "down_s": None}
    reached = _reached(attempt, end)
    lost = 0 if reached is None or following.begin is None else max(0, reached - following.begin)
    first = following.training_at
    if first is None and following.rows:
        first = following.rows[0]["time"]
    return {
        "lost_steps": lost,
        "lost_s": lost * (attempt.step_time_s or following.step_time_s or 0.0),
        # What nobody was there for, or the queue took, is no cost of what ended it.
        "down_s": max(
            0.0,
            (following.end if first is None else first)
            - (attempt.end if attempt.will_restart else following.started),
        ),
    }


def checkpoint_rows(events: Sequence[Record], began: float) -> list[Record]:
    """Return a row for each save, the oldest first: when, the stall, the seconds and bytes of the writing,
    and what came of it: committed, failed, skipped (another one was still being written) or not known.
    """
    rows: dict[tuple[Any, Any], Record] = {}
    for event in events:
        name, step = event["event"], event.get("step")
        if not name.startswith("checkpoint_") or not is_whole(step):
            continue
        key = (event["attempt"], step)
        if name == "checkpoint_started":
            rows[key] = {"attempt": event["attempt"], "step": step, "state": "unknown"}
            rows[key] |= {"time_s": event["time"] - began, "stall_s": _number(event, "blocked_s")}
        elif name == "checkpoint_committed":
            row = rows.setdefault(key, {"attempt": event["attempt"], "step": step})
            row |= {"state": "committed", "time_s": row.get("time_s", event["time"] - began)}
            row |= {"write_s": _number(event, "seconds"), "bytes": _number(event, "bytes")}
            row.setdefault("stall_s", _number(event, "blocked_s"))
        elif name == "checkpoint_failed":
            row = rows.setdefault(key, {"attempt": event["attempt"], "step": step})
            # Other ranks tell of it too.
            row.setdefault("time_s", event["time"] - began)
            if row.get("state") != "committed":
                row |= {"state": "failed", "reason": failed_save(event)}
        elif name == "checkpoint_skipped":
            row = {"attempt": event["attempt"], "step": step, "state": "skipped"}
            # Of many only some are told of: the number so far stands in each.
            why = f"{event.get('why', 'no reason given')} (skipped so far: {event.get('count', '?')})"
            rows[key] = row | {"time_s": event["time"] - began, "reason": why}
    return list(rows.values())


def passed_over_checkpoints(events: Sequence[Record]) -> list[str]:
    """Return in a sentence each which newer checkpoints a restore did not take, and why, and what it had to
    read twice.
    """
    restored = (event for event in events if event["event"] == "restored")
    return list(
        dict.fromkeys(words for event in restored for words in (*passed_over(event), *read_twice(event)))
    )


def node_rows(events: Sequence[Record], began: float) -> list[Record]:
    """Return what the agents saw of nodes: lost, replaced, unfit, slow ranks."""
    return [
        {
            "time_s": event["time"] - began,
            "attempt": event["attempt"],
            "event": event["event"],
            "host": event.get("host"),
            "rank": event.get("rank"),
            "what": event.get("cause") or (f"replaced by {event['by_host']}" if "by_host" in event else None),
        }
        for event in events
        if event["event"] in (*_KINDS_OF_NODES, "node_replaced", "node_unfit", "straggler_found")
    ]


def expert_move_rows(events: Sequence[Record], began: float) -> list[Record]:
    """Return a row for each time that experts moved to other ranks, the oldest first: after which step, how
    many of how many layers, the bytes and seconds, and the load of the worst layer's busiest rank over the
    mean one's, as it was and as it was expected to be.
    """
    columns = ("step", "experts", "layers", "bytes", "seconds", "load_before", "load_expected")
    rows = [
        {
            "time_s": event["time"] - began,
            "attempt": event["attempt"],
            **{column: _number(event, column) for column in columns},
        }
        for event in events
        if event["event"] == "experts_moved"
    ]
    return rows[-MOST_LISTED:]


def _number(event: Mapping[str, Any], key: str) -> float | int | None:
    value = event.get(key)
    return value if is_number(value) else None
