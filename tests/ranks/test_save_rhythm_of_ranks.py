"""`checkpoint.every_steps=auto` on two ranks: both save the same steps, by the times that rank 0 measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pool import RankPool
from test_resume import attempt_of, config_of

from checkpointing import catalog
from checkpointing.storage import open_storage
from conf.schema import ClusterConfig, Config
from orchestra.run.events import read_events
from orchestra.run.paths import RunDir
from orchestra.sizes.save_interval import AUTO

pytestmark = pytest.mark.ranks

TIMED_STEPS = 20


def auto() -> Config:
    """Return a run whose devices fail so often that each step is worth a save."""
    config = config_of(every_steps=AUTO, keep_last=100)
    return replace(config, cluster=ClusterConfig(mtbf_device_hours=1e-9))


def told(path: Path) -> list[tuple[str, int]]:
    events = read_events(RunDir(path), ("save_interval",))
    return [(event["source"], event["every_steps"]) for event in events]


def committed(path: Path) -> list[int]:
    return catalog.committed_steps(open_storage(path / "checkpoints"))


def test_ranks_save_the_same_steps_by_their_first_steps_and_then_by_earlier_attempts(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    base = auto()
    config = replace(base, train=replace(base.train, steps=TIMED_STEPS + 3))
    ranks(2).run(attempt_of, world=2, path=tmp_path, attempt=0, config=config)
    ((source, every),) = told(tmp_path)
    assert source == "measured"
    # The first step is not timed, and after the last timed one the interval is known.
    due = [step for step in range(TIMED_STEPS + 1, config.train.steps) if step % every == 0]
    assert committed(tmp_path) == [*due, config.train.steps]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "step_time_s": 1e6}) + "\n")
    longer = replace(config, train=replace(config.train, steps=config.train.steps + 3))
    ranks(2).run(attempt_of, world=2, path=tmp_path, attempt=1, config=longer)
    assert told(tmp_path)[1:] == [("measured", 1)]
    assert committed(tmp_path)[-3:] == list(range(config.train.steps + 1, longer.train.steps + 1))
