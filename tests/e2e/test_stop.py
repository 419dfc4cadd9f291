"""Stops on request as a user asks for them: signals to the command, `orchestra cancel`, and going on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from commands import (
    PACE,
    ROOT,
    TINY,
    Started,
    assert_same_training,
    events_of,
    newest_manifest,
    orchestra,
    processes_of,
    start_run,
    state_of,
    train,
)

from orchestra.run.control import stop_requests
from orchestra.run.metrics_file import read_metrics

# The learning rate of a step depends on no later one, so that a run can be ended where it was stopped.
_ENDLESS = ("train.steps=1000000", "optim=adamw_constant", "optim.warmup_steps=5", PACE)


def _start(folder: Path, *overrides: str) -> Started:
    started = start_run(folder, "endless", *TINY, *_ENDLESS, *overrides)
    started.wait_for_steps(2)
    return started


def _stopped_step(started: Started, out: str, reason: str) -> int:
    """Check everything that a stop leaves, and return the step after which it came."""
    (request,) = events_of(started.run, "stop_requested")
    assert (request["reason"], request["rank"]) == (reason, 0)
    step = int(request["step"])
    assert newest_manifest(started.run.checkpoints).step == step == read_metrics(started.run)[-1]["step"]
    ends = [event for event in events_of(started.run, "failed") if "rank" in event]
    assert sorted((end["rank"], end["code"], end["step"]) for end in ends) == [(0, 75, step), (1, 75, step)]
    assert (started.verdict()["code"], started.verdict()["step"]) == (75, step)
    assert f"stopped after {step} of 1000000 steps" in out
    assert out.splitlines()[-1] == f"resume  `orchestra resume endless` goes on from step {step}"
    return step


@pytest.mark.timeout(240)
def test_sigterm_saves_and_ends_with_75_and_the_run_goes_on_to_the_bits_of_one_left_alone(
    folder: Path,
) -> None:
    started = _start(folder)
    started.process.send_signal(signal.SIGTERM)
    out, err = started.end(75)
    assert err == ""
    step = _stopped_step(started, out, "signal SIGTERM")
    assert f"stopping after step {step}: signal SIGTERM" in out.splitlines()

    state = state_of(folder, "endless")
    assert (state["state"], state["code"]) == ("stopped", 75)
    assert state["step"] == state["checkpoint_step"] == step
    follow = f"resume  `orchestra resume endless` goes on from step {step}"
    assert orchestra(folder, "status", "endless").stdout.splitlines()[-1] == follow
    why = orchestra(folder, "why", "endless").stdout.splitlines()
    assert why[0].startswith(f"endless: stopped at step {step}: signal SIGTERM, asked for by ")
    assert why[1].startswith("time ")
    assert why[-1] == follow

    end = f"train.steps={step + 7}"
    assert f"restored the checkpoint of step {step}" in orchestra(folder, "resume", "endless", end).stdout
    alone = train(folder, "alone", *TINY, *_ENDLESS, end)
    assert_same_training(started.run, alone)
    assert newest_manifest(alone.checkpoints).step == step + 7


def test_a_run_that_trains_is_not_resumed_and_cancel_asks_once_and_saves(
    tmp_path: Path,
) -> None:
    started = _start(tmp_path, "checkpoint.every_steps=50")
    refused = orchestra(tmp_path, "resume", "endless", code=2)
    assert f"endless is running, attempt 0: process {started.process.pid} on " in refused.stderr
    planned = orchestra(tmp_path, "cancel", "endless", "--dry-run")
    assert "attempt 0 would be asked to save and stop" in planned.stdout
    assert stop_requests.read_requests(started.run, 0) == []
    done = orchestra(tmp_path, "cancel", "end")
    assert done.stderr == ""
    assert done.stdout.startswith("endless: attempt 0 asked to save and stop; `orchestra status endless`")
    out, err = started.end(75)
    assert err == ""
    _stopped_step(started, out, "cancel")
    (record,) = json.loads(orchestra(tmp_path, "cancel", "endless", "--json").stdout)
    assert (record["state"], record["asked"], record["attempt"]) == ("stopped", False, None)
    assert "stopped, nothing runs that could be stopped" in orchestra(tmp_path, "cancel", "endless").stdout


def test_ranks_that_do_not_stop_in_time_are_ended(tmp_path: Path) -> None:
    started = _start(tmp_path, "recovery.stop_timeout_s=0")
    started.process.send_signal(signal.SIGTERM)
    started.end(130)
    assert "recovery.stop_timeout_s=0" in str(started.verdict()["message"])


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    started = _start(tmp_path)
    # Stopped ranks can't save.
    for pid in processes_of(started.run):
        os.kill(pid, signal.SIGSTOP)
    started.process.send_signal(signal.SIGINT)
    started.wait_for(lambda: stop_requests.read_requests(started.run, 0), 10)
    time.sleep(0.5)
    assert started.process.poll() is None
    started.process.send_signal(signal.SIGINT)
    out, err = started.end(130)
    assert "Traceback" not in out + err
    assert "interrupted after" in out
    assert started.verdict()["message"] == "SIGINT received, and a second signal after it"


def _start_gated(folder: Path, *overrides: str) -> Started:
    """Start a run whose fork server imports nothing before there is a file `gate`; return where it waits."""
    is_server = "'launchers.fork_server.server' in sys.orig_argv"
    waits = f"while {is_server} and not os.path.exists('gate'):\n    time.sleep(0.05)\n"
    (folder / "sitecustomize.py").write_text(f"import os, sys, time\n{waits}")
    started = start_run(folder, "early", *TINY, *overrides, extra={"PYTHONPATH": f"{folder}:{ROOT}"})
    started.wait_for(lambda: events_of(started.run, "node_started"), 30)
    return started


def test_a_request_during_the_start_is_heard_before_the_first_step(tmp_path: Path) -> None:
    started = _start_gated(tmp_path, *_ENDLESS)
    stop_requests.write_request(started.run, 0, stop_requests.CANCEL)
    (tmp_path / "gate").touch()
    out, err = started.end(75)
    assert err == ""
    assert "nothing was committed" in out
    assert [event["step"] for event in events_of(started.run, "stop_requested")] == [0]
    assert not read_metrics(started.run)


def test_a_signal_while_torch_is_imported_waits_for_no_rank(tmp_path: Path) -> None:
    started = _start_gated(tmp_path)
    started.process.send_signal(signal.SIGINT)
    out, err = started.end(75)
    assert err == ""
    assert "stopping (Ctrl-C again: at once)" in out.splitlines()
    assert out.splitlines()[-1].endswith("starts again at step 1: nothing was committed")
    message = str(started.verdict()["message"])
    assert message.startswith("signal SIGINT, asked for by ")
    assert message.endswith("its ranks were started")
    assert [request.reason for request in stop_requests.read_requests(started.run, 0)] == ["signal SIGINT"]
    assert not list(started.run.logs.glob("*rank*"))
    assert "restored" not in orchestra(tmp_path, "resume", "early", "train.steps=3").stdout
    assert [row["step"] for row in read_metrics(started.run)] == [1, 2, 3]
