"""The examples of docs/plug-ins.md, as a user runs them: trained, stopped, resumed, and changed meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.pages import DOCS, ROOT, blocks

PAGE = DOCS / "plug-ins.md"
FILES = ("lion.py", "losses.py", "arrays.py", "layers.py", "smoothing.py")
SMALL = (
    *("experiment=demo", "run.name=mine", "run.dir=runs", "wandb=disabled", "optim.warmup_steps=1"),
    "optim.schedule=constant",
    *("model.num_hidden_layers=1", "model.hidden_size=16", "model.intermediate_size=32", "train.seq_len=32"),
    *("optim.target=lion:Lion", "optim.options.weight_decay=0.3", "parallelism=zero1"),
    *("data.source=arrays:Array", "data.source_options.path=mine/corpus.npy"),
    *("model.block=layers:Parallel", "model.block_options.gain=0.5"),
    *("train.loss=losses:with_z_loss", "train.loss_options.weight=1e-3"),
    *('train.callbacks=["smoothing:Smoothed"]', "train.callbacks_options.Smoothed.factor=0.5"),
)


def orchestra(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder / 'mine'}"}
    command = [sys.executable, "-m", "orchestra", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    for name, text in zip(FILES, blocks(PAGE, "python"), strict=True):
        assert f"`{name}`" in PAGE.read_text()
        (tmp_path / "mine" / name).write_text(text)
    np.save(tmp_path / "mine" / "corpus.npy", np.arange(20_000, dtype=np.uint8) % 251)
    return tmp_path


def test_the_examples_of_the_page_train_and_go_on_with_their_state(folder: Path) -> None:
    ended = orchestra(folder, "run", *SMALL, "train.steps=3")
    assert ended.returncode == 0, ended.stderr
    ended = orchestra(folder, "resume", "mine", "train.steps=5")
    assert ended.returncode == 0, ended.stderr
    lines = (folder / "runs/mine/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    mean = rows[0]["loss"]
    for row in rows:
        mean = 0.5 * mean + 0.5 * row["loss"]
        assert row["smoothed_loss"] == pytest.approx(mean, rel=1e-12)
    names = (path.name for path in (folder / "runs/mine/checkpoints").iterdir())
    newest = max(name for name in names if name.startswith("step-"))
    manifest = json.loads((folder / "runs/mine/checkpoints" / newest / "manifest.json").read_text())
    assert any(name.startswith("optimizer.momentum.layers.0.") for name in manifest["tensors"])


def test_what_is_wrong_is_said_at_once_with_all_the_rest(folder: Path) -> None:
    wrong = (
        "optim.options.weight_dekay=1",
        "train.loss=losses:with_y_loss",
        'train.callbacks=["smooth:Smoothed"]',
    )
    ended = orchestra(folder, "run", *SMALL, *wrong)
    assert ended.returncode == 2
    for words in ("did you mean weight_decay?", "did you mean with_z_loss?", "no module smooth"):
        assert words in ended.stderr
    assert not (folder / "runs").exists()
