"""Which hosts the decisions so far keep out of a run's later jobs."""

from __future__ import annotations

from orchestra.agents.choose_nodes import excluded_hosts


def test_what_was_lost_beside_a_host_that_failed_twice_is_taken_again_by_later_jobs() -> None:
    began = {
        "attempt": 3,
        "event": "attempt_started",
        "job": "7",
        "job_start": 0,
        "hosts": ["node2", "node3"],
    }
    out = {"attempt": 3, "event": "restarting", "rule": "same_host_twice", "exclude": ["node2", "node3"]}
    lost = {"attempt": 3, "event": "node_lost", "host": "node3"}
    # So is what was found unfit beside them left out of the run.
    out["exclude"] = ["node2", "node3", "unfit4"]
    events = [began, lost, {**out, "listed": ["node2"]}]
    assert excluded_hosts(events, {"job": "7", "job_start": 0}) == {"node2", "node3", "unfit4"}
    assert excluded_hosts(events, {"job": "8", "job_start": 0}) == {"node2", "unfit4"}
    # A rehearsal lists nobody.
    rehearsed = [began, lost, {**out, "listed": []}]
    assert excluded_hosts(rehearsed, {"job": "8"}) == {"node2", "node3", "unfit4"}
