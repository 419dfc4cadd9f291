"""Where the time went and who is slow, as `status` and `why` print it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.command_line import CommandLine

from conf.schema import Config
from orchestra.cli.text.describe import spent_lines
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter, node_writer, rank_writer, read_events
from orchestra.run.files import JsonLinesWriter
from orchestra.run.metrics_file import FollowedRows
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that waited 100 s for its start, trained 100 s from 20 s after it on, and has just ended."""
    run = RunDir(tmp_path / "a-run")
    run.path.mkdir()
    write_config(run.config, Config())
    now = time.time()
    submitted = {"submitted": now - 230, "token": "t"}
    run.record.write_text(json.dumps({"name": run.name, "created": now - 230, "jobs": [submitted]}))
    node = JsonLinesWriter(run.event_file(node_writer(0, 0)))
    rank = JsonLinesWriter(run.event_file(rank_writer(0, 0)))
    node.write({"time": now - 130, "attempt": 0, "event": "attempt_started", "node": 0})
    rank.write({"time": now - 110, "attempt": 0, "event": "training_started", "rank": 0})
    node.write({"time": now - 10, "attempt": 0, "event": "finished", "node": 0, "code": 0})
    metrics = JsonLinesWriter(run.metrics)
    for step in range(1, 101):
        metrics.write({"step": step, "time": now - 110 + step, "step_time_s": 1.0, "loss": 3.0})
    return run


@pytest.mark.parametrize("verb", ["status", "why"])
def test_a_run_says_where_its_time_went(verb: str, run: RunDir, orchestra: CommandLine) -> None:
    printed = orchestra(verb, str(run.path)).out
    assert "time    3:40, goodput 45.5%: productive 1:40, starts 20.0s, queue 1:40" in printed
    assert max(map(len, printed.splitlines())) <= 80 + len(str(run.path))
    read = orchestra.json(verb, str(run.path))
    state = read[0] if isinstance(read, list) else read
    accounts = state["accounts"]
    assert accounts["wall_s"] == pytest.approx(220)
    assert state["goodput"] == accounts["goodput"] == pytest.approx(100 / 220)
    assert state["stragglers"] == []


def test_slow_ranks_are_named_slowest_first_until_they_are_gone(run: RunDir) -> None:
    events = EventWriter(run, rank_writer(0, 1), 0)
    for rank, ratio in ((3, 1.5), (7, 2.25), (8, 9.0)):
        events.write("straggler_found", rank=rank, host=f"node{rank}", ratio=ratio, step=40, steps=50)
    events.write("straggler_gone", rank=8, host="node8", step=90, steps=50)
    lines = spent_lines(
        run, read_events(run), FollowedRows(run.metrics).read(), RunPhase.finished, time.time()
    )
    assert lines[1:] == ["slow    rank 7 on node7, 2.2 × the others; rank 3 on node3, 1.5 × the others"]


def test_a_run_without_records_says_nothing(tmp_path: Path) -> None:
    assert spent_lines(RunDir(tmp_path), [], [], RunPhase.not_started, time.time()) == []
