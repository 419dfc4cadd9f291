"""Damaged checkpoints: passed over by `orchestra resume`, each with its reason, and nothing made up.

Every kind of damage: tests/ranks/test_restore.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commands import TINY, assert_same_training, events_of, orchestra, train

from checkpointing.manifest import MANIFEST, decode
from orchestra.run.paths import RunDir

_EVERY, _STEPS = 2, 10
_SETTINGS = (
    *TINY,
    f"train.steps={_STEPS}",
    f"checkpoint.every_steps={_EVERY}",
    "checkpoint.keep_last=100",
    # A kill finds none in flight.
    "checkpoint.async_save=false",
)


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


@pytest.fixture(scope="module")
def failed(folder: Path) -> RunDir:
    """A run that was killed at its last step and kept every checkpoint."""
    fault = f"recovery.inject=[{{at_step: {_STEPS}, rank: all}}]"
    return train(folder, "failed", *_SETTINGS, fault, "recovery.max_restarts=0", code=1)


def _copy(run: RunDir, name: str) -> RunDir:
    return RunDir(Path(shutil.copytree(run.path, run.path.with_name(name))))


def _checkpoints(run: RunDir) -> dict[int, Path]:
    """Return the folders of the checkpoints by their steps, newest first."""
    folders = {int(path.name.removeprefix("step-")): path for path in run.checkpoints.iterdir()}
    return dict(sorted(folders.items(), reverse=True))


def test_damaged_checkpoints_are_passed_over_with_their_reasons(folder: Path, failed: RunDir) -> None:
    run = _copy(failed, "damaged")
    checkpoints = _checkpoints(run)
    assert list(checkpoints) == [8, 6, 4, _EVERY]
    for path, (damage, _) in zip(checkpoints.values(), _DAMAGES, strict=False):
        damage(path)

    done = orchestra(folder, "resume", str(run.path))
    (restored,) = events_of(run, "restored")
    assert (restored["step"], [entry["step"] for entry in restored["skipped"]]) == (_EVERY, [8, 6, 4])
    for entry, (damage, words) in zip(restored["skipped"], _DAMAGES, strict=True):
        assert words in entry["reason"], (damage.__name__, entry)
        assert f"the checkpoint of step {entry['step']} was passed over: " in done.stdout
    assert_same_training(run, train(folder, "alone", *_SETTINGS))


def test_without_an_intact_checkpoint_nothing_is_trained_or_begun_anew(folder: Path, failed: RunDir) -> None:
    run = _copy(failed, "hopeless")
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
    assert f"record a checkpoint of step {_STEPS - 2}" in done.stderr
    assert run.metrics.read_bytes() == rows
