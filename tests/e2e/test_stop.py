"""Stops on request as a user asks for them: signals to the command, `orchestra cancel`, and going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import (
    PACE,
    TINY,
    events_of,
    eventually,
    newest_manifest,
    orchestra,
    processes_of,
    start,
    trained_digest,
    trained_rows,
)

from orchestra.run import stop_requests
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

pytestmark = pytest.mark.ranks

# The learning rate of a step depends on no later one, so that a run can be ended where it was stopped.
_ENDLESS = ("train.steps=1000000", "optim=adamw_constant", "optim.warmup_steps=5", PACE)
_START_S = 60.0


@dataclass
class Started:
    """An endless run that has trained its first steps."""

    folder: Path
    run: RunDir
    process: subprocess.Popen[str]

    def end(self, limit_s: float = 60.0) -> tuple[int, str, str]:
        """Wait for the command's end; return its code and what it printed."""
        out, err = self.process.communicate(timeout=limit_s)
        return self.process.returncode, out, err

    def verdict(self) -> dict[str, object]:
        """Return what the agent recorded as the end."""
        return [event for event in events_of(self.run, "failed") if "rank" not in event][-1]


def _start(folder: Path, *overrides: str) -> Started:
    process = start(folder, "run", "run.name=endless", *TINY, *_ENDLESS, *overrides)
    started = Started(folder, RunDir(folder / "runs" / "endless"), process)
    is_up = eventually(lambda: len(read_metrics(started.run)) > 1 or process.poll() is not None, _START_S)
    assert is_up
    assert process.poll() is None, process.communicate()
    return started


def _stopped_step(started: Started, out: str, reason: str) -> int:
    """Check everything that a stop leaves, and return the step it came behind."""
    (asked,) = events_of(started.run, "stop_requested")
    assert (asked["reason"], asked["rank"]) == (reason, 0)
    step = asked["step"]
    assert newest_manifest(started.run.checkpoints).step == step == read_metrics(started.run)[-1]["step"]
    ends = [event for event in events_of(started.run, "failed") if "rank" in event]
    assert sorted((end["rank"], end["code"], end["step"]) for end in ends) == [(0, 75, step), (1, 75, step)]
    assert (started.verdict()["code"], started.verdict()["step"]) == (75, step)
    assert f"stopped after {step} of 1000000 steps" in out
    assert out.splitlines()[-1] == f"resume  `orchestra resume endless` goes on from step {step}"
    assert processes_of(started.run) == []
    return step


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Started, int, str, str]:
    """A run that got SIGTERM; its command's exit code and what it printed."""
    started = _start(tmp_path_factory.mktemp("work"))
    started.process.send_signal(signal.SIGTERM)
    return (started, *started.end())


@pytest.fixture
def step(stopped: tuple[Started, int, str, str]) -> int:
    """The step behind which that run stopped."""
    return int(events_of(stopped[0].run, "stop_requested")[0]["step"])


def test_sigterm_saves_and_ends_with_75(stopped: tuple[Started, int, str, str]) -> None:
    started, code, out, err = stopped
    assert (code, err) == (75, "")
    step = _stopped_step(started, out, "signal SIGTERM")
    assert f"stopping after step {step}: signal SIGTERM" in out.splitlines()


def test_status_and_why_tell_of_the_stop_and_how_to_go_on(
    stopped: tuple[Started, int, str, str], step: int
) -> None:
    folder = stopped[0].folder
    (state,) = json.loads(orchestra(folder, "status", "endless", "--json").stdout)
    assert (state["state"], state["code"]) == ("stopped", 75)
    assert state["step"] == state["checkpoint_step"] == step
    follow = f"resume  `orchestra resume endless` goes on from step {step}"
    assert orchestra(folder, "status", "endless").stdout.splitlines()[-1] == follow
    why = orchestra(folder, "why", "endless").stdout.splitlines()
    assert why[0].startswith(f"endless: stopped at step {step}: signal SIGTERM, asked for by ")
    assert why[1].startswith("time ")
    assert why[-1] == follow


def test_the_stopped_run_goes_on_to_the_bits_of_one_that_was_left_alone(
    stopped: tuple[Started, int, str, str], step: int
) -> None:
    folder, run = stopped[0].folder, stopped[0].run
    end = f"train.steps={step + 7}"
    done = orchestra(folder, "resume", "endless", end)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"restored the checkpoint of step {step}" in done.stdout
    alone = RunDir(folder / "runs" / "alone")
    assert orchestra(folder, "run", "run.name=alone", *TINY, *_ENDLESS, end).returncode == 0
    assert trained_rows(run) == trained_rows(alone)
    ours, theirs = (newest_manifest(each.checkpoints) for each in (run, alone))
    assert ours.step == theirs.step == step + 7
    assert trained_digest(ours) == trained_digest(theirs)


def test_cancel_asks_once_saves_and_says_what_it_did(tmp_path: Path) -> None:
    started = _start(tmp_path, "checkpoint.every_steps=50")
    planned = orchestra(tmp_path, "cancel", "endless", "--dry-run")
    assert "attempt 0 would be asked to save and stop" in planned.stdout
    assert stop_requests.read_requests(started.run, 0) == []
    told = orchestra(tmp_path, "cancel", "end")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("endless: attempt 0 asked to save and stop; `orchestra status endless`")
    code, out, err = started.end()
    assert (code, err) == (75, "")
    _stopped_step(started, out, "cancel")
    again = orchestra(tmp_path, "cancel", "endless", "--json")
    (record,) = json.loads(again.stdout)
    assert (again.returncode, record["state"], record["asked"], record["attempt"]) == (
        0,
        "stopped",
        False,
        None,
    )
    assert "stopped, nothing runs that could be stopped" in orchestra(tmp_path, "cancel", "endless").stdout


def test_cancel_now_ends_at_once(tmp_path: Path) -> None:
    started = _start(tmp_path)
    assert orchestra(tmp_path, "cancel", "endless", "--now").returncode == 0
    code, out, _ = started.end()
    assert (code, processes_of(started.run)) == (130, [])
    assert "interrupted after" in out
    assert str(started.verdict()["message"]).startswith("cancel, asked for by ")


def test_ranks_that_do_not_stop_in_time_are_ended(tmp_path: Path) -> None:
    started = _start(tmp_path, "recovery.stop_timeout_s=0")
    started.process.send_signal(signal.SIGTERM)
    code, _, _ = started.end()
    assert (code, processes_of(started.run)) == (130, [])
    assert "recovery.stop_timeout_s=0" in str(started.verdict()["message"])


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    started = _start(tmp_path)
    # Stopped ranks can't save.
    for pid in processes_of(started.run):
        os.kill(pid, signal.SIGSTOP)
    started.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: bool(stop_requests.read_requests(started.run, 0)), 10)
    time.sleep(0.5)
    assert started.process.poll() is None
    started.process.send_signal(signal.SIGTERM)
    code, _, _ = started.end()
    assert (code, processes_of(started.run)) == (130, [])


def test_a_request_during_the_start_is_heard_before_the_first_step(tmp_path: Path) -> None:
    process = start(tmp_path, "run", "run.name=early", *TINY, *_ENDLESS)
    run = RunDir(tmp_path / "runs" / "early")
    assert eventually(lambda: bool(events_of(run, "attempt_started")), 30)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (75, "")
    assert "nothing was committed" in out
    assert [event["step"] for event in events_of(run, "stop_requested")] == [0]
    assert not read_metrics(run)
    assert processes_of(run) == []
