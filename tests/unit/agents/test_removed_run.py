"""An attempt whose run directory is removed or renamed while it trains says where its saves went."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launchers.torchrun import Ending
from orchestra.agents.attempt_record import AttemptRecord
from orchestra.errors import EXIT_FAILED
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir


@pytest.mark.parametrize("saves_on", [True, False])
def test_a_run_that_was_renamed_is_told_where_its_last_saves_lie(tmp_path: Path, saves_on: bool) -> None:
    run = RunDir(tmp_path / "run")
    events = EventWriter(run, node_writer(0, 0), 0)
    events.write("attempt_started")
    events.close()
    run.path.rename(tmp_path / "renamed")
    if saves_on:
        run.checkpoints.mkdir(parents=True)
    record = AttemptRecord(run, 0, 0, EventWriter(run, node_writer(0, 0), 0))
    shutil.rmtree(run.events, ignore_errors=True)
    verdict = record.conclude(Ending(0), None, steps=10)
    assert verdict.code == EXIT_FAILED
    assert "was removed or renamed while it trained" in verdict.message
    assert (f"lies in {run.checkpoints}" in verdict.message) is saves_on
