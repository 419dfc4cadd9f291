"""`orchestra resume` as a user types it: what it says, what it changes, what it continues.

Damaged checkpoints are passed over, each with its reason, and nothing is made up.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import (
    TINY,
    assert_same_training,
    events_of,
    orchestra,
    run_of,
    start,
    state_of,
)

from checkpointing.manifest import MANIFEST, decode
from orchestra.run.config_file import read_config
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

_STEPS, _EVERY = 12, 2
# A kill finds no save in flight.
_SAVING = (f"checkpoint.every_steps={_EVERY}", "checkpoint.keep_last=100", "checkpoint.async_save=false")


def _flip_a_bit(checkpoint: Path) -> None:
    manifest = decode((checkpoint / MANIFEST).read_bytes())
    chunk = manifest.tensors[max(manifest.tensors)].chunks[-1]
    content = bytearray((checkpoint / chunk.file).read_bytes())
    content[chunk.begin + chunk.num_bytes // 2] ^= 0x10
    (checkpoint / chunk.file).write_bytes(content)


def _delete(checkpoint: Path) -> None:
    min(checkpoint.glob("*.safetensors")).unlink()


def _empty_the_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_bytes(b"")


# From the newest checkpoint back: what is done to it, and what its reason must name.
_DAMAGES = ((_flip_a_bit, ".safetensors"), (_delete, "missing"), (_empty_the_manifest, "not JSON"))


def _checkpoints(run: RunDir) -> dict[int, Path]:
    """Return the folders of the checkpoints by their steps, newest first."""
    folders = {int(path.name.removeprefix("step-")): path for path in run.checkpoints.iterdir()}
    return dict(sorted(folders.items(), reverse=True))


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunDir:
    """A run that nobody interrupted."""
    done = orchestra(folder, "run", "run.name=alone", f"train.steps={_STEPS}", *TINY, *_SAVING)
    assert "saved   step 12 in runs/alone/checkpoints" in done.stdout
    return run_of(folder, "alone")


@pytest.fixture(scope="module")
def failed(folder: Path) -> subprocess.CompletedProcess[str]:
    """The same run, killed at step 10."""
    fault = ("recovery.inject=[{at_step: 10, rank: 1}]", "recovery.max_restarts=0")
    name = "run.name=failed"
    return orchestra(folder, "run", name, f"train.steps={_STEPS}", *TINY, *_SAVING, *fault, code=1)


@pytest.fixture(scope="module")
def copies(failed: object, folder: Path) -> dict[str, RunDir]:
    """Copies of the failed run as it was, to be damaged."""
    run = run_of(folder, "failed")
    assert list(_checkpoints(run)) == [8, 6, 4, _EVERY]
    names = ("damaged", "hopeless")
    return {name: RunDir(Path(shutil.copytree(run.path, run.path.with_name(name)))) for name in names}


def _content(run: RunDir) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_failed_run_says_how_to_go_on_and_a_dry_run_of_it_writes_nothing(
    failed: subprocess.CompletedProcess[str], folder: Path
) -> None:
    follow = "resume  `orchestra resume failed` goes on from step 8"
    assert follow in failed.stdout.splitlines()
    for words in ("error: rank 1 on ", "killed by SIGKILL", "rank-00001.log"):
        assert words in failed.stderr
    assert follow in orchestra(folder, "why", "failed").stdout.splitlines()
    state = state_of(folder, "failed")
    assert (state["state"], state["checkpoint_step"], state["attempts"]) == ("failed", 8, 1)

    run = run_of(folder, "failed")
    before = _content(run)
    more = ("train.steps=20", "--dry-run")
    refused = orchestra(folder, "resume", "failed", *more, code=2).stderr
    assert "train.steps=20: the learning rate would jump at step 9, " in refused
    plan = json.loads(orchestra(folder, "resume", "failed", *more, "--accept-jump", "--json").stdout)
    assert plan["changed"] == {"train.steps": ["12", "20"]}
    assert plan["learning_rate"]["before"] < plan["learning_rate"]["now"]
    told = orchestra(folder, "resume", "failed", *more, "optim.schedule=constant", "optim.lr=1e-5").stdout
    assert "changed optim.schedule: cosine → constant\n" in told
    assert " → 1e-05\n" in told
    assert " tokens left\n" in told
    assert (plan["attempt"], plan["checkpoint_step"], plan["command"][-2:]) == (1, 8, ["--attempt", "1"])
    assert plan["config"]["train"]["steps"] == 20
    assert "attempt 1, from step 8" in orchestra(folder, "resume", "failed", "--dry-run").stdout
    assert _content(run) == before


def test_damaged_checkpoints_are_passed_over_with_their_reasons(
    folder: Path, copies: dict[str, RunDir], alone: RunDir
) -> None:
    """Every kind of damage: tests/ranks/test_restore.py."""
    run = copies["damaged"]
    for path, (damage, _) in zip(_checkpoints(run).values(), _DAMAGES, strict=False):
        damage(path)

    done = orchestra(folder, "resume", str(run.path))
    (restored,) = events_of(run, "restored")
    assert (restored["step"], [entry["step"] for entry in restored["skipped"]]) == (_EVERY, [8, 6, 4])
    for entry, (damage, words) in zip(restored["skipped"], _DAMAGES, strict=True):
        assert words in entry["reason"], (damage.__name__, entry)
        assert f"the checkpoint of step {entry['step']} was passed over: " in done.stdout
    assert_same_training(run, alone)


def test_without_an_intact_checkpoint_nothing_is_trained_or_begun_anew(
    folder: Path, copies: dict[str, RunDir]
) -> None:
    run = copies["hopeless"]
    for path in _checkpoints(run).values():
        _flip_a_bit(path)
    rows = run.metrics.read_bytes()
    done = orchestra(folder, "resume", str(run.path), code=93)
    assert "no committed checkpoint is intact" in done.stderr
    assert "orchestra resume" not in done.stdout
    for step in _checkpoints(run):
        assert f"step {step}: " in done.stderr
    shutil.rmtree(run.checkpoints)
    done = orchestra(folder, "resume", str(run.path), "checkpoint.restore_patience_s=0.5", code=93)
    assert "record a checkpoint of step 8" in done.stderr
    assert run.metrics.read_bytes() == rows


@pytest.mark.usefixtures("copies")
def test_of_two_resumes_at_once_one_trains_to_the_bits_of_a_run_left_alone(
    failed: subprocess.CompletedProcess[str], folder: Path, alone: RunDir
) -> None:
    run = run_of(folder, "failed")
    old = run.config.read_text()
    overrides = ("recovery.inject=[]", "checkpoint.keep_last=2")
    both = [start(folder, "failed", "resume", "failed", *overrides).process for _ in range(2)]
    ends = [(*process.communicate(timeout=100), process.returncode) for process in both]
    (loser,), (winner,) = ([end for end in ends if end[2] == code] for code in (2, 0))
    assert "failed is being resumed already" in loser[1] or "failed is running, attempt 1" in loser[1]
    assert "attempt 1, from step 8" in winner[0]
    assert "restored the checkpoint of step 8" in winner[0]
    assert len(events_of(run, "attempt_started")) == 2

    assert_same_training(run, alone)
    assert run.config_of_attempt(0).read_text() == old
    assert read_config(run.config).checkpoint.keep_last == 2
    (resumed,) = json.loads(run.record.read_text())["resumes"]
    assert (resumed["attempt"], resumed["overrides"]) == (1, list(overrides))


def test_a_finished_run_says_so_and_can_be_trained_further_on_another_layout(
    folder: Path, alone: RunDir
) -> None:
    before = _content(alone)
    done = orchestra(folder, "resume", "alone")
    assert done.stderr == ""
    assert "alone is finished: 12 of 12 steps" in done.stdout
    assert "orchestra resume alone train.steps=24" in done.stdout
    result = json.loads(orchestra(folder, "resume", "alone", "--json").stdout)
    assert (result["state"], result["code"], result["checkpoint_step"]) == ("finished", 0, 12)
    assert _content(alone) == before

    # Two micro-batches on one rank, in 16 bits with a loss scale that no checkpoint has yet.
    further = ("train.steps=14", "cluster.gpus_per_node=1", "train.micro_batch_size=2", "precision.name=fp16")
    result = json.loads(orchestra(folder, "resume", "alone", *further, "--accept-jump", "--json").stdout)
    assert (result["attempt"], result["step"], result["checkpoint_step"]) == (1, 14, 14)
    rows = read_metrics(alone)
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert rows[-1]["loss_scale"] >= 1
    (restored,) = events_of(alone, "restored")
    assert (restored["step"], restored["layout"]["dp"]) == (12, 1)
