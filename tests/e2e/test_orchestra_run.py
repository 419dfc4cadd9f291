"""`orchestra run` as a user types it: real processes, real training, real signals."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import (
    PACE,
    Started,
    environment,
    events_of,
    orchestra,
    press_ctrl_c_twice,
    processes_of,
    run_of,
    start_run,
    state_of,
)

from orchestra.run.metrics_file import read_metrics
from tests.support.waiting import eventually

_SMALL = ("train.global_batch_size=2", "train.seq_len=32", "wandb.mode=disabled")
_END_S = 20.0


def _start(folder: Path, *overrides: str, **options: Any) -> Started:
    """Start a run that is ended by a signal long before its last step, and wait for its first ones."""
    started = start_run(folder, "endless", "train.steps=1000000", *_SMALL, PACE, *overrides, **options)
    started.wait_for_steps(3)
    return started


@pytest.fixture(scope="module")
def finished(folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of six steps on two ranks, mirrored to an offline wandb run."""
    # A mirror that yields to everybody gets little of a busy machine: it may take its time at the end.
    overrides = ("train.steps=6", "run.name=first", "train.global_batch_size=4", "wandb.finish_timeout_s=60")
    return orchestra(folder, "run", *overrides)


def test_a_run_ends_with_0_and_leaves_a_whole_run_directory_that_commands_tell_of(
    finished: subprocess.CompletedProcess[str], folder: Path
) -> None:
    assert finished.stderr == ""
    run = run_of(folder, "first")
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert json.loads(run.record.read_text())["overrides"][0] == "train.steps=6"
    assert "gpus_per_node: 2" in run.config.read_text()
    assert sorted(event["rank"] for event in events_of(run, "finished") if "rank" in event) == [0, 1]
    assert events_of(run, "finished")[-1]["code"] == 0
    logs = sorted(path.name for path in run.attempt_logs(0).iterdir())
    assert logs == ["node-000.log", "rank-00000.log", "rank-00001.log"]
    assert list(run.wandb.rglob("*.wandb")), events_of(run, "wandb_failed")
    assert processes_of(run) == []
    state = state_of(folder, "fir")
    assert (state["state"], state["step"], state["steps"], state["attempts"]) == ("finished", 6, 6, 1)
    assert "finished at step 6" in orchestra(folder, "why", "first").stdout
    assert "launchers.bound_torchrun" in orchestra(folder, "logs", "first", "--node", "0").stdout


def test_piped_output_is_plain_complete_and_within_80_columns(
    finished: subprocess.CompletedProcess[str],
) -> None:
    lines = finished.stdout.splitlines()
    assert "\x1b" not in finished.stdout
    assert max(map(len, lines)) <= 80
    begins = ["run     first", "model   debug: 808,064 parameters", "layout  2 ranks: dp 2"]
    for begin in (*begins, "step 1/6", "step 6/6", "finished after 6 of 6 steps"):
        assert any(line.startswith(begin) for line in lines), finished.stdout
    assert any(line.startswith("loss ") and " → " in line for line in lines)


def test_ranks_that_compile_nothing_start_without_torchs_compiler(tmp_path: Path) -> None:
    """Its import takes a second of each start."""
    traced = {"PYTHONPROFILEIMPORTTIME": "1"}
    one_rank = ("cluster.gpus_per_node=1", "cluster.device=cpu", "train.steps=2")
    orchestra(tmp_path, "run", "run.name=plain", *_SMALL, *one_rank, extra=traced)
    logs = [path for path in run_of(tmp_path, "plain").logs.rglob("*") if path.is_file()]
    imported = {
        line.rpartition("|")[2].strip()
        for path in logs
        for line in path.read_text(errors="replace").splitlines()
        if line.startswith("import time:")
    }
    assert {"torch.nn", "orchestra.train.build"} <= imported
    assert not imported & {"torch._dynamo", "torch._dynamo.convert_frame", "sympy"}


def test_a_dry_run_prints_the_command_and_writes_nothing(tmp_path: Path) -> None:
    overrides = ("run.name=planned", "cluster.gpus_per_node=4")
    plan = json.loads(orchestra(tmp_path, "run", "--dry-run", "--json", *overrides).stdout)
    assert (plan["name"], plan["command"][0]) == ("planned", sys.executable)
    assert "--nproc-per-node" in plan["command"]
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_twice_ends_every_process_with_130(tmp_path: Path) -> None:
    started = _start(tmp_path)
    assert len(processes_of(started.run)) >= 3, "torchrun and two workers"
    press_ctrl_c_twice(started)
    out, err = started.end(130, _END_S)
    assert "Traceback" not in out + err
    assert "interrupted after" in out
    assert events_of(started.run, "failed")[-1]["message"] == "SIGINT received, and a second signal after it"


def test_nothing_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    started = _start(tmp_path)
    started.process.kill()
    started.process.communicate(timeout=_END_S)
    assert eventually(lambda: not processes_of(started.run), 5.0)
    assert state_of(tmp_path, "endless")["state"] == "died"


@pytest.mark.parametrize(
    "program",
    [
        '"$0" -m orchestra run "$@" | head -1; echo "code ${PIPESTATUS[0]}"',
        '"$0" -m orchestra run "$@" >/dev/full; echo "code $?"',
    ],
    ids=["a reader that goes away", "a full disk"],
)
def test_output_that_nobody_takes_does_not_end_the_training(tmp_path: Path, program: str) -> None:
    small = (*_SMALL, "train.steps=3", "run.name=alone", "cluster.gpus_per_node=1")
    words = ["bash", "-c", program, sys.executable, *small]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("code 0", "")
    assert len(read_metrics(run_of(tmp_path, "alone"))) == 3


def test_a_run_under_nohup_outlives_its_terminal_and_its_removed_directory_ends_in_words(
    tmp_path: Path,
) -> None:
    started = _start(tmp_path, "cluster.gpus_per_node=1", through=("nohup",))
    steps = len(read_metrics(started.run))
    started.process.send_signal(signal.SIGHUP)
    started.wait_for_steps(steps + 21)
    shutil.rmtree(started.run.path)
    time.sleep(1.0)
    assert started.process.poll() is None
    started.process.terminate()
    out, err = started.end(130, _END_S)
    assert "Traceback" not in out + err
