"""A run's state from its records: real files, real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from conf.schema import Config
from launchers import processes
from orchestra.cli import main
from orchestra.report.run_state import RunState, read_state
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter, node_writer, rank_writer
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir


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


def test_a_prepared_run_has_not_started(run: RunDir) -> None:
    assert _state(run).state == "not started"


@pytest.mark.parametrize(
    ("event", "code", "word"),
    [
        ("finished", 0, "finished"),
        ("failed", 1, "failed"),
        ("failed", 130, "interrupted"),
        ("failed", 75, "stopped"),
    ],
)
def test_the_recorded_end_is_the_state(run: RunDir, event: str, code: int, word: str) -> None:
    _start(run, os.getpid()).write(event, code=code, cause="x")
    state = _state(run)
    assert (state.state, state.code, state.eta_s) == (word, code, None)


def test_a_run_whose_leader_is_gone_without_a_verdict_died(run: RunDir) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    _start(run, gone.pid, started=1)
    assert _state(run).state == "died"


def test_a_process_that_got_the_leaders_id_later_is_not_the_leader(run: RunDir) -> None:
    _start(run, os.getpid(), started=1)
    assert _state(run).state == "died"


def test_what_the_ranks_wrote_counts_when_the_leader_is_gone(run: RunDir) -> None:
    _start(run, os.getpid(), started=1)
    rank = EventWriter(run, rank_writer(0, 0), 0, rank=0)
    rank.write("failed", code=93, cause="NonFiniteError", message="nan")
    state = _state(run)
    assert (state.state, state.code, state.cause) == ("failed", 93, "NonFiniteError")


def test_a_run_of_another_host_is_running_while_its_files_grow(run: RunDir) -> None:
    events = JsonLinesWriter(run.event_file(node_writer(0, 0)))
    other = "not-" + socket.gethostname()
    events.write({"time": time.time(), "attempt": 0, "event": "attempt_started", "host": other, "pid": 1})
    assert _state(run).state == "running"
    assert read_state(run, time.time() + 3600).state == "unknown"


def test_the_last_attempt_counts(run: RunDir) -> None:
    _start(run, os.getpid()).write("failed", code=1, cause="x")
    _start(run, os.getpid(), attempt=1)
    state = _state(run)
    assert (state.state, state.attempts) == ("running", 2)


def test_damaged_records_make_unknowns_and_no_errors(run: RunDir) -> None:
    run.record.write_text("{")
    run.config.write_text("train: [")
    run.metrics.write_text('{"step": 1, "loss": 3.0}\n{"step": "x"}\n[1]\n{"step": 2, "lo')
    state = _state(run)
    assert (state.steps, state.step, state.loss, state.age_s) == (None, 1, 3.0, None)


def test_only_the_end_of_long_metrics_is_read(run: RunDir) -> None:
    _train(run, 3000)
    assert run.metrics.stat().st_size > 2 * (1 << 16)
    assert _state(run).step == 3000


def _prepared_by(run: RunDir, pid: int, host: str) -> None:
    run.record.write_text(json.dumps({"name": run.name, "pid": pid, "pid_started": 1, "host": host}))


def test_a_run_that_was_prepared_by_a_process_that_is_gone_died(run: RunDir) -> None:
    _prepared_by(run, os.getpid(), socket.gethostname())
    assert _state(run).state == "died"
    _prepared_by(run, os.getpid(), "not-" + socket.gethostname())
    assert _state(run).state == "not started"


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
    run: RunDir, damaged: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    _start(run, os.getpid())
    with run.event_file("damaged").open("w") as file:
        file.write(json.dumps(damaged) + "\n")
    assert _state(run).name == run.name
    for verb in ("status", "why", "logs"):
        assert main([verb, run.name, "--dir", str(run.path.parent)]) == 0
    assert capsys.readouterr().err == ""


def test_a_rank_that_is_no_number_does_not_end_the_run(run: RunDir) -> None:
    events = _start(run, os.getpid())
    events.write("failed", rank="zero", code=1)
    assert _state(run).state == "running"


def test_damaged_metrics_are_unknown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    _start(run, os.getpid())
    rows = ('{"step": 1, "loss": 3.0}', '{"step": 2, "loss": "high", "mfu": NaN, "step_time_s": 1e999}')
    run.metrics.write_text("\n".join([*rows, '{"step": -5, "loss": 1.0}', '{"step": true}', ""]))
    state = _state(run)
    assert (state.step, state.loss, state.mfu, state.eta_s) == (2, None, None, None)
    assert main(["status", "--dir", str(run.path.parent)]) == 0
    assert "2/50" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "3", "train: 3", "a: b: c", "train: {steps: x}", "\0"])
def test_a_damaged_configuration_is_unknown(run: RunDir, text: str) -> None:
    run.config.write_text(text)
    assert _state(run).steps is None


def test_one_unreadable_run_does_not_hide_the_others(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    other = RunDir(run.path.with_name("other"))
    other.metrics.mkdir(parents=True)
    other.events.mkdir()
    (other.events / "node.jsonl").mkdir()
    other.record.write_text('{"created": NaN}')
    assert main(["status", "--dir", str(run.path.parent)]) == 0
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert rows == {"RUN": "STATE", "a-run": "not", "other": "unreadable"}
