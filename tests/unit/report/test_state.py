"""A run's state from its records: real files, real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.run_records import started_elsewhere

from conf.schema import Config
from launchers import processes
from orchestra.report.page.curves import void_curve
from orchestra.report.run_state import (
    RunState,
    failed_save,
    failed_saves,
    passed_over,
    read_state,
    read_twice,
)
from orchestra.report.stalled import stalled_words
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter, node_writer, rank_writer
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir
from orchestra.run.run_lineage import newest_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "a-run")
    run.path.mkdir()
    config = Config()
    write_config(run.config, dataclasses.replace(config, train=dataclasses.replace(config.train, steps=50)))
    run.record.write_text(json.dumps({"name": run.name, "created": time.time() - 60}))
    return run


def _state(run: RunDir) -> RunState:
    return read_state(run, time.time())


def _start(run: RunDir, pid: int, started: int | None = None, attempt: int = 0) -> EventWriter:
    events = EventWriter(run, node_writer(attempt, 0), attempt)
    if started is None:
        found = processes.find(pid)
        started = found.started if found else 0
    events.write("attempt_started", pid=pid, pid_started=started)
    return events


def _train(run: RunDir, steps: int) -> None:
    metrics = JsonLinesWriter(run.metrics)
    for step in range(1, steps + 1):
        speed = {"tokens_per_s": 100.0, "mfu": 0.5, "step_time_s": 2.0}
        metrics.write({"step": step, "loss": 5.0 - step, **speed})


def test_a_run_whose_leader_lives_is_running_with_numbers_and_time_left(run: RunDir) -> None:
    _start(run, os.getpid())
    _train(run, 3)
    state = _state(run)
    assert (state.state, state.step, state.steps, state.loss) == ("running", 3, 50, 2.0)
    assert (state.tokens_per_s, state.mfu, state.eta_s) == (100.0, 0.5, 94.0)
    assert state.age_s == pytest.approx(60, abs=5)
    _train(run, 3000)
    assert run.metrics.stat().st_size > 2 * (1 << 16), "more than is read of its end"
    assert _state(run).step == 3000


@pytest.mark.parametrize(
    ("code", "word"), [(0, "finished"), (1, "failed"), (130, "interrupted"), (75, "stopped")]
)
def test_the_recorded_end_is_the_state(run: RunDir, code: int, word: str) -> None:
    _start(run, os.getpid()).write("failed" if code else "finished", code=code, cause="x")
    state = _state(run)
    assert (state.state, state.code, state.eta_s) == (word, code, None)


@pytest.mark.parametrize("is_taken", [False, True], ids=["gone", "its id is another process's"])
def test_a_run_whose_leader_is_gone_died_unless_its_ranks_wrote_why(run: RunDir, is_taken: bool) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    _start(run, os.getpid() if is_taken else gone.pid, started=1)
    assert _state(run).state == "died"
    rank = EventWriter(run, rank_writer(0, 0), 0, rank=0)
    rank.write("failed", code=93, cause="NonFiniteError", message="nan")
    state = _state(run)
    assert (state.state, state.code, state.cause) == ("failed", 93, "NonFiniteError")


def test_a_run_of_another_host_is_running_while_its_files_grow_and_the_last_attempt_counts(
    run: RunDir,
) -> None:
    _start(run, os.getpid()).write("failed", code=1, cause="x")
    started_elsewhere(run, attempt=1)
    state = _state(run)
    assert (state.state, state.attempts) == ("running", 2)
    later = time.time() + 3600
    assert read_state(run, later).state == "unknown"
    # Its node's agent lives, in a step that takes longer than any file was written.
    run.heartbeats.mkdir()
    run.heartbeat(0).write_text("{}")
    os.utime(run.heartbeat(0), (later - 5, later - 5))
    assert read_state(run, later).state == "running"


def test_damaged_records_make_unknowns_and_no_errors(run: RunDir) -> None:
    run.record.write_text("{")
    run.config.write_text("train: [")
    run.metrics.write_text('{"step": 1, "loss": 3.0}\n{"step": "x"}\n[1]\n{"step": 2, "lo')
    state = _state(run)
    assert (state.steps, state.step, state.loss, state.age_s) == (None, 1, 3.0, None)


def test_records_that_somebody_edited_end_no_command(run: RunDir) -> None:
    started = {"event": "attempt_started", "attempt": 0, "time": 1.0, "nodes": 1, "ranks_per_node": None}
    hung = {"event": "hang_detected", "attempt": 0, "time": 2.0}
    assert stalled_words(run, [started, hung]) is None
    row = {"step": 1, "loss": 2.0, "time": []}
    assert void_curve([row, {**row, "step": 2}], [row])["step"] == [2]


@pytest.mark.parametrize(("host", "state"), [(socket.gethostname(), "died"), ("elsewhere", "not started")])
def test_a_run_that_was_prepared_by_a_process_that_is_gone_died(run: RunDir, host: str, state: str) -> None:
    run.record.write_text(json.dumps({"name": run.name, "pid": os.getpid(), "pid_started": 1, "host": host}))
    assert _state(run).state == state


_DAMAGED_EVENTS = (
    {"event": "attempt_started"},
    {"event": "attempt_started", "time": 1.0},
    {"event": "attempt_started", "time": "abc", "attempt": 0},
    {"event": "attempt_started", "time": 1.0, "attempt": "x"},
    {"event": "attempt_started", "time": 1.0, "attempt": 10**400},
    {"event": ["list"], "time": 1.0, "attempt": 0},
    {"event": "failed", "time": float("nan"), "attempt": 0, "code": 1},
    {"event": "failed", "time": 1.0, "attempt": 0, "rank": "zero", "code": 1},
    {"event": "failed", "time": 1.0, "attempt": 0, "rank": None, "code": 1},
    {"event": "attempt_started", "time": 1.0, "attempt": 0, "pid": "me", "host": 3},
    {"event": "finished", "time": 1.0, "attempt": 0, "code": None},
    {"event": "failed", "time": 1.0, "attempt": 0, "rank": 1, "code": "one", "traceback": 7, "host": {}},
)


@pytest.mark.parametrize("damaged", _DAMAGED_EVENTS, ids=str)
def test_a_damaged_event_changes_no_running_run_into_an_error(
    run: RunDir, damaged: dict[str, object], orchestra: CommandLine
) -> None:
    _start(run, os.getpid())
    with run.event_file("damaged").open("w") as file:
        file.write(json.dumps(damaged) + "\n")
    assert _state(run).name == run.name
    for verb in ("status", "why", "logs"):
        assert orchestra(verb, run.name, "--dir", str(run.path.parent)).err == ""


def test_damaged_metrics_are_unknown_and_a_rank_that_is_no_number_does_not_end_the_run(
    run: RunDir, orchestra: CommandLine
) -> None:
    _start(run, os.getpid()).write("failed", rank="zero", code=1)
    rows = ('{"step": 1, "loss": 3.0}', '{"step": 2, "loss": "high", "mfu": NaN, "step_time_s": 1e999}')
    run.metrics.write_text("\n".join([*rows, '{"step": -5, "loss": 1.0}', '{"step": true}', ""]))
    state = _state(run)
    assert (state.state, state.step, state.loss, state.mfu, state.eta_s) == ("running", 2, None, None, None)
    assert "2/50" in orchestra("status", "--dir", str(run.path.parent)).out


def test_a_damaged_configuration_is_unknown(run: RunDir) -> None:
    for text in ("train: [", "[]", "3", "train: 3", "a: b: c", "train: {steps: x}", "\0"):
        run.config.write_text(text)
        assert _state(run).steps is None, text


def test_one_unreadable_run_does_not_hide_the_others(run: RunDir, orchestra: CommandLine) -> None:
    other = RunDir(run.path.with_name("other"))
    other.metrics.mkdir(parents=True)
    other.events.mkdir()
    (other.events / "node.jsonl").mkdir()
    other.record.write_text('{"created": NaN}')
    lines = orchestra("status", "--dir", str(run.path.parent)).out.splitlines()
    rows = dict(line.split()[:2] for line in lines)
    assert rows == {"RUN": "STATE", "a-run": "not", "other": "unreadable"}


def _event(name: str, step: object, attempt: int = 0) -> dict[str, Any]:
    return {"event": name, "step": step, "attempt": attempt}


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ([], None),
        ([_event("checkpoint_started", 10)], None),
        ([_event("checkpoint_committed", 10), _event("checkpoint_failed", 20)], 10),
        ([_event("checkpoint_committed", 10), _event("checkpoint_committed", 20)], 20),
        ([_event("checkpoint_committed", 20), _event("restored", 10, 1)], 10),
        # Published late.
        ([_event("restored", 10, 1), _event("checkpoint_committed", 20)], 10),
        ([_event("restored", 10, 1), _event("checkpoint_committed", 20, 1)], 20),
        ([_event("restored", 0)], None),
        ([_event("checkpoint_committed", "ten")], None),
    ],
)
def test_a_run_goes_on_from_what_was_committed_or_restored_last(
    events: list[dict[str, Any]], step: int | None
) -> None:
    assert newest_checkpoint(events) == step


def test_checkpoints_that_failed_or_were_passed_over_say_why() -> None:
    event = {**_event("checkpoint_failed", 4), "reasons": {"0": "full", "1": "full", "2": "stalled"}}
    assert failed_save(event) == "the checkpoint of step 4 was not saved: full (rank 0, 1); stalled (rank 2)"
    assert "no reason given" in failed_save(_event("checkpoint_failed", 4))
    event = {**_event("restored", 2), "skipped": [{"step": 4, "reason": "a flipped bit"}, "nonsense"]}
    assert passed_over(event) == ["the checkpoint of step 4 was passed over: a flipped bit"]
    assert passed_over(_event("restored", 2)) == []
    (words,) = read_twice({**_event("restored", 2), "read_twice": ["rank 1: the first", "rank 3: another"]})
    assert words.endswith("right when they were read again: rank 1: the first (and 1 more like it)")
    assert read_twice(_event("restored", 2)) == []


def test_saves_that_failed_since_the_last_commit_are_counted_once_for_all_ranks() -> None:
    def failed(step: int, rank: int) -> dict[str, Any]:
        return {
            **_event("checkpoint_failed", step),
            "rank": rank,
            "time": 100.0 + step,
            "reasons": {"0": "full"},
        }

    before = [failed(5, 0), failed(5, 1), _event("checkpoint_committed", 10)]
    assert failed_saves(before) is None
    after = [*before, failed(15, 0), failed(15, 1), failed(20, 1), failed(20, 0)]
    found = failed_saves(after)
    assert found is not None
    assert (found.count, found.since) == (2, 115.0)
    assert "step 20 was not saved: full" in found.why
    assert failed_saves([*after, _event("checkpoint_committed", 25)]) is None
