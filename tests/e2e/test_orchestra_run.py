"""`orchestra run` as a user types it: real processes, real training, real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import PACE, environment, events_of, eventually, orchestra, processes_of, start

from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

pytestmark = pytest.mark.ranks

# Small and endless: ended by a signal long before its last step.
_ENDLESS = (
    *("train.steps=1000000", "train.global_batch_size=2", "train.seq_len=32", "wandb.mode=disabled"),
    PACE,
)
_START_S = 60.0


@dataclass
class Started:
    """An endless run that has trained its first steps."""

    run: RunDir
    process: subprocess.Popen[str]

    def end(self, limit_s: float = 20.0) -> tuple[int, str, str]:
        """Wait for the command's end; return its code and what it printed."""
        out, err = self.process.communicate(timeout=limit_s)
        return self.process.returncode, out, err

    def all_gone(self, limit_s: float) -> bool:
        return eventually(lambda: not processes_of(self.run), limit_s)


def _start(folder: Path, *overrides: str, through: tuple[str, ...] = ()) -> Started:
    """Start an endless run, `through` a command that takes one, and wait for its first steps."""
    process = start(folder, "run", "run.name=endless", *_ENDLESS, *overrides, through=through)
    started = Started(RunDir(folder / "runs" / "endless"), process)
    is_up = eventually(lambda: len(read_metrics(started.run)) > 2 or process.poll() is not None, _START_S)
    assert is_up
    assert process.poll() is None, process.communicate()
    return started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def finished(folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of six steps on two ranks, mirrored to an offline wandb run."""
    # A mirror that yields to everybody gets little of a busy machine: it may take its time at the end.
    overrides = ("train.steps=6", "run.name=first", "train.global_batch_size=4", "wandb.finish_timeout_s=60")
    return orchestra(folder, "run", *overrides)


def test_a_run_ends_with_0_and_leaves_a_whole_run_directory(
    finished: subprocess.CompletedProcess[str], folder: Path
) -> None:
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    run = RunDir(folder / "runs" / "first")
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert json.loads(run.record.read_text())["overrides"][0] == "train.steps=6"
    assert "gpus_per_node: 2" in run.config.read_text()
    assert sorted(event["rank"] for event in events_of(run, "finished") if "rank" in event) == [0, 1]
    assert events_of(run, "finished")[-1]["code"] == 0
    logs = sorted(path.name for path in run.attempt_logs(0).iterdir())
    assert logs == ["node-000.log", "rank-00000.log", "rank-00001.log"]
    assert list(run.wandb.rglob("*.wandb")), events_of(run, "wandb_failed")
    assert processes_of(run) == []


def test_piped_output_is_plain_complete_and_within_80_columns(
    finished: subprocess.CompletedProcess[str],
) -> None:
    lines = finished.stdout.splitlines()
    assert "\x1b" not in finished.stdout
    assert max(map(len, lines)) <= 80
    for begin in (
        "run     first",
        "model   debug: 808,064 parameters",
        "layout  2 ranks: dp 2",
        "step 1/6",
        "step 6/6",
    ):
        assert any(line.startswith(begin) for line in lines), finished.stdout
    assert any(line.startswith("finished after 6 of 6 steps") for line in lines)
    assert any(line.startswith("loss ") and " → " in line for line in lines)


def test_status_why_and_logs_tell_of_the_run(
    finished: subprocess.CompletedProcess[str], folder: Path
) -> None:
    (state,) = json.loads(orchestra(folder, "status", "fir", "--json").stdout)
    assert (state["state"], state["step"], state["steps"], state["attempts"]) == ("finished", 6, 6, 1)
    assert "finished at step 6" in orchestra(folder, "why", "first").stdout
    assert "torch.distributed.run" in orchestra(folder, "logs", "first", "--node", "0").stdout


def test_a_name_that_is_taken_is_refused_and_the_run_kept(
    finished: subprocess.CompletedProcess[str], folder: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs" / "first").rglob("*")}
    again = orchestra(folder, "run", "train.steps=2", "run.name=first")
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in (folder / "runs" / "first").rglob("*")} == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallelism.pp=2",), "pipeline parallelism"),
        (("parallelism.tp=3",), "parallelism.tp=3"),
        (("train.stepz=3", "optim.lr=abc"), "train.steps"),
        (("data.path=/nowhere/x.bin", "data=tokens"), "/nowhere/x.bin"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_exists(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    done = orchestra(tmp_path, "run", *overrides)
    assert done.returncode == 2
    assert message in done.stderr
    assert all(line.startswith(("error: ", "       ")) for line in done.stderr.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_command_and_writes_nothing(tmp_path: Path) -> None:
    overrides = ("run.name=planned", "cluster.gpus_per_node=4")
    done = orchestra(tmp_path, "run", "--dry-run", "--json", *overrides)
    plan = json.loads(done.stdout)
    assert (plan["name"], plan["command"][0]) == ("planned", sys.executable)
    assert "--nproc-per-node" in plan["command"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to_group", [False, True])
def test_ctrl_c_ends_every_process_with_130(tmp_path: Path, to_group: bool) -> None:
    started = _start(tmp_path)
    assert len(processes_of(started.run)) >= 3, "torchrun and two workers"
    (os.killpg if to_group else os.kill)(started.process.pid, signal.SIGINT)
    code, out, err = started.end()
    assert code == 130
    assert "Traceback" not in out + err
    assert "interrupted after" in out
    assert processes_of(started.run) == []
    assert events_of(started.run, "failed")[-1]["message"] == "SIGINT received"


def test_nothing_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    started = _start(tmp_path)
    started.process.kill()
    started.end()
    assert started.all_gone(5.0)
    (state,) = json.loads(orchestra(tmp_path, "status", "--json").stdout)
    assert state["state"] == "died"


def test_a_killed_worker_ends_the_run_with_1_and_is_named(tmp_path: Path) -> None:
    # Ranks that were not forked show their environment.
    plain = ("recovery.warm_start=false", "recovery.max_restarts=0")
    started = _start(tmp_path, "run.dir=runs", *plain)
    victim = events_of(started.run, "attempt_started")[0]
    assert victim["pid"] == started.process.pid
    workers = [pid for pid in processes_of(started.run) if _rank_of(pid) == "1"]
    os.kill(workers[0], signal.SIGKILL)
    code, _, err = started.end()
    assert code == 1
    assert "error: rank 1 on " in err
    assert "killed by SIGKILL" in err
    assert "rank-00001.log" in err
    assert processes_of(started.run) == []


def _rank_of(pid: int) -> str | None:
    variables = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    return next((entry[5:].decode() for entry in variables if entry.startswith(b"RANK=")), None)


def test_the_code_is_the_verdict_of_the_worker(tmp_path: Path) -> None:
    """torchrun itself turns every failure into 1."""
    diverging = ("optim.lr=1e30", "optim.warmup_steps=0", "train.on_nonfinite=stop", "train.steps=50")
    small = ("wandb.mode=disabled", "train.global_batch_size=2", "train.seq_len=32")
    done = orchestra(tmp_path, "run", "--json", *diverging, *small)
    assert done.returncode == 93, done.stderr
    result = json.loads(done.stdout)
    assert (result["code"], result["state"], result["cause"]) == (93, "failed", "NonFiniteError")
    assert "NonFiniteError" in done.stderr


def test_a_reader_that_goes_away_does_not_end_the_training(tmp_path: Path) -> None:
    program = '"$0" -m orchestra run "$@" | head -1; echo "code ${PIPESTATUS[0]}"'
    words = [
        sys.executable,
        *("train.steps=3", "train.seq_len=32", "train.global_batch_size=2"),
        "run.name=alone",
        "cluster.gpus_per_node=1",
        "wandb.mode=disabled",
    ]
    done = subprocess.run(
        ["bash", "-c", program, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "code 0"
    assert done.stderr == ""
    assert len(read_metrics(RunDir(tmp_path / "runs" / "alone"))) == 3


def test_a_run_under_nohup_outlives_its_terminal_and_its_removed_directory_ends_in_words(
    tmp_path: Path,
) -> None:
    started = _start(tmp_path, "cluster.gpus_per_node=1", through=("nohup",))
    steps = len(read_metrics(started.run))
    started.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: len(read_metrics(started.run)) > steps + 20, 60.0)
    shutil.rmtree(started.run.path)
    time.sleep(1.0)
    assert started.process.poll() is None
    started.process.terminate()
    code, out, err = started.end()
    assert (code, "Traceback" in out + err) == (130, False)
    assert processes_of(started.run) == []


def test_output_to_a_full_disk_does_not_end_the_training(tmp_path: Path) -> None:
    small = ("train.steps=3", "train.seq_len=32", "train.global_batch_size=2", "wandb.mode=disabled")
    program = '"$0" -m orchestra run "$@" >/dev/full; echo "code $?"'
    words = ["bash", "-c", program, sys.executable, *small, "run.name=full", "cluster.gpus_per_node=1"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("code 0\n", "")
    assert len(read_metrics(RunDir(tmp_path / "runs" / "full"))) == 3
