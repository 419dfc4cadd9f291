"""`orchestra run` as a user types it: real processes, real training, real signals."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import (
    PACE,
    TINY,
    Started,
    environment,
    events_of,
    orchestra,
    processes_of,
    run_of,
    start_run,
    state_of,
)

from orchestra.data.order import read_ledger
from orchestra.run.metrics_file import METRIC_KEYS, read_metrics
from orchestra.run.paths import RunDir
from tests.support import listening
from tests.support.waiting import eventually

_SMALL = ("train.global_batch_size=2", "train.seq_len=32", "wandb.mode=disabled")
_END_S = 20.0
STEPS, BATCH, SEQUENCE = 20, 8, 64


def _start(folder: Path, *overrides: str, **options: Any) -> Started:
    """Start a run that is ended by a signal long before its last step, and wait for its first ones."""
    started = start_run(folder, "endless", "train.steps=1000000", *_SMALL, PACE, *overrides, **options)
    started.wait_for_steps(3)
    return started


@pytest.fixture(scope="module")
def finished(folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of two ranks with one micro-batch each, traced in steps 3 and 4, with an offline wandb run."""
    # A mirror that yields to everybody gets little of a busy machine: it may take its time at the end.
    mirror = "wandb.finish_timeout_s=60"
    batch = (f"train.seq_len={SEQUENCE}", f"train.global_batch_size={BATCH}", "train.micro_batch_size=4")
    shape = (*batch, "optim.lr=1e-3", "data.ledger=true", "cluster.device=cpu", "train.deterministic=true")
    traced = ("train.profile.enabled=true", "train.profile.steps=[3,4]")
    return orchestra(folder, "run", f"train.steps={STEPS}", "run.name=first", mirror, *shape, *traced)


def test_a_run_ends_with_0_and_leaves_a_whole_run_directory_that_commands_tell_of(
    finished: subprocess.CompletedProcess[str], folder: Path
) -> None:
    assert finished.stderr == ""
    run = run_of(folder, "first")
    assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))
    assert json.loads(run.record.read_text())["overrides"][0] == f"train.steps={STEPS}"
    assert "gpus_per_node: 2" in run.config.read_text()
    assert sorted(event["rank"] for event in events_of(run, "finished") if "rank" in event) == [0, 1]
    assert events_of(run, "finished")[-1]["code"] == 0
    logs = sorted(path.name for path in run.attempt_logs(0).iterdir())
    assert logs == ["node-000.log", "rank-00000.log", "rank-00001.log"]
    assert list(run.wandb.rglob("*.wandb")), events_of(run, "wandb_failed")
    assert processes_of(run) == []
    state = state_of(folder, "fir")
    assert (state["state"], state["step"], state["steps"], state["attempts"]) == ("finished", STEPS, STEPS, 1)
    assert f"finished at step {STEPS}" in orchestra(folder, "why", "first").stdout
    assert "launchers.bound_torchrun" in orchestra(folder, "logs", "first", "--node", "0").stdout


def test_the_loss_falls_every_row_has_every_key_and_no_sample_comes_twice(
    finished: object, folder: Path
) -> None:
    run = run_of(folder, "first")
    seen = [sample for ids in read_ledger(run).values() for sample in ids]
    assert len(seen) == STEPS * BATCH == len(set(seen))
    rows = read_metrics(run)
    assert all(set(METRIC_KEYS) <= row.keys() for row in rows)
    assert rows[0]["loss"] == pytest.approx(5.6, abs=0.15)  # ln(272): nothing known yet
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert rows[-1]["tokens"] == STEPS * BATCH * SEQUENCE
    assert 0 < rows[-1]["mfu_causal"] < rows[-1]["mfu"] < 1.5
    assert rows[-1]["hfu"] == rows[-1]["mfu"]  # nothing is recomputed


def test_the_trace_holds_the_steps_that_were_asked_for(finished: object, folder: Path) -> None:
    run = run_of(folder, "first")
    (trace,) = run.profile.glob("rank-00000-*.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"step 3", "step 4"} <= names
    assert not {"step 2", "step 5"} & names
    assert not list(run.profile.glob("rank-00001*"))


def test_piped_output_is_plain_complete_and_within_80_columns(
    finished: subprocess.CompletedProcess[str],
) -> None:
    lines = finished.stdout.splitlines()
    assert "\x1b" not in finished.stdout
    assert max(map(len, lines)) <= 80
    begins = ["run     first", "model   debug: 808,064 parameters", "layout  2 ranks: dp 2"]
    for begin in (
        *begins,
        f"step  1/{STEPS}",
        f"step {STEPS}/{STEPS}",
        f"finished after {STEPS} of {STEPS} steps",
    ):
        assert any(line.startswith(begin) for line in lines), finished.stdout
    assert any(line.startswith("loss ") and " → " in line for line in lines)


@pytest.fixture(scope="module")
def bare(folder: Path) -> RunDir:
    """A run under a umask that hides nothing, whose processes say what they import. One rank fails once."""
    steps = ("train.steps=3", "checkpoint.every_steps=2", "data.ledger=true", "cluster.gpus_per_node=2")
    # Another attempt too: by the same agent, its ranks forked from what it started first.
    fault = "recovery.inject=[{at_step: 2, rank: 1}]"
    through = ("sh", "-c", 'umask 000; exec "$@"', "sh")
    traced = {"PYTHONPROFILEIMPORTTIME": "1"}
    started = start_run(folder, "bare", *TINY, *steps, fault, through=through, extra=traced)
    started.end(0)
    return started.run


def test_others_can_write_nothing_of_a_run_whatever_the_umask_is(bare: RunDir) -> None:
    paths = [path for path in (bare.path, *bare.path.rglob("*")) if not path.is_symlink()]
    assert {"checkpoints", "control", "events", "logs", "samples"} <= {path.name for path in paths}
    assert [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o022] == []


def test_ranks_that_compile_nothing_start_without_torchs_compiler(bare: RunDir) -> None:
    """Its import takes a second of each start."""
    logs = [path for path in bare.logs.rglob("*") if path.is_file()]
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


def test_a_run_listens_on_this_machine_alone_and_nothing_outlives_a_command_that_is_killed(
    tmp_path: Path,
) -> None:
    started = _start(tmp_path)
    ours = processes_of(started.run)
    assert len(ours) >= 3, "torchrun and two workers"
    assert {each for pid in ours for each in listening.addresses(pid).values()} == {"127.0.0.1"}
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
