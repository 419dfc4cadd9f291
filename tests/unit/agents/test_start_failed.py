"""A start of a job that ends before its attempt begins: the run's records say why, and `why` tells it."""

from __future__ import annotations

import dataclasses
import time

import pytest
from job_in_slurm import TASK, Slurm, record
from support.command_line import CommandLine

from conf.schema import Config
from orchestra.agents import setup_failed
from orchestra.agents.attempt_record import write_start_failed
from orchestra.errors import EXIT_DO_NOT_RESTART
from orchestra.report.run_state import read_state
from orchestra.run.config_file import to_yaml
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase

SETUP = ["export A=1\nexport B=2", "module load nosuch"]


@pytest.fixture(autouse=True)
def _in_batch_script(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = dataclasses.replace(Config().cluster, setup=SETUP)
    run.config.write_text(to_yaml(dataclasses.replace(Config(), cluster=cluster)))
    record(
        run, {"token": "orchestra:0", "id": "12", "attempt": 0, "name": "mine", "user": "me", "submitted": 1}
    )
    for name, value in {"JOB_ID": TASK.job, "JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def state(run: RunDir) -> tuple[RunPhase, int | None]:
    found = read_state(run, time.time())
    return found.state, found.code


def test_a_set_up_line_that_failed_is_told_with_its_number_and_text(
    run: RunDir, slurm: Slurm, orchestra: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup_failed.main([str(run.path), "3", "127"]) == EXIT_DO_NOT_RESTART
    words = "line 3 of cluster.setup `module load nosuch` failed with exit code 127"
    assert words in capsys.readouterr().err
    (event,) = read_events(run)
    assert (event["event"], event["job"], event["code"], event["attempt"]) == ("start_failed", "12", 93, -1)
    assert state(run) == (RunPhase.failed, 93)
    run.job_logs.mkdir(parents=True)
    (run.job_logs / "12_0_log.out").write_text("module: nosuch is unknown\n")
    why = orchestra("why", str(run.path)).out
    assert f"mine: failed: {words}" in why
    assert "module: nosuch is unknown" in why
    assert words in orchestra("status", str(run.path)).out
    assert orchestra.json("why", str(run.path))["verdict"]["code"] == 93


def test_it_says_nothing_of_other_jobs_nor_once_an_attempt_began(run: RunDir) -> None:
    write_start_failed(run, "job-11.start-0", "11", 93, "of the job before")
    assert state(run)[0] is RunPhase.not_started
    write_start_failed(run, "job-12.start-0", "12", 93, "of this one")
    assert state(run) == (RunPhase.failed, 93)
    EventWriter(run, node_writer(0, 0), 0).write("attempt_started", host="elsewhere")
    assert state(run)[0] is RunPhase.running


def test_after_attempts_it_is_the_start_that_failed(run: RunDir, orchestra: CommandLine) -> None:
    events = EventWriter(run, node_writer(0, 0), 0)
    events.write("attempt_started", job="12", host="elsewhere")
    events.write("failed", code=75, cause="StopRequested", node=0)
    write_start_failed(run, "job-12.start-1", "12", 93, "three starts in a row ended too early")
    assert state(run) == (RunPhase.failed, 93)
    why = orchestra("why", str(run.path)).out
    assert why.startswith("mine: failed: three starts in a row ended too early\n")
    assert "exit code 75" not in why
