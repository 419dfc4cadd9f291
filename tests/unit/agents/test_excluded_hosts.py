"""Which hosts the decisions so far keep out of a run's later jobs, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from orchestra.agents.choose_nodes import excluded_hosts, last_resort
from orchestra.run.files import Record

DAY_H, NOW = 24.0, 1_800_000_000.0


def began(attempt: int, job: str, *hosts: str) -> Record:
    facts = {"time": NOW, "attempt": attempt, "event": "attempt_started"}
    return {**facts, "job": job, "job_start": 0, "hosts": list(hosts)}


def left_out(attempt: int, rule: str, *hosts: str, hours_ago: float = 0.0, **facts: Any) -> Record:
    event = {"time": NOW - 3600 * hours_ago, "attempt": attempt, "event": "restarting"}
    return {**event, "rule": rule, "exclude": list(hosts), **facts}


def test_what_was_lost_beside_a_host_that_failed_twice_is_taken_again_by_later_jobs() -> None:
    started = began(3, "7", "node2", "node3")
    lost = {"time": NOW, "attempt": 3, "event": "node_lost", "host": "node3"}
    # So is what was found unfit beside them left out of the run.
    out = left_out(3, "same_host_twice", "node2", "node3", "unfit4")
    events = [started, lost, {**out, "listed": ["node2"]}]
    assert excluded_hosts(events, {"job": "7", "job_start": 0}, DAY_H, NOW) == {"node2", "node3", "unfit4"}
    assert excluded_hosts(events, {"job": "8", "job_start": 0}, DAY_H, NOW) == {"node2", "unfit4"}
    # A rehearsal lists nobody.
    rehearsed = [started, lost, {**out, "listed": []}]
    assert excluded_hosts(rehearsed, {"job": "8"}, DAY_H, NOW) == {"node2", "node3", "unfit4"}


@pytest.mark.parametrize("here", [{"job": "7", "job_start": 0}, {"job": "8", "job_start": 0}])
@pytest.mark.parametrize("rule", ["same_host_twice", "broken_device"])
def test_a_host_is_as_good_as_any_other_when_its_time_is_over(rule: str, here: dict[str, Any]) -> None:
    """As on the cluster's list: a node that was repaired is no longer missed by the run that it failed."""
    events = [began(3, "7", "node1", "node2"), left_out(3, rule, "node2", hours_ago=23.9)]
    assert excluded_hosts(events, here, DAY_H, NOW) == {"node2"}
    assert excluded_hosts(events, here, 12.0, NOW) == frozenset()
    assert excluded_hosts(events, here, DAY_H, NOW + 3600) == frozenset()
    assert last_resort(events, here, DAY_H, NOW + 3600) == frozenset()
    # It failed once more: the time begins anew.
    again = [*events, left_out(4, rule, "node2", hours_ago=-1.0)]
    assert excluded_hosts(again, here, DAY_H, NOW + 3600) == {"node2"}
    # The clock of whoever wrote that ran a year ahead.
    assert excluded_hosts([events[0], left_out(3, rule, "node2", hours_ago=-9000)], here, DAY_H, NOW) == set()


@pytest.mark.parametrize("hours", [0.0, DAY_H])
def test_a_host_that_fell_silent_stays_out_of_its_start_however_long_failed_ones_do(hours: float) -> None:
    """recovery.exclude_hours=0 uses hosts that failed, and none that may thaw in an attempt."""
    events = [began(3, "7", "node1", "node2"), left_out(3, "node_is_gone", "node2", hours_ago=30.0)]
    assert excluded_hosts(events, {"job": "7", "job_start": 0}, hours, NOW) == {"node2"}
    assert excluded_hosts(events, {"job": "8", "job_start": 0}, hours, NOW) == frozenset()
