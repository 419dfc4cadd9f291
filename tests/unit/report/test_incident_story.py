"""What ended a run, as `orchestra why` tells it: each attempt, what was decided, in 80 columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestra.cli import main
from orchestra.report.attempts import attempt_lines, ended_attempts
from orchestra.run.events import EventWriter, node_writer, rank_writer, read_events
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


def told(run: RunDir) -> list[str]:
    return attempt_lines(ended_attempts(read_events(run)))


def test_a_single_attempt_about_which_nothing_was_decided_has_no_story(run: RunDir) -> None:
    attempt(run, 0)
    assert told(run) == []


def test_each_attempt_and_what_was_decided(run: RunDir) -> None:
    attempt(run, 0, {"decision": "restart", "rule": "start_again", "reason": "ValueError at step 30"})
    same = "attempts 0 and 1 failed at step 30: ValueError; bad data or code, no node is blamed"
    attempt(run, 1, {"decision": "give_up", "rule": "fails_at_same_step", "reason": same})
    assert told(run) == [
        "attempts",
        "  0  steps 1 to 30: ValueError (rank 3 on node2); nothing was saved",
        "     → restarted in place [start_again]",
        "  1  steps 1 to 30: ValueError (rank 3 on node2); nothing was saved",
        "     → gave up: attempts 0 and 1 failed at step 30: ValueError; bad data or",
        "       code, no node is blamed [fails_at_same_step]",
    ]


def test_a_spare_a_wait_and_left_out_hosts_are_told(run: RunDir) -> None:
    leader = attempt(
        run,
        0,
        {
            "decision": "replace",
            "rule": "same_host_twice",
            "reason": "twice",
            "wait_s": 9.5,
            "exclude": ["a", "b"],
        },
    )
    leader.write("node_replaced", node=1, host="a", by=4, by_host="c")
    assert "restarted with a spare (c for a) after 9.5 s, without b: twice" in " ".join(told(run))


def test_a_requeue_keeps_the_rule_it_came_from(run: RunDir) -> None:
    leader = attempt(run, 0, {"decision": "requeue", "rule": "node_is_gone", "reason": "a gone"})
    leader.write("requeued", job="9", how="chain", reason="a gone")
    (ended,) = ended_attempts(read_events(run))
    assert (ended.decision, ended.rule, ended.reason) == ("requeue", "node_is_gone", "a gone")


def test_long_stories_are_told_from_their_end(run: RunDir) -> None:
    for number in range(30):
        attempt(run, number, {"decision": "restart", "rule": "start_again", "reason": "ValueError"})
    lines = told(run)
    assert [line[:3].strip() for line in lines if line[:3].strip().isdigit()] == [
        "0",
        *(str(number) for number in range(19, 30)),
    ]
    assert "  … 18 more" in lines


def test_no_line_is_wider_than_80_columns(run: RunDir) -> None:
    attempt(run, 0, {"decision": "shrink", "rule": "node_is_gone", "reason": "word " * 60}, cause="Error" * 9)
    attempt(run, 1)
    assert max(map(len, told(run))) <= 80


def test_why_tells_the_story_and_json_has_it_all(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    attempt(run, 0, {"decision": "restart", "rule": "start_again", "reason": "ValueError at step 30"})
    attempt(run, 1, step=41)
    assert main(["why", "first"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "first: failed with exit code 1, attempt 1"
    assert out.index("attempts") < len(out) - 1
    assert main(["why", "first", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["attempts"]
    assert (first["incident"]["kind"], first["decision"], first["rule"]) == (
        "rank_failed",
        "restart",
        "start_again",
    )
    assert (second["incident"]["step"], second["decision"]) == (41, None)


def test_why_ends_with_the_code_that_the_run_was_given_up_with(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(run, 0, {"decision": "give_up", "rule": "fails_at_same_step", "reason": "again", "code": 93})
    assert main(["why", "first"]) == 0
    out = capsys.readouterr().out
    assert "first: failed with exit code 93, attempt 0" in out
    assert "orchestra resume" not in out


def test_damaged_decisions_are_passed_over(run: RunDir) -> None:
    attempt(run, 0, {"decision": 3, "rule": [], "code": "x", "wait_s": "x", "exclude": "node1"})
    attempt(run, 1)
    assert told(run)[:2] == [
        "attempts",
        "  0  steps 1 to 30: ValueError (rank 3 on node2); nothing was saved",
    ]
