"""TensorBoard's files, as TensorBoard itself reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestra.errors import ConfigError
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.train.watch import tensorboard_files
from orchestra.train.watch.tensorboard_files import TensorBoardFiles


def write(run: RunDir, attempt: int, begin: int, end: int) -> None:
    files = TensorBoardFiles(run, attempt, begin)
    for step in range(begin + 1, end + 1):
        row: Record = {"step": step, "time": 1e9 + step, "attempt": attempt, "loss": attempt + 1 / step}
        files.add({**row, "mfu": None, "mfu_convention": "palm", "moe/0/tokens_per_expert": [1, 2]})
    files.close()


def test_steps_that_were_trained_again_are_there_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDir(tmp_path)
    write(run, attempt=0, begin=0, end=9)
    write(run, attempt=1, begin=5, end=12)
    read = EventAccumulator(str(run.tensorboard))
    read.Reload()
    assert read.Tags()["scalars"] == ["loss"]
    shown = [(each.step, each.value, each.wall_time) for each in read.Scalars("loss")]
    attempts = {step: 0 if step <= 5 else 1 for step in range(1, 13)}
    assert shown == [
        (step, pytest.approx(attempt + 1 / step), 1e9 + step) for step, attempt in attempts.items()
    ]


def test_without_the_package_rank_0_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard_files.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'orchestra-train\[tensorboard\]'"):
        TensorBoardFiles(RunDir(tmp_path), 0, 0)
