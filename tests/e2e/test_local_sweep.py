"""A sweep on this machine, as a user types it: whole, again, interrupted, and with somebody's sweeper."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from commands import PACE, environment, orchestra, words

from orchestra.run.events import read_events
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from tests.support.tiny import TINY_MODEL
from tests.support.waiting import eventually
from tests.unit.submit.test_third_party_sweeper import PLUGIN

pytestmark = pytest.mark.slow

ONE_RANK = (
    *TINY_MODEL,
    "train.global_batch_size=4",
    "cluster.gpus_per_node=1",
    "train.log_every=1",
    "run.name=grid",
)
SHORT = (*ONE_RANK, "train.steps=4", "optim.lr=1e-2,1e-3", "cluster.members_at_once=2")


def losses(folder: Path, name: str) -> list[float]:
    return [row["loss"] for row in read_metrics(RunDir(folder / "runs" / name))]


def test_members_train_as_single_runs_do_and_only_once(tmp_path: Path) -> None:
    done = json.loads(orchestra(tmp_path, "run", "-m", *SHORT, "--json").stdout)
    assert [(row["name"], row["state"], row["overrides"]) for row in done["results"]] == [
        ("grid/000", "finished", ["optim.lr=0.01"]),
        ("grid/001", "finished", ["optim.lr=0.001"]),
    ]
    alone = [*ONE_RANK[:-1], "train.steps=4", "optim.lr=1e-3", "run.name=alone", "cluster.threads_per_rank=1"]
    orchestra(tmp_path, "run", *alone)
    assert losses(tmp_path, "grid/001") == losses(tmp_path, "alone") != losses(tmp_path, "grid/000")

    # The same values under another number at a time and another name are the same members.
    again = orchestra(tmp_path, "run", "-m", *SHORT[:-1], "run.name=other").stdout
    assert "adopted 2 members" in again
    assert "finished  loss" in again
    assert not (tmp_path / "runs" / "other" / "000").exists()
    (start,) = read_events(RunDir(tmp_path / "runs" / "grid" / "000"), ("attempt_started",))
    assert start["begun_by"]["pid"] not in (None, start["pid"])
    table = orchestra(tmp_path, "status", "grid").stdout
    assert "2 finished" in table
    assert "lowest  grid/000" in table


def test_a_sweep_that_is_cancelled_begins_no_member_that_waits_and_tells_changed_values(
    tmp_path: Path,
) -> None:
    sweep = (*ONE_RANK, "train.steps=100000", "checkpoint.every_steps=1000", "optim.lr=1e-2,1e-3", PACE)
    command = subprocess.Popen(
        words("run", "-m", *sweep), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        first, second = (RunDir(tmp_path / "runs" / "grid" / name) for name in ("000", "001"))
        assert eventually(lambda: first.metrics.exists() and len(read_metrics(first)) > 3, 90)
        assert "2 asked" in orchestra(tmp_path, "cancel", "grid").stdout
        printed = command.communicate(timeout=90)[0]
    finally:
        command.kill()
    assert command.returncode == 75, printed
    assert read_events(second, ("attempt_started",)) == []
    plan = orchestra(tmp_path, "resume", "grid", "optim.lr=5e-2", "--dry-run").stdout
    assert "000  optim.lr=5e-2  (to train)" in plan
    last = read_metrics(first)[-1]["step"]
    words_of_resume = ("resume", "grid/000", "optim.lr=5e-2", f"train.steps={last + 1}", "--accept-jump")
    orchestra(tmp_path, *words_of_resume)
    (status,) = json.loads(orchestra(tmp_path, "status", "grid", "--json").stdout)
    assert [member["overrides"] for member in status["members"]] == [["optim.lr=5e-2"], ["optim.lr=0.001"]]


def test_members_that_are_removed_cost_the_others_nothing(tmp_path: Path) -> None:
    # The first member trains until it is cancelled, whatever this test is kept from meanwhile.
    sweep = ("run", "-m", *ONE_RANK, "train.steps=100000,30,40", PACE)
    command = subprocess.Popen(
        words(*sweep),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first, waiting, last = (RunDir(tmp_path / "runs" / "grid" / name) for name in ("000", "001", "002"))
        assert eventually(lambda: first.metrics.exists() and len(read_metrics(first)) > 3, 90)
        shutil.rmtree(waiting.path)
        orchestra(tmp_path, "cancel", "grid/000")
        assert eventually(lambda: last.metrics.exists() and len(read_metrics(last)) > 3, 90)
        shutil.rmtree(first.path)
        output, errors = command.communicate(timeout=60)
    finally:
        if command.poll() is None:
            command.terminate()
            command.wait(60)
    assert command.returncode == 1, output + errors
    assert errors == ""
    assert re.search("grid/002 +finished", output)
    assert [row["step"] for row in read_metrics(last)] == list(range(1, 41))
    assert "`orchestra run -m …`" in orchestra(tmp_path, "resume", "grid", code=2).stderr


def test_one_signal_saves_what_trains_and_resume_goes_on_with_the_rest(tmp_path: Path) -> None:
    sweep = (*ONE_RANK, "train.steps=100000", "checkpoint.every_steps=1000", "train.seed=1,2", PACE)
    command = subprocess.Popen(
        ["nohup", *words("run", "-m", *sweep)],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        first = RunDir(tmp_path / "runs" / "grid" / "000")
        assert eventually(lambda: first.metrics.exists() and len(read_metrics(first)) > 3, 90)
        # The terminal hangs up, of which a command under nohup takes no notice.
        os.kill(command.pid, signal.SIGHUP)
        trained = len(read_metrics(first))
        assert eventually(lambda: len(read_metrics(first)) > trained + 10, 90)
        states = json.loads(orchestra(tmp_path, "status", "grid", "--json").stdout)[0]["members"]
        assert [member["state"] for member in states] == ["running", "not started"]
        os.kill(command.pid, signal.SIGINT)
        output, _ = command.communicate(timeout=60)
    finally:
        if command.poll() is None:
            command.terminate()
            command.wait(60)
    assert command.returncode == 75, output
    states = json.loads(orchestra(tmp_path, "status", "grid", "--json").stdout)[0]["members"]
    assert [member["state"] for member in states] == ["stopped", "interrupted"]
    step = states[0]["step"]
    assert states[0]["checkpoint_step"] == step > 3

    steps = f"train.steps={step + 2}"
    done = json.loads(orchestra(tmp_path, "resume", "grid", steps, "--accept-jump", "--json").stdout)
    assert [row["state"] for row in done["results"]] == ["finished"] * 2
    assert [row["step"] for row in read_metrics(first)] == list(range(1, step + 3))


def test_a_sweeper_from_elsewhere_chooses_by_what_was_trained_here(tmp_path: Path) -> None:
    plugins = tmp_path / "site" / "hydra_plugins"
    plugins.mkdir(parents=True)
    (plugins / "halving.py").write_text(PLUGIN)
    path = {"PYTHONPATH": f"{environment()['PYTHONPATH']}:{plugins.parent}"}
    choice = ("hydra/sweeper=halving", "hydra.sweeper.rounds=1", "optim.lr=interval(1e-4,1e-2)")
    trials = json.loads(
        orchestra(tmp_path, "run", "-m", *ONE_RANK, "train.steps=3", *choice, "--json", extra=path).stdout
    )["trials"]
    assert [trial["overrides"] for trial in trials] == [["optim.lr=0.0001"], ["optim.lr=0.01"]]
    assert [trial["value"] for trial in trials] == [
        losses(tmp_path, f"grid-batch-0/{member}")[-1] for member in ("000", "001")
    ]
    assert (tmp_path / "runs" / "grid" / "best.txt").exists()
