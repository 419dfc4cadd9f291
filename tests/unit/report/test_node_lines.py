"""`orchestra why` tells which nodes were left out, and why; of sound ones nothing."""

from __future__ import annotations

from typing import Any

from orchestra.report.attempts import node_lines


def event(name: str, time: float, **evidence: Any) -> dict[str, Any]:
    return {"event": name, "time": time, "attempt": 0, **evidence}


def test_sound_nodes_are_not_spoken_of() -> None:
    assert node_lines([]) == []
    assert node_lines([event("node_checked", 1.0, nodes=4, looked=4, seconds=0.2)]) == []


def test_each_node_with_a_fault_is_told_with_what_became_of_it() -> None:
    found = {"unfit": {"node1": "/tmp is no folder here"}, "doubt": {"node2": "Xid 79 of device 3b"}}
    checked = event("node_checked", 5.0, **found, left_out=["node1"], clock_off_s={"node3": -40.0})
    slow = event("node_slow", 6.0, host="node4", cause="sends 9 MB/s")
    assert node_lines([event("node_slow", 1.0, host="node9", cause="before"), checked, slow]) == [
        "nodes",
        "     node1, left out: /tmp is no folder here",
        "     node2, used all the same: Xid 79 of device 3b",
        "     node4, used all the same: sends 9 MB/s",
        "     node3: its clock is 40.0 s behind the others'",
    ]


def test_only_the_last_job_is_told_and_lines_fit() -> None:
    first = event("node_checked", 1.0, unfit={"node1": "old"})
    many = {f"node{number}": "word " * 40 for number in range(20)}
    lines = node_lines([first, event("node_checked", 2.0, unfit=many, left_out=list(many))])
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1] == "     … 12 more"
    assert "old" not in " ".join(lines)


def test_damaged_records_are_passed_over() -> None:
    assert node_lines([event("node_checked", 1.0, unfit="x", doubt=3, left_out=7, clock_off_s=[])]) == []
