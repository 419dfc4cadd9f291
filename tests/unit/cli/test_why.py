"""What `orchestra why` tells beside the cause: each attempt, what was decided, which nodes were left out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine

from orchestra.cli.look.why_command import attempt_lines, node_lines
from orchestra.report.attempts import ended_attempts
from orchestra.report.page.run_page import read_run, run_page
from orchestra.run.events import EventWriter, node_writer, rank_writer, read_events
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir


def attempt(run: RunDir, number: int, decision: dict[str, Any] | None = None, **failure: Any) -> EventWriter:
    """Write one attempt on two nodes that a failure of rank 3 ended; return the leader's writer."""
    leader = EventWriter(run, node_writer(number, 0), number, host="node1")
    leader.write("attempt_started", node=0, nodes=2, pid=1, pid_started=1)
    rank = EventWriter(run, rank_writer(number, 3), number, rank=3, host="node2")
    rank.write("failed", **{"code": 1, "cause": "ValueError", "message": "bad token", "step": 30, **failure})
    leader.write("failed", node=0, code=1, cause="ValueError", message="bad token")
    if decision is not None:
        leader.write("restarting", **{"wait_s": 0.0, "exclude": [], **decision})
    return leader


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs" / "first")
    run.events.mkdir(parents=True)
    run.record.write_text(json.dumps({"name": "first", "pid": None}))
    return run


def story(run: RunDir) -> list[str]:
    return attempt_lines(ended_attempts(read_events(run)))


def test_each_attempt_and_what_was_decided(run: RunDir) -> None:
    leader = attempt(run, 0)
    assert story(run) == [], "a single attempt about which nothing was decided"
    leader.write("restarting", decision="restart", rule="start_again", reason="ValueError at step 30")
    same = "attempts 0 and 1 failed at step 30: ValueError; bad data or code, no node is blamed"
    attempt(run, 1, {"decision": "give_up", "rule": "fails_at_same_step", "reason": same})
    assert story(run) == [
        "attempts",
        "  0  steps 1 to 30: ValueError (rank 3 on node2); nothing was saved",
        "     → restarted in place [start_again]",
        "  1  steps 1 to 30: ValueError (rank 3 on node2); nothing was saved",
        "     → gave up: attempts 0 and 1 failed at step 30: ValueError; bad data or",
        "       code, no node is blamed [fails_at_same_step]",
    ]


def test_a_spare_a_wait_and_left_out_hosts_are_told(run: RunDir) -> None:
    decision = {"decision": "replace", "rule": "same_host_twice", "reason": "twice"}
    leader = attempt(run, 0, {**decision, "wait_s": 9.5, "exclude": ["a", "b"]})
    leader.write("node_replaced", node=1, host="a", by=4, by_host="c")
    assert "restarted with a spare (c for a) after 9.5 s, without b: twice" in " ".join(story(run))


def test_a_requeue_keeps_the_rule_it_came_from(run: RunDir) -> None:
    leader = attempt(run, 0, {"decision": "requeue", "rule": "node_is_gone", "reason": "a gone"})
    leader.write("requeued", job="9", how="chain", reason="a gone")
    (ended,) = ended_attempts(read_events(run))
    assert (ended.decision, ended.rule, ended.reason) == ("requeue", "node_is_gone", "a gone")


def test_long_stories_are_told_from_their_end_and_fit_80_columns(run: RunDir) -> None:
    decision = {"decision": "shrink", "rule": "node_is_gone", "reason": "word " * 60}
    for number in range(30):
        attempt(run, number, decision, cause="Error" * 9)
    lines = story(run)
    numbers = [int(line[:3]) for line in lines if line[:3].strip().isdigit()]
    assert numbers == [0, *range(19, 30)]
    assert "  … 18 more" in lines
    assert max(map(len, lines)) <= 80


def test_why_tells_the_story_and_json_has_it_all(run: RunDir, orchestra: CommandLine) -> None:
    attempt(run, 0, {"decision": "restart", "rule": "start_again", "reason": "ValueError at step 30"})
    attempt(run, 1, step=41)
    out = orchestra("why", "first").out.splitlines()
    assert out[0] == "first: failed with exit code 1, attempt 1"
    assert out.index("attempts") < len(out) - 1
    first, second = orchestra.json("why", "first")["attempts"]
    decided = (first["incident"]["kind"], first["decision"], first["rule"])
    assert decided == ("rank_failed", "restart", "start_again")
    assert (second["incident"]["step"], second["decision"]) == (41, None)


def test_why_ends_with_the_code_that_the_run_was_given_up_with(run: RunDir, orchestra: CommandLine) -> None:
    attempt(run, 0, {"decision": "give_up", "rule": "fails_at_same_step", "reason": "again", "code": 93})
    out = orchestra("why", "first").out
    assert "first: failed with exit code 93, attempt 0" in out
    assert "orchestra resume" not in out


@pytest.mark.parametrize("verb", ["status", "why"])
def test_steps_that_were_skipped_are_told(verb: str, run: RunDir, orchestra: CommandLine) -> None:
    attempt(run, 0)
    rows = JsonLinesWriter(run.metrics)
    rows.write({"step": 8, "loss": 2.5, "nonfinite_steps": 0})
    assert "skipped" not in orchestra(verb, "first").out
    rows.write({"step": 9, "loss": 2.0, "nonfinite_steps": 3})
    lines = orchestra(verb, "first").out.splitlines()
    assert "skipped 3 steps, whose loss or gradient was not finite" in lines
    answer = orchestra.json(verb, "first")
    assert (answer[0] if verb == "status" else answer)["nonfinite_steps"] == 3
    page = run_page(read_run(run, time.time()), time.time())
    assert "3 steps were skipped: their loss or gradient was not finite" in page["verdict"]["evidence"]
    assert page["figures"]["nonfinite_steps"] == 3


def test_damaged_decisions_are_passed_over(run: RunDir) -> None:
    attempt(run, 0, {"decision": 3, "rule": [], "code": "x", "wait_s": "x", "exclude": "node1"})
    attempt(run, 1)
    assert story(run)[1] == "  0  steps 1 to 30: ValueError (rank 3 on node2); nothing was saved"


def event(name: str, time: float, **evidence: Any) -> dict[str, Any]:
    return {"event": name, "time": time, "attempt": 0, **evidence}


def test_sound_nodes_and_damaged_records_are_not_spoken_of() -> None:
    assert node_lines([]) == []
    assert node_lines([event("node_checked", 1.0, nodes=4, looked=4, seconds=0.2)]) == []
    assert node_lines([event("node_checked", 1.0, unfit="x", doubt=3, left_out=7, clock_off_s=[])]) == []


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
