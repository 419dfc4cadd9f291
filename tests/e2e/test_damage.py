"""Damaged checkpoints, each in its own way: found before a step is taken from them, told, and passed over."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TINY, events_of, newest_manifest, orchestra, trained_digest, trained_rows

from checkpointing.catalog import step_name
from checkpointing.manifest import MANIFEST, decode
from orchestra.run.paths import RunDir

pytestmark = pytest.mark.ranks

_EVERY = 2
_STEPS = 22
_SETTINGS = (
    *TINY,
    f"train.steps={_STEPS}",
    f"checkpoint.every_steps={_EVERY}",
    "checkpoint.keep_last=100",
    # A kill finds none in flight.
    "checkpoint.async_save=false",
)


class _Malicious:
    """Unpickled, it would leave a file behind."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return (Path.touch, (self._marker,))


def _files(checkpoint: Path) -> list[Path]:
    files = sorted(checkpoint.glob("*.safetensors"))
    assert len(files) >= 2, "one of each rank"
    return files


def _flip_a_bit(checkpoint: Path) -> None:
    manifest = decode((checkpoint / MANIFEST).read_bytes())
    chunk = manifest.tensors[max(manifest.tensors)].chunks[-1]
    content = bytearray((checkpoint / chunk.file).read_bytes())
    content[chunk.begin + chunk.num_bytes // 2] ^= 0x10
    (checkpoint / chunk.file).write_bytes(content)


def _truncate(checkpoint: Path) -> None:
    content = _files(checkpoint)[1].read_bytes()
    _files(checkpoint)[1].write_bytes(content[:-1])


def _delete(checkpoint: Path) -> None:
    _files(checkpoint)[0].unlink()


def _swap(checkpoint: Path) -> None:
    first, second = _files(checkpoint)[:2]
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])


def _edit_the_manifest(checkpoint: Path) -> None:
    document = json.loads((checkpoint / MANIFEST).read_text())
    document["state"]["samples"] += 4
    (checkpoint / MANIFEST).write_text(json.dumps(document))


def _take_a_stale_shard(checkpoint: Path) -> None:
    """A whole and valid file of the same name, from an older checkpoint."""
    older = checkpoint.with_name(step_name(_EVERY))
    shutil.copy(_files(older)[1], _files(checkpoint)[1])


def _take_a_stale_manifest(checkpoint: Path) -> None:
    shutil.copy(checkpoint.with_name(step_name(_EVERY)) / MANIFEST, checkpoint / MANIFEST)


def _empty_the_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_bytes(b"")


def _put_a_pickle(checkpoint: Path) -> None:
    """A pickle of the very size in the place of a shard."""
    file = _files(checkpoint)[0]
    size = file.stat().st_size
    content = pickle.dumps(_Malicious(checkpoint.parents[2] / "executed"))
    file.write_bytes(content.ljust(size, b"\0"))


# From the newest checkpoint back: what is done to it, and what its reason must name.
_DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (_flip_a_bit, ".safetensors"),
    (_truncate, "expected"),
    (_delete, "missing"),
    (_swap, ".safetensors"),
    (_edit_the_manifest, "edited or damaged"),
    (_take_a_stale_shard, ".safetensors"),
    (_take_a_stale_manifest, "step 2"),
    (_put_a_pickle, ".safetensors"),
    (_empty_the_manifest, "not JSON"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def failed(folder: Path) -> RunDir:
    """A run that was killed at its last step and kept every checkpoint."""
    fault = f"recovery.inject=[{{at_step: {_STEPS}, rank: all}}]"
    done = orchestra(folder, "run", "run.name=failed", *_SETTINGS, fault, "recovery.max_restarts=0")
    assert done.returncode == 1, done.stdout + done.stderr
    return RunDir(folder / "runs" / "failed")


def _copy(run: RunDir, name: str) -> RunDir:
    return RunDir(Path(shutil.copytree(run.path, run.path.with_name(name))))


def _checkpoints(run: RunDir) -> dict[int, Path]:
    """Return the folders of the checkpoints by their steps, newest first."""
    folders = {int(path.name.removeprefix("step-")): path for path in run.checkpoints.iterdir()}
    return dict(sorted(folders.items(), reverse=True))


def test_damaged_checkpoints_are_passed_over_with_their_reasons(folder: Path, failed: RunDir) -> None:
    run = _copy(failed, "damaged")
    checkpoints = _checkpoints(run)
    assert list(checkpoints) == list(range(_STEPS - 2, 0, -_EVERY))
    assert len(checkpoints) == len(_DAMAGES) + 1
    for path, (act, _) in zip(checkpoints.values(), _DAMAGES, strict=False):
        act(path)

    done = orchestra(folder, "resume", str(run.path))
    assert done.returncode == 0, done.stdout + done.stderr
    (restored,) = events_of(run, "restored")
    assert restored["step"] == _EVERY
    assert [entry["step"] for entry in restored["skipped"]] == list(checkpoints)[:-1]
    for entry, (act, words) in zip(restored["skipped"], _DAMAGES, strict=True):
        assert words in entry["reason"], (act.__name__, entry)
        assert f"the checkpoint of step {entry['step']} was passed over: " in done.stdout
    assert not (folder / "runs" / "executed").exists()

    alone = orchestra(folder, "run", "run.name=alone", *_SETTINGS)
    assert alone.returncode == 0, alone.stderr
    undisturbed = RunDir(folder / "runs" / "alone")
    ours, theirs = (newest_manifest(each.checkpoints) for each in (run, undisturbed))
    assert ours.step == theirs.step == _STEPS
    assert trained_digest(ours) == trained_digest(theirs)
    assert trained_rows(run) == trained_rows(undisturbed)


def test_without_an_intact_checkpoint_nothing_is_trained(folder: Path, failed: RunDir) -> None:
    run = _copy(failed, "hopeless")
    for path in _checkpoints(run).values():
        _flip_a_bit(path)
    rows = run.metrics.read_bytes()
    done = orchestra(folder, "resume", str(run.path))
    assert done.returncode == 93
    assert "no committed checkpoint is intact" in done.stderr
    assert "orchestra resume" not in done.stdout
    for step in _checkpoints(run):
        assert f"step {step}: " in done.stderr
    assert run.metrics.read_bytes() == rows


def test_a_folder_that_is_gone_is_no_reason_to_begin_anew(folder: Path, failed: RunDir) -> None:
    run = _copy(failed, "lost")
    shutil.rmtree(run.checkpoints)
    done = orchestra(folder, "resume", str(run.path))
    assert done.returncode == 93
    assert f"record a checkpoint of step {_STEPS - 2}" in done.stderr
    assert trained_rows(run) == trained_rows(failed)


def test_the_pickle_of_these_tests_would_do_harm(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(_Malicious(tmp_path / "executed")).ljust(1000, b"\0"))
    assert (tmp_path / "executed").exists()
