"""`checkpoint.every_steps=auto` on two ranks: both save the same steps, by the plan and then as measured."""

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


def auto() -> Config:
    """Return a run whose devices fail so often that each step is worth a save."""
    config = config_of(every_steps=AUTO, keep_last=100)
    return replace(config, cluster=ClusterConfig(mtbf_device_hours=1e-9))


def told(path: Path) -> list[tuple[str, int]]:
    events = read_events(RunDir(path), ("save_interval",))
    return [(event["source"], event["every_steps"]) for event in events]


def test_ranks_save_the_same_steps_by_the_plan_and_then_by_what_was_measured(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    config = auto()
    (tmp_path / "run.json").write_text(json.dumps({"save_interval": {"step_time_s": 1e6}}))
    ranks(2).run(attempt_of, world=2, path=tmp_path, attempt=0, config=config)
    assert told(tmp_path) == [("predicted", 1)]
    committed = catalog.committed_steps(open_storage(tmp_path / "checkpoints"))
    assert committed == list(range(1, config.train.steps + 1))
    ranks(2).run(attempt_of, world=2, path=tmp_path, attempt=1, config=config)
    assert [source for source, _ in told(tmp_path)] == ["predicted", "measured"]
